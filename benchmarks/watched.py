"""Speed of a training that browsers watch, or that trackers follow, against the same training alone, in alternation.

    python benchmarks/watched.py [--by nobody browsers mlflow swanlab ...] [--pairs N] [--steps N]
                                 [--out benchmarks/results/watched]

Writes OUT.json after each pair, from which a restart goes on, and OUT.md. `nobody` is a second training alone: the
noise of the machine. `failing` and `hanging` are trackers that raise an error and that sleep for a minute. The training
has the first core to itself; trackers, server and browsers have the others, as they would on a machine with free cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import Page, sync_playwright

BROWSERS = 4
SKIPPED = 5
"""First steps, which are slower."""
TRACKERS = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb", "failing", "hanging")
WATCHERS = ("nobody", "browsers", *TRACKERS)
FAULTY = Path(__file__).parents[1] / "tests/e2e/faulty_trackers.py"
ALL_CORES = sorted(os.sched_getaffinity(0))


def start_training(folder: Path, name: str, steps: int, by: str) -> subprocess.Popen[bytes]:
    settings = [f"stop.max_steps={steps}", "stop.hours=null", "evaluate.every=0", "checkpoint.every=0"]
    tracked = ["--track", by, "--set", "tracking.wait=0"] if by in TRACKERS else []
    command = [
        sys.executable,
        "-m",
        "preheat",
        "--plugin",
        "faulty_trackers",
        "train",
        "demo",
        "--out",
        f"runs/{name}",
        *tracked,
    ]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.Popen(
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
        stderr=(folder / f"{name}.log").open("wb"),
    )


def start_server(folder: Path) -> tuple[subprocess.Popen[str], str]:
    others = ",".join(map(str, ALL_CORES[1:]))
    server = subprocess.Popen(
        ["taskset", "--cpu-list", others, sys.executable, "-m", "preheat", "ui", "runs", "--port", "0"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    return server, server.stdout.readline().removeprefix("preheat ui: ").strip()


def read_seconds(run: Path) -> list[float]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [step["seconds"] for step in steps if "seconds" in step][SKIPPED:]


def move_children(training: psutil.Process) -> None:
    """Moves the trackers' processes off the training's core; a process that just ended is no matter."""
    for child in training.children(recursive=True):
        try:
            child.cpu_affinity(ALL_CORES[1:])
        except psutil.NoSuchProcess:
            continue


def watch(process: subprocess.Popen[bytes], name: str, steps: int, url: str) -> None:
    """Follows the run's page in four browsers until it ends, and checks that each showed the last step."""
    browser_path = shutil.which("chromium")
    assert browser_path is not None, "needs chromium"
    os.sched_setaffinity(0, ALL_CORES[1:])  # inherited by the browsers
    with sync_playwright() as playwright:
        pages: list[Page] = []
        for _ in range(BROWSERS):
            page = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"]).new_page()
            page.goto(url)
            page.get_by_role("link", name=name, exact=True).first.click()
            pages.append(page)
        while process.poll() is None:
            pages[0].wait_for_timeout(500)
        pages[0].wait_for_timeout(3000)
        for page in pages:
            shown = page.locator("main").inner_text()
            assert re.search(rf"\b{steps}\b", shown), f"a page did not show the last step: {shown[:500]}"
    os.sched_setaffinity(0, ALL_CORES)


def measure(folder: Path, name: str, steps: int, by: str) -> float:
    """Trains and returns the median seconds of a step."""
    server, url = start_server(folder) if by == "browsers" else (None, "")
    process = start_training(folder, name, steps, by)
    run = folder / "runs" / name
    try:
        while not (run / "metrics.jsonl").exists():
            assert process.poll() is None, (folder / f"{name}.log").read_text()
            time.sleep(0.2)
        if by == "browsers":
            watch(process, name, steps, url)
        elif by in TRACKERS:
            training = psutil.Process(process.pid)
            while process.poll() is None:
                move_children(training)
                time.sleep(0.5)
        process.wait()
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    assert process.returncode == 0, (folder / f"{name}.log").read_text()
    if by in TRACKERS:
        assert (run / "tracking").is_dir(), f"{by} did not follow the run"
    return statistics.median(read_seconds(run))


def measure_pair(number: int, steps: int, by: str) -> tuple[float, float]:
    folder = Path(tempfile.mkdtemp(prefix="preheat-watched-"))
    try:
        (folder / "runs").mkdir()
        shutil.copy(FAULTY, folder)
        order = ["alone", by]
        random.Random(f"{by} {number}").shuffle(order)
        seconds = {watcher: measure(folder, f"run-{watcher}", steps, watcher) for watcher in order}
        return seconds["alone"], seconds[by]
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a tracker may still write there


def write_table(pairs: dict[str, list[tuple[float, float]]], steps: int, out: Path) -> None:
    lines = [
        "# A training that is watched, against the same training alone",
        "",
        "| watched by | median | least to most | pairs |",
        "|---|---|---|---|",
    ]
    for by, measured in pairs.items():
        slower = [100 * (watched / alone - 1) for alone, watched in measured]
        name = f"{BROWSERS} browsers" if by == "browsers" else by
        lines.append(
            f"| {name} | {statistics.median(slower):+.1f} % | {min(slower):+.1f} to {max(slower):+.1f} % | {len(slower)} |"
        )
    lines += [
        "",
        f"`python benchmarks/watched.py`: the demo for {steps} steps, one thread on a core of its own, the watchers on the others of",
        f"{len(ALL_CORES)} cores ({platform.processor() or platform.machine()}); time of the median step, positive is slower. `nobody` is a second training alone: the noise.",
    ]
    out.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", nargs="+", choices=WATCHERS, default=WATCHERS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/watched"))
    arguments = parser.parse_args()
    if len(ALL_CORES) < 2:
        sys.exit("watched.py needs two cores: one for the training, one for what watches it")
    record = arguments.out.with_suffix(".json")
    pairs: dict[str, list[tuple[float, float]]] = json.loads(record.read_text()) if record.exists() else {}
    # Pairs of all watchers in turn: a machine that becomes slower meets them all.
    for number in range(arguments.pairs):
        for by in arguments.by:
            if len(pairs.setdefault(by, [])) > number:
                continue
            alone, watched = measure_pair(number, arguments.steps, by)
            pairs[by].append((alone, watched))
            record.write_text(json.dumps(pairs, indent=1) + "\n")
            write_table(pairs, arguments.steps, arguments.out.with_suffix(".md"))
            print(f"{by}, pair {number + 1}: alone {alone:.4f} s a step, watched {watched:.4f} s", flush=True)


if __name__ == "__main__":
    main()
