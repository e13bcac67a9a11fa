"""Seconds and memory of `preheat ui` with 200 runs of 10,000 steps and one of 1,000,000.

    python benchmarks/dashboard.py [--out FILE.json] [--keep FOLDER]

The runs are written with the records of preheat, so that a line is as long as a real one; the plan is that of the demo.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from preheat.core.plan import Plan
from preheat.core.run_records import Checkpoint, EvaluationMetrics, Started, StepMetrics
from preheat.files import to_json
from preheat.run.writer import Writer

KEYS = ("loss", "validation_loss", "tokens_per_second", "gradient_norm", "lr", "memory")
FIELDS = [name for name in StepMetrics.__dataclass_fields__ if name != "scores"]
REPEATS = 20


def write_run(folder: Path, steps: int, predicted: Plan, recipe: str, seed: int) -> None:
    """Writes a run with a checkpoint and an evaluation every 100th part of its steps."""
    draw = random.Random(seed)
    writer = Writer(folder)
    writer.write_json("plan.json", predicted)
    writer.write_text("recipe.yaml", recipe)
    writer.write_event(Started())
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            loss = 2 + 9 * math.exp(-step / steps * 8) + draw.gauss(0, 0.1)
            line = StepMetrics(
                step,
                tokens=524_288 * step,
                loss=loss,
                lr=3e-4 * (1 - step / steps),
                gradient_norm=abs(draw.gauss(1, 0.3)),
                seconds=draw.gauss(1.5, 0.02),
                tokens_per_second=draw.gauss(349_525, 5_000),
                memory=draw.randrange(60 << 30, 70 << 30),
                elapsed=1.5 * step,
                length=4096,
            )
            # Four times as fast as `to_json`, and the same.
            text = json.dumps({key: value for key in FIELDS if (value := getattr(line, key)) is not None})
            assert step % 1000 or text == to_json(line)
            file.write(text + "\n")
            if step % (steps // 100) == 0:
                file.write(to_json(EvaluationMetrics(step, validation_loss=loss + 0.1, tokens=1 << 20)) + "\n")
                writer.write_event(Checkpoint(step=step, path=f"checkpoints/step-{step}", seconds=3.0))
    writer.close()


class Server:
    """A server as a user starts it, and a browser's session with it."""

    def __init__(self, folder: Path, cache: Path):
        environment = {**os.environ, "PREHEAT_CACHE": str(cache)}
        command = [sys.executable, "-u", "-m", "preheat", "ui", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().split()[-1]
        self.client = httpx.Client(base_url=url.partition("/?")[0], timeout=120)
        while True:
            try:
                self.client.get(url)
                break
            except httpx.ConnectError:
                time.sleep(0.1)

    def get(self, path: str) -> httpx.Response:
        answer = self.client.get(path)
        answer.raise_for_status()
        return answer

    def time(self, *paths: str) -> float:
        begin = time.perf_counter()
        for path in paths:
            self.get(path)
        return time.perf_counter() - begin

    def index(self) -> dict[str, float]:
        """Waits until all runs are indexed; returns the seconds, those of the process, and the longest answer."""
        begin, longest = time.perf_counter(), 0.0
        while True:
            before = time.perf_counter()
            runs = self.get("/api/runs").json()["runs"]
            longest = max(longest, time.perf_counter() - before)
            if all(run["progress"] == 1 for run in runs):
                break
            time.sleep(0.5)
        used = psutil.Process(self.process.pid).cpu_times()
        return {"seconds": time.perf_counter() - begin, "cpu_seconds": used.user + used.system, "longest": longest}

    @property
    def peak_mb(self) -> float:
        """Peak of the resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1000

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait()


def measure(folder: Path, cache: Path) -> dict[str, object]:
    results: dict[str, object] = {}
    for name, path in {"million": folder / "million", "all": folder}.items():
        with Server(path, cache) as server:
            results[name] = {**server.index(), "peak_mb": server.peak_mb}
            print(name, results[name], file=sys.stderr, flush=True)
    with Server(folder, cache) as server:
        results["table_after_restart"] = server.time("/api/runs")
        runs = server.get("/api/runs").json()["runs"]
        assert len(runs) == 201
        (long,) = (run["id"] for run in runs if run["step"] == 1_000_000)
        short = next(run["id"] for run in runs if run["step"] == 10_000)
        curves = f"/api/runs/{long}/curves?points=1200&key="
        for name, paths in {
            "table": ["/api/runs"],
            "page": ["/"],
            "long_run": [f"/api/runs/{long}", f"/api/runs/{long}/events", *(curves + key for key in KEYS)],
            "short_run": [
                f"/api/runs/{short}",
                f"/api/runs/{short}/events",
                *(f"/api/runs/{short}/curves?points=1200&key={key}" for key in KEYS),
            ],
            "long_curve": [f"{curves}loss"],
            "zoom": [f"{curves}loss&first=400000&last=401000"],
            "wide_zoom": [f"{curves}loss&x=tokens&first=1e11&last=4e11"],
        }.items():
            seconds = [server.time(*paths) for _ in range(REPEATS)]
            results[name] = {"median": statistics.median(seconds), "most": max(seconds)}
        exact = server.get(f"{curves}loss&first=400000&last=401000").json()
        assert exact["is_exact"]
        assert exact["rows"] == 1_001
        results["peak_mb"] = server.peak_mb
    results["cache_mb"] = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) / 1e6
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs, used again if it exists")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)) / "runs"
        if not folder.exists():
            from preheat import load_recipe, plan
            from preheat.recipe import dump

            recipe = load_recipe("demo")
            predicted, text = plan(recipe), dump(recipe)
            write_run(folder / "million", 1_000_000, predicted, text, 0)
            for number in range(10):
                write_run(folder / f"{number}-0", 10_000, predicted, text, number)
                for copy in range(1, 20):
                    shutil.copytree(folder / f"{number}-0", folder / f"{number}-{copy}")
        results = measure(folder, Path(temporary) / "cache")
    results["load"] = os.getloadavg()[0]
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
