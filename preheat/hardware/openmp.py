"""How OpenMP's threads wait for each other. No torch: its OpenMP reads the variables once, when torch is imported."""

from __future__ import annotations

import os

__all__ = ["VARIABLES", "wait_passively"]

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user may have chosen: OpenMP's own, and those of GNU's and LLVM's libraries."""


def wait_passively() -> None:
    """Lets the threads of this process and its children sleep while they wait, unless the user has chosen.

    By default, a thread that ends its part of a parallel loop early spins for about a millisecond. Beside other
    processes it uses up the time slices that the threads it waits for need: training becomes up to 20 times as slow
    (`benchmarks/results/busy_cores.md`). Has no effect on this process once torch is imported.
    """
    if not any(name in os.environ for name in VARIABLES):
        os.environ["OMP_WAIT_POLICY"] = "passive"
