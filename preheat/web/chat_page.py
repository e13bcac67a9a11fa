"""The page *Chat*: with a run or a model, with two side by side, or before and after training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from preheat.errors import PreheatError, RecipeError
from preheat.files import to_json
from preheat.sanitize import quote_value
from preheat.web.forms import Choice, Field, clean_values, describe_key, fill, read_number, read_values
from preheat.web.labels import name_run
from preheat.web.settings import state_of
from preheat.web.templating import build_url, render

if TYPE_CHECKING:
    from starlette.requests import Request

    from preheat.web.jobs import Job
    from preheat.web.settings import State

__all__ = ["routes"]

_IDLE_S = 60.0
"""Seconds after which a chat ends whose page is closed."""
_LIMIT_S = 4 * 3600.0
_POLL_S = 0.1
_HEARTBEAT_S = 15.0
_MOST_STREAMS = 16
"""Pages that follow chats: twice as many as there may be chats, and each looks for output ten times a second."""
_open_streams: set[object] = set()
_BEFORE = "before"
_TEMPLATES = ("alpaca", "chatml", "gemma", "llama3", "mistral", "phi3", "phi4", "qwen", "t5")


def routes() -> list[Route]:
    return [
        Route("/chat", _show, methods=["GET"]),
        Route("/chat", _open, methods=["POST"]),
        Route("/chat/stream", _stream),
        Route("/chat/{id}/say", _say, methods=["POST"]),
        Route("/chat/{id}/interrupt", _interrupt, methods=["POST"]),
        Route("/chat/{id}/end", _end, methods=["POST"]),
    ]


def _list_fields(state: State) -> list[Field]:
    runs = [Choice(entry.id, name_run(entry)) for entry in state.catalogue.list_runs()]
    models = [Choice(file.id, file.name) for file in state.files.list_files("model")]
    groups = {name: choices for name, choices in (("Runs", runs), ("Models", models)) if choices}
    return [
        Field(
            "a", "Run or model", "A run answers from its last checkpoint.", "select", groups, placeholder="choose one"
        ),
        Field(
            "b",
            "Side by side with",
            "Another one, or the same run as it was before its first step; both get every message.",
            "select",
            {"Before and after": [Choice(_BEFORE, "the same run before training")], **groups},
            placeholder="nothing",
        ),
        Field(
            "template",
            "Chat template",
            "A model without a template of its own continues each message as plain text. "
            + describe_key("data.template"),
            "select",
            {"Templates": [Choice(name, name) for name in _TEMPLATES]},
            placeholder="its own",
        ),
        Field("system", "System message", "What the model is told before the conversation; needs a chat template."),
        Field("tokens", "Tokens", describe_key("sample.max_new_tokens"), "number", placeholder="256", minimum=1),
        Field("temperature", "Temperature", describe_key("sample.temperature"), placeholder="0"),
    ]


async def _show(request: Request) -> Response:
    values = clean_values(request.query_params.multi_items())
    await run_in_threadpool(state_of(request).catalogue.update_for, values.get("a", ""))
    fields = await run_in_threadpool(_list_fields, state_of(request))
    try:
        jobs = _find_chats(state_of(request), values.get("chats", ""))
    except HTTPException:
        jobs = []  # it ended long ago: the form opens it again
    return render(request, "chat.html", fields=fill(fields, values), jobs=jobs)


async def _open(request: Request) -> Response:
    state = state_of(request)
    form = await read_values(request)
    fields = await run_in_threadpool(_list_fields, state)
    try:
        jobs = await run_in_threadpool(_start, state, form, {field.name: field for field in fields})
    except (PreheatError, HTTPException) as error:
        return render(
            request, "_problem.html", message=error.detail if isinstance(error, HTTPException) else str(error)
        )
    response: Response = render(request, "_chat.html", jobs=jobs)
    values = {field.name: form[field.name] for field in fields if field.name in form}
    # With the chats' names, so that a reload shows the conversation again.
    values["chats"] = ",".join(job.id for job in jobs)
    response.headers["hx-push-url"] = build_url(request, "/chat", **values)
    return response


def _start(state: State, form: Mapping[str, str], fields: Mapping[str, Field]) -> list[Job]:
    """Starts the processes of a form: one for each side.

    Raises:
        RecipeError: a value is wrong.
    """
    if "a" not in form:
        raise RecipeError("Run or model: is empty; choose one, or start a run first")
    labels = {choice.value: choice.label for choices in fields["b"].groups.values() for choice in choices}
    options = []
    if (tokens := read_number(form, fields["tokens"])) is not None:
        options.append(f"--tokens={tokens}")
    for name in ("temperature", "system"):
        if name in form:
            options.append(f"--{name}={form[name]}")
    if "template" in form:
        if form["template"] not in _TEMPLATES:
            raise RecipeError(f"Chat template: {quote_value(form['template'])}: must be one of {', '.join(_TEMPLATES)}")
        options.append(f"--template={form['template']}")
    sides = [(form["a"], False)]
    if (other := form.get("b")) is not None:
        sides.append((form["a"], True) if other == _BEFORE else (other, False))
    commands = []
    for id, is_before in sides:
        if id not in labels:
            raise RecipeError("Run or model: does not exist any more; choose another one")
        title = f"{labels[id]}, before training" if is_before else labels[id]
        path = _find_path(state, id)
        commands.append((title, ["chat", "--json", *options, *(["--before"] if is_before else []), "--", path]))
    return [
        state.jobs.start(title, arguments, limit_s=_LIMIT_S, idle_s=_IDLE_S, talks=True)
        for title, arguments in commands
    ]


def _find_path(state: State, id: str) -> str:
    for file in state.files.list_files("model"):
        if file.id == id:
            return str(file.path)
    entry = state.catalogue.find(id)
    return entry.url or str(entry.path)


def _find_chats(state: State, ids: str) -> list[Job]:
    """Returns the chats of a page, two at most.

    Raises:
        HTTPException: 404, one does not exist any more.
    """
    jobs = [state.jobs.find(id) for id in ids.split(",")[:2] if id]
    if not all(job.talks for job in jobs):
        raise HTTPException(404, "This is no chat; open one.")
    return jobs


async def _say(request: Request) -> Response:
    job = state_of(request).jobs.find(request.path_params["id"])
    form = await read_values(request)
    if "message" in form:
        await run_in_threadpool(job.send, to_json({"message": form["message"]}))
    elif "reset" in form:
        await run_in_threadpool(job.send, to_json({"reset": True}))
    return Response(status_code=204)


async def _interrupt(request: Request) -> Response:
    await run_in_threadpool(state_of(request).jobs.find(request.path_params["id"]).interrupt)
    return Response(status_code=204)


async def _end(request: Request) -> Response:
    await run_in_threadpool(state_of(request).jobs.find(request.path_params["id"]).cancel)
    return Response(status_code=204)


async def _stream(request: Request) -> Response:
    """Streams the lines of chats as server-sent events; a connection that comes again goes on behind the last ones.

    One stream for all sides: browsers open six connections to a server at most.
    """
    if len(_open_streams) >= _MOST_STREAMS:
        raise HTTPException(503, f"{_MOST_STREAMS} chats are open already; close some of these pages.")
    jobs = _find_chats(state_of(request), request.query_params.get("chats", ""))
    if not jobs:
        raise HTTPException(404, "No chat is named; open one.")
    last = request.headers.get("last-event-id", "").split(",")
    offsets = [int(text) for text in last if text.isascii() and text.isdigit() and len(text) < 16]
    if len(offsets) != len(jobs):
        offsets = [0] * len(jobs)
    return StreamingResponse(_follow(request, jobs, offsets), media_type="text/event-stream")


async def _follow(request: Request, jobs: list[Job], offsets: list[int]) -> AsyncIterator[str]:
    key = object()
    _open_streams.add(key)
    try:
        async for text in _follow_jobs(request, jobs, offsets):
            yield text
    finally:
        _open_streams.discard(key)


async def _follow_jobs(request: Request, jobs: list[Job], offsets: list[int]) -> AsyncIterator[str]:
    idle, open_jobs = 0.0, list(jobs)
    while open_jobs and not await request.is_disconnected():
        events = []
        for n, job in enumerate(jobs):
            job.touch()
            is_running = job.is_running
            lines, offsets[n] = await run_in_threadpool(job.read_lines, offsets[n], 0.0)
            # A line is JSON, so it has no line feed inside.
            events += [f'data: {{"chat": {to_json(job.id)}, "record": {line}}}' for line in lines]
            if not lines and not is_running and job in open_jobs:
                open_jobs.remove(job)
                events.append(f"event: end\ndata: {to_json({'chat': job.id, 'problem': job.problem})}")
        if events:
            # The offset belongs to the last event: a connection that broke before it gets all of them again.
            events[-1] = f"id: {','.join(map(str, offsets))}\n{events[-1]}"
            yield "".join(f"{event}\n\n" for event in events)
            idle = 0.0
        elif idle >= _HEARTBEAT_S:
            yield ": still here\n\n"
            idle = 0.0
        idle += _POLL_S
        await asyncio.sleep(_POLL_S)
