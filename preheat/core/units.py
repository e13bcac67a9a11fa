"""Formats durations, shares, sizes and rates as text: the same for terminal, pages and messages."""

from __future__ import annotations

import math

__all__ = [
    "format_bytes",
    "format_duration",
    "format_gflops",
    "format_memory",
    "format_percent",
    "format_rate",
    "format_three_digits",
]


def format_memory(gib: float) -> str:
    """Returns an amount of memory in GiB, or below 1 GiB in MiB.

    Example:
        >>> format_memory(1.5), format_memory(0.25), format_memory(139.8), format_memory(0.0021)
        ('1.50 GiB', '256 MiB', '139.8 GiB', '2.15 MiB')
    """
    size = abs(gib)
    # 0.9995 GiB would read 1024 MiB.
    if size < 0.9995:
        mib = size * 1024
        digits = 0 if mib >= 99.95 else 1 if mib >= 9.995 else 2
        return "0 MiB" if mib < 0.005 else f"{gib * 1024:.{digits}f} MiB"
    return f"{gib:,.{2 if size < 99.995 else 1 if size < 999.95 else 0}f} GiB"


def format_bytes(count: float) -> str:
    """Returns bytes with three digits, or four from 1,000 on, and a binary unit: sizes of files and messages.

    Example:
        >>> format_bytes(1023), format_bytes(1536), format_bytes(64 * 2**20), format_bytes(1023.8 * 2**20)
        ('1,023 B', '1.5 KiB', '64 MiB', '1 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    # 1,023.5 rounds to the next unit.
    power = next((i for i in range(len(units)) if abs(count) < 1023.5 * 1024**i), len(units) - 1)
    value = count / 1024**power
    return f"{value:,.0f} {units[power]}" if abs(value) >= 999.5 else f"{format_three_digits(value)} {units[power]}"


def format_percent(share: float, digits: int = 0) -> str:
    """Returns a fraction as a percentage.

    Example:
        >>> format_percent(0.344), format_percent(0.344, 1)
        ('34 %', '34.4 %')
    """
    return f"{share * 100:,.{digits}f} %"


def format_three_digits(value: float) -> str:
    """Returns a number with three significant digits, without an exponent from 0.0001 on.

    Example:
        >>> format_three_digits(1329.5), format_three_digits(4.567)
        ('1,330', '4.57')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_duration(seconds: float | None) -> str:
    """Returns seconds with three digits below 10, and in their two largest units from there on; "-" if unknown.

    Example:
        >>> format_duration(2.5e-5), format_duration(0.0123), format_duration(4.567)
        ('25 µs', '12.3 ms', '4.57 s')
        >>> format_duration(75), format_duration(7300), format_duration(3 * 86400)
        ('1 min 15 s', '2 h 1 min', '3 d')
    """
    # A plan without a known end has no duration.
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 9.995:
        scale, unit = next(
            ((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds > 0.9994 * s), (1e-9, "ns")
        )
        value = float(f"{seconds / scale:.3g}")  # 0.9995 ms is 1,000 µs otherwise
        return f"{value:g} {unit}" if seconds else "0 s"
    if seconds >= 1e10:
        return f"{seconds / 86400:.3g} d"
    rounded = round(seconds)
    parts = [(rounded // 86400, "d"), (rounded // 3600 % 24, "h"), (rounded // 60 % 60, "min"), (rounded % 60, "s")]
    # The largest unit that is not 0; the next one follows it, and smaller ones are dropped.
    first = next(i for i, (n, _) in enumerate(parts) if n)
    return " ".join(f"{n} {unit}" for n, unit in parts[first : first + 2] if n)


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
