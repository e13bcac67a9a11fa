"""Techniques side by side on this machine: each contender in its own process, in turns, repeated.

recipe ──contenders──▶ runs (worker.py, a process each) ──compare──▶ rows and verdicts (bench.json, bench.html)
"""

from preheat.bench.compare import bench

__all__ = ["bench"]
