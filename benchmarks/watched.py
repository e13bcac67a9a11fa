"""Speed of trainings that browsers watch, or that trackers follow, against the same training alone.

    python benchmarks/watched.py [--by nobody browsers mlflow swanlab ...] [--rounds N] [--out benchmarks/results/watched]

All trainings are started, and then one at a time runs for a few steps, in a new order each round, while the others are
stopped (SIGSTOP) with all that follows them. So a change of the machine's speed, which between two whole trainings is
several times the effect, meets all of them alike. `nobody` is a second training alone: the noise. `remote`
has four clients that ask the server for what four browsers ask, and draw nothing: browsers on other machines. `failing`
and `hanging` are trackers that raise an error and that sleep for a minute. The training has the first core to itself;
trackers, server and browsers have the others, as they would on a machine with free cores.

Writes OUT.json after each round and OUT.md at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, Playwright, sync_playwright

BROWSERS = 4
SKIPPED, COUNTED = 5, 20
"""Steps of a turn. The first ones are not counted: the first spans the pause, and in the next ones those that watch do at
once what they missed meanwhile, as they never do while a training runs."""
TRACKERS = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb", "failing", "hanging")
WATCHERS = ("nobody", "browsers", "remote", *TRACKERS)
FAULTY = Path(__file__).parents[1] / "tests/e2e/faulty_trackers.py"
ALL_CORES = sorted(os.sched_getaffinity(0))


@dataclass
class Training:
    """A training of the demo, and the processes that follow it."""

    by: str
    run: Path
    log: Path
    process: psutil.Popen
    watchers: list[psutil.Process] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    answers: Path | None = None

    def _tree(self) -> list[psutil.Process]:
        tree: list[psutil.Process] = []
        for root in (psutil.Process(self.process.pid), *self.watchers):
            with contextlib.suppress(psutil.NoSuchProcess):  # a browser's helper that has ended
                tree += [root, *root.children(recursive=True)]
        return tree

    def _signal(self, name: str) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, name)()

    def pause(self) -> None:
        self._signal("suspend")

    def resume(self) -> None:
        self._signal("resume")

    def kill(self) -> None:
        self._signal("kill")
        self.process.wait()

    def move_followers(self) -> None:
        """Moves the trackers' processes off the training's core."""
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.cpu_affinity(ALL_CORES[1:])

    def seconds(self) -> list[float]:
        if not (self.run / "metrics.jsonl").exists():
            return []
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [step["seconds"] for step in map(json.loads, lines) if "seconds" in step]

    def wait_for(self, count: int) -> list[float]:
        """Waits until `count` steps are written, and returns the seconds of all."""
        while len(seconds := self.seconds()) < count:
            assert self.process.poll() is None, self.log.read_text()
            self.move_followers()
            time.sleep(0.3)
        return seconds

    def take_turn(self) -> float:
        """Runs for a turn, and returns the median seconds of its steps."""
        known = len(self.seconds())
        self.resume()
        seconds = self.wait_for(known + SKIPPED + COUNTED)
        self.pause()
        return statistics.median(seconds[known + SKIPPED : known + SKIPPED + COUNTED])


def start_training(folder: Path, by: str) -> Training:
    settings = ["stop.max_steps=100000", "stop.hours=null", "evaluate.every=0", "checkpoint.every=0"]
    command = [sys.executable, "-m", "preheat", "--plugin", "faulty_trackers", "train", "demo"]
    command += ["--out", f"runs/run-{by}"]
    if by in TRACKERS:
        command += ["--track", by, "--set", "tracking.wait=0"]
    for setting in settings:
        command += ["--set", setting]
    log = folder / f"{by}.log"
    process = psutil.Popen(
        ["taskset", "--cpu-list", str(ALL_CORES[0]), *command],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "HOME": str(folder),
            "WANDB_MODE": "offline",
            "SWANLAB_MODE": "offline",
        },
        stdout=subprocess.DEVNULL,
        stderr=log.open("wb"),
    )
    return Training(by, folder / f"runs/run-{by}", log, process)


def start_server(training: Training, folder: Path) -> str:
    """Starts a server for the training and returns its address."""
    others = ",".join(map(str, ALL_CORES[1:]))
    command = [sys.executable, "-m", "preheat", "ui", "runs", "--port", "0"]
    server = psutil.Popen(["taskset", "--cpu-list", others, *command], cwd=folder, stdout=subprocess.PIPE, text=True)
    training.watchers.append(psutil.Process(server.pid))
    return str(server.stdout.readline().removeprefix("preheat ui: ").strip())


def find_browser() -> str:
    browser_path = shutil.which("chromium")
    assert browser_path is not None, "needs chromium"
    return browser_path


def open_browsers(training: Training, folder: Path, playwright: Playwright) -> None:
    """Opens the run's page in four browsers."""
    url, browser_path = start_server(training, folder), find_browser()
    before = set(psutil.Process().children(recursive=True))
    for _ in range(BROWSERS):
        page = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"]).new_page()
        page.goto(url)
        page.get_by_role("link", name=training.run.name, exact=True).first.click()
        training.pages.append(page)
    started = set(psutil.Process().children(recursive=True)) - before
    training.watchers += [process for process in started if "chromium" in " ".join(process.cmdline()[:1])]


def open_clients(training: Training, folder: Path, playwright: Playwright) -> None:
    """Starts four clients that send the requests that a browser sends while it shows the run's page."""
    url = start_server(training, folder)
    browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
    page = browser.new_page()
    requests: list[str] = []
    page.goto(url)
    page.get_by_role("link", name=training.run.name, exact=True).first.click()
    page.wait_for_timeout(3000)
    page.on("request", lambda request: requests.append(request.url))
    page.reload()
    page.wait_for_timeout(10_000)
    cookie = "; ".join(f"{c['name']}={c['value']}" for c in page.context.cookies())
    browser.close()
    events = next(url for url in requests if urllib.parse.urlsplit(url).path == "/events")
    # The charts' data and the live part of the page are requested at each change.
    repeated = sorted({url for url in requests if requests.count(url) > 1 and url != events})
    assert repeated, f"a browser repeated no request: {requests}"
    print(f"remote: at each change {repeated}", file=sys.stderr, flush=True)
    others = ",".join(map(str, ALL_CORES[1:]))
    command = ["taskset", "--cpu-list", others, sys.executable, __file__, "--follow"]
    training.answers = folder / "answers"
    clients = psutil.Popen([*command, json.dumps([events, repeated, cookie, str(training.answers)])])
    training.watchers.append(psutil.Process(clients.pid))


def follow(events: str, repeated: list[str], cookie: str, answers: str) -> None:
    """Reads the stream of changes in four threads, and sends the requests at each.

    Args:
        answers: the file to which each thread adds a line for each change that it has followed.
    """

    def fetch(url: str) -> Any:
        return urllib.request.urlopen(urllib.request.Request(url, headers={"Cookie": cookie}), timeout=600)

    def watch(number: int) -> None:
        for line in fetch(events):
            if line.startswith(b"data:"):
                count = sum(len(fetch(url).read()) for url in repeated)
                with Path(answers).open("a") as file:
                    file.write(f"{number} {count}\n")

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(BROWSERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_followed(training: Training) -> None:
    """Checks that the watcher did follow: a page shows the last step, a tracker has its record."""
    if training.by in TRACKERS:
        assert list((training.run / "tracking").iterdir()), f"{training.by} did not follow the run"
    if training.answers is not None:
        lines = training.answers.read_text().split("\n")[:-1]
        steps = len(training.seconds())
        for number in range(BROWSERS):
            count = sum(line.startswith(f"{number} ") for line in lines)
            assert count > steps / 4, f"client {number} followed {count} changes in {steps} steps"
        print(f"remote: {len(lines)} changes followed by {BROWSERS} clients in {steps} steps", file=sys.stderr)
    if training.pages:
        training.resume()
        training.process.suspend()
        training.pages[0].wait_for_timeout(5000)
        last = len(training.seconds())
        for page in training.pages:
            shown = page.locator("main").inner_text()
            assert re.search(rf"\b{last}\b", shown), f"a page did not show step {last}: {shown[:500]}"


@contextlib.contextmanager
def started(names: list[str]) -> Iterator[list[Training]]:
    """Starts all trainings, each until its first steps are done, and pauses them."""
    folder = Path(tempfile.mkdtemp(prefix="preheat-watched-"))
    trainings: list[Training] = []
    try:
        (folder / "runs").mkdir()
        shutil.copy(FAULTY, folder)
        # Before the driver starts: it and its browsers inherit the watchers' cores.
        os.sched_setaffinity(0, ALL_CORES[1:])
        with sync_playwright() as playwright:
            for name in names:
                training = start_training(folder, name)
                trainings.append(training)
                training.wait_for(1)
                if name in ("browsers", "remote"):
                    opening = open_browsers if name == "browsers" else open_clients
                    opening(training, folder, playwright)
                training.wait_for(SKIPPED)
                training.pause()
                print(f"{name}: started", file=sys.stderr, flush=True)
            yield trainings
            for training in trainings:
                check_followed(training)
    finally:
        for training in trainings:
            with contextlib.suppress(psutil.NoSuchProcess):
                training.kill()
        shutil.rmtree(folder, ignore_errors=True)  # a tracker may still write there


def find_median_interval(values: list[float]) -> tuple[float, float]:
    """Returns the order statistics that hold the median with 95 % (sign test), the extremes if there are too few."""
    ordered, n = sorted(values), len(values)
    lowest, tail = 0, 0.0
    for k in range(n // 2):
        tail += math.comb(n, k) / 2**n
        if tail > 0.025:
            break
        lowest = k
    return ordered[lowest], ordered[n - 1 - lowest]


def write_table(rounds: list[dict[str, float]], out: Path) -> None:
    lines = ["| watched by | slower | 95 % interval | rounds |", "|---|---|---|---|"]
    for by in [name for name in rounds[0] if name != "alone"]:
        slower = [100 * (measured[by] / measured["alone"] - 1) for measured in rounds]
        low, high = find_median_interval(slower)
        name = {"browsers": "4 browsers", "remote": "4 browsers elsewhere"}.get(by, by)
        lines.append(f"| {name} | {statistics.median(slower):+.2f} % | {low:+.2f} to {high:+.2f} % | {len(slower)} |")
    table = "\n".join(lines)
    alone = statistics.median(measured["alone"] for measured in rounds)
    text = f"""# A training that is watched, against the same training alone

{table}

`python benchmarks/watched.py`: the demo ({alone:.2f} s a step), one thread on a core of its own, the watchers on the others of
{len(ALL_CORES)} cores ({platform.processor() or platform.machine()}). All trainings take turns of {SKIPPED + COUNTED} steps, of which the first {SKIPPED} are not counted; the figure is the median over the rounds of a
turn's median step against the turn alone of the same round. `nobody` is a second training alone: the noise.
"""
    out.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", nargs="+", choices=WATCHERS, default=WATCHERS)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/watched"))
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow:
        follow(*json.loads(arguments.follow))
        return
    if len(ALL_CORES) < 2:
        sys.exit("watched.py needs two cores: one for the training, one for what watches it")
    rounds: list[dict[str, float]] = []
    names = ["alone", *arguments.by]
    with started(names) as trainings:
        for number in range(arguments.rounds):
            order = random.Random(number).sample(trainings, len(trainings))
            measured = {training.by: training.take_turn() for training in order}
            rounds.append({name: measured[name] for name in names})
            arguments.out.with_suffix(".json").write_text(json.dumps(rounds, indent=1) + "\n")
            print(f"round {number + 1}: " + ", ".join(f"{k} {v:.4f}" for k, v in rounds[-1].items()), flush=True)
    write_table(rounds, arguments.out.with_suffix(".md"))


if __name__ == "__main__":
    main()
