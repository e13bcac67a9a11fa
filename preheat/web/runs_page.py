"""The page of all runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from preheat.web.settings import state_of
from preheat.web.templating import render

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["routes"]


def routes() -> list[Route]:
    return [Route("/", _show)]


async def _show(request: Request) -> Response:
    runs = await run_in_threadpool(state_of(request).catalogue.list_runs)
    return render(request, "runs.html", runs=runs)
