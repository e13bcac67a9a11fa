"""Reduces a curve to bins: the extremes of each survive, so that a spike of one step in a million is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from preheat.web.columns import Items, Table

__all__ = ["Axis", "Outline", "bin_items", "place_items"]

Axis: TypeAlias = Literal["step", "tokens", "hours"]


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A curve in at most some number of bins.

    Attributes:
        x, low, high, mean: per bin; None: no value was finite.
        broken: x of bins with a value that was not finite.
        rows: values that the curve covers.
        is_exact: each bin is one value.
        newest: the last finite value; None: no value is finite, or not one of the newest.
        first, last: range of x of the whole run; None: there is no value.
    """

    key: str
    axis: Axis
    x: Sequence[float] = ()
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    mean: Sequence[float | None] = ()
    broken: Sequence[float] = ()
    rows: int = 0
    is_exact: bool = True
    newest: float | None = None
    first: float | None = None
    last: float | None = None


def bin_items(items: Items, key: str, axis: Axis, scale: float, points: int) -> Outline:
    """Groups rows or blocks of rows into at most `points` bins of equal width.

    Args:
        scale: x of the items in a unit of the curve's x.
    """
    import numpy as np

    values = items.finite + items.broken
    is_used = (values > 0) & np.isfinite(items.first_x) & np.isfinite(items.last_x)
    first_x, last_x, values = items.first_x[is_used], items.last_x[is_used], values[is_used]
    if not len(first_x):
        return Outline(key=key, axis=axis)
    if len(first_x) <= points:
        starts = np.arange(len(first_x))
    else:
        middle, width = (first_x + last_x) / 2, last_x[-1] - first_x[0]
        places = (middle - first_x[0]) * (points / width) if width > 0 else np.zeros(len(middle))
        bins: NDArray[np.int64] = places.astype(np.int64)
        starts = np.flatnonzero(np.diff(np.minimum(bins, points - 1), prepend=-1))
    ends: NDArray[np.int64] = np.append(starts[1:], len(first_x)) - 1
    low = np.minimum.reduceat(items.low[is_used], starts)
    high = np.maximum.reduceat(items.high[is_used], starts)
    finite = np.add.reduceat(items.finite[is_used], starts)
    mean = np.add.reduceat(items.total[is_used], starts) / np.maximum(finite, 1)
    broken = np.add.reduceat(items.broken[is_used], starts)
    known = np.flatnonzero(items.finite[is_used])
    # A block of many values has only their sum.
    is_known = len(known) > 0 and items.finite[is_used][known[-1]] == 1
    x = (first_x[starts] + last_x[ends]) / 2 / scale
    return Outline(
        key=key,
        axis=axis,
        x=x.tolist(),
        low=_list_finite(low, finite),
        high=_list_finite(high, finite),
        mean=_list_finite(mean, finite),
        broken=x[broken > 0].tolist(),
        rows=int(values.sum()),
        is_exact=len(starts) == int(values.sum()),
        newest=float(items.total[is_used][known[-1]]) if is_known else None,
    )


def _list_finite(figures: NDArray[np.float64], finite: NDArray[np.float64]) -> list[float | None]:
    return [value if count else None for value, count in zip(figures.tolist(), finite.tolist(), strict=True)]


def place_items(table: Table, steps: Table, key: str, column: str, first: float | None, last: float | None) -> Items:
    """Returns the rows of a table that has no such column, at the places of their steps in another table."""
    import numpy as np

    from preheat.web.columns import Items

    items = table.read_items(key, "step", None, None)
    all_steps, places = steps.read("step", 0, steps.rows), steps.read(column, 0, steps.rows)

    def place(x: NDArray[np.float64]) -> NDArray[np.float64]:
        # An evaluation before the first step is at 0.
        rows = np.searchsorted(all_steps, x, side="right") - 1
        return np.where(rows >= 0, places[np.maximum(rows, 0)], 0.0)

    first_x, last_x = place(items.first_x), place(items.last_x)
    inside = (last_x >= (-np.inf if first is None else first)) & (first_x <= (np.inf if last is None else last))
    return Items(
        *(
            figures[inside]
            for figures in (first_x, last_x, items.low, items.high, items.total, items.finite, items.broken)
        )
    )
