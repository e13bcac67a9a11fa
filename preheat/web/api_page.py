"""The read-only JSON API: runs, their curves and events."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast, get_args

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from preheat.files import to_json, to_plain_data
from preheat.web.index import list_keys, read_marks, read_outline, read_rows, summarize
from preheat.web.labels import add_labels
from preheat.web.outline import Axis
from preheat.web.settings import state_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from preheat.web.catalogue import RunEntry
    from preheat.web.index import RunSummary

__all__ = ["routes"]

_Result = TypeVar("_Result")

_MOST_POINTS = 5_000
"""Bins of a curve: more than a screen has pixels."""


def routes() -> list[Route]:
    return [
        Route("/api/runs", _list_runs),
        Route("/api/runs/{id}", _show_run),
        Route("/api/runs/{id}/curves", _show_curve),
        Route("/api/runs/{id}/curves.csv", _send_table),
        Route("/api/runs/{id}/events", _list_events),
    ]


def _respond(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _read(request: Request, read: Callable[[RunEntry], _Result]) -> _Result:
    """Reads something of the run that the URL names, in a thread."""
    catalogue, id = state_of(request).catalogue, request.path_params["id"]
    return await run_in_threadpool(lambda: read(catalogue.find(id)))


async def _list_runs(request: Request) -> Response:
    catalogue = state_of(request).catalogue

    def read() -> list[dict[str, object]]:
        return [_describe(add_labels(summarize(entry))) for entry in catalogue.list_runs()]

    return _respond({"runs": await run_in_threadpool(read), "is_cut_off": catalogue.is_cut_off})


def _describe(summary: RunSummary) -> dict[str, object]:
    values: dict[str, object] = to_plain_data(summary)
    return {**values, "path": str(summary.path)}


async def _show_run(request: Request) -> Response:
    return _respond(
        await _read(request, lambda entry: {**_describe(add_labels(summarize(entry))), "keys": list_keys(entry)})
    )


async def _show_curve(request: Request) -> Response:
    query = request.query_params
    axis, key = query.get("x", "step"), query.get("key", "loss")
    if axis not in get_args(Axis):
        raise HTTPException(400, f"x={axis[:40]}: is not an axis; use {', '.join(get_args(Axis))}.")
    first, last = _parse_number(request, "first"), _parse_number(request, "last")
    points = int(_parse_number(request, "points") or 800)
    if not 1 <= points <= _MOST_POINTS:
        raise HTTPException(400, f"points={points}: must be from 1 to {_MOST_POINTS:,}.")
    outline = await _read(
        request,
        lambda entry: read_outline(entry, key, x=cast(Axis, axis), first=first, last=last, points=points),
    )
    values = to_plain_data(outline)
    for name in ("x", "low", "high", "mean", "broken"):
        values[name] = [None if value is None else float(f"{value:.8g}") for value in values[name]]
    if outline.is_exact:
        del values["low"], values["high"]
    return _respond(values)


def _parse_number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise HTTPException(400, f"{name}={text[:40]}: is not a number.")
    return number


async def _list_events(request: Request) -> Response:
    return _respond({"events": await _read(request, _place_marks)})


def _place_marks(entry: RunEntry) -> list[dict[str, object]]:
    """Returns the events of a run with the tokens and the hours of training up to their steps."""
    import numpy as np

    marks = read_marks(entry)
    steps = [math.nan if mark.step is None else float(mark.step) for mark in marks]

    def place(key: str, scale: float) -> list[float | None]:
        outline = read_outline(entry, key, points=_MOST_POINTS)
        known = [(x, mean) for x, mean in zip(outline.x, outline.mean, strict=True) if mean is not None]
        if not known:
            return [None] * len(marks)
        # Events before the first step are at 0. A bin of several steps has their mean at its middle.
        places = np.interp(np.array(steps), [x for x, _ in known], [mean for _, mean in known], left=0.0) / scale
        return [value if math.isfinite(value) else None for value in places.tolist()]

    return [
        {**to_plain_data(mark), "tokens": tokens, "hours": hours}
        for mark, tokens, hours in zip(marks, place("tokens", 1.0), place("elapsed", 3600.0), strict=True)
    ]


async def _send_table(request: Request) -> Response:
    entry = await _read(request, lambda entry: entry)
    # Slashes of a name would be folders; other characters could end the header.
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in entry.name)[:80] or "run"
    return StreamingResponse(
        _write_table(entry),
        media_type="text/csv; charset=utf-8",
        headers={"content-disposition": f'attachment; filename="{name}.csv"'},
    )


def _write_table(entry: RunEntry) -> Iterator[bytes]:
    """Yields the values of all steps as CSV, some thousand lines at a time."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for number, row in enumerate(read_rows(entry)):
        writer.writerow([_escape_formula(cell) if isinstance(cell, str) else _format_cell(cell) for cell in row])
        if number % 2_000 == 1_999:
            yield buffer.getvalue().encode("utf-8", "replace")
            buffer.seek(0)
            buffer.truncate()
    # Keys are text of JSON, which may hold lone surrogates.
    yield buffer.getvalue().encode("utf-8", "replace")


def _format_cell(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _escape_formula(text: str) -> str:
    """Keeps a spreadsheet from computing a name that begins as a formula does."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
