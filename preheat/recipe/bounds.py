"""Bounds of numbers, and the names that fields give them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

__all__ = ["Bound", "Count", "NonNegative", "Positive", "Share", "Whole"]

# Bounds, as pydantic metadata: enforced at the YAML boundary only. A plain tuple keeps pydantic out of this import.


@dataclass(frozen=True)
class Bound:
    """A closed or half-open range that a number must lie in."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def problem(self, value: float) -> str | None:
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return f"must be {'above' if self.open_low else 'at least'} {self.low:g}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high:g}"
        return None


Count = Annotated[int, Bound(1)]
Whole = Annotated[int, Bound(0)]
Positive = Annotated[float, Bound(0, open_low=True)]
NonNegative = Annotated[float, Bound(0)]
Share = Annotated[float, Bound(0, 1)]
