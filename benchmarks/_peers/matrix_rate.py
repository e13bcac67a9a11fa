"""This machine's matrix rate, the ceiling of every contender: prints {"bf16": FLOP/s, "fp32": FLOP/s, "cpu", "threads"}."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch


def rate(dtype: torch.dtype, size: int, seconds: float = 4.0) -> float:
    """Median FLOP/s of [size, size] x [size, size] on random data, after a first product that is not counted."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    torch.mm(a, b, out=out)
    times: list[float] = []
    while sum(times) < seconds:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


if __name__ == "__main__":
    rates = {"bf16": rate(torch.bfloat16, 4096), "fp32": rate(torch.float32, 2048)}
    print(json.dumps({**rates, "cpu": cpu(), "threads": torch.get_num_threads()}))
