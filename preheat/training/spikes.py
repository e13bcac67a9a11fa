"""Spikes of the loss or of the gradient norm: detects them, and counts samples around those that a run leaves out.

Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), section 5.1: training resumed from a checkpoint before a spike,
without the batches that led to it, does not spike there again.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["HISTORY", "Range", "Spike", "SpikeDetector", "advance", "iterate_around"]

Range: TypeAlias = tuple[int, int]
"""Samples from the first number up to, and without, the second; in the order of training, from 0."""

_WINDOW = 64
"""Steps whose median a step is compared with: the loss hardly falls over so few, and one spike does not move it."""
_FEWEST = 16
"""Steps before the first comparison: of fewer, the deviation is too uncertain."""
HISTORY = _WINDOW + 1
"""Last steps that decide whether a spike begins at the next one."""
_DEVIATIONS = 8.0
"""Robust standard deviations (1.4826 times the median absolute deviation) above the median: beyond noise."""
# The deviation of a nearly constant loss is tiny. A loss spikes if it also exceeds the median by a tenth and by 0.1
# nats; norms vary more from batch to batch, so they must be four times their median.
_LEAST_LOSS = (0.1, 0.1)
_LEAST_NORM = (3.0, 0.0)

Score: TypeAlias = Literal["loss", "gradient_norm"]


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is far above those of the steps before.

    Attributes:
        value: of the step; NaN if it is not finite.
        median: of the steps before.
        threshold: least value of a spike.
    """

    score: Score
    value: float
    median: float
    threshold: float


class SpikeDetector:
    """Compares each step with the median of the steps before it.

    The answer depends on the last `HISTORY` steps only, so that a resumed run sees the same spikes.

    Args:
        history: (loss, gradient norm) of the last steps, in order.

    Example:
        >>> detector = SpikeDetector([(2.0, 1.0)] * 20)
        >>> detector.observe(2.1, 1.1)
        >>> detector.observe(2.0, 9.0)
        Spike(score='gradient_norm', value=9.0, median=1.0, threshold=4.0)
        >>> detector.observe(2.5, 9.0)  # of the same spike
    """

    def __init__(self, history: Iterable[tuple[float, float]] = ()):
        self._steps = deque[tuple[float, float]](maxlen=_WINDOW)
        self._spiking = False
        for loss, norm in list(history)[-HISTORY:]:
            self.observe(loss, norm)

    def observe(self, loss: float, norm: float) -> Spike | None:
        """Returns the spike that begins at a step, if one does, and remembers the step."""
        spike = self.compare("loss", loss) or self.compare("gradient_norm", norm)
        # Also a spike's values: if the level has changed for good, the median follows.
        self._steps.append((loss, norm))
        begins = spike is not None and not self._spiking
        self._spiking = spike is not None
        return spike if begins else None

    def compare(self, score: Score, value: float) -> Spike | None:
        """Returns a spike if a value is one beside the steps remembered; a value that is not finite always is."""
        values = [step[score == "gradient_norm"] for step in self._steps]
        median = statistics.median(values) if values else math.nan
        if not math.isfinite(value):
            return Spike(score, math.nan, median, math.nan)
        if len(values) < _FEWEST:
            return None
        deviation = 1.4826 * statistics.median(abs(v - median) for v in values)
        share, least = _LEAST_NORM if score == "gradient_norm" else _LEAST_LOSS
        threshold = median + max(_DEVIATIONS * deviation, share * abs(median), least)
        return Spike(score, value, median, threshold) if value >= threshold else None


def advance(position: int, count: int, left_out: Sequence[Range]) -> int:
    """Returns the position in the order of samples after `count` further ones, none of which is left out.

    Example:
        >>> advance(0, 4, [(8, 12)]), advance(4, 4, [(8, 12)]), advance(8, 4, [(8, 12)]), advance(6, 4, [(8, 12)])
        (4, 8, 16, 14)
    """
    for first, end in sorted(left_out):
        if end <= position:
            continue
        before = max(first - position, 0)
        # Exactly up to the range: the next step goes over it, so that a run whose range is added there agrees.
        if before >= count:
            break
        count, position = count - before, end
    return position + count


def iterate_around(order: Callable[[int], Iterator[int]], position: int, left_out: Sequence[Range]) -> Iterator[int]:
    """Returns the items of an order from a position on, without those of the ranges.

    Args:
        order: position -> the items from there on; called here, before the first item is requested, since an order may
            refuse its settings.

    Example:
        >>> import itertools
        >>> list(itertools.islice(iterate_around(itertools.count, 2, [(4, 6)]), 4))
        [2, 3, 6, 7]
    """
    pieces: list[tuple[int, int | None]] = []  # first item and number of items; None: without end
    for first, end in sorted(left_out):
        if end <= position:
            continue
        if first > position:
            pieces.append((position, first - position))
        position = end
    (start, count), *later = [*pieces, (position, None)]
    return itertools.chain(
        itertools.islice(order(start), count),
        # Only when it is reached: an order may read all scores.
        itertools.chain.from_iterable(itertools.islice(order(start), count) for start, count in later),
    )
