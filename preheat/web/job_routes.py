"""Routes of the commands that a page starts: their state, and cancelling them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from preheat.web.settings import state_of

if TYPE_CHECKING:
    from preheat.web.jobs import Job

__all__ = ["build_job_routes"]


def build_job_routes(prefix: str, show: Callable[[Request, Job], Awaitable[Response]]) -> list[Route]:
    """Returns `PREFIX/{id}`, which shows a job, and `PREFIX/{id}/cancel`, which ends it and then shows it.

    Args:
        show: renders a job, running or ended.
    """

    async def show_job(request: Request) -> Response:
        return await show(request, state_of(request).jobs.find(request.path_params["id"]))

    async def cancel(request: Request) -> Response:
        job = state_of(request).jobs.find(request.path_params["id"])
        await run_in_threadpool(job.cancel)
        await run_in_threadpool(job.wait, 10.0)
        return await show(request, job)

    return [Route(f"{prefix}/{{id}}", show_job), Route(f"{prefix}/{{id}}/cancel", cancel, methods=["POST"])]
