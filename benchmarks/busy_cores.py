"""Training beside other processes: tokens/s by how OpenMP's threads wait for each other, quiet and busy.

    python benchmarks/busy_cores.py [--repeats 2] [--runs NAME ...] [--waits NAME ...] [--out FILE.json]

A thread that reaches the end of a parallel loop first waits for the others. libgomp lets it spin; beside other processes
it then uses up the time slices that the others need. Each run is a process of its own; runs take turns, and the loops
that keep the cores busy are processes that only count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cpu_vs_peers

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
WAITS: dict[str, dict[str, str]] = {
    # libgomp's own count while there are no more threads than cores.
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    **{f"spin {count}": {"GOMP_SPINCOUNT": str(count)} for count in (1000, 3000, 10000, 30000, 100000)},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    # Nothing is set: `preheat` chooses at its start, peers have torch's default.
    "own": {},
}
DEMO = {
    "demo fp32": ("--set", "techniques.mixed_precision=null"),
    "demo bf16": (),
}
SHAPE = cpu_vs_peers.SHAPES["15M"]
OF_15M = {
    "15M fp32": "preheat-fp32",
    "15M bf16": "preheat",
    "Trainer fp32": "trainer",
    "Trainer bf16": "trainer-bf16",
}
RUNS = (*DEMO, *OF_15M)
STEPS = {"demo": 32, "15M": 7, "Trainer": 6}
UNTIMED = 3
"""Steps at the beginning that are not timed."""
PATIENCE = 150.0
"""Seconds of a run at most; the steps of a run that takes longer are those it has made."""


@contextmanager
def keep_busy(loops: int) -> Iterator[None]:
    """Keeps so many cores busy."""
    counting = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def measure_demo(settings: tuple[str, ...], environment: dict[str, str]) -> float:
    """Tokens/s of `preheat train demo`: the median of its steps, but for the first."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        off = ["evaluate.every=0", "evaluate.baselines=false", "sample.prompts=[]", "checkpoint.every=0"]
        sets = itertools.chain.from_iterable(("--set", one) for one in [f"stop.max_steps={STEPS['demo']}", *off])
        command = [sys.executable, "-m", "preheat", "train", "demo", "--out", str(out), *sets, *settings]
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
        file, end = out / "metrics.jsonl", time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
        if process.poll() is None:
            process.kill()
        process.wait()
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        speeds = [line["tokens_per_second"] for line in lines if "loss" in line]
        if len(speeds) <= UNTIMED:
            raise SystemExit(f"preheat train demo made {len(speeds)} steps: {log.read_text()[-2000:]}")
        return statistics.median(speeds[UNTIMED:])


def measure_15m(contender: str, folder: Path, options: argparse.Namespace, environment: dict[str, str]) -> float:
    """Tokens/s of a contender of cpu_vs_peers.py."""
    own = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    os.environ.update({name: environment[name] for name in VARIABLES if name in environment})
    try:
        chosen = next(c for c in cpu_vs_peers.CONTENDERS if c.name == contender)
        result = cpu_vs_peers.train(chosen, folder, SHAPE, options)
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(own)
    if "failed" in result:
        raise SystemExit("\n".join(result["log"]))
    return float(result["tokens_per_second"])


def render_markdown(result: dict[str, Any]) -> str:
    loads, waits = result["loads"], result["waits"]
    lines = ["| run | " + " | ".join(f"{load}, {wait}" for load in loads for wait in waits) + " |"]
    lines.append("|---|" + "---|" * (len(loads) * len(waits)))
    for run in result["runs"]:
        cells = []
        for load, wait in itertools.product(loads, waits):
            speeds = result["tokens_per_second"][run][load][wait]
            cells.append(f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})")
        lines.append(f"| {run} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--waits", nargs="+", choices=list(WAITS), default=["spinning", "spin 10000", "passive"])
    parser.add_argument("--loads", nargs="+", choices=["quiet", "busy"], default=["quiet", "busy"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    peers = argparse.Namespace(steps=STEPS["15M"], seed=0, tokenizer="")
    cores = len(os.sched_getaffinity(0))
    speeds: dict[str, Any] = {
        run: {load: {wait: [] for wait in options.waits} for load in options.loads} for run in options.runs
    }
    plain = {k: v for k, v in os.environ.items() if k not in (*VARIABLES, "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if any(run in OF_15M for run in options.runs):
            cpu_vs_peers.prepare(folder, SHAPE, peers, litgpt=False)
        # Rates are measured by the first run of an empty cache; the runs share one, so that they are planned alike.
        plain |= {"PYTHONPATH": str(ROOT)}
        for _, run, load, wait in itertools.product(range(options.repeats), options.runs, options.loads, options.waits):
            environment = plain | WAITS[wait]
            with keep_busy(cores if load == "busy" else 0):
                peers.steps = STEPS[run.partition(" ")[0]]
                if run in DEMO:
                    speed = measure_demo(DEMO[run], environment)
                else:
                    speed = measure_15m(OF_15M[run], folder, peers, environment)
            speeds[run][load][wait].append(speed)
            print(f"{run:14} {load:6} {wait:9} {speed:9,.0f} tokens/s", flush=True)
    result = {
        "command": " ".join(["python", "benchmarks/busy_cores.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "cores": cores,
        "processor": platform.processor(),
        "loads": options.loads,
        "waits": options.waits,
        "runs": options.runs,
        "tokens_per_second": speeds,
    }
    print(render_markdown(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
