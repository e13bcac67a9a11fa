"""A metric as sums over rows: so it can be taken again over resampled rows, and its interval comes from the data alone.

The bootstrap (Efron 1979, "Bootstrap methods: another look at the jackknife"): rows are drawn with replacement, the metric
is taken over each draw, and the middle 95 % of what came out is the interval (the percentile method). Two models that answered
the same rows are compared draw by draw, so what makes rows easy or hard for both cancels out (the paired bootstrap).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Metric", "difference", "draws", "interval", "macro_f1", "mean", "perplexity", "ratio", "resampled_sums"]

SHARE = 0.95
RESAMPLES = 1000
ROOM = 100_000
"""Counts held at once, under 1 MiB: a run evaluates with little memory to spare."""


@dataclass(frozen=True)
class Metric:
    """A number that is a function of sums over rows.

    Attributes:
        rows: [rows, features] float64, what each row adds.
        kind: which function of the sums it is, a key of `KINDS`; a name, so that a metric can be written down.
        higher: whether more is better.
    """

    rows: np.ndarray
    kind: str
    higher: bool = True

    def of(self, sums: np.ndarray) -> np.ndarray:
        """Sums [..., features] -> the metric [...]."""
        return KINDS[self.kind](sums)

    @property
    def value(self) -> float:
        """The metric over all rows."""
        return float(self.of(self.rows.sum(axis=0))) if len(self.rows) else math.nan


def _divided(sums: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[..., 0] / sums[..., 1]


def _exponential(sums: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # a perplexity beyond floats is infinite
        return np.exp(_divided(sums))


def _macro(sums: np.ndarray) -> np.ndarray:
    hit, predicted, gold = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
    seen = predicted + gold > 0
    f1 = np.where(seen, 2 * hit / np.maximum(predicted + gold, 1), 0.0)
    return f1.sum(axis=-1) / np.maximum(seen.sum(axis=-1), 1)


KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ratio": _divided,
    "perplexity": _exponential,
    "macro_f1": _macro,
}


def ratio(above: Sequence[float], below: Sequence[float], *, higher: bool = True) -> Metric:
    """A sum over another: the mean loss a token from losses and tokens of rows."""
    return Metric(np.stack([np.asarray(above, np.float64), np.asarray(below, np.float64)], axis=1), "ratio", higher)


def mean(values: Sequence[float], *, higher: bool = True) -> Metric:
    """
    >>> mean([1.0, 0.0, 1.0, 1.0]).value
    0.75
    """
    return ratio(values, [1.0] * len(values), higher=higher)


def perplexity(losses: Sequence[float], weights: Sequence[float]) -> Metric:
    """exp of the mean loss: losses in nats, summed over `weights` tokens each."""
    return Metric(ratio(losses, weights).rows, "perplexity", higher=False)


def macro_f1(gold: Sequence[int], predicted: Sequence[int], classes: int) -> Metric:
    """The mean over classes of F1 = 2 hits / (predicted + gold); classes that are neither predicted nor gold do not count.

    Args:
        gold, predicted: class of each row, from 0. A prediction of -1 is none of the classes.

    Example:
        >>> round(macro_f1([0, 0, 1, 2], [0, 1, 1, 1], 4).value, 4)  # F1 of 2/3, 1/2 and 0
        0.3889
    """
    one = np.eye(classes + 1)[:, :classes]  # the last row, that of -1, is zeros
    g, p = one[np.asarray(gold, np.int64)], one[np.asarray(predicted, np.int64)]
    return Metric(np.concatenate([g * p, p, g], axis=1), "macro_f1")


def resampled_sums(rows: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[np.ndarray]:
    """Sums over rows drawn with replacement, [some, features] at a time. Equal counts of rows and seeds give equal draws."""
    n, generator = len(rows), np.random.Generator(np.random.PCG64(seed))
    at_once = max(1, min(resamples, ROOM // n))
    for first in range(0, resamples, at_once):
        some = min(at_once, resamples - first)
        chosen = generator.integers(n, size=(some, n)) + n * np.arange(some)[:, None]
        counts = np.bincount(chosen.ravel(), minlength=some * n).reshape(some, n)
        # No matmul: OpenBLAS takes a large buffer for each of its threads at the first one, and ends the process if there is no room for it.
        yield np.einsum("sn,nf->sf", counts, rows)


def draws(metric: Metric, *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """The metric over each resample, [resamples]."""
    return np.concatenate([metric.of(sums) for sums in resampled_sums(metric.rows, resamples=resamples, seed=seed)])


def _middle(values: np.ndarray) -> tuple[float, float] | None:
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def interval(metric: Metric, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float] | None:
    """The 95 % interval; None where fewer than two rows leave nothing to resample."""
    return _middle(draws(metric, resamples=resamples, seed=seed)) if len(metric.rows) > 1 else None


def difference(
    before: Metric, after: Metric, *, paired: bool = True, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """after - before, and its 95 % interval.

    Args:
        paired: row n is the same for both, and both are resampled alike; else each by itself.
    """
    if paired and len(before.rows) != len(after.rows):
        raise ValueError(f"{len(before.rows)} rows before and {len(after.rows)} after cannot be compared row by row")
    value = after.value - before.value
    if min(len(before.rows), len(after.rows)) < 2:
        return value, None
    a = draws(before, resamples=resamples, seed=seed)
    b = draws(after, resamples=resamples, seed=seed if paired else seed + 1)
    with np.errstate(invalid="ignore"):  # two infinite perplexities have no difference
        return value, _middle(b - a)
