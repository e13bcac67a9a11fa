"""How OpenMP's threads wait for each other. No torch: its OpenMP reads the variables once, when torch is imported.

By default, a thread that ends its part of a parallel loop early spins 300,000 times before it sleeps, 15 ms on some
processors. Beside other processes it uses up the time slices that the threads it waits for need, and training may
become 20 times as slow. On a quiet machine, sleeping at once costs up to a third of the speed, since cores take long to
wake, and a short spin costs nothing (`benchmarks/results/busy_cores.md`).
"""

from __future__ import annotations

import os
import time

from preheat.hardware.machine_use import UseMeter
from preheat.hardware.probe import count_cores

__all__ = ["VARIABLES", "choose_waiting", "spin_briefly"]

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user may have chosen: OpenMP's own, and those of GNU's and LLVM's libraries."""
_SPINS = "10000"
"""The fewest of those measured that cost nothing on a quiet machine: 3,000 cost a tenth."""
_WATCH = 0.1  # seconds, ten ticks of the kernel's counters


def choose_waiting() -> None:
    """Chooses for this process and its children: to sleep if other processes use its cores now, else to spin briefly.

    Takes a tenth of a second. Changes nothing if the user has chosen, or on a single core.
    """
    cores = count_cores()
    stated = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(int(stated), cores) if stated.isdecimal() else cores
    if threads == 1 or any(name in os.environ for name in VARIABLES):
        return
    meter = UseMeter()
    time.sleep(_WATCH)
    if meter.use(threads).alone is False:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    else:
        spin_briefly()


def spin_briefly() -> None:
    """Lets threads spin briefly before they sleep, in this process and its children, unless the user has chosen."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = _SPINS
