"""Benchmark utilities: stopwatch and random operands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Random", "Stopwatch", "threads_of"]

_LONG = 0.03
"""Seconds of a call that is not repeated for the noise of the scheduler alone."""
_COMPUTED = 0.8
"""CPU seconds for each second in which a call ran without interruption: at least 1 by one thread or more, less the
resolution of the clock."""
_MORE = 4
"""Calls after two that were interrupted."""
_INTERRUPTED = 2.0
"""A sample that takes so many times as long as the shortest one was interrupted: another process had a core for a time
slice (3 ms and more), while samples of short calls take 0.2 ms and differ by a tenth."""
_PATIENCE = 0.05
"""Seconds beyond the budget in which to wait for samples without interruption: a dozen time slices."""


class Stopwatch:
    """Times calls on one device.

    Args:
        end: time after which a call that other processes interrupt is not repeated.
    """

    def __init__(self, cuda: bool, end: float = math.inf):
        self.cuda, self.end = cuda, end

    def _once(self, call: Callable[[], object], times: int = 1) -> float:
        if self.cuda:
            return self._by_events(call, times)
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    def _by_events(self, call: Callable[[], object], times: int) -> float:
        """Times calls by CUDA events, because synchronization on the host adds up to half a millisecond."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Earlier work must not run between the events.
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        # Events have a resolution of about half a microsecond, so a short call may measure as 0.
        return max(start.elapsed_time(end) / 1e3, 1e-9) / times  # milliseconds to seconds

    def __call__(self, call: Callable[[], object], budget: float = 0.01) -> float:
        """Returns the seconds of one call: the median of a few samples, which is closer to a run than the minimum."""
        # The warm-up. It is repeated however long it takes: torch imports a part of itself at the first backward pass
        # or optimizer step, which takes seconds after an installation.
        begin, used = time.perf_counter(), time.process_time()

        def was_interrupted() -> bool:
            return not self.cuda and time.process_time() - used < _COMPUTED * (time.perf_counter() - begin)

        first, second = self._once(call), self._once(call)
        shortest = min(first, second)
        # More calls would take minutes for all operators, and their rates would be as wrong.
        if time.perf_counter() > self.end and was_interrupted():
            return shortest
        # Two long calls are enough: the noise of a scheduler is small compared with them. If they differ much, one of
        # them was interrupted, and if this process did not compute all the time, maybe both: a short call seems long.
        more = _MORE if was_interrupted() else 1 if max(first, second) > 1.5 * shortest else 0
        while shortest > _LONG and more:
            shortest, more = min(shortest, self._once(call)), more - 1
        if shortest > _LONG:
            return shortest
        # Several calls per sample if one is too short for the clock or, on a GPU, to hide the launch.
        times = max(1, math.ceil((2e-3 if self.cuda else 2e-4) / shortest))
        # The shortest call is a sample only if samples have the same number of calls.
        samples = [shortest] if times == 1 else []
        end = time.perf_counter() + budget
        # Two to nine samples, as many as fit into the budget; more while calls are interrupted.
        while True:
            now = time.perf_counter()
            if len(samples) >= 2 and (len(samples) >= 9 or now >= end):
                uninterrupted = [sample for sample in samples if sample <= _INTERRUPTED * min(samples)]
                usual = 2 * len(uninterrupted) > len(samples) and not was_interrupted()
                if usual or 3 <= len(uninterrupted) < len(samples) or now >= end + _PATIENCE:
                    return median(uninterrupted)
            samples.append(self._once(call, times))


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
    """Tensors of normal random numbers from a separate generator, which leaves the caller's random state alone.

    Sampling takes longer than most measurements, so a million numbers are sampled once and reused from different
    offsets.
    """

    def __init__(self, device: str):
        import torch

        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)
        self.numbers = torch.randn(2**20, device=device, generator=self.generator)
        # Offset of the next tensor, which differs between tensors so that no two operands are equal.
        self.place = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        self.place = (self.place + 64 * 1009) % len(self.numbers)  # a multiple of 64, so that memory stays aligned
        # Ceiling division: enough repetitions to cover the offset and the count.
        numbers = self.numbers.to(dtype).repeat(-(-(self.place + count) // len(self.numbers)))
        return numbers[self.place : self.place + count].view(shape)

    def rows(self, count: int, below: int) -> Tensor:
        """Returns `count` row indices in random order, without repetition if there are enough."""
        import torch

        # (count,)
        return torch.randperm(max(count, below), device=self.device, generator=self.generator)[:count] % below
