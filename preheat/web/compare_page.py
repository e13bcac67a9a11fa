"""The page that compares several runs: curves on one plot, recipes, evaluations, and plan against measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.routing import Route

from preheat.files import to_json
from preheat.report.formatting import format_interval
from preheat.sanitize import shorten
from preheat.web.comparison import Comparison, compare_runs
from preheat.web.index import list_keys, summarize
from preheat.web.labels import add_labels
from preheat.web.runs_page import compare_with_plan
from preheat.web.settings import state_of
from preheat.web.templating import build_url, render

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from preheat.web.catalogue import Catalogue
    from preheat.web.index import RunSummary

__all__ = ["routes"]

_MOST_RUNS = 8
"""The page's style has so many colours for lines; more lines on one plot cannot be told apart."""
_AXES = {"step": "steps", "tokens": "tokens", "hours": "hours"}
_KEYS = ("loss", "validation_loss", "tokens_per_second", "gradient_norm", "lr", "memory")
"""Curves in the order of the page; others follow."""


def routes() -> list[Route]:
    return [Route("/compare", _show)]


@dataclass(frozen=True)
class _Compared:
    runs: tuple[RunSummary, ...]
    keys: tuple[str, ...]
    comparison: Comparison
    problems: tuple[str, ...]


async def _show(request: Request) -> Response:
    ids = list(dict.fromkeys(request.query_params.getlist("run")))
    if not ids:
        raise HTTPException(400, "No runs are selected; tick two or more runs in the table of runs, then Compare.")
    compared = await run_in_threadpool(_read, state_of(request).catalogue, ids)
    axis = request.query_params.get("x", "step")
    wanted = request.query_params.getlist("key")
    keys = [key for key in compared.keys if key in wanted] or [*compared.keys[:2]]
    return render(
        request,
        "compare.html",
        runs=compared.runs,
        ids=",".join(run.id for run in compared.runs),
        names=to_json([shorten(run.name, 40) for run in compared.runs]),
        keys=compared.keys,
        other_keys=[key for key in compared.keys if "/" in key],
        chosen=keys,
        axes=_AXES,
        axis=axis if axis in _AXES else "step",
        comparison=compared.comparison,
        problems=compared.problems,
        compare_with_plan=compare_with_plan,
        interval=format_interval,
        request_url=build_url(request, "/compare") + f"?{request.url.query}",
    )


def _read(catalogue: Catalogue, ids: Sequence[str]) -> _Compared:
    problems: list[str] = []
    if len(ids) > _MOST_RUNS:
        problems.append(f"{len(ids)} runs are selected; the first {_MOST_RUNS} are compared.")
    entries = []
    for id in ids[:_MOST_RUNS]:
        try:
            entries.append(catalogue.find(id))
        except HTTPException as error:
            problems.append(error.detail)
    if not entries:
        raise HTTPException(404, "None of the selected runs exist any more; select others in the table of runs.")
    if len(ids) == 1:
        problems.append("One run is selected; tick two or more in the table of runs to see their differences.")
    runs = tuple(add_labels(summarize(entry)) for entry in entries)
    recorded = dict.fromkeys(key for entry in entries for key in list_keys(entry))
    keys = (*(key for key in _KEYS if key in recorded), *(key for key in recorded if key not in _KEYS))
    folders: list[Path] = [entry.path for entry in entries]
    comparison = compare_runs(folders, [run.name for run in runs])
    return _Compared(runs, keys, comparison, (*problems, *comparison.problems))
