"""What a process holds for the tensors that a dry run saw: the log of allocations replayed through a model of the allocator.

On a CPU that is glibc's malloc. Blocks above a threshold are mapped from the system one by one and given back when freed;
smaller ones are cut from one heap, where freed blocks are joined, used again by the best fit, and given back only from its
end. The threshold starts at 128 KiB and grows to the largest mapped block that was freed, up to 32 MiB (malloc(3), M_MMAP_THRESHOLD).
So a process holds more than is alive, and its pages stay resident once touched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

__all__ = ["Heap", "heap_peak"]

_PAGE = 4096
_MAXIMUM = 32 << 20


class Heap:
    """glibc's malloc as far as tensors go. Sizes in bytes."""

    def __init__(self) -> None:
        self.threshold = 128 << 10
        self.mapped = 0
        self.end = 0  # of the heap that is in use or free inside; beyond lies the top
        self.top = 0  # bytes touched beyond `end` and not given back
        self._where: dict[int, tuple[int, int]] = {}  # block -> (start, size); start -1: mapped
        self._free: list[tuple[int, int]] = []  # (size, start), sorted: the first that is large enough is the best fit
        self._starts: dict[int, int] = {}  # start of a free block -> size
        self._ends: dict[int, int] = {}  # end of a free block -> start

    @property
    def resident(self) -> int:
        """Bytes held from the system."""
        return self.mapped + self.end + self.top

    def allocate(self, block: int, size: int) -> None:
        size = max(size + 64, 64)  # torch aligns to 64 bytes
        if size >= self.threshold:
            size = -(-size // _PAGE) * _PAGE
            self.mapped += size
            self._where[block] = (-1, size)
            return
        at = bisect_left(self._free, (size, -1))
        if at < len(self._free):
            room, start = self._free[at]
            self._take(room, start)
            if room > size:
                self._give(start + size, room - size)
        else:
            start = self.end
            self.end += size
            self.top = max(self.top - size, 0)
        self._where[block] = (start, size)

    def free(self, block: int) -> None:
        start, size = self._where.pop(block)
        if start < 0:
            self.mapped -= size
            if self.threshold < size <= _MAXIMUM:
                self.threshold = size
            return
        if start + size in self._starts:  # joins the free block behind it
            behind = self._starts[start + size]
            self._take(behind, start + size)
            size += behind
        if start in self._ends:  # and the one before it
            before = self._ends[start]
            room = self._starts[before]
            self._take(room, before)
            start, size = before, room + size
        if start + size == self.end:
            self.end = start
            self.top += size
            if self.top > 2 * self.threshold:  # malloc_trim gives back what lies beyond
                self.top = 0
            return
        self._give(start, size)

    def _take(self, size: int, start: int) -> None:
        self._free.pop(bisect_left(self._free, (size, start)))
        del self._starts[start]
        del self._ends[start + size]

    def _give(self, start: int, size: int) -> None:
        insort(self._free, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start


def heap_peak(log: Iterable[tuple[int, int, str]]) -> int:
    """The most that the heap (what is not mapped block by block) grows to.

    Args:
        log: (block, bytes: positive when made and negative when freed, phase) in order.

    Example:
        >>> heap_peak([(0, 100_000, "load"), (1, 64 << 20, "load")])  # the second is mapped
        100064
    """
    heap, peak = Heap(), 0
    for block, size, _ in log:
        if size > 0:
            heap.allocate(block, size)
        elif size < 0:
            heap.free(block)
        peak = max(peak, heap.end + heap.top)
    return peak
