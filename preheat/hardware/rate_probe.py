"""Probe of at most half a second: compares a CPU's rate of matmuls now with its calibration.

A calibration that was made beside other work is too slow, and a machine that is shared now is slower than its
calibration. Plans of this machine ask for the rates through `measure_checked_rates`, which tells the two apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from statistics import median
from threading import Thread
from typing import TYPE_CHECKING

from preheat.core import Device
from preheat.hardware.benchmark_rates import rates, remeasure_rates
from preheat.hardware.machine_use import UseMeter
from preheat.hardware.rates import MatrixRate, Present, Rates
from preheat.hardware.timing import limit_threads

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SPREAD", "measure_checked_rates", "probe_rates", "probe_present_rate"]

SPREAD = 0.15
"""Largest difference from the calibration that counts as the same rate.

Nine in ten runs on a quiet machine differed from their plans by less than 14 % (benchmarks/results,
plan_vs_measured-drawn.md), and a probe from the calibration by at most 4 %, once waiting for others was left out.
"""
_SECONDS = 0.3  # of the probe, without making its operands
_FRESH = 60.0  # seconds for which a result is used
_SHAPES = 3  # the median of three rates ignores a moment's disturbance of one
_LEAST, _LARGEST = 2e8, 16 << 20  # FLOPs: a smaller matmul measures its launch; bytes: operands and result of one
_COLD = 32 << 20  # bytes of operands to cycle through, as a calibration does, so that they are not in the cache

_log = logging.getLogger(__name__)


def measure_checked_rates(device: Device, threads: int) -> Rates:
    """Returns the rates of this machine, as `benchmark_rates.rates` does, after a probe of those of a CPU.

    If it is faster now than when it was calibrated, or was calibrated beside other work and is quiet now, it is
    calibrated again. If it is slower now, `Rates.now` says so. Rates without a note of how they were measured were
    given by somebody and are not doubted.

    Raises:
        RunError: measuring failed, or the rates cannot be stored.
    """
    known = rates(device, threads, again=False)
    present = None if known.of_gpu or known.machine is None else _find_recent_probe(known, threads)
    if present is None:
        return rates(device, threads) if known.contended else known
    # Beside other work a calibration would be as wrong as the one that it replaces.
    quiet = present.machine.alone is not False
    if quiet and (known.contended or present.share > 1 + SPREAD):
        _log.warning(
            "measuring this machine again: it was calibrated while other processes ran%s",
            "" if known.contended else f", and is {present.share - 1:.0%} faster now",
        )
        measured = remeasure_rates(device, threads)
        # What was just measured is not doubted; beside work that comes and goes, each plan would take a minute.
        _remember(measured, Present(1.0, measured.machine or present.machine))
        return measured
    return _add_present_rate(known, present)


def probe_present_rate(known: Rates, threads: int) -> Rates:
    """Returns the rates, with `Rates.now` if this machine's CPU is slower now."""
    present = None if known.of_gpu else probe_rates(known, threads)
    return known if present is None else _add_present_rate(known, present)


def _add_present_rate(known: Rates, present: Present) -> Rates:
    return dataclasses.replace(known, now=present) if present.share < 1 - SPREAD else known


_last: tuple[float, Rates, Present | None] | None = None


def _find_recent_probe(known: Rates, threads: int) -> Present | None:
    """Returns the result of a probe of these rates in the last minute: commands such as `bench` plan many recipes."""
    if _last is not None and _last[1] == known and time.monotonic() - _last[0] < _FRESH:
        return _last[2]
    present = probe_rates(known, threads)
    _remember(known, present)
    return present


def _remember(known: Rates, present: Present | None) -> None:
    global _last
    _last = time.monotonic(), known, present


def probe_rates(known: Rates, threads: int) -> Present | None:
    """Measures a few matmuls of a calibration of a CPU again; None if it has none of a suitable size."""
    shapes = _choose_matmuls(known)
    if not shapes:
        return None
    results: list[Present] = []
    # In a thread of its own: OpenMP's threads end with it, and the search may fork this process afterwards.
    probing = Thread(target=lambda: results.append(_probe(shapes, threads)))
    probing.start()
    probing.join()
    return results[0]


def _choose_matmuls(known: Rates) -> list[MatrixRate]:
    """Returns the quickest fp32 matmuls that are long enough; fp32, because bf16 may be slow in software."""
    rows = [
        row
        for row in known.matrix
        if (row.dtype, row.layout) == ("fp32", "forward")
        and 2 * row.n * row.k * row.m >= _LEAST
        and 4 * (row.n * row.k + row.k * row.m + row.n * row.m) <= _LARGEST
    ]
    rows.sort(key=lambda row: row.n * row.k * row.m / row.flops)
    return rows[:_SHAPES]


def _probe(shapes: list[MatrixRate], threads: int) -> Present:
    import torch

    with limit_threads(threads), torch.no_grad():
        operands = [_allocate_operands(row) for row in shapes]
        meter = UseMeter()
        shares = [
            _measure_rate(row, sets, _SECONDS / len(shapes)) / row.flops
            for row, sets in zip(shapes, operands, strict=True)
        ]
        return Present(median(shares), meter.use(threads))


def _allocate_operands(row: MatrixRate) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns as many (input, weight, result) as leave the cache."""
    import torch

    count = max(2, min(16, _COLD // (4 * (row.n * row.k + row.k * row.m + row.n * row.m))))
    # The values do not change the time, and ones take no random numbers from the user's generator.
    return [(torch.ones(row.n, row.k), torch.ones(row.m, row.k), torch.ones(row.n, row.m)) for _ in range(count)]


def _measure_rate(row: MatrixRate, sets: list[tuple[Tensor, Tensor, Tensor]], seconds: float) -> float:
    """Returns the FLOP/s over `seconds`: a mean, because waiting for other processes is part of the rate now."""
    import torch

    turns, done = itertools.cycle(sets), 0

    def run_step() -> None:
        x, w, out = next(turns)
        torch.mm(x, w.t(), out=out)

    run_step()  # the first call plans the kernel
    start = time.perf_counter()
    while done < 2 or time.perf_counter() - start < seconds:
        run_step()
        done += 1
        if time.perf_counter() - start > 2 * seconds:  # a machine so busy that two calls take too long
            break
    return 2 * row.n * row.k * row.m * done / (time.perf_counter() - start)
