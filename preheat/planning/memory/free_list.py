"""Free pieces of an address space: found by the best fit, joined with their neighbours. What models of allocators are made of."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Holes"]


class Holes:
    """Free pieces by address and size, in bytes.

    Example:
        >>> holes = Holes()
        >>> holes.give(0, 100), holes.give(200, 60), holes.give(100, 20)
        ((0, 100), (200, 60), (0, 120))
        >>> holes.take(50)  # the smallest that is large enough, and of those the first
        (200, 60)
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (size, start), sorted
        self._starts: dict[int, int] = {}  # start -> size
        self._ends: dict[int, int] = {}  # end -> start

    def give(self, start: int, size: int) -> tuple[int, int]:
        """Enters a piece; returns it with the free ones beside it, which it now makes one with: (start, size)."""
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
        """Takes out the smallest piece of at least `size`, whole: (start, size); None where there is none."""
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free):
            return None
        room, start = self._free[at]
        self.remove(start)
        return start, room

    def remove(self, start: int) -> int:
        """Takes out the piece that begins at `start`; returns its size."""
        size = self._starts.pop(start)
        del self._ends[start + size]
        self._free.pop(bisect_left(self._free, (size, start)))
        return size

    def whole(self, start: int, size: int) -> bool:
        """Whether exactly this piece is free."""
        return self._starts.get(start) == size

    def ending(self, end: int) -> int | None:
        """Start of the free piece that ends at `end`."""
        return self._ends.get(end)
