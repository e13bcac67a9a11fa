"""The page of a run's labels: its name, note and tags, and its removal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from preheat.errors import RunError
from preheat.files import BadJson, parse_json, read_record, to_json
from preheat.run.removal import remove_run
from preheat.web.forms import read_form
from preheat.web.index import summarize
from preheat.web.labels import Conflict, Labels, change_labels, merge_labels, parse_tags, read_labels
from preheat.web.settings import state_of
from preheat.web.templating import render

if TYPE_CHECKING:
    from starlette.requests import Request

    from preheat.web.catalogue import Catalogue, RunEntry

__all__ = ["routes"]


def routes() -> list[Route]:
    return [
        Route("/runs/{id}/labels", _show),
        Route("/runs/{id}/labels", _save, methods=["POST"]),
        Route("/runs/{id}/delete", _delete, methods=["POST"]),
    ]


async def _find(request: Request) -> RunEntry:
    return await run_in_threadpool(state_of(request).catalogue.find, request.path_params["id"])


async def _show(request: Request) -> Response:
    entry = await _find(request)
    labels = await run_in_threadpool(read_labels, entry.path)
    return _render_page(request, entry, labels, labels)


def _render_page(
    request: Request,
    entry: RunEntry,
    seen: Labels,
    wanted: Labels,
    status: int = 200,
    *,
    problem: str = "",
    done: str = "",
) -> Response:
    """Renders the form with what the user wants, so that a refused change is not lost."""
    return render(
        request,
        "labels.html",
        status,
        run=entry,
        wanted=wanted,
        seen=to_json(vars(seen)),
        folder_name=entry.path.name,
        problem=problem,
        done=done,
    )


async def _save(request: Request) -> Response:
    entry, form = await _find(request), await read_form(request)

    def read(key: str) -> str:
        return form.get(key, [""])[-1].replace("\r\n", "\n").strip()

    try:
        seen = read_record(Labels, parse_json(form.get("seen", [""])[-1]))
    except BadJson:
        raise HTTPException(400, "The form cannot be read; load the page again.") from None
    wanted = Labels(" ".join(read("name").split()), read("note"), parse_tags(read("tags")), "archived" in form)
    name = wanted.name or entry.name
    catalogue = state_of(request).catalogue
    other = await run_in_threadpool(_find_namesake, catalogue, entry, name) if wanted.name != seen.name else None
    if other is not None:
        problem = f"Not saved: the run in {other.path} is called {name} already; choose another name."
        return _render_page(request, entry, seen, wanted, 422, problem=problem)
    try:
        saved = await run_in_threadpool(change_labels, entry.path, lambda current: merge_labels(current, seen, wanted))
    except Conflict as error:
        # Saving again compares with the present labels, and so replaces them.
        current = await run_in_threadpool(read_labels, entry.path)
        wanted = merge_labels(current, seen, wanted, overwrite=True)
        return _render_page(request, entry, current, wanted, 409, problem=f"Not saved: {error}.")
    except RunError as error:
        return _render_page(request, entry, seen, wanted, 422, problem=f"Not saved: {error}.")
    return _render_page(request, entry, saved, saved, done="Saved.")


def _find_namesake(catalogue: Catalogue, entry: RunEntry, name: str) -> RunEntry | None:
    """Returns another run that the table of runs shows under this name."""
    others = [other for other in catalogue.list_runs() if other.id != entry.id]
    return next((other for other in others if name == (read_labels(other.path).name or other.name)), None)


async def _delete(request: Request) -> Response:
    entry, form = await _find(request), await read_form(request)
    labels = await run_in_threadpool(read_labels, entry.path)
    typed = form.get("typed", [""])[-1].strip()
    problem = ""
    if entry.url:
        problem = f"Not deleted: the run is in object storage; delete the folder {entry.url} there."
    elif typed != entry.path.name:
        problem = f"Not deleted: the name of its folder is {entry.path.name}; type that to delete it."
    elif await run_in_threadpool(state_of(request).jobs.find_unfinished, entry.path):
        problem = "Not deleted: a training of it waits or runs; cancel it on the page Start first."
    else:
        try:
            problem = await run_in_threadpool(_find_writer, entry)
            removal = None if problem else await run_in_threadpool(remove_run, entry.path)
        except RunError as error:
            problem = f"Not deleted: {error}."
    if problem:
        return _render_page(request, entry, labels, labels, 422, problem=problem)
    assert removal is not None
    return render(request, "deleted.html", run=entry, name=labels.name or entry.name, removal=removal)


def _find_writer(entry: RunEntry) -> str:
    """Returns a sentence if the run is being written, here or on another machine, whose lock cannot be seen."""
    state = summarize(entry).state
    if state == "running":
        return "Not deleted: the run is being trained; stop it first."
    if state == "elsewhere":
        return "Not deleted: another machine wrote to the run in the last minutes; stop it there first."
    return ""
