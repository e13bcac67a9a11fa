"""Numbers in words, and foreign text made safe for a page. A value that is missing reads 'not recorded'."""

from __future__ import annotations

import html
import math
import re
from typing import Any

from preheat.text import clean

__all__ = [
    "MISSING",
    "count",
    "duration",
    "escape",
    "gib",
    "grouped",
    "loss",
    "number",
    "off_by",
    "percent",
    "signed_percent",
    "tied",
    "value",
]

MISSING = "not recorded"


def escape(text: Any) -> str:
    """`clean` text, escaped for HTML, in attributes too."""
    return html.escape(clean(text))


def tied(text: Any) -> str:
    """`escape`d text whose numbers stay on one line with their units."""
    return re.sub(r"(?<=\d) (?=(?:%|GiB|MiB|[KMBT]|d|h|min|s)\b|%)", "\u00a0", escape(text))


def number(value: Any) -> float | None:
    """The value as a finite float, or None: for what is missing, no number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _signed(text: str) -> str:
    return text.replace("-", "\u2212")


def loss(value: Any) -> str:
    """A loss in nats, or 'not finite' where it was NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    found = number(value)
    return MISSING if found is None else _signed(f"{found:.3f}")


def grouped(value: Any, digits: int = 0) -> str:
    """3882.4 -> '3,882'."""
    found = number(value)
    return MISSING if found is None else _signed(f"{found:,.{digits}f}")


def count(value: Any) -> str:
    """15_120_000 -> '15.1 M'."""
    found = number(value)
    if found is None:
        return MISSING
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        if abs(found) >= 0.99995 * size:
            return f"{found / (1e3 if letter == 'K' else size):.3g} {letter}"
    return f"{found:,.0f}"


def gib(value: Any) -> str:
    """1.0512 -> '1.05 GiB'; what would round away is said in MiB."""
    found = number(value)
    if found is None:
        return MISSING
    if 0 < abs(found) < 0.095:
        return f"{found * 1024:.3g} MiB"
    return f"{found:,.2f} GiB" if abs(found) < 100 else f"{found:,.0f} GiB"


def percent(value: Any, digits: int = 0) -> str:
    """0.444 -> '44 %'."""
    found = number(value)
    return MISSING if found is None else _signed(f"{100 * found:.{digits}f} %")


def between(found: Any, *, signed: bool = False) -> str:
    """{value, low, high} -> '1.788 [1.70, 1.88]'; an interval that is not known is left out.

    Example:
        >>> between({"value": 0.24, "low": 0.16, "high": 0.33}), between({"value": -0.5, "low": None, "high": None}, signed=True)
        ('0.240 [0.160, 0.330]', '−0.500')
    """
    values = [number((found or {}).get(key)) for key in ("value", "low", "high")]

    def one(x: float) -> str:
        plain = f"{x:,.3f}" if abs(x) < 100 else f"{x:,.4g}" if abs(x) < 1e6 else f"{x:.3g}"
        return _signed(f"+{plain}" if signed and x > 0 else plain)

    if values[0] is None:
        return MISSING
    low, high = values[1:]
    return one(values[0]) + (f" [{one(low)}, {one(high)}]" if low is not None and high is not None else "")


def off_by(predicted: Any, measured: Any) -> float | None:
    """How far a prediction is from what was measured, as a share of the measured; None where either is missing."""
    guess, real = number(predicted), number(measured)
    return None if guess is None or not real else guess / real - 1


def signed_percent(value: float) -> str:
    """-0.029 -> '−3 %'; a difference that rounds to nothing has no sign."""
    whole = round(100 * value)
    return _signed(f"{whole:+d} %") if whole else "0 %"


def duration(seconds: Any) -> str:
    """3725 -> '1 h 2 min'; the two largest units."""
    found = number(seconds)
    if found is None:
        return MISSING
    if found < 9.95:
        return f"{found:.1f} s"
    whole = round(found)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((i for i, (n, _) in enumerate(parts) if n), len(parts) - 1)
    return " ".join(f"{n} {unit}" for n, unit in parts[first : first + 2] if n)


def value(found: Any) -> str:
    """Any value of a run in one line, for tables; not escaped."""
    if found is None or found in ("", [], {}):
        return MISSING
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, float):
        if not math.isfinite(found):
            return "not finite"
        return _signed(f"{found:,.4g}" if abs(found) < 1e4 else f"{found:,.0f}")
    if isinstance(found, int):
        return _signed(f"{found:,}" if abs(found) >= 10_000 else str(found))
    if isinstance(found, list | tuple):
        return " ".join(value(item) for item in found)
    if isinstance(found, dict):
        return ", ".join(f"{key} {value(item)}" for key, item in found.items())
    return str(found)
