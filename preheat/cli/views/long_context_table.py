"""Tables of long-context tasks: accuracy by depth and length, loss by position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["build_grids"]


def build_grids(summary: JsonObject) -> Iterator[Table]:
    """Yields a table for each task with parts; a cell holds the values before and after.

    Args:
        summary: as `preheat eval --json` prints it.
    """
    for name, result in summary["tasks"].items():
        if parts := result.get("parts"):
            old = ((summary.get("before") or {}).get("tasks", {}).get(name) or {}).get("parts") or []
            # Loss by position has ranges; the other tasks have a length and a depth or share.
            yield _build_stretches(name, parts, old) if "start" in parts[0] else _build_cells(name, parts, old)


def _build_stretches(name: str, parts: list[JsonObject], old: list[JsonObject]) -> Table:
    from rich.table import Table

    table = Table(f"{name}: places", *(("loss before", "after") if old else ("loss",)), box=None, pad_edge=False)
    before = {(p["start"], p["end"]): p["value"] for p in old}
    for p in parts:
        was = [_format_number(before.get((p["start"], p["end"])))] if old else []
        # `end` is exclusive, the printed range is not.
        table.add_row(f"{p['start']:,} to {p['end'] - 1:,}", *was, _format_number(p["value"]))
    return table


def _build_cells(name: str, parts: list[JsonObject], old: list[JsonObject]) -> Table:
    from rich.table import Table

    down = "depth" if "depth" in parts[0] else "share"
    # Columns: lengths; rows: depths or shares. A cell may be missing, if its length does not fit.
    lengths = sorted({p["length"] for p in parts})
    values = {(p[down], p["length"]): p["value"] for p in parts}
    before = {(p[down], p["length"]): p["value"] for p in old}
    head = {"depth": "accuracy at depth, by length", "share": "loss with this share of the context, by length"}[down]
    table = Table(f"{name}: {head}", *(f"{n:,}" for n in lengths), box=None, pad_edge=False)
    for at in sorted({p[down] for p in parts}):
        cells = [(before.get((at, n)), values.get((at, n))) for n in lengths]
        table.add_row(
            f"{at:.0%}", *(f"{_format_number(a)} → {_format_number(b)}" if old else _format_number(b) for a, b in cells)
        )
    return table


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
