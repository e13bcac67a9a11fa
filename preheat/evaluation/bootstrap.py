"""Metrics as functions of sums over rows, with bootstrap confidence intervals.

The bootstrap (Efron 1979, "Bootstrap methods: another look at the jackknife") draws rows with replacement and computes
the metric of each resample; the interval holds the middle 95 % of these values (percentile method). Two models that
answered the same rows are compared on the same resamples, which cancels the difficulty of the rows (paired bootstrap).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.ma  # np.quantile loads it at its first call, in a run beside the model: 7 MiB

__all__ = [
    "Metric",
    "compute_difference",
    "draw_metrics",
    "compute_interval",
    "macro_f1",
    "mean_metric",
    "perplexity_metric",
    "ratio_metric",
    "resample_sums",
]

SHARE = 0.95
RESAMPLES = 1000
ROOM = 100_000
"""Counts in memory at once, under 1 MiB: evaluation within a run has little memory to spare."""


@dataclass(frozen=True)
class Metric:
    """A number that is a function of sums over rows.

    Attributes:
        rows: [rows, features] float64, the summands of each row.
        kind: the function of the sums, as a key of `KINDS`, so that metrics can be serialized.
        higher: True if higher is better.
    """

    rows: np.ndarray
    kind: str
    higher: bool = True

    def of(self, sums: np.ndarray) -> np.ndarray:
        """Computes the metric [...] from sums [..., features]."""
        return KINDS[self.kind](sums)

    @property
    def value(self) -> float:
        """The metric over all rows."""
        return float(self.of(self.rows.sum(axis=0))) if len(self.rows) else math.nan


def _divide_sums(sums: np.ndarray) -> np.ndarray:
    # 0 / 0 gives NaN, which `_middle_interval` leaves out.
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[..., 0] / sums[..., 1]


def _exponentiate_ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # overflow gives an infinite perplexity
        return np.exp(_divide_sums(sums))


def _average_f1(sums: np.ndarray) -> np.ndarray:
    # [..., classes] each: sums of hits, predictions and golds, the order of `macro_f1`.
    hit, predicted, gold = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
    present = predicted + gold > 0
    # F1 = 2 hits / (predicted + gold); a class that occurs in neither has none and does not count.
    f1 = np.where(present, 2 * hit / np.maximum(predicted + gold, 1), 0.0)
    return f1.sum(axis=-1) / np.maximum(present.sum(axis=-1), 1)


KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ratio": _divide_sums,
    "perplexity": _exponentiate_ratio,
    "macro_f1": _average_f1,
}


def ratio_metric(above: Sequence[float], below: Sequence[float], *, higher: bool = True) -> Metric:
    """Returns a ratio of two sums, e.g. the mean loss per token from the losses and tokens of rows."""
    return Metric(np.stack([np.asarray(above, np.float64), np.asarray(below, np.float64)], axis=1), "ratio", higher)


def mean_metric(values: Sequence[float], *, higher: bool = True) -> Metric:
    """Returns the mean over rows.

    >>> mean_metric([1.0, 0.0, 1.0, 1.0]).value
    0.75
    """
    return ratio_metric(values, [1.0] * len(values), higher=higher)


def perplexity_metric(losses: Sequence[float], weights: Sequence[float]) -> Metric:
    """Returns exp of the mean loss; losses in nats, each summed over `weights` tokens."""
    return Metric(ratio_metric(losses, weights).rows, "perplexity", higher=False)


def macro_f1(gold: Sequence[int], predicted: Sequence[int], classes: int) -> Metric:
    """Returns the mean F1 = 2 hits / (predicted + gold) over the classes that are predicted or gold somewhere.

    Args:
        gold, predicted: class of each row, from 0; a prediction of -1 is none of the classes.

    Example:
        >>> round(macro_f1([0, 0, 1, 2], [0, 1, 1, 1], 4).value, 4)  # F1 of 2/3, 1/2 and 0
        0.3889
    """
    one_hot = np.eye(classes + 1)[:, :classes]  # the last row, for -1, is zero
    g, p = one_hot[np.asarray(gold, np.int64)], one_hot[np.asarray(predicted, np.int64)]
    # [rows, 3 * classes]: F1 is no mean over rows, but a function of these sums.
    return Metric(np.concatenate([g * p, p, g], axis=1), "macro_f1")


def resample_sums(rows: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[np.ndarray]:
    """Yields sums over rows drawn with replacement, [chunk, features]; equal row counts and seeds give equal draws."""
    n, generator = len(rows), np.random.Generator(np.random.PCG64(seed))
    # Chunks draw from one generator in turn, so the draws do not depend on their number.
    at_once = max(1, min(resamples, ROOM // n))
    for first in range(0, resamples, at_once):
        chunk = min(at_once, resamples - first)
        # [chunk, n] drawn rows. Offset by n per resample, a single bincount counts them all.
        chosen = generator.integers(n, size=(chunk, n)) + n * np.arange(chunk)[:, None]
        counts = np.bincount(chosen.ravel(), minlength=chunk * n).reshape(chunk, n)
        # einsum, not matmul: OpenBLAS allocates a large buffer per thread at its first matmul and aborts the process if
        # that fails.
        yield np.einsum("sn,nf->sf", counts, rows)


def draw_metrics(metric: Metric, *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Returns the metric of each resample, [resamples]."""
    return np.concatenate([metric.of(sums) for sums in resample_sums(metric.rows, resamples=resamples, seed=seed)])


def _middle_interval(values: np.ndarray) -> tuple[float, float] | None:
    # A resample may hold no row that counts, which has no ratio.
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def compute_interval(metric: Metric, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float] | None:
    """Returns the 95 % interval; None with fewer than two rows."""
    return _middle_interval(draw_metrics(metric, resamples=resamples, seed=seed)) if len(metric.rows) > 1 else None


def compute_difference(
    before: Metric, after: Metric, *, paired: bool = True, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """Returns after - before and its 95 % interval.

    Args:
        paired: both metrics have the same rows and use the same resamples; else independent ones.
    """
    if paired and len(before.rows) != len(after.rows):
        raise ValueError(f"{len(before.rows)} rows before and {len(after.rows)} after cannot be compared row by row")
    value = after.value - before.value
    if min(len(before.rows), len(after.rows)) < 2:
        return value, None
    a = draw_metrics(before, resamples=resamples, seed=seed)
    # With equal seeds both metrics see the same rows in each resample.
    b = draw_metrics(after, resamples=resamples, seed=seed if paired else seed + 1)
    with np.errstate(invalid="ignore"):  # two infinite perplexities have no difference
        return value, _middle_interval(b - a)
