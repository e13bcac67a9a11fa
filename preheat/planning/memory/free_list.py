"""Free list of an address space with best fit and coalescing, for the models of allocators."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Holes"]


class Holes:
    """Free blocks by address and size, in bytes.

    Example:
        >>> holes = Holes()
        >>> holes.give(0, 100), holes.give(200, 60), holes.give(100, 20)
        ((0, 100), (200, 60), (0, 120))
        >>> holes.take(50)  # best fit: the smallest that is large enough, the first of equal ones
        (200, 60)
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (size, start), sorted
        self._starts: dict[int, int] = {}  # start -> size
        self._ends: dict[int, int] = {}  # end -> start

    def give(self, start: int, size: int) -> tuple[int, int]:
        """Frees a block, coalesces it with its free neighbours, and returns the result: (start, size)."""
        # A free block right behind, then one right before: afterwards no two free blocks are adjacent.
        if (behind := self._starts.get(start + size)) is not None:
            self.remove(start + size)
            size += behind
        if (before := self._ends.get(start)) is not None:
            room = self.remove(before)
            start, size = before, room + size
        insort(self._free, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start
        return start, size

    def take(self, size: int) -> tuple[int, int] | None:
        """Removes and returns the smallest free block of at least `size`, unsplit: (start, size); None without one."""
        # -1 sorts before every start, so blocks of exactly `size` are found as well.
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free):
            return None
        room, start = self._free[at]
        self.remove(start)
        return start, room

    def remove(self, start: int) -> int:
        """Removes the free block that begins at `start`; returns its size."""
        size = self._starts.pop(start)
        del self._ends[start + size]
        self._free.pop(bisect_left(self._free, (size, start)))
        return size

    def is_free(self, start: int, size: int) -> bool:
        """True if exactly this block is free."""
        return self._starts.get(start) == size

    def ending(self, end: int) -> int | None:
        """Returns the start of the free block that ends at `end`; None if there is none."""
        return self._ends.get(end)
