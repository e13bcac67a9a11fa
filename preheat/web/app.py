"""The ASGI app: its pages, its static files, and its error pages."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from preheat.errors import PreheatError
from preheat.run.remote_runs import RemoteRuns
from preheat.web import (
    api_page,
    chat_page,
    compare_page,
    data_page,
    events,
    labels_page,
    plan_page,
    results_page,
    run_page,
    runs_page,
    start_page,
)
from preheat.web.catalogue import Catalogue
from preheat.web.jobs import Jobs
from preheat.web.results import ResultFinder
from preheat.web.security import Guard
from preheat.web.settings import Settings, State
from preheat.web.templating import render
from preheat.web.user_files import UserFiles

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["create_app"]

PAGES = (
    *(runs_page, run_page, compare_page, labels_page, results_page),
    *(plan_page, start_page, data_page, chat_page, api_page, events),
)
"""Modules of pages; each has `routes()`."""


def create_app(settings: Settings) -> Starlette:
    """Returns the app; it reads nothing before the first request."""
    routes: list[Route | Mount] = [route for page in PAGES for route in page.routes()]
    routes.append(Route("/static/page.css", _send_style))
    routes.append(Mount("/static", StaticFiles(packages=[("preheat.web", "static")])))
    handlers: dict[int | type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        HTTPException: _show_http_error,
        PreheatError: _show_error,
    }
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers=handlers,
        lifespan=_manage_background,
    )
    folders = settings.folders
    remotes = tuple(RemoteRuns(url) for url in settings.urls)
    files, results = UserFiles(folders), ResultFinder(folders)
    app.state.ui = State(settings, Catalogue(folders, remotes), Jobs(), files, results, remotes)
    return app


@asynccontextmanager
async def _manage_background(app: Starlette) -> AsyncIterator[None]:
    """Follows runs in object storage while the server runs, and ends its commands with it."""
    state: State = app.state.ui
    ends = threading.Event()
    for remote in state.remotes:
        # A request to the storage may take minutes to fail, which must not hold up the end.
        threading.Thread(target=remote.watch, args=(ends.wait,), name="preheat-remote", daemon=True).start()
    yield
    ends.set()
    await run_in_threadpool(state.jobs.close)


async def _send_style(request: Request) -> Response:
    """Sends the style of the reports, so that a page here looks like the report of a run."""
    style = resources.files("preheat.report").joinpath("page.css").read_text(encoding="utf-8")
    return PlainTextResponse(style, media_type="text/css")


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.detail}, error.status_code)
    return render(request, "error.html", error.status_code, message=error.detail)


async def _show_error(request: Request, error: Exception) -> Response:
    """A user's fault is a sentence on the page; ours stays a traceback in the terminal."""
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": str(error)}, 400)
    return render(request, "error.html", 400, message=str(error))
