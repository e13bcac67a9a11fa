"""Model of glibc's malloc, which serves the tensors of other trainers' processes on a CPU.

torch takes tensors by `posix_memalign`. Requests below a threshold come from one heap that only shrinks at its end,
others from `mmap`. Each freed mmap raises the threshold to its size, up to 32 MiB, so that after the first step only
larger tensors return to the system. Source: malloc/malloc.c of glibc 2.36 (`_int_memalign`, `sysmalloc`,
`munmap_chunk`, `systrim`).
"""

from __future__ import annotations

from preheat.planning.memory.free_list import Holes

__all__ = ["GlibcHeap"]

_PAGE = 4096
_ALIGNMENT = 64  # gAlignment of c10/core/alignment.h
_HEADER, _UNIT, _LEAST = 16, 16, 32  # of a chunk: before its memory, granularity, MINSIZE
_FIRST_THRESHOLD, _LAST_THRESHOLD = 128 << 10, 32 << 20  # DEFAULT_MMAP_THRESHOLD and its maximum
_TOP_PAD = 128 << 10
_CACHED_SIZE, _CACHED_CHUNKS = 1040, 7  # the cache of a thread: its largest chunks, and how many of a size
_CONSOLIDATION = 64 << 10  # FASTBIN_CONSOLIDATION_THRESHOLD: the heap's end is looked at when such a block is freed


class GlibcHeap:
    """Main arena of glibc's malloc; sizes in bytes."""

    def __init__(self) -> None:
        self._threshold = self._trim = _FIRST_THRESHOLD
        self._start_of_top = self._end = 0  # of the heap: the last used chunk, and what the system gave
        self._touched = 0
        self._mapped = 0
        self._chunks: dict[int, tuple[int, int]] = {}  # block -> (start, size); start -1: a mapping of its own
        self._holes = Holes()
        self._cached: dict[int, int] = {}  # size -> chunks in the thread's cache

    @property
    def resident(self) -> int:
        """Bytes reserved from the system."""
        return -(-self._touched // _PAGE) * _PAGE + self._mapped

    def allocate(self, block: int, size: int) -> None:
        """Allocates a block as `posix_memalign` does."""
        needed = max(-(-(size + 8) // _UNIT) * _UNIT, _LEAST)
        # A chunk must be larger than the block, so that an aligned address lies in it: a freed block is too small.
        padded = needed + _ALIGNMENT + _LEAST
        hole = self._holes.take(padded)
        if hole is None and self._end - self._start_of_top < padded + _LEAST:
            if padded >= self._threshold:
                mapping = -(-(padded + 8) // _PAGE) * _PAGE
                self._chunks[block] = (-1, mapping)
                self._mapped += mapping
                return
            self._end = -(-(self._start_of_top + padded + _TOP_PAD + _LEAST) // _PAGE) * _PAGE
        if hole is None:
            hole = (self._start_of_top, padded)
            self._start_of_top += padded
        start, room = hole
        aligned = -(-(start + _HEADER) // _ALIGNMENT) * _ALIGNMENT - _HEADER
        if 0 < aligned - start < _LEAST:
            aligned += _ALIGNMENT
        if start < aligned:
            self._give(start, aligned - start)
        used, room = needed, room - (aligned - start)
        if room - needed > _LEAST:
            self._give(aligned + needed, room - needed)
        else:
            used = room
        self._chunks[block] = (aligned, used)
        self._touched = max(self._touched, aligned + used)

    def free(self, block: int) -> None:
        start, size = self._chunks.pop(block)
        if start < 0:
            self._mapped -= size
            if self._threshold < size <= _LAST_THRESHOLD:
                self._threshold, self._trim = size, 2 * size
            return
        if self._give(start, size) >= _CONSOLIDATION and self._end - self._start_of_top >= self._trim:
            spare = self._end - self._start_of_top - _LEAST - 1 - _TOP_PAD
            self._end -= max(spare // _PAGE * _PAGE, 0)
            self._touched = min(self._touched, self._end)

    def _give(self, start: int, size: int) -> int:
        """Frees a part of the heap; returns the size of the free part that it then belongs to."""
        # What is cut off in front of and behind a block is small. Chunks in the cache are not merged with their
        # neighbours, so that a block that is freed beside them is too small for its like.
        if size <= _CACHED_SIZE and self._cached.get(size, 0) < _CACHED_CHUNKS:
            self._cached[size] = self._cached.get(size, 0) + 1
            return 0
        start, size = self._holes.give(start, size)
        if start + size == self._start_of_top:
            self._holes.remove(start)
            self._start_of_top = start
            return self._end - start
        return size
