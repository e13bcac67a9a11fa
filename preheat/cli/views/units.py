"""Formats rates and durations for the terminal."""

from __future__ import annotations

import math

__all__ = ["format_duration", "format_gflops", "format_rate"]


def format_rate(value: float | None) -> str:
    """Returns a rate as text: 12,345, or 12.3 below 100."""
    if value is None:
        return "-"
    # Below 100, a digit after the point is still significant.
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def format_gflops(rate: float) -> str:
    """Returns FLOP/s as a number of GFLOP/s.

    >>> format_gflops(2.3e8), format_gflops(9.81e11)
    ('0.23', '981')
    """
    giga = rate / 1e9
    return f"{giga:.2g}" if giga < 10 else f"{giga:,.0f}"


def format_duration(seconds: float | None) -> str:
    """Returns seconds as text in its two largest units.

    >>> format_duration(75), format_duration(7300), format_duration(3 * 86400)
    ('1 min 15 s', '2 h 1 min', '3 d 0 h')
    """
    # A plan without a known end has no duration.
    if seconds is None or not math.isfinite(seconds):
        return "-"
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"
