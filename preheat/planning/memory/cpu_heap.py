"""Memory that a process reserves for its tensors: replays the log of a dry run through a model of the allocator.

On a CPU that is the heap of `hardware/cpu_allocator.cpp`: tensors of 64 KiB and more come from one heap that never
shrinks, with best fit and coalescing of free blocks; smaller tensors come from malloc. On a GPU it is torch's caching
allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from preheat.core import STEP, Device, Phase
from preheat.planning.memory.cuda_caching_allocator import replay_caching
from preheat.planning.memory.free_list import Holes

__all__ = ["Heap", "hold", "replay"]

_SMALL, _HUGE = 64 << 10, 2 << 20  # kSmall and kHuge of cpu_allocator.cpp
_STEPS = 3  # the first step allocates the optimizer states behind its own tensors; after the second nothing moves


class Heap:
    """Model of the heap of `hardware/cpu_allocator.cpp`; sizes in bytes."""

    def __init__(self) -> None:
        self.small = 0  # bytes allocated by malloc
        self.end = 0  # end of the last used block
        self.touched = 0  # largest value of `end` so far
        self._where: dict[int, tuple[int, int]] = {}  # block -> (start, size); start -1: from malloc
        self._holes = Holes()

    @property
    def resident(self) -> int:
        """Bytes reserved from the system, in huge pages."""
        # The heap uses huge pages of 2 MiB, each of which is resident as a whole.
        return self.small + -(-self.touched // _HUGE) * _HUGE

    def allocate(self, block: int, size: int) -> None:
        """Allocates a block; the recorder has already rounded its size up to 64 bytes."""
        # Small blocks are malloc's, of which the model counts only the bytes in use.
        if size < _SMALL:
            self.small += size
            self._where[block] = (-1, size)
            return
        # Best fit before growing, as in cpu_allocator.cpp: the heap grows only if no free block is large enough.
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
        # Coalesced first, so that a free block at the end reaches back as far as possible.
        start, size = self._holes.give(start, size)
        if start + size == self.end:
            # `touched` stays: the heap never shrinks, so pages once used remain resident.
            self.end = start
            self._holes.remove(start)


def hold(log: list[tuple[int, int, Phase]], streams: Mapping[int, str], device: Device) -> int:
    """Returns the peak of reserved bytes for the tensors of a dry run: our heap on a CPU, torch's segments on a GPU.

    Args:
        log: log of the dry run.
        streams: {block: stream} for the blocks that are not allocated on the main stream.
    """
    if device.kind == "cpu":
        return replay(log)
    return replay_caching(log, streams, expandable=device.expandable).reserved


def replay(log: Iterable[tuple[int, int, str]]) -> int:
    """Returns the peak of the heap's reserved bytes over a dry run, with the step repeated a few times.

    Args:
        log: (block, bytes: positive when allocated and negative when freed, phase) in order; phase `load` comes before
            the first step; phases outside `STEP` are ignored.

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
            # Separate keys for blocks that live within the step.
            key = block if turn == 0 or block in lasting else -1 - block
            if size > 0:
                heap.allocate(key, size)
                living[key] = None
            # Frees of blocks that an ignored phase allocated have nothing to free here.
            elif size < 0 and (key in living or key in lasting):
                living.pop(key, None)
                lasting.discard(key)
                heap.free(key)
            peak = max(peak, heap.resident)
        for key in living if turn else ():  # blocks that only a later phase frees
            heap.free(key)
    return peak
