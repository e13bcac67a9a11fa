"""What a process holds for the tensors that a dry run saw: the log of allocations replayed through the allocator's own algorithm.

On a CPU that is the heap of `hardware/cpu_allocator.cpp`: tensors of 64 KiB and more are cut from one heap, where freed ones are joined and used again by
the best fit, and which never shrinks; smaller ones are malloc's. On a GPU it is torch's caching allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from preheat.core import STEP, Device, Phase
from preheat.planning.memory.cuda_caching_allocator import replay_caching
from preheat.planning.memory.free_list import Holes

__all__ = ["Heap", "hold", "replay"]

_SMALL, _HUGE = 64 << 10, 2 << 20  # of cpu_allocator.cpp
_STEPS = 3  # the first builds the optimizer's states behind its own tensors; after the second nothing moves


class Heap:
    """The heap of `hardware/cpu_allocator.cpp`. Sizes in bytes."""

    def __init__(self) -> None:
        self.small = 0  # malloc's
        self.end = 0  # of what is handed out or free between; what is free at the end does not count
        self.touched = 0  # the furthest that `end` has been
        self._where: dict[int, tuple[int, int]] = {}  # block -> (start, size); start -1: malloc's
        self._holes = Holes()

    @property
    def resident(self) -> int:
        """Bytes held from the system, in huge pages."""
        return self.small + -(-self.touched // _HUGE) * _HUGE

    def allocate(self, block: int, size: int) -> None:
        """Sizes are already rounded up to 64, as the recorder logs them."""
        if size < _SMALL:
            self.small += size
            self._where[block] = (-1, size)
            return
        hole = self._holes.take(size)
        if hole is None:
            start = self.end
            self.end += size
            self.touched = max(self.end, self.touched)
        else:
            start, room = hole
            if room > size:
                self._holes.give(start + size, room - size)
        self._where[block] = (start, size)

    def free(self, block: int) -> None:
        start, size = self._where.pop(block)
        if start < 0:
            self.small -= size
            return
        start, size = self._holes.give(start, size)
        if start + size == self.end:
            self.end = start
            self._holes.remove(start)


def hold(log: list[tuple[int, int, Phase]], streams: Mapping[int, str], device: Device) -> int:
    """Bytes that a process on a device holds at most for the tensors of a dry run: our heap on a CPU, torch's segments on a GPU.

    Args:
        log: of the dry run.
        streams: {block: stream} of those that are made beside the main one.
    """
    if device.kind == "cpu":
        return replay(log)
    return replay_caching(log, streams, expandable=device.expandable).reserved


def replay(log: Iterable[tuple[int, int, str]]) -> int:
    """The most bytes that the heap comes to hold over the allocations of a dry run, its step some times over.

    Args:
        log: (block, bytes: positive when made and negative when freed, phase) in order; phase `load` comes before the first
            step; what is in none of `STEP` is left out.

    Example:
        >>> replay([(0, 1 << 20, "load"), (1, 64 << 20, "forward"), (1, -(64 << 20), "forward")]) >> 20
        66
    """
    heap, peak = Heap(), 0
    log = list(log)
    load = [entry for entry in log if entry[2] == Phase.LOAD]
    step = [entry for entry in log if entry[2] in STEP]
    lasting = {block for block, size, _ in load if size > 0}
    for turn, entries in enumerate([load, *[step] * _STEPS]):
        living: dict[int, None] = {}  # in order
        for block, size, _ in entries:
            key = (
                block if turn == 0 or block in lasting else -1 - block
            )  # the step's own blocks, apart from those that last
            if size > 0:
                heap.allocate(key, size)
                living[key] = None
            elif size < 0 and (key in living or key in lasting):
                living.pop(key, None)
                lasting.discard(key)
                heap.free(key)
            peak = max(peak, heap.resident)
        for key in living if turn else ():  # what only a later phase frees
            heap.free(key)
    return peak
