"""Benchmark utilities: stopwatch and random operands."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from preheat.hardware.machine_use import run_delays
from preheat.hardware.probe import count_cores

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Random", "Stopwatch", "limit_threads"]

_LONG_CALL = 0.03
"""Seconds of a call that is not repeated for the noise of the scheduler alone."""
_MAX_RUN_DELAY = 0.1
"""Share of a time that a thread may wait for a CPU. Another process has a core for a time slice (3 ms and more), while
most calls take less."""
_LEAST_CPU = 0.8
"""If run delays are unknown: CPU seconds for each second of calls that were not preempted, at least 1 by one thread or
more, less the resolution of the clock."""
_OUTLIER = 2.0
"""If run delays are unknown: a sample that takes so many times as long as the shortest one was preempted; others differ
by a tenth."""
_BACKOFF = (2e-3, 7e-3, 4e-3, 1e-3, 6e-3)
"""Seconds of sleep after a preempted sample, in turns.

The time slices of two threads can alternate, so that each call takes two of them, again and again. Threads that have
slept are scheduled sooner, and pauses of different lengths meet the other processes' slices in different places.
"""
_SAMPLE_SECONDS = 5e-5
"""Seconds of a sample beside other processes: the shorter, the fewer of them are preempted."""
_SAMPLES = 3
"""Samples without preemption whose median is the result."""
_PATIENCE = 0.06
"""Seconds in which to wait for these samples; fewer after the calibration's limit."""
_TOO_LONG_ALONE = 0.2
"""Seconds of a call that one thread would need too long for; one of eight short parts, as an optimizer's step, takes
eight time slices and more."""
_SCALING = 8
"""Threads at most by which the time of one thread is divided: memory-bound operators do not scale to more."""


class Stopwatch:
    """Times calls on one device.

    Args:
        end: time after which the wait for calls without preemption is short.
        strict: late after `end`, whatever the reason.
    """

    def __init__(self, cuda: bool, end: float = math.inf, *, strict: bool = False):
        self.cuda, self.end, self.strict = cuda, end, strict
        self.preempted = self.was_late = False

    def is_late(self) -> bool:
        """Returns True after `end`, if it is strict or other processes preempted calls.

        Otherwise a slow machine has all the time it needs.
        """
        late = (self.preempted or self.strict) and time.perf_counter() > self.end
        self.was_late |= late and self.preempted
        return late

    def _time_once(self, call: Callable[[], object], times: int = 1) -> float:
        if self.cuda:
            return self._time_by_events(call, times)
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    def _time_by_events(self, call: Callable[[], object], times: int) -> float:
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
        meter = None if self.cuda or _is_oversubscribed() else _PreemptionMeter()

        def was_preempted() -> bool:
            return meter is not None and meter.was_preempted()

        # The warm-up. It is repeated however long it takes: torch imports a part of itself at the first backward pass
        # or optimizer step, which takes seconds after an installation.
        first, second = self._time_once(call), self._time_once(call)
        shortest = min(first, second)
        if was_preempted():
            return self._time_beside_others(call)
        # Two long calls are enough: the noise of a scheduler is small compared with them. If they differ much, the
        # warm-up lasted until the second.
        if shortest > _LONG_CALL:
            return shortest if max(first, second) < 1.5 * shortest else min(shortest, self._time_once(call))
        # Several calls per sample if one is too short for the clock or, on a GPU, to hide the launch.
        times = max(1, math.ceil((2e-3 if self.cuda else 2e-4) / shortest))
        # The shortest call is a sample only if samples have the same number of calls.
        samples = [shortest] if times == 1 else []
        end = time.perf_counter() + budget
        # Two to nine samples, as many as fit into the budget.
        while len(samples) < 2 or (len(samples) < 9 and time.perf_counter() < end):
            samples.append(self._time_once(call, times))
            # More samples of so many calls would take long.
            if samples[-1] > 2 * shortest and was_preempted():
                break
        return self._time_beside_others(call) if was_preempted() else median(samples)

    def _time_beside_others(self, call: Callable[[], object]) -> float:
        """Returns the seconds of one call on a CPU whose cores other processes use, too."""
        import torch

        self.preempted = True
        late = self.is_late()
        samples, uninterrupted = _sample(call, 0.0 if late else _PATIENCE)
        threads = torch.get_num_threads()
        if uninterrupted:
            return median(uninterrupted)
        if threads == 1 or min(samples) > _TOO_LONG_ALONE:
            return min(samples)
        # One thread waits for no other one. That the threads share its work evenly is nearer to the truth than calls
        # of microseconds that took time slices.
        with limit_threads(1):
            call()
            alone, uninterrupted = _sample(call, _PATIENCE / 3 if late else _PATIENCE)
        one = median(uninterrupted) if uninterrupted else min(alone)
        return min(*samples, one / min(threads, _SCALING))


def _is_oversubscribed() -> bool:
    """True if there are more threads than CPUs: then they wait for each other, in a run as here."""
    import torch

    return torch.get_num_threads() > count_cores()


def _sample(call: Callable[[], object], patience: float) -> tuple[list[float], list[float]]:
    """Returns the seconds of one call, by all samples and by those without preemption."""
    samples, uninterrupted = list[float](), list[float]()
    pauses, end = itertools.cycle(_BACKOFF), time.perf_counter() + patience
    while True:
        seconds, preempted = _take_sample(call)
        samples.append(seconds)
        if preempted is None:
            uninterrupted = [each for each in samples if each <= _OUTLIER * min(samples)]
        elif not preempted:
            uninterrupted.append(seconds)
        # If they are told apart by their times only, samples that are all alike may all have been preempted.
        enough = len(uninterrupted) >= _SAMPLES and (preempted is not None or len(uninterrupted) < len(samples))
        if enough or time.perf_counter() > end:
            return samples, uninterrupted
        if preempted:
            time.sleep(next(pauses))
            call()  # wakes the threads


def _take_sample(call: Callable[[], object]) -> tuple[float, bool | None]:
    """Returns the seconds of one call, and whether it was preempted; None if that is unknown."""
    meter, start, count = _PreemptionMeter(), time.perf_counter(), 0
    while True:
        call()
        count, seconds = count + 1, time.perf_counter() - start
        if seconds >= _SAMPLE_SECONDS:
            # Clocks of CPU time are too coarse for a single sample.
            return seconds / count, meter.was_preempted() if meter.delays is not None else None


class _PreemptionMeter:
    """Detects that other processes had a core that this process's threads needed, since its creation."""

    def __init__(self) -> None:
        self.delays = run_delays()
        self._begin, self._used = time.perf_counter(), time.process_time()

    def was_preempted(self) -> bool:
        wall, used, delays = time.perf_counter() - self._begin, time.process_time() - self._used, run_delays()
        if self.delays is None or delays is None:
            return used < _LEAST_CPU * wall
        return max(delay - self.delays.get(thread, 0.0) for thread, delay in delays.items()) > _MAX_RUN_DELAY * wall


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
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
