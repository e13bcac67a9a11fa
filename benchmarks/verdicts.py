"""Verdicts of plans held against real runs whose address space is capped: what is said to fit runs, what is said not to fit does not.

    python benchmarks/verdicts.py [--count 50] [--seed 7] [--out benchmarks/results/verdicts.json]

Each recipe (drawn at random) is planned, then trained in a process of its own that may take no more from the build on than a limit drawn around the
planned peak, when all that it imports is there. It ran if no allocation failed: the first that does ends the process, before the ladder. A plan says `fits` or `does not` where the limit lies outside its
interval, and nothing where it lies within.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drawn import draw_settings, format_settings

SLOW = 120  # seconds; a run takes 10 to 20 with memory enough
# What a run imports and compiles on the way no plan counts, nor address space that is reserved and never touched (stacks of threads, malloc's arenas):
# the same recipe without a cap, in a process of its own, says what both are. One of a layer and few tokens does not: what it leaves untouched a larger one needs.
BEFORE = """
import json, sys
from preheat import load_recipe, train
from preheat.training.observer import Watch

def sizes(*names):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(lines[name].split()[0]) << 10 for name in names]

class Begun(Watch):
    def stage(self, words):
        if words == "building":
            self.at = sizes("VmSize", "VmRSS")

begun = Begun()
train(load_recipe("demo", sys.argv[3:]), out=sys.argv[1], watch=begun)
address, memory = (now - then for now, then in zip(sizes("VmPeak", "VmHWM"), begun.at))
json.dump({"modules": list(sys.modules), "untouched": max(address - memory, 0)}, open(sys.argv[2], "w"))
"""
CHILD = """
import contextlib, importlib, json, sys
sys.path.insert(0, sys.argv[1])
from capped import Cap
from preheat import load_recipe, train
from preheat.training.recovery.oom import Recovery
before = json.load(open(sys.argv[4]))
for name in before["modules"]:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
Recovery._step_down = lambda self, failure: sys.exit(f"out of memory, {failure.phase}")
train(load_recipe("demo", sys.argv[5:]), out=sys.argv[2], watch=Cap("building", int(sys.argv[3]) + (before["untouched"] >> 20)))
"""


def plan_recipe(values: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "preheat", "plan", "demo", "--json", *format_settings(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    made: dict[str, object] = json.loads(done.stdout)
    return made


def try_run(values: list[str], mib: int) -> tuple[bool, str]:
    """Whether it went through within the limit, and its last words."""
    beside = Path(__file__).parents[1] / "tests" / "e2e"
    with tempfile.TemporaryDirectory() as folder:
        told = f"{folder}/told.json"
        subprocess.run(
            [sys.executable, "-c", BEFORE, f"{folder}/before", told, *values], capture_output=True, check=True
        )
        command = [sys.executable, "-c", CHILD, str(beside), f"{folder}/run", str(mib), told, *values]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SLOW)
        except (
            subprocess.TimeoutExpired
        ):  # where the compiler of kernels gets no memory, reference code runs in its place
            return False, f"not through in {SLOW} s"
    return done.returncode == 0, (done.stderr.strip().splitlines() or [""])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/verdicts.json"))
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    for n, values in enumerate(draw_settings(options.count, options.seed), 1):
        values = [*values, "stop.max_steps=3"]
        plan = plan_recipe(values)
        low, high = plan["peak_gib_interval"]
        limit = plan["peak_gib"] * draw.uniform(0.5, 1.6)
        verdict = "fits" if limit >= high else "does not" if limit < low else "not said"
        through, message = try_run(values, int(limit * 1024))
        wrong = (verdict == "fits") != through and verdict != "not said"
        row = {"settings": values, "peak_gib": plan["peak_gib"], "limit_gib": limit, "verdict": verdict, "ran": through}
        rows.append({**row, "words": message} if not through else row)
        print(
            f"{n:3d} {limit / plan['peak_gib']:.2f} of the peak: {verdict:9s} ran: {through!s:5s} {'WRONG ' + message if wrong else ''}",
            flush=True,
        )
    told = [row for row in rows if row["verdict"] != "not said"]
    right = sum((row["verdict"] == "fits") == row["ran"] for row in told)
    print(f"{right} of {len(told)} verdicts hold; {len(rows) - len(told)} lay within the interval")
    options.out.write_text(json.dumps({"command": " ".join(["python", *sys.argv]), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
