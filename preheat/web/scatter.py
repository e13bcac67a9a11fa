"""Arranges candidates as points of a chart: memory against speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from preheat.report.formatting import format_gib, format_grouped

__all__ = ["Point", "PlacedPoint", "Scatter", "Tick", "arrange"]

WIDTH, HEIGHT = 720.0, 360.0
_LEFT, _BOTTOM, _TOP, _RIGHT = 64.0, 44.0, 20.0, 16.0


@dataclass(frozen=True)
class Point:
    """A candidate: GiB, tokens a second, and its description."""

    number: int
    gib: float
    tokens_per_second: float
    text: str
    kind: Literal["best", "tried", "guess"]


@dataclass(frozen=True)
class PlacedPoint:
    """A point in the coordinates of the drawing, and the sentence that a screen reader says."""

    number: int
    x: float
    y: float
    label: str
    kind: str


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis."""

    place: float
    text: str


@dataclass(frozen=True)
class Scatter:
    """A drawing: points, ticks of both axes, and where the device's memory ends; None: outside of the drawing."""

    points: tuple[PlacedPoint, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit: Tick | None
    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def arrange(points: Sequence[Point], available_gib: float) -> Scatter:
    """Returns the drawing; memory grows to the right on a logarithmic axis if it spans more than a factor of ten."""
    memory = [p.gib for p in points]
    low, high = min(memory), max(memory)
    # The device's memory, if it is near: a line far away would push the points together.
    if low / 2 < available_gib < 3 * high:
        low, high = min(low, available_gib), max(high, available_gib)
    is_log = high > 10 * low
    low, high = (low / 1.15, high * 1.15) if is_log else (max(0.0, low - 0.06 * (high - low)), high * 1.03)
    most = max(p.tokens_per_second for p in points) * 1.06

    def place_x(gib: float) -> float:
        share = math.log(gib / low) / math.log(high / low) if is_log else (gib - low) / (high - low or 1.0)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def place_y(speed: float) -> float:
        return round(HEIGHT - _BOTTOM - speed / most * (HEIGHT - _BOTTOM - _TOP), 1)

    x_values = [v for v in (_list_log_ticks(low, high) if is_log else list_ticks(low, high)) if low <= v <= high]
    return Scatter(
        points=tuple(
            PlacedPoint(
                p.number,
                place_x(p.gib),
                place_y(p.tokens_per_second),
                f"{p.text}: {format_gib(p.gib)}, {format_grouped(p.tokens_per_second)} tokens a second",
                p.kind,
            )
            # The estimates below the rest, the chosen one on top; within each from left to right, as arrow keys go.
            for p in sorted(points, key=lambda p: (("guess", "tried", "best").index(p.kind), p.gib))
        ),
        x_ticks=tuple(
            Tick(place_x(value), f"{value:,.4g} GiB" if value >= 1 else format_gib(value)) for value in x_values
        ),
        y_ticks=tuple(Tick(place_y(value), format_grouped(value)) for value in list_ticks(0.0, most)),
        limit=Tick(place_x(available_gib), format_gib(available_gib)) if low <= available_gib <= high else None,
    )


def list_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns round values between two bounds.

    Example:
        >>> list_ticks(0, 23)
        [0.0, 5.0, 10.0, 15.0, 20.0]
    """
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _list_log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    # Powers of ten alone would leave a narrow range with a single label.
    factors = (1, 2, 5) if high < 1000 * low else (1,)
    return [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
