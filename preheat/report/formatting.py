"""Formats numbers and escapes text from outside for the pages.

A missing value becomes 'not recorded'; a number too small to show becomes 0 without a sign; text that is too long for
a page loses its middle.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

from preheat.core import units
from preheat.core.json_types import JsonObject
from preheat.core.run_records import Estimate
from preheat.sanitize import escape_control_characters, shorten

__all__ = [
    "LONG",
    "MISSING",
    "NOT_FINITE",
    "format_interval",
    "format_change",
    "format_clock",
    "count",
    "format_duration",
    "escape",
    "format_headline",
    "format_gib",
    "format_grouped",
    "format_loss",
    "read_mapping",
    "read_number",
    "relative_error",
    "format_percent",
    "format_signed_percent",
    "format_sizes",
    "join_units",
    "choose_unit",
    "format_value",
]

MISSING = "not recorded"
NOT_FINITE = "not finite"


LONG = 20_000
"""Maximum characters of a sample, a token listing or a recipe on a page."""
_INLINE = 2_000  # maximum characters of a name, value or message: longer than our messages, short enough for a page
_LARGEST = 1e100  # no measurement is larger, and matplotlib's arithmetic overflows soon after


def escape(text: object, limit: int = _INLINE) -> str:
    """Returns text cleaned and escaped for HTML and attributes; beyond `limit` characters its middle is left out."""
    text = str(text)
    if len(text) > limit:
        # The end of a long message is often its most useful part.
        half = limit // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"
    # Cleaned of control characters first: they are invalid in HTML, even as entities.
    return html.escape(escape_control_characters(text))


def read_mapping(data: object) -> JsonObject:
    """Returns the value if it is a dict, else an empty dict: a file of a run may hold anything."""
    return data if isinstance(data, dict) else {}


def format_headline(text: object) -> str:
    """Returns a name from outside as one short line for a title or a heading, not escaped."""
    return shorten(str(text), 120) or "unnamed"


def join_units(text: object) -> str:
    """Returns escaped text with no-break spaces between numbers and their units."""
    return re.sub(r"(?<=\d) (?=(?:%|[KMGT]iB|[KMBT]|d|h|min|s|ms|µs|ns)\b|%)", "\u00a0", escape(text))


def read_number(value: object) -> float | None:
    """Returns the value as a finite float; None if it is missing, not a number, NaN, infinite or absurdly large."""
    # bool is a subclass of int, but True is no measurement.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None


def _format_sign(text: str) -> str:
    """Replaces a hyphen by a minus sign, or drops it if only zeros follow."""
    return text.replace("-", "\u2212" if re.search("[1-9]", text) else "")


def _format_decimals(value: float, digits: int) -> str:
    """1234.5 -> '1,234.5'; numbers from 1e15 on get an exponent."""
    return _format_sign(f"{value:,.{digits}f}" if abs(value) < 1e15 else f"{value:.3g}")


def format_loss(value: object) -> str:
    """Returns a loss in nats, or 'not finite' if it is NaN or infinite."""
    finite = read_number(value)
    if finite is None:
        return NOT_FINITE if isinstance(value, float) else MISSING
    return _format_decimals(finite, 3)


def format_grouped(value: object, digits: int = 0) -> str:
    """3882.4 -> '3,882'."""
    finite = read_number(value)
    return MISSING if finite is None else _format_decimals(finite, digits)


def count(value: object) -> str:
    """15_120_000 -> '15.1 M'."""
    finite = read_number(value)
    if finite is None:
        return MISSING
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        # 0.99995, so that 999,960 becomes 1 M rather than 1e+03 K.
        if abs(finite) >= 0.99995 * size:
            return _format_sign(f"{finite / (1e3 if letter == 'K' else size):.3g} {letter}")
    return _format_sign(f"{finite:,.0f}")


def format_gib(value: object) -> str:
    """1.0512 -> '1.05 GiB'; below 1 GiB in MiB."""
    finite = read_number(value)
    if finite is None:
        return MISSING
    return _format_sign(units.format_memory(finite) if abs(finite) < 1e15 else f"{finite:.3g} GiB")


def choose_unit(sizes: Sequence[object]) -> tuple[str, float]:
    """Returns the unit for the sizes (GiB) of a column or an axis, chosen by the largest, and a GiB in that unit.

    Example:
        >>> choose_unit([0.0002, 1.4]), choose_unit([0.0002, 0.3])
        (('GiB', 1.0), ('MiB', 1024.0))
    """
    most = max((abs(n) for size in sizes if (n := read_number(size)) is not None), default=1.0)
    return ("GiB", 1.0) if most >= 0.9995 else ("MiB", 1024.0)


def format_sizes(values: Sequence[object], *, signed: bool = False) -> tuple[str, list[str]]:
    """Formats a column of sizes (GiB) in one unit with equal decimals; returns (unit, texts). Rounded zeros are '0'.

    Example:
        >>> format_sizes([0.30001, 0.0005, 0.0, None])
        ('MiB', ['307.2', '0.5', '0', 'not recorded'])
    """
    unit, scale = choose_unit(values)
    most = max((abs(n) * scale for size in values if (n := read_number(size)) is not None), default=0.0)
    digits = 1 if most >= 100 else 2

    def show(size: float | None) -> str:
        if size is None:
            return MISSING
        text = _format_decimals(size * scale, digits)
        if not re.search("[1-9]", text):
            return "0"
        return f"+{text}" if signed and size > 0 else text

    return unit, [show(read_number(size)) for size in values]


def format_change(value: float, total: float) -> str:
    """Returns a signed difference, to about a thousandth of `total`; anything smaller is 0.

    Example:
        >>> format_change(-0.437, 12.0), format_change(-1.5e-05, 0.055)
        ('\u22120.4', '0')
    """
    # Three significant digits of `total`: 12.0 has one decimal, 0.055 has four.
    digits = max(0, 2 - math.floor(math.log10(abs(total)))) if total else 0
    text = f"{value:+,.{digits}f}" if digits < 12 else f"{value:+.2g}"
    return _format_sign(text) if re.search("[1-9]", text) else "0"


def format_percent(value: object, digits: int = 0) -> str:
    """0.444 -> '44 %'."""
    finite = read_number(value)
    if finite is None:
        return MISSING
    return _format_sign(units.format_percent(finite, digits) if abs(finite) < 1e13 else f"{100 * finite:.3g} %")


def format_interval(estimate: Estimate | None, *, signed: bool = False) -> str:
    """Returns a value with its interval, as in '1.788 [1.70, 1.88]'; an unknown interval is left out.

    Example:
        >>> format_interval(Estimate(0.24, 0.16, 0.33))
        '0.240 [0.160, 0.330]'
        >>> format_interval(Estimate(-0.5), signed=True)
        '−0.500'
    """
    if estimate is None:
        return MISSING
    values = [read_number(bound) for bound in (estimate.value, estimate.low, estimate.high)]

    def show(x: float) -> str:
        plain = f"{x:,.3f}" if abs(x) < 100 else f"{x:,.4g}" if abs(x) < 1e6 else f"{x:.3g}"
        return _format_sign(f"+{plain}" if signed and x > 0 and re.search("[1-9]", plain) else plain)

    if values[0] is None:
        return MISSING
    low, high = values[1:]
    return show(values[0]) + (f" [{show(low)}, {show(high)}]" if low is not None and high is not None else "")


def relative_error(predicted: object, measured: object) -> float | None:
    """Returns the relative error of a prediction, predicted / measured - 1; None if either is missing."""
    guess, real = read_number(predicted), read_number(measured)
    # `not real` covers None and 0.
    return None if guess is None or not real else guess / real - 1


def format_signed_percent(value: float) -> str:
    """-0.029 -> '−3 %'; a difference that rounds to 0 has no sign."""
    rounded = round(100 * value)
    return _format_sign(f"{rounded:+,d} %" if abs(rounded) < 1e6 else f"{float(rounded):+.2g} %") if rounded else "0 %"


def format_duration(seconds: object) -> str:
    """3725 -> '1 h 2 min'; the two largest units."""
    finite = read_number(seconds)
    if finite is None:
        return MISSING
    return _format_sign(units.format_duration(finite))


def format_clock(seconds: object) -> str:
    """3725.4 -> '1:02:05', the same format for all rows of a column."""
    finite = read_number(seconds)
    if finite is None or not 0 <= finite < 1e10:
        return MISSING
    total = int(finite)
    return f"{total // 3600:,}:{total // 60 % 60:02}:{total % 60:02}"


def format_value(data: object, depth: int = 0) -> str:
    """Returns any value of a run as one line for tables, not escaped."""
    if data is None or data in ("", [], {}):
        return MISSING
    if isinstance(data, bool):
        return "yes" if data else "no"
    if isinstance(data, int | float):
        real = read_number(data)
        if real is None:
            return NOT_FINITE if isinstance(data, float) else "too large to show"
        if isinstance(data, int):
            return _format_sign(
                f"{data:,}" if 10_000 <= abs(data) < 1e15 else str(data) if abs(data) < 1e15 else f"{real:.4g}"
            )
        return _format_sign(f"{real:,.4g}" if abs(real) < 1e4 else _format_decimals(real, 0))
    if isinstance(data, list | tuple | dict):
        # Values come from files: a deeply nested one must not fill the page.
        if depth > 4:
            return "…"
        shown = list(data.items() if isinstance(data, dict) else data)[:50]
        rest = f" and {len(data) - 50:,} more" if len(data) > 50 else ""
        if isinstance(data, dict):
            return ", ".join(f"{str(key)[:200]} {format_value(item, depth + 1)}" for key, item in shown) + rest
        return " ".join(format_value(item, depth + 1) for item in shown) + rest
    return str(data)
