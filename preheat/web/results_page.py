"""The results of other commands, as the pages that they wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse
from starlette.routing import Route

from preheat.web.results import read_page
from preheat.web.settings import state_of
from preheat.web.templating import render

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from preheat.web.results import ResultEntry

__all__ = ["routes"]

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'"
)
"""A page of a folder may have been edited: no scripts, nothing from elsewhere."""


def routes() -> list[Route]:
    return [
        Route("/results", _list),
        Route("/results/{id}", _show),
        Route("/results/{id}/file", _send),
        Route("/results/{id}/{part:path}", _send_part),
    ]


async def _find(request: Request) -> ResultEntry:
    return await run_in_threadpool(state_of(request).results.find, request.path_params["id"])


async def _list(request: Request) -> Response:
    results = await run_in_threadpool(state_of(request).results.list_results)
    return render(request, "results.html", results=results)


async def _show(request: Request) -> Response:
    entry = await _find(request)
    problem = ""
    try:
        await run_in_threadpool(read_page, entry.page)
    except HTTPException as error:
        problem = error.detail
    return render(request, "result.html", result=entry, problem=problem)


async def _send(request: Request) -> Response:
    """Sends the page of a result, for the frame or, with ?save=1, as a file to keep."""
    entry = await _find(request)
    text = await run_in_threadpool(read_page, entry.page)
    headers = {"content-security-policy": _POLICY}
    if request.query_params.get("save") == "1":
        headers["content-disposition"] = f'attachment; filename="{entry.page.name}"'
    return HTMLResponse(text, headers=headers)


async def _send_part(request: Request) -> Response:
    """Sends a page that the page of a result links to. The path is looked up in a list, and never opened as such."""
    entry = await _find(request)
    file = entry.parts.get(request.path_params["part"])
    if file is None:
        raise HTTPException(404, "This result has no such page.")
    return HTMLResponse(await run_in_threadpool(read_page, file), headers={"content-security-policy": _POLICY})
