"""Runs the dashboard's server."""

from __future__ import annotations

import errno
import socket
import sys
from typing import TYPE_CHECKING

from preheat.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    import uvicorn

    from preheat.web.settings import Settings

__all__ = ["build_server", "open_socket"]


_SLOW_MS = 60_000
"""Milliseconds for which a reader may leave sent bytes unacknowledged."""


def open_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there; port 0 takes a free one.

    Raises:
        RunError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":
        # Connections inherit it: one whose reader takes nothing is closed.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SLOW_MS)
    try:
        listener.bind((host, port))
        # Here, so that a port in use is found: with SO_REUSEADDR two sockets may bind, but only one may listen.
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise RunError(
                f"--port {port}: cannot listen on {host} ({error.strerror}); name another port, or 0 for a free one"
            ) from None
        raise RunError(
            f"--host {host}: cannot listen there ({error.strerror}); name an address of this machine, or leave it out "
            "for 127.0.0.1"
        ) from None
    return listener


def build_server(settings: Settings, say: Callable[[str], None]) -> uvicorn.Server:
    """Returns the server with its limits, with copies of the runs at URLs, and with the queue of an earlier server.

    Its method `run` serves.

    Args:
        say: prints the progress of the copies.

    Raises:
        RecipeError: a URL names no folder, or its backend is not installed.
        RunError: a URL cannot be read, or the stored queue of trainings is damaged.
    """
    import uvicorn

    from preheat.web.app import create_app
    from preheat.web.connections import BACKLOG, MOST_CONNECTIONS, BoundedConnection

    app = create_app(settings)
    for remote in app.state.ui.remotes:
        runs = remote.update(say)
        say(f"{remote.url}: {runs:,} run{'s' if runs != 1 else ''}, copied without checkpoints")
    if not settings.read_only:  # the queue stays for the next server
        app.state.ui.jobs.take_over(settings.folders[0])
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            log_level="error",  # a warning is a line for each request that is malformed: strangers could send masses
            access_log=False,  # it would print the token
            server_header=False,
            backlog=BACKLOG,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=2,
            proxy_headers=False,
        )
    )
