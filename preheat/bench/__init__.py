"""Compares techniques on this machine: each contender runs in its own process, in alternating turns.

recipe ──contenders──▶ runs (worker.py, a process each) ──compare──▶ rows and verdicts (bench.json, bench.html)
"""

from preheat.bench.compare import run_bench

__all__ = ["run_bench"]
