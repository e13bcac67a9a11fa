"""Text of a figure with its interval."""

from __future__ import annotations

from preheat.core.json_types import JsonObject

__all__ = ["format_estimate"]


def format_estimate(value: JsonObject | None, *, signed: bool = False) -> str:
    """Returns `0.4312 [0.41, 0.45]` for an `Estimate` as JSON; `-` if it is unknown.

    Example:
        >>> format_estimate({"value": 0.5, "low": None, "high": None})
        '0.5000'
    """
    if value is None or value["value"] is None:
        return "-"

    def show(v: float) -> str:
        return f"{v:+.4g}" if signed else f"{v:.4g}" if abs(v) >= 10 else f"{v:.4f}"

    between = f" [{show(value['low'])}, {show(value['high'])}]" if value["low"] is not None else ""
    return show(value["value"]) + between
