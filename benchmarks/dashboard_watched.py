"""Speed of a training that four browsers watch, against the same training unwatched, in alternation.

    python benchmarks/dashboard_watched.py [--pairs N] [--steps N] [--out FILE.json]

The training has one core to itself (taskset), and the server and the browsers the others: usually browsers run on other
machines. The page of the run is open in each browser, and updates itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

BROWSERS = 4
SKIPPED = 5
"""First steps, which are slower."""


def start_training(folder: Path, name: str, steps: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "preheat",
        "train",
        "demo",
        "--out",
        f"runs/{name}",
        "--set",
        f"stop.max_steps={steps}",
    ]
    command += ["--set", "stop.hours=null", "--set", "evaluate.every=0", "--set", "checkpoint.every=0"]
    core = min(os.sched_getaffinity(0))
    return subprocess.Popen(
        ["taskset", "--cpu-list", str(core), *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"{name}.log").open("wb"),
    )


def start_server(folder: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    others = ",".join(map(str, sorted(os.sched_getaffinity(0))[1:]))
    server = subprocess.Popen(
        ["taskset", "--cpu-list", others, sys.executable, "-m", "preheat", "ui", "runs", "--port", "0"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    return server, server.stdout.readline().removeprefix("preheat ui: ").strip()


def read_seconds(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [step["seconds"] for step in steps if "seconds" in step][SKIPPED:]


def measure(folder: Path, name: str, steps: int, watched: bool, environment: dict[str, str], url: str) -> float:
    """Returns the median seconds of a step."""
    process = start_training(folder, name, steps, environment)
    run = folder / "runs" / name
    while not (run / "recipe.yaml").exists():
        assert process.poll() is None, (folder / f"{name}.log").read_text()
        time.sleep(0.2)
    if watched:
        browser_path = shutil.which("chromium")
        assert browser_path is not None, "needs chromium"
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:])  # inherited by the browsers
        with sync_playwright() as playwright:
            pages = []
            for _ in range(BROWSERS):
                browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
                page = browser.new_page()
                page.goto(url)
                page.get_by_role("link", name=name, exact=True).first.click()
                pages.append(page)
            while process.poll() is None:
                pages[0].wait_for_timeout(500)
            # The pages did follow the run.
            for page in pages:
                assert re.search(rf"\b{steps}\b", page.locator("main").inner_text()), (
                    "a page did not show the last step"
                )
    process.wait()
    assert process.returncode == 0, (folder / f"{name}.log").read_text()
    return statistics.median(read_seconds(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="preheat-watched-"))
    (folder / "runs").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server, url = start_server(folder, environment)
    everything = os.sched_getaffinity(0)
    try:
        pairs = []
        for number in range(arguments.pairs):
            seconds: dict[bool, float] = {}
            order = [True, False]
            random.Random(number).shuffle(order)
            for watched in order:
                os.sched_setaffinity(0, everything)
                name = f"pair-{number}-{'watched' if watched else 'alone'}"
                seconds[watched] = measure(folder, name, arguments.steps, watched, environment, url)
            pairs.append((seconds[False], seconds[True]))
            print(f"pair {number + 1}: alone {seconds[False]:.4f} s a step, watched {seconds[True]:.4f} s", flush=True)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder)
    ratios = [watched / alone - 1 for alone, watched in pairs]
    summary = {
        "pairs": pairs,
        "slower_median": statistics.median(ratios),
        "slower_least": min(ratios),
        "slower_most": max(ratios),
    }
    print(json.dumps(summary, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
