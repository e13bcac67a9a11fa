"""Server-sent events: tells open pages which runs changed.

One task looks at the sizes of the runs' files, for all streams together. A stream remembers the ids that it has not
sent yet, and nothing more, so that a slow reader costs no memory; one that takes nothing at all is dropped.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from preheat.web.index import find_signature
from preheat.web.settings import state_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from preheat.web.catalogue import Catalogue

__all__ = ["routes"]

_MOST_STREAMS = 100
"""Streams at a time, of all pages: a browser opens six per host at most."""
_POLL_S = 1.0
_QUIET_ROUNDS = 5
"""A run that did not change for some minutes is looked at in every fifth round: 200 of them would take time."""
_QUIET_S = 300.0
_HEARTBEAT_S = 15.0
"""Seconds after which an empty line finds out that the reader is gone; proxies close connections after 60 s."""
_SLOW_S = 20.0
"""Seconds for which a reader may take nothing."""


def routes() -> list[Route]:
    watcher = _Watcher()
    return [Route("/events", watcher.open_stream)]


@dataclass(eq=False)
class _Stream:
    """A page that listens.

    Attributes:
        ids: runs that it shows; None: all.
        changed: ids that it was not told of yet.
    """

    ids: frozenset[str] | None
    changed: set[str] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, ids: set[str]) -> None:
        new = ids if self.ids is None else ids & self.ids
        if new:
            self.changed |= new
            self.wake.set()


class _Watcher:
    """Looks for changes while there are streams."""

    def __init__(self) -> None:
        self._streams: set[_Stream] = set()
        self._task: asyncio.Task[None] | None = None
        self._signatures: dict[str, tuple[int | bool | float | None, ...]] = {}
        self._changed_at: dict[str, float] = {}
        self._round = 0

    async def open_stream(self, request: Request) -> Response:
        if len(self._streams) >= _MOST_STREAMS:
            return PlainTextResponse(
                f"{_MOST_STREAMS} pages are open already, the most that this server updates; close some of them. "
                "This page is shown, but does not update itself.\n",
                503,
                {"retry-after": "30", "connection": "close"},
            )
        names = request.query_params.get("runs", "")
        stream = _Stream(frozenset(names.split(",")[:1_000]) if names else None)
        self._streams.add(stream)
        if self._task is None or self._task.done():
            self._signatures.clear()
            self._task = asyncio.create_task(self._watch(state_of(request).catalogue))
        return _EventStream(stream, self._streams)

    async def _watch(self, catalogue: Catalogue) -> None:
        self._signatures = await run_in_threadpool(self._look, catalogue, None)
        while self._streams:
            await asyncio.sleep(_POLL_S)
            wanted: frozenset[str] | None = frozenset()
            for stream in self._streams:
                wanted = None if wanted is None or stream.ids is None else wanted | stream.ids
            signatures = await run_in_threadpool(self._look, catalogue, wanted)
            # A run that is new, or gone, is a change too.
            known = self._signatures
            changed = {id for id in signatures.keys() | known.keys() if signatures.get(id) != known.get(id)}
            now = time.monotonic()
            self._changed_at |= dict.fromkeys(changed, now)
            self._signatures = signatures
            for stream in self._streams:
                stream.add(changed)

    def _look(
        self, catalogue: Catalogue, wanted: frozenset[str] | None
    ) -> dict[str, tuple[int | bool | float | None, ...]]:
        """Returns the signatures of all runs; those that nobody wants, or that are quiet, are not read again."""
        self._round += 1
        is_full = self._round % _QUIET_ROUNDS == 0 or not self._signatures
        now = time.monotonic()
        signatures = {}
        for entry in catalogue.list_runs():
            last = self._signatures.get(entry.id)
            is_wanted = wanted is None or entry.id in wanted
            is_busy = now - self._changed_at.get(entry.id, -_QUIET_S) < _QUIET_S
            skips = last is not None and not (is_wanted and (is_full or is_busy))
            signatures[entry.id] = last if skips and last is not None else find_signature(entry)
        return signatures


class _EventStream(Response):
    """Sends the changes of a stream until its reader is gone, or takes nothing any more."""

    def __init__(self, stream: _Stream, streams: set[_Stream]):
        self.status_code = 200
        self.background = None
        self._stream, self._streams = stream, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            text = "event: hello\ndata: {}\n\n"
            while not gone.done():
                message = {"type": "http.response.body", "body": text.encode(), "more_body": True}
                async with asyncio.timeout(_SLOW_S):
                    await send(message)
                text = await self._wait_for_text(gone)
        except TimeoutError:
            pass  # the reader takes nothing; the server closes the connection
        finally:
            gone.cancel()
            self._streams.discard(self._stream)

    async def _wait_for_text(self, gone: asyncio.Task[None]) -> str:
        """Waits for a change and returns its event; a comment after some seconds without any."""
        stream = self._stream
        wake = asyncio.create_task(stream.wake.wait())
        await asyncio.wait((wake, gone), timeout=_HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        wake.cancel()
        if not stream.changed:
            return ": nothing new\n\n"
        ids, stream.changed = sorted(stream.changed), set()
        stream.wake.clear()
        return f"event: change\ndata: {json.dumps({'ids': ids})}\n\n"


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
