"""What measuring needs: a stopwatch for one device, random operands, and a look at who else uses the cores."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["OtherProcesses", "Random", "Stopwatch", "threads_of"]


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, cuda: bool):
        self.cuda = cuda

    def _once(self, call: Callable[[], object], times: int = 1) -> float:
        if self.cuda:
            return self._by_events(call, times)
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    def _by_events(self, call: Callable[[], object], times: int) -> float:
        """On a GPU, by its own clock: waiting for it takes the host up to half a millisecond, which would count as work."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) / 1e3, 1e-9) / times  # it is in milliseconds

    def __call__(self, call: Callable[[], object], budget: float = 0.01) -> float:
        """Seconds of one call: the median of some samples, as a run meets the machine; the least would be what it does at its best."""
        first = self._once(call)
        if first > 1:
            return first
        second = self._once(call)
        if second > 0.03:
            return min(first, second)
        # Several calls to a sample where one is too short for the clock or, on a GPU, for its launch not to count.
        times = max(1, math.ceil((2e-3 if self.cuda else 2e-4) / second))
        samples = [second] if times == 1 else []
        end = time.perf_counter() + budget
        while len(samples) < 2 or (len(samples) < 9 and time.perf_counter() < end):
            samples.append(self._once(call, times))
        return median(samples)


class OtherProcesses:
    """How many cores the other processes of the machine keep busy from now on. Linux counts that; elsewhere it is taken as none."""

    def __init__(self) -> None:
        self.start = self._read()

    def _read(self) -> tuple[float, float]:
        """Seconds of CPU that all processes but this one have used, and the time now."""
        if not Path("/proc/stat").exists():
            return 0.0, time.perf_counter()
        user, nice, system = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=4)[1:4]
        total = (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
        return total - time.process_time(), time.perf_counter()

    def cores(self) -> float:
        (used, now), (used_then, then) = self._read(), self.start
        return (used - used_then) / (now - then)


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Random:
    """Tensors of normal numbers, from a generator of its own: a caller's draws stay what they were.

    Drawing takes longer than most of what is measured, so a million numbers are drawn and repeated, from another place
    each time.
    """

    def __init__(self, device: str):
        import torch

        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)
        self.numbers = torch.randn(2**20, device=device, generator=self.generator)
        self.place = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        self.place = (self.place + 64 * 1009) % len(self.numbers)  # a multiple of 64, so that memory stays aligned
        numbers = self.numbers.to(dtype).repeat(-(-(self.place + count) // len(self.numbers)))
        return numbers[self.place : self.place + count].view(shape)

    def rows(self, count: int, below: int) -> Tensor:
        """`count` row numbers in random order, each once where there are enough."""
        import torch

        return torch.randperm(max(count, below), device=self.device, generator=self.generator)[:count] % below
