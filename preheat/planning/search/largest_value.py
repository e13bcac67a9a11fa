"""Largest value of a setting with which a plan fits, by doubling or halving and then interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from preheat.core.plan import SAFE, Plan
from preheat.planning.search.result import describe_too_large

__all__ = ["DOUBLINGS", "Attempt", "Bounds", "find_largest", "judge"]

DOUBLINGS = 10
"""Each doubling costs a dry run or a search, and 1024 times the first value is beyond any practical limit."""
_REFINEMENTS = 14
"""Attempts between the two nearest values at most: bisection alone would narrow them 16,384 times."""
_BISECT_EVERY = 3
"""Interpolation may approach a curve from one side only; every so many attempts, the middle is tried instead."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Attempt(Generic[_Result]):
    """The outcome of trying a value.

    Attributes:
        result: None: the value is refused.
        free_gib: below the limit of safe use; negative if the value does not fit, NaN if it is refused.
        reason: why it does not fit or is refused; empty if it fits.
    """

    result: _Result | None
    free_gib: float = math.nan
    reason: str = ""


@dataclass(frozen=True)
class Bounds(Generic[_Result]):
    """The largest value known to fit and the smallest known not to, each with its attempt.

    Attributes:
        largest: None: not even the least value fits.
        too_large: None: no value was tried that does not fit.
    """

    largest: tuple[int, Attempt[_Result]] | None
    too_large: tuple[int, Attempt[_Result]] | None


def judge(plan: Plan, result: _Result) -> Attempt[_Result]:
    """Returns the attempt with a plan; only what fits safely counts as fitting, as in a search.

    Args:
        result: the plan, or what it belongs to.
    """
    free = SAFE * plan.available_gib - plan.peak_gib
    if plan.fits_safely:
        return Attempt(result, max(free, 0.0))
    return Attempt(result, min(free, -1e-9), describe_too_large(plan))


def find_largest(
    attempt: Callable[[int], Attempt[_Result]],
    start: int,
    *,
    least: int = 1,
    most: int | None = None,
    refine: bool = True,
) -> Bounds[_Result]:
    """Finds the largest value that fits; memory must grow with the value.

    Args:
        attempt: tries a value.
        start: the first value to try; it is doubled, or halved if it does not fit.
        least: no smaller value is tried.
        most: no larger value is tried.
        refine: narrow the bounds until they are neighbours; False: they stay a factor of two apart.

    Example:
        >>> found = find_largest(lambda n: Attempt(n, 1000.5 - n, "" if n <= 1000 else "too large"), 3)
        >>> found.largest[0], found.too_large[0]
        (1000, 1001)
    """
    largest = too_large = None
    value, doubled = start, 0
    while doubled <= DOUBLINGS:
        tried = attempt(value)
        if tried.reason:
            too_large = value, tried
            if largest or value <= least:
                break
            value = max(value // 2, least)
            continue
        largest = value, tried
        # A larger value failed before: halving has found one that fits.
        if too_large or (most is not None and value >= most):
            break
        value, doubled = 2 * value if most is None else min(2 * value, most), doubled + 1
    if refine and largest and too_large:
        largest, too_large = _narrow(attempt, largest, too_large)
    return Bounds(largest, too_large)


def _narrow(
    attempt: Callable[[int], Attempt[_Result]],
    largest: tuple[int, Attempt[_Result]],
    too_large: tuple[int, Attempt[_Result]],
) -> tuple[tuple[int, Attempt[_Result]], tuple[int, Attempt[_Result]]]:
    """Returns two values that are neighbours, the first of which fits."""
    for count in range(1, _REFINEMENTS + 1):
        low, high = largest[0], too_large[0]
        if high - low <= 1:
            break
        free, lacking = largest[1].free_gib, -too_large[1].free_gib
        # A refused value has no memory to interpolate with.
        share = 0.5 if math.isnan(lacking) or count % _BISECT_EVERY == 0 else free / (free + lacking)
        value = min(max(low + int((high - low) * share), low + 1), high - 1)
        tried = attempt(value)
        if tried.reason:
            too_large = value, tried
        else:
            largest = value, tried
    return largest, too_large
