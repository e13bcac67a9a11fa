"""What a process holds for the tensors that a dry run saw: the log of allocations replayed through a model of the allocator.

On a CPU that is glibc's malloc as `hardware.probe.keep_heap` sets it. Blocks of 32 MiB and more are mapped from the system one by one
and given back when freed; smaller ones are cut from one heap, where freed blocks are joined and used again by the best fit,
and which never shrinks.
An aligned block, as torch asks for, is cut out of a larger piece, and what is left beside it returns to the heap. Blocks from the
heap's end stand side by side, so a freed one leaves a hole that is too short by that rest for another of its size (before glibc
2.38 memalign does not look for holes that are aligned already); in a hole the rest joins again, unless a small object took it meanwhile. So
a process holds more than is alive, and its pages stay resident once touched.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from preheat.planning.caching import replay_caching
from preheat.planning.holes import Holes
from preheat.planning.recorder import STEP, Phase
from preheat.technique import Device

__all__ = ["Heap", "HeapUse", "hold", "replay"]

_PAGE = 4096
_MAPPED = 32 << 20
_REST = 96  # bytes beside a block: the alignment of 64 and the least piece that malloc keeps
# How many of the rests are taken, and over how many steps: fitted to the peaks of eleven recipes between 0.1 and 10 GiB
# (benchmarks/results/plan_vs_measured.json). In a run the growth ends after a few steps, as small objects are freed again.
_TAKEN = 0.03
_STEPS = 4


class Heap:
    """glibc's malloc as far as tensors go. Sizes in bytes."""

    def __init__(self) -> None:
        self._draws = random.Random(0)  # a model of chance, the same each time
        self.mapped = 0
        self.fresh = 0  # bytes had from the system so far, to be touched for the first time
        self.end = 0  # of the heap that is in use or free inside; beyond lies the top
        self.touched = 0  # the furthest that `end` has been
        self._where: dict[int, tuple[int, int]] = {}  # block -> (start, size); start -1: mapped
        self._holes = Holes()

    @property
    def resident(self) -> int:
        """Bytes held from the system."""
        return self.mapped + self.touched

    def allocate(self, block: int, size: int) -> None:
        need = size + _REST
        if need >= _MAPPED:
            size = -(-need // _PAGE) * _PAGE
            self.mapped += size
            self.fresh += size
            self._where[block] = (-1, size)
            return
        used = need if self._draws.random() < _TAKEN else size
        hole = self._holes.take(need)
        if hole is not None:
            start, room = hole
            if room > used:
                self._holes.give(start + used, room - used)
        else:
            start = self.end
            self.end += used
            self.fresh += max(self.end - self.touched, 0)
            self.touched = max(self.end, self.touched)
        self._where[block] = (start, size)

    def free(self, block: int) -> None:
        start, size = self._where.pop(block)
        if start < 0:
            self.mapped -= size
            return
        start, size = self._holes.give(start, size)
        if start + size == self.end:
            self.end = start
            self._holes.remove(start)


@dataclass(frozen=True)
class HeapUse:
    """What a process holds at most for its tensors, and what a step has from the system anew (on a CPU); in bytes."""

    peak: int
    fresh: int


def hold(
    log: list[tuple[int, int, Phase]],
    streams: Mapping[int, str],
    device: Device,
    repeats: Iterable[tuple[int, int, int]] = (),
) -> HeapUse:
    """What a process on a device holds for the tensors of a dry run: glibc's heap on a CPU, torch's segments on a GPU.

    Args:
        log: of the dry run.
        streams: {block: stream} of those that are made beside the main one.
        repeats: see `replay`.
    """
    if device.kind == "cpu":
        return replay(log, repeats)
    # Segments that expand: near to affine in the number of layers, which those of fixed sizes are not, and 3 to 9 % below them.
    return HeapUse(replay_caching(log, streams, expandable=True).reserved, 0)


def replay(log: Iterable[tuple[int, int, str]], repeats: Iterable[tuple[int, int, int]] = ()) -> HeapUse:
    """Replays the allocations of a dry run, its step some times over.

    Args:
        log: (block, bytes: positive when made and negative when freed, phase) in order; phase `load` comes before the first
            step; what is in none of `STEP` is left out.
        repeats: (start, end, times): entries that stand for so many more like them, which take as much from the system again.

    Example:
        >>> use = replay([(0, 100_000, "load"), (1, 64 << 20, "forward"), (1, -(64 << 20), "forward")])
        >>> use.peak >> 20, use.fresh >> 20
        (64, 64)
    """
    heap, peak, fresh = Heap(), 0, 0
    log = list(log)
    times = [1] * len(log)
    for start, end, more in repeats:
        times[start:end] = [n * (1 + more) for n in times[start:end]]
    counted = list(zip(log, times, strict=True))
    load = [entry for entry in counted if entry[0][2] == "load"]
    step = [entry for entry in counted if entry[0][2] in STEP]
    lasting = {block for (block, size, _), _ in load if size > 0}
    for turn, entries in enumerate([load, *[step] * _STEPS]):
        fresh = 0
        living: dict[int, None] = {}  # in order
        for (block, size, _), like in entries:
            before = heap.fresh
            key = block if turn == 0 or block in lasting else -1 - block  # the step's own blocks, apart from those that last
            if size > 0:
                heap.allocate(key, size)
                living[key] = None
            elif size < 0 and (key in living or key in lasting):
                living.pop(key, None)
                lasting.discard(key)
                heap.free(key)
            peak = max(peak, heap.resident)
            fresh += (heap.fresh - before) * like
        for key in living if turn else ():  # what only a later phase frees
            heap.free(key)
    return HeapUse(peak, fresh)
