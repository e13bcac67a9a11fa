"""Bounded numeric types for recipe fields. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

__all__ = [
    "LARGEST",
    "Bound",
    "Count",
    "Fraction",
    "Long",
    "NonNegative",
    "NonNegativeInt",
    "Numerics",
    "Positive",
    "Seed",
]

# Bounds, as pydantic metadata: enforced at the YAML boundary only. A plain class keeps pydantic out of this import.


LARGEST = 2**31 - 1
"""Default upper bound of numbers: larger sizes overflow in torch long before anything could run."""


@dataclass(frozen=True)
class Bound:
    """A closed or half-open range for a number. Every number is bounded: `high` is `LARGEST` by default."""

    low: float | None = None
    high: float = LARGEST
    open_low: bool = False

    def problem(self, value: float) -> str | None:
        """Returns the error message for an invalid number, or None."""
        # First, because every comparison with NaN is false: NaN would pass all bounds.
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return f"must be {'above' if self.open_low else 'at least'} {self.low:g}"
        if value > self.high:
            return f"must be at most {self.high:,}"
        return f"must be at least {-LARGEST:,}" if value < -LARGEST else None


Count = Annotated[int, Bound(1)]
NonNegativeInt = Annotated[int, Bound(0)]
# Beyond LARGEST, because a run may read trillions of tokens; no tensor has such a size.
Long = Annotated[int, Bound(1, 10**15)]
"""A count of tokens, steps or documents of a whole run."""
Seed = Annotated[int, Bound(0, 2**32 - 1)]
"""A seed for any random generator (numpy's limit)."""
Positive = Annotated[float, Bound(0, open_low=True)]
NonNegative = Annotated[float, Bound(0)]
Fraction = Annotated[float, Bound(0, 1)]

Numerics = Literal["exact", "rounding", "different"]
"""A technique's effect on the numbers. exact: only the order of sums differs; rounding: the number format differs;
different: another model or loss."""
