"""The server's connections: limits on clients that send no request, and an end within seconds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

__all__ = ["BACKLOG", "MOST_CONNECTIONS", "BoundedConnection"]

MOST_CONNECTIONS = 512
"""Connections at a time. A request beyond is answered with status 503. Half of them may be silent, and the streams of
events and chats are 116 at most. Systems allow 1,024 file descriptors at least."""
BACKLOG = 64
"""Connections that are accepted in one turn of the event loop: each takes a file descriptor before its refusal."""
_MOST_SILENT = 256
"""Connections whose request has not arrived. Another one closes the oldest of them, so that a new client is served.
Several turns of the event loop fill them, and a request that comes with its connection needs one."""
_HEAD_S = 10.0
"""Seconds for the request line and the headers, from the first byte or the opening of the connection."""
_END_S = 1.0
"""Seconds that answers get when the server ends; streams never end by themselves."""


class BoundedConnection(H11Protocol):
    """A connection that is closed unless the head of a request arrives in time.

    A client without the token never gets beyond this state: the guard closes the connections that it refuses.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        silent = [
            (other._head_timer.when(), n, other)
            for n, other in enumerate(self.connections)
            if isinstance(other, BoundedConnection) and other._head_timer is not None
        ]
        if len(silent) >= _MOST_SILENT:
            oldest = min(silent)[2]
            oldest._stop_timer()  # it is not counted again
            oldest.transport.abort()
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Until the first byte of the next request, the time-out of kept connections counts.
        if self.conn.trailing_data[0]:
            self._watch_head()

    def shutdown(self) -> None:
        super().shutdown()
        # A stream sees a client that has gone, and its task ends by itself: uvicorn would cancel it, with a traceback.
        self.loop.call_later(_END_S, self.transport.abort)

    def _watch_head(self) -> None:
        """Starts the timer if a request is incomplete, and stops it if its head is there."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
