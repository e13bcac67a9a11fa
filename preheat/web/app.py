"""The ASGI app: its pages, its static files, and its error pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from preheat.errors import PreheatError
from preheat.web import compare_page, labels_page, results_page, runs_page
from preheat.web.catalogue import Catalogue
from preheat.web.results import ResultFinder
from preheat.web.security import Guard
from preheat.web.settings import Settings, State
from preheat.web.templating import render

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["create_app"]

PAGES = (runs_page, compare_page, labels_page, results_page)
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
    app = Starlette(routes=routes, middleware=[Middleware(Guard, settings=settings)], exception_handlers=handlers)
    app.state.ui = State(settings, Catalogue(settings.folders), ResultFinder(settings.folders))
    return app


async def _send_style(request: Request) -> Response:
    """Sends the style of the reports, so that a page here looks like the report of a run."""
    style = resources.files("preheat.report").joinpath("page.css").read_text(encoding="utf-8")
    return PlainTextResponse(style, media_type="text/css")


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return render(request, "error.html", error.status_code, message=error.detail)


async def _show_error(request: Request, error: Exception) -> Response:
    """A user's fault is a sentence on the page; ours stays a traceback in the terminal."""
    return render(request, "error.html", 400, message=str(error))
