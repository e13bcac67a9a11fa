"""Model of torch's CUDA caching allocator: replays the allocations of a dry run and returns the reserved memory.

Tensors are rounded to 512 bytes and cut from segments that the driver provides and the allocator caches: 2 MiB segments
for tensors up to 1 MiB, 20 MiB segments for tensors below 10 MiB, otherwise the tensor's size rounded up to 2 MiB. A
freed block is coalesced with free neighbours in its segment and reused by best fit, on its own stream only. With
`expandable_segments` each stream has one segment that grows page by page, so blocks of any size fit one after the
other. Source: torch's c10/cuda/CUDACachingAllocator.cpp and
https://pytorch.org/docs/stable/notes/cuda.html#memory-management.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from preheat.core import STEP, Phase
from preheat.planning.memory.free_list import Holes

__all__ = ["Caching", "Reserved", "replay_caching"]

_MIB = 2**20
# Constants of CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer,
# then kLargeBuffer, kMinLargeAlloc, kRoundLarge.
_ROUND, _SMALL, _SMALL_SEGMENT = 512, _MIB, 2 * _MIB
_LARGE_SEGMENT, _OWN_SEGMENT, _ROUND_LARGE = 20 * _MIB, 10 * _MIB, 2 * _MIB
_GAP = 1  # gap between segments, so that blocks of two segments never coalesce


class _Pool:
    """Segments of one stream, for either small or large tensors."""

    def __init__(self) -> None:
        self.holes = Holes()
        self.segments: dict[int, int] = {}  # start -> size
        self.end = 0

    def grow(self, size: int) -> tuple[int, int]:
        start = self.end
        # Addresses are made up: each new segment follows the last one of its pool, with a gap.
        self.segments[start] = size
        self.end += size + _GAP
        return start, size

    def stretch(self, need: int, page: int) -> tuple[tuple[int, int], int]:
        """Extends the expandable segment; returns the free block at its end, and the bytes by which it grew."""
        size = self.segments.get(0, 0)
        # A free block at the end is used for the new one, so the segment grows by the rest only.
        last = self.holes.ending(size)
        start = size if last is None else last
        if last is not None:
            self.holes.remove(last)
        grown = -(-(start + need - size) // page) * page
        self.segments[0] = size + grown
        return (start, size + grown - start), grown


class Caching:
    """The allocator's handling of tensors; sizes in bytes.

    Args:
        expandable: `PYTORCH_ALLOC_CONF=expandable_segments:True`.
        limit: maximum of reserved bytes. Before it is exceeded, free segments are released; of an expandable segment
            all free pages.

    Example:
        >>> held = Caching()
        >>> held.allocate(0, 100_000_000), held.allocate(1, 1000)
        (True, True)
        >>> held.free(0)
        >>> held.allocated, held.reserved >> 20
        (1024, 98)
    """

    def __init__(self, *, expandable: bool = False, limit: int | None = None):
        self.expandable, self.limit = expandable, limit
        self.allocated = self.reserved = 0
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._where: dict[int, tuple[_Pool, int, int]] = {}

    def allocate(self, block: int, size: int, stream: str = "") -> bool:
        """Allocates a block; returns False if `limit` leaves no room for it."""
        # Even an empty tensor takes a block.
        need = max(-(-size // _ROUND) * _ROUND, _ROUND)
        small = need <= _SMALL
        if self.expandable and self.limit is not None and self.allocated + need > self.limit:
            return False
        # A free block is reused on its own stream only, and small tensors never share a segment with large ones.
        pool = self._pools.setdefault((stream, small), _Pool())
        piece = pool.holes.take(need)
        if piece is None:
            piece = self._allocate_segment(pool, need, small)
        if piece is None:
            return False
        start, room = piece
        # torch's should_split: of a large block, a rest of at most kSmallSize is not split off.
        if room - need >= (_ROUND if small or self.expandable else _SMALL + 1):
            pool.holes.give(start + need, room - need)
            room = need
        # `room` may exceed the size by a rest that was not split off: it counts as allocated, as in torch.
        self._where[block] = (pool, start, room)
        self.allocated += room
        return True

    def holds(self, block: int) -> bool:
        return block in self._where

    def free(self, block: int) -> None:
        pool, start, size = self._where.pop(block)
        self.allocated -= size
        pool.holes.give(start, size)

    def _allocate_segment(self, pool: _Pool, need: int, small: bool) -> tuple[int, int] | None:
        if self.expandable:
            # Pages of an expandable segment: 2 MiB for small tensors, 20 MiB for large ones.
            piece, grown = pool.stretch(need, _SMALL_SEGMENT if small else _LARGE_SEGMENT)
            self.reserved = self.reserved + grown if self.limit is None else min(self.reserved + grown, self.limit)
            return piece
        size = (
            _SMALL_SEGMENT
            if small
            else _LARGE_SEGMENT
            if need < _OWN_SEGMENT
            else -(-need // _ROUND_LARGE) * _ROUND_LARGE
        )
        # As torch does when cudaMalloc fails: release cached segments, then try once more.
        if self.limit is not None and self.reserved + size > self.limit:
            self._release_segments()
            if self.reserved + size > self.limit:
                return None
        self.reserved += size
        return pool.grow(size)

    def _release_segments(self) -> None:
        """Releases all segments without live blocks."""
        for pool in self._pools.values():
            # A segment is free if one free block covers it.
            for start, size in list(pool.segments.items()):
                if pool.holes.is_free(start, size):
                    pool.holes.remove(start)
                    del pool.segments[start]
                    self.reserved -= size


@dataclass(frozen=True)
class Reserved:
    """Peaks of a process's memory for tensors, in bytes.

    Attributes:
        reserved: segments from the driver; what `nvidia-smi` shows, without the context.
        allocated: blocks in use.
        fits: True if no allocation failed under the limit.
    """

    reserved: int
    allocated: int
    fits: bool = True


def replay_caching(
    log: Iterable[tuple[int, int, str]],
    streams: Mapping[int, str] | None = None,
    *,
    expandable: bool = False,
    limit: int | None = None,
    steps: int = 2,
) -> Reserved:
    """Replays the allocations of a dry run: `load` once, then the step `steps` times.

    Args:
        log: (block, bytes: positive when allocated and negative when freed, phase) in order; phases other than `load`
            and `STEP` are ignored.
        streams: {block: name} for the blocks that are not allocated on the main stream.

    Example:
        >>> log = [(0, 100 << 20, "load"), (1, 15 << 20, "forward"), (1, -(15 << 20), "backward")]
        >>> replay_caching(log).reserved >> 20
        116
    """
    allocator, streams = Caching(expandable=expandable, limit=limit), streams or {}
    log = list(log)
    load = [entry for entry in log if entry[2] == Phase.LOAD]
    step = [entry for entry in log if entry[2] in STEP]
    lasting = {block for block, size, _ in load if size > 0}
    reserved = allocated = 0
    fits = True
    # The second step begins with the segments that the first one left, as all later steps do.
    for turn, entries in enumerate([load, *[step] * steps]):
        living: dict[int, None] = {}  # in order
        for block, size, _ in entries:
            # Separate keys for blocks that live within the step.
            key = block if turn == 0 or block in lasting else -1 - block
            if size > 0 and not allocator.holds(key):
                if allocator.allocate(key, size, streams.get(block, "")):
                    living[key] = None
                else:
                    fits = False
            elif size < 0 and allocator.holds(key):
                allocator.free(key)
                living.pop(key, None)
            if allocator.reserved > reserved:
                reserved = allocator.reserved
            if allocator.allocated > allocated:
                allocated = allocator.allocated
        for key in living if turn else ():  # blocks that only a later phase frees
            allocator.free(key)
    return Reserved(reserved, allocated, fits)
