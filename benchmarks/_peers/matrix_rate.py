"""This machine's matrix rate, the ceiling of every contender.

Prints {"bf16": FLOP/s, "fp32": FLOP/s, "size": {"bf16": N, "fp32": N}, "cpu", "threads"}; size is that of the product measured.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def find_best_rate(dtype: torch.dtype, largest: int, seconds: float = 4.0) -> tuple[float, int]:
    """FLOP/s of the largest product that takes at most `seconds` at the rate of the next smaller one, and its size.

    Without AVX512 a bf16 product of 4096 would take minutes, so it goes by one of 256, whose rate there is the same.
    """
    size = 256
    # Small products by their quickest: one that waits for a busy core must not decide that larger ones take too long.
    measured = measure_rate(dtype, size, seconds / 8, pick=min)
    while size < largest and 2 * min(4 * size, largest) ** 3 / measured <= seconds:
        size = min(4 * size, largest)
        measured = (
            measure_rate(dtype, size, seconds) if size == largest else measure_rate(dtype, size, seconds / 8, pick=min)
        )
    return measured, size


def measure_rate(
    dtype: torch.dtype, size: int, seconds: float, *, pick: Callable[[list[float]], float] = statistics.median
) -> float:
    """FLOP/s, by the median time, of [size, size] x [size, size] on random data, after a first product that is not counted."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    torch.mm(a, b, out=out)
    times: list[float] = []
    while sum(times) < seconds:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / pick(times)


def name_cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


if __name__ == "__main__":
    measured = {"bf16": find_best_rate(torch.bfloat16, 4096), "fp32": find_best_rate(torch.float32, 2048)}
    rates, sizes = ({kind: pair[i] for kind, pair in measured.items()} for i in (0, 1))
    print(json.dumps({**rates, "size": sizes, "cpu": name_cpu(), "threads": torch.get_num_threads()}))
