"""Seconds of twelve plans with nothing cached and asked again, and of the same plans by another version of preheat.

    python benchmarks/plan_seconds.py [--before FOLDER] [--repeats 3] [--only 8b ...] [--out benchmarks/results/plan_seconds.md]

Each plan is a process of its own, started as a user starts it; its packages are compiled and in the page cache, because
one plan is asked beforehand. "Cold" has an empty cache of preheat's own, "again" is the same command once more. The two
versions take turns. Times are medians by the wall clock and of CPU time (user and system, with all processes started).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

PLANS = (
    "Qwen/Qwen2.5-0.5B --method qlora --gpu RTX-4090",
    "llama-3.2-1b --gpu H100",
    "Qwen/Qwen3-8B --method qlora --gpu RTX-4090",
    "Qwen/Qwen2.5-1.5B --method lora --gpu L40S",
    "Qwen/Qwen3-1.7B --gpu A100-80GB",
    "Qwen/Qwen3-4B --method lora --gpu RTX-4090",
    "Qwen/Qwen3.5-9B --method qlora --gpu RTX-4090",
    "Qwen/Qwen2.5-32B --method qlora --gpu L40S",
    "llama-3.1-8b --method lora --gpu H100 --allow different",
    "llama-3.1-8b --gpu A100-80GB --count 8",
    "llama-3.1-70b --gpu H100 --count 8 --nodes 8",
    "llama-3.1-405b --gpu H100 --count 8 --nodes 2048",
)


@dataclass
class Times:
    """Wall and CPU seconds of each repetition of a plan."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        return f"{statistics.median(self.wall):.1f} ({statistics.median(self.cpu):.1f})"


def time_plan(plan: str, tree: Path, cache: str, times: Times) -> None:
    """Runs a plan and adds its seconds, or keeps the last line of its error."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PREHEAT_CACHE": cache, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "preheat", "plan", *plan.split(), "--json"]
    done = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        times.failure = (done.stderr.strip() or "failed").splitlines()[-1][:60]
        return
    times.wall.append(wall)
    times.cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the folder of another version, which has the package preheat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="only plans with one of these texts")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    trees = {"now": Path(__file__).resolve().parent.parent}
    if options.before:
        trees = {"before": options.before.resolve()} | trees
    plans = [plan for plan in PLANS if not options.only or any(text in plan for text in options.only)]
    with tempfile.TemporaryDirectory() as cache:
        for tree in trees.values():
            time_plan(plans[0], tree, cache, Times())
    columns = [(version, when) for when in ("cold", "again") for version in trees]
    lines = [
        "| `preheat plan` | " + " | ".join(f"{version}, {when}" for version, when in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    print(*lines, sep="\n", flush=True)
    for plan in plans:
        times = {column: Times() for column in columns}
        for _ in range(options.repeats):
            for version, tree in trees.items():
                with tempfile.TemporaryDirectory() as cache:
                    for when in ("cold", "again"):
                        if not times[version, when].failure:
                            time_plan(plan, tree, cache, times[version, when])
        lines.append(f"| `{plan}` | " + " | ".join(str(times[column]) for column in columns) + " |")
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
