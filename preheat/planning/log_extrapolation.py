"""Extrapolates the allocation log of a deep model from the logs of two models of few layers, event by event.

The log of one more layer has the same events and, in some places, a layer's events once more: where weights are
allocated, in each forward and backward pass, in the update. The two logs are aligned, and what the second one inserts
is inserted once for each further layer.

An event frees the block with the same age among the allocated blocks of the same size, which is the same in each layer:
counted from the newest in a backward pass, which frees what came last, and from the oldest elsewhere.

Logs that cannot be aligned this way have no extrapolation: of layers with an alternating pattern, whose two logs do not
contain two whole periods, or of experts, whose load-balancing loss takes all layers at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from preheat.core import STEP, Phase
from preheat.planning.observation import Observation

__all__ = ["extrapolate_log"]

Log = list[tuple[int, int, Phase]]
_WINDOW = 24  # events that must go on alike after an insertion
_MOST_CHANGED = 8  # of these, events of other sizes: kernels that take the tensors of all layers


class _Event(NamedTuple):
    """An allocation, or a free.

    Attributes:
        size: bytes before rounding, which are affine in the number of layers; negative if freed.
        part: number of the part of load and step, from phase to phase, in which the block was allocated.
        newer, older: of a free, how many living blocks of the same size, stream and part came later and earlier.
    """

    size: int
    phase: Phase
    stream: str
    part: int
    newer: int = 0
    older: int = 0

    def is_like(self, other: _Event) -> bool:
        """True if both events are the same one, in two models."""
        return self[:4] == other[:4] and (self.newer == other.newer or self.older == other.older)

    def is_of_kind(self, other: _Event) -> bool:
        """True if the events may differ in nothing but their size and the block that they free."""
        return self[1:4] == other[1:4] and (self.size > 0) == (other.size > 0)


class _Insertion(NamedTuple):
    """Events `start` to `stop` of the longer log, which the shorter one lacks before its event `at`."""

    at: int
    start: int
    stop: int


def extrapolate_log(
    fewer: Observation, more: Observation, times: int, rounding: int
) -> tuple[Log, dict[int, str]] | None:
    """Returns the log, and the streams of its blocks, of a model with `times` times the layers more that `more` has.

    Only load and step are in the log: a replay ignores all other phases.

    Args:
        fewer, more: observations with logs.
        rounding: bytes to which the allocator rounds sizes.

    Returns:
        None if the logs do not repeat from layer to layer.
    """
    short, long = _collect_events(fewer), _collect_events(more)
    if short is None or long is None:
        return None
    aligned = _align(short, long)
    if aligned is None:
        return None
    insertions, pairs = aligned
    writer = _Writer(rounding)
    for n in range(len(short) + 1):
        for insertion in insertions:
            if insertion.at == n and not _repeat(writer, long, insertion, times):
                return None
        if n < len(short) and not writer.write(short[n], long[pairs[n]], times):
            return None
    return writer.log, writer.streams


def _collect_events(observation: Observation) -> list[_Event] | None:
    """Returns the events of load and step in the order of a replay; None if the step reallocates a lasting block."""
    events: list[_Event] = []
    blocks: dict[int, tuple[int, int]] = {}  # living block -> size before rounding, part
    living: defaultdict[tuple[int, str, int], list[int]] = defaultdict(list)
    lasting: set[int] = set()
    part, last = 0, None
    for block, size, phase in _order_log(observation.log):
        if phase != last:
            part, last = part + 1, phase
        stream = observation.streams.get(block, "")
        if size > 0:
            if block in blocks or block in lasting:
                return None
            if phase == Phase.LOAD:
                lasting.add(block)
            exact = observation.unrounded[block]
            blocks[block] = exact, part
            living[exact, stream, part].append(block)
            events.append(_Event(exact, phase, stream, part))
        elif block in blocks:  # allocated by load or step
            exact, born = blocks.pop(block)
            alike = living[exact, stream, born]
            n = alike.index(block)
            del alike[n]
            events.append(_Event(-exact, phase, stream, born, len(alike) - n, n))
    return events


def _order_log(log: Log) -> Log:
    """Returns the entries of load, then those of the step, as a replay takes them.

    Frees between two allocations are sorted by the age of their blocks: their order may be that of a hash table (in
    autocast), and makes no difference to an allocator.
    """
    ordered: Log = []
    freed: Log = []
    age: dict[int, int] = {}

    def flush() -> None:
        ordered.extend(sorted(freed, key=lambda entry: age.get(entry[0], -1)))
        freed.clear()

    entries = [[entry for entry in log if entry[1] and entry[2] in phases] for phases in ((Phase.LOAD,), STEP)]
    for entry in (*entries[0], *entries[1]):
        if entry[1] > 0 or (freed and freed[-1][2] != entry[2]):
            flush()
        if entry[1] > 0:
            age[entry[0]] = len(ordered)
            ordered.append(entry)
        else:
            freed.append(entry)
    flush()
    return ordered


def _align(short: Sequence[_Event], long: Sequence[_Event]) -> tuple[list[_Insertion], list[int]] | None:
    """Returns what the longer log inserts, and for each event of the shorter one its index in the longer."""
    insertions: list[_Insertion] = []
    pairs: list[int] = []
    n = 0  # in the longer log
    while n < len(long) or len(pairs) < len(short):
        at = len(pairs)
        if at < len(short) and n < len(long) and short[at].is_like(long[n]):
            pairs.append(n)
            n += 1
            continue
        length = _count_inserted(short, long, at, n)
        if length is None:
            return None
        if length == 0:  # the same event, of another size
            pairs.append(n)
            n += 1
            continue
        start = n
        if insertions and insertions[-1].at == at:
            start = insertions.pop().start
        n += length
        insertions.append(_Insertion(at, start, n))
    return insertions, pairs


def _count_inserted(short: Sequence[_Event], long: Sequence[_Event], at: int, n: int) -> int | None:
    """Returns how many events the longer log inserts from `n` on, so that it goes on most like the shorter one."""
    most = len(long) - n - (len(short) - at)
    window = short[at : at + _WINDOW]
    if not window:
        return most
    best: tuple[int, int] | None = None  # events of other sizes, length
    for length in range(most + 1):
        following = long[n + length : n + length + len(window)]
        changed = 0
        for a, b in zip(window, following, strict=True):
            if not a.is_like(b):
                if not a.is_of_kind(b):
                    break
                changed += 1
        else:
            if changed <= (len(window) if length == 0 else _MOST_CHANGED) and (best is None or changed < best[0]):
                best = changed, length
            if changed == 0:
                break
    return best[1] if best else None


def _repeat(writer: _Writer, long: Sequence[_Event], insertion: _Insertion, times: int) -> bool:
    """Writes an insertion so many times; returns False if it does not repeat what precedes or follows it."""
    length = insertion.stop - insertion.start
    layer = long[insertion.start : insertion.stop]
    for start in (insertion.start - length, insertion.stop):
        other = long[max(start, 0) : start + length]
        if len(other) == length and all(
            a.is_of_kind(b) and a.size == b.size for a, b in zip(layer, other, strict=True)
        ):
            return all(writer.write(b, a, 1) for _ in range(times) for a, b in zip(layer, other, strict=True))
    return False


class _Writer:
    """Writes a log, with its own numbers for blocks.

    Args:
        rounding: bytes to which sizes are rounded.
    """

    def __init__(self, rounding: int):
        self.rounding = rounding
        self.log: Log = []
        self.streams: dict[int, str] = {}
        self._living: defaultdict[tuple[int, str, int], list[int]] = defaultdict(list)
        self._blocks = 0

    def write(self, one: _Event, two: _Event, times: int) -> bool:
        """Writes the event that follows from the same one in two models; returns False if it frees no known block."""
        exact = abs(one.size + (two.size - one.size) * times)
        size = -(-exact // self.rounding) * self.rounding
        alike = self._living[exact, one.stream, one.part]
        if one.size > 0:
            block = self._blocks
            self._blocks += 1
            alike.append(block)
            if one.stream:
                self.streams[block] = one.stream
            self.log.append((block, size, one.phase))
            return True
        if one.newer == two.newer:
            n = len(alike) - 1 - one.newer
        elif one.older == two.older:
            n = one.older
        else:
            return False
        if not 0 <= n < len(alike):
            return False
        self.log.append((alike.pop(n), -size, one.phase))
        return True
