"""The page of all runs: a table that is sorted, filtered and kept up to date, and changes of several runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.routing import Route

from preheat.errors import RunError
from preheat.report.formatting import relative_error
from preheat.web.forms import read_form
from preheat.web.index import summarize
from preheat.web.labels import Labels, add_labels, change_labels, parse_tags
from preheat.web.settings import state_of
from preheat.web.templating import render

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.datastructures import QueryParams
    from starlette.requests import Request
    from starlette.responses import Response

    from preheat.web.catalogue import Catalogue
    from preheat.web.index import RunSummary
    from preheat.web.jobs import Jobs, Training

__all__ = ["routes"]

_MOST_ROWS = 500
"""Rows of the table; a browser lays out more only slowly, and the filter reaches the others."""
_LONGEST_FILTER = 200


def routes() -> list[Route]:
    return [
        Route("/", _show),
        Route("/runs/labels", _change_several, methods=["POST"]),
    ]


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: the field of `RunSummary` that it sorts by.
        descends: the first click puts the highest values first.
        kind: CSS classes of its cells: n is a number; extra is left out of narrow pages.
    """

    key: str
    title: str
    descends: bool = False
    kind: str = ""


COLUMNS = (
    Column("name", "Run"),
    Column("state", "State", kind="extra"),
    Column("model", "Model", kind="extra"),
    Column("loss", "Loss", kind="n"),
    Column("validation_loss", "Validation loss", kind="n extra"),
    Column("tokens_per_second", "Tokens/s", descends=True, kind="n"),
    Column("peak_gib", "Memory", descends=True, kind="n extra"),
    Column("seconds_left", "Time left", kind="n extra"),
    Column("cost", "Cost", descends=True, kind="n extra"),
    Column("updated", "Last change", descends=True, kind="n extra"),
)

STATES = ("running", "elsewhere", "finished", "stopped", "failed", "killed", "not started")


@dataclass(frozen=True)
class Filter:
    """The part of the runs that a page shows, and its order.

    Attributes:
        text: words that name, folder, model, note or tags contain.
        sort: key of a column.
        descends: the highest values first.
    """

    text: str = ""
    state: str = ""
    tag: str = ""
    archived: bool = False
    sort: str = "updated"
    descends: bool = True

    @classmethod
    def read(cls, query: QueryParams) -> Filter:
        """Reads a filter from a URL; unknown values count as not given."""
        column = next((column for column in COLUMNS if column.key == query.get("sort")), None)
        if column is None:
            sort, descends = cls.sort, cls.descends
        else:
            sort, descends = column.key, query.get("order", "down" if column.descends else "up") == "down"
        state = query.get("state", "")
        return cls(
            query.get("q", "")[:_LONGEST_FILTER].strip(),
            state if state in STATES else "",
            query.get("tag", "")[:_LONGEST_FILTER],
            query.get("archived") == "1",
            sort,
            descends,
        )

    def query(self, **changed: str) -> dict[str, str]:
        """Returns the URL's query of this filter, with some values changed."""
        values = {
            "q": self.text,
            "state": self.state,
            "tag": self.tag,
            "archived": "1" if self.archived else "",
            "sort": self.sort,
            "order": "down" if self.descends else "up",
        }
        return {key: value for key, value in (values | changed).items() if value}

    def sort_link(self, column: Column) -> dict[str, str]:
        """Returns the query after a click on the heading of a column."""
        descends = not self.descends if column.key == self.sort else column.descends
        return self.query(sort=column.key, order="down" if descends else "up")

    def aria_sort(self, column: Column) -> str:
        return "none" if column.key != self.sort else "descending" if self.descends else "ascending"

    def select(self, runs: Sequence[RunSummary]) -> list[RunSummary]:
        """Returns the runs to show, in order. Runs without the value to sort by are last in both orders."""
        shown = [run for run in runs if self._is_shown(run)]
        absent = [run for run in shown if getattr(run, self.sort) is None]
        present = [run for run in shown if getattr(run, self.sort) is not None]
        present.sort(key=self._sort_key, reverse=self.descends)
        return present + absent

    def _sort_key(self, run: RunSummary) -> str | float:
        value: str | float = getattr(run, self.sort)
        return value.casefold() if isinstance(value, str) else value

    def _is_shown(self, run: RunSummary) -> bool:
        if run.archived and not self.archived:
            return False
        if self.state and run.state != self.state:
            return False
        if self.tag and self.tag not in run.tags:
            return False
        text = " ".join((run.name, run.path.name, run.model or "", run.note, *run.tags)).casefold()
        return all(word in text for word in self.text.casefold().split())


def compare_with_plan(measured: float | None, planned: float | None) -> float | None:
    """Returns measured / planned - 1; None if either is unknown."""
    return relative_error(measured, planned)


def list_summaries(catalogue: Catalogue) -> list[RunSummary]:
    """Returns the figures of all runs, with their labels. A run that is deleted meanwhile is left out."""
    summaries = []
    for entry in catalogue.list_runs():
        try:
            summaries.append(add_labels(summarize(entry)))
        except RunError:
            # Still a row: otherwise a damaged run would look like a deleted one.
            if not entry.path.exists():
                continue
            raise
    return summaries


async def _show(request: Request) -> Response:
    return await _render_runs(request, Filter.read(request.query_params))


async def _render_runs(request: Request, shown: Filter, *, problems: Sequence[str] = (), done: str = "") -> Response:
    catalogue = state_of(request).catalogue
    runs = await run_in_threadpool(list_summaries, catalogue)
    selected = shown.select(runs)
    jobs = state_of(request).jobs
    starting = await run_in_threadpool(lambda: _list_starting(jobs, catalogue.folders, runs))
    return render(
        request,
        "runs.html",
        runs=selected[:_MOST_ROWS],
        matching=len(selected),
        total=len(runs),
        archived=sum(run.archived for run in runs),
        tags=sorted({tag for run in runs for tag in run.tags}),
        states=[state for state in STATES if any(run.state == state for run in runs)],
        columns=COLUMNS,
        shown=shown,
        is_cut_off=catalogue.is_cut_off,
        linked=catalogue.linked,
        remotes=state_of(request).remotes,
        compare_with_plan=compare_with_plan,
        starting=starting,
        problems=problems,
        done=done,
    )


def _list_starting(jobs: Jobs, folders: Sequence[Path], runs: Sequence[RunSummary]) -> list[Training]:
    """Returns the trainings below these folders that wait or run and are no run yet."""
    known = {run.path for run in runs}
    return [
        training
        for training in jobs.list_trainings()
        if training.is_unfinished
        and (run := training.run.resolve()) not in known
        and any(run.is_relative_to(folder) for folder in folders)
    ]


async def _change_several(request: Request) -> Response:
    """Adds or removes tags of the selected runs, or archives them."""
    form = await read_form(request)
    ids, action = form.get("run", []), form.get("action", [""])[-1]
    tags = parse_tags(form.get("tags", [""])[-1])
    problems = []
    if not ids:
        problems = ["No run is selected; tick the boxes of the runs to change."]
    elif action in ("add-tags", "remove-tags") and not tags:
        problems = ["No tag is given; type one into the field Tags, or several with commas between them."]
    done = ""
    if not problems:
        changed, problems = await run_in_threadpool(_change, state_of(request).catalogue, ids, action, tags)
        done = f"{changed} run{'s' if changed != 1 else ''} changed." if changed else ""
    return await _render_runs(request, Filter.read(request.query_params), problems=problems, done=done)


def _change(catalogue: Catalogue, ids: Sequence[str], action: str, tags: tuple[str, ...]) -> tuple[int, list[str]]:
    """Changes the labels of runs; returns how many, and a sentence for each that was not changed."""

    def change(labels: Labels) -> Labels:
        if action == "add-tags":
            return replace(labels, tags=tuple(dict.fromkeys((*labels.tags, *tags))))
        if action == "remove-tags":
            return replace(labels, tags=tuple(tag for tag in labels.tags if tag not in tags))
        return replace(labels, archived=action == "archive")

    if action not in ("add-tags", "remove-tags", "archive", "restore"):
        raise HTTPException(400, f"action={action[:40]}: is not a change of runs.")
    changed, problems = 0, []
    for id in dict.fromkeys(ids):
        try:
            change_labels(catalogue.find(id).path, change)
            changed += 1
        except RunError as error:
            problems.append(f"{error}.")
        except HTTPException as error:
            problems.append(error.detail)
    return changed, problems
