"""Connections of the dashboard's server, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from preheat.web import connections
from preheat.web.server import build_server, open_socket
from preheat.web.settings import Settings

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int) -> Streams:
    return await asyncio.open_connection("127.0.0.1", port)


async def close(streams: Streams) -> None:
    streams[1].transport.abort()
    with contextlib.suppress(ConnectionError):
        await streams[1].wait_closed()


@asynccontextmanager
async def run_server(runs: Path) -> AsyncIterator[int]:
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = build_server(Settings((runs,), "token", port), print)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield port
    finally:
        server.should_exit = True
        await task


async def send(port: int, path: str, *, cookie: str = "token") -> Streams:
    reader, writer = await connect(port)
    head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncookie: preheat-ui-{port}={cookie}\r\n\r\n"
    writer.write(head.encode())
    return reader, writer


async def read_status(streams: Streams) -> int:
    return int((await streams[0].readline()).split()[1])


async def is_closed(streams: Streams, seconds: float) -> bool:
    """Returns True if the server closes a connection within some seconds."""
    try:
        async with asyncio.timeout(seconds):
            await streams[0].read()
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("text", [b"", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: "])
def test_silent_connections_do_not_keep_a_user_out(tmp_path: Path, text: bytes) -> None:
    async def check() -> None:
        async with run_server(tmp_path) as port:
            silent: list[Streams] = []
            for _ in range(connections._MOST_SILENT + 20):
                silent.append(await connect(port))
                silent[-1][1].write(text)
            user = await send(port, "/")
            assert await read_status(user) == 200
            # The oldest are closed, and the newest may still send their request.
            assert await is_closed(silent[0], 5)
            assert not await is_closed(silent[-1], 0.1)
            for streams in (user, *silent):
                await close(streams)

    asyncio.run(check())


@pytest.mark.parametrize("before", [False, True])
def test_a_request_that_comes_byte_by_byte_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 0.5)

    async def check() -> None:
        async with run_server(tmp_path) as port:
            if before:  # the second request of a connection
                streams = await send(port, "/static/page.css")
                assert await read_status(streams) == 200
            else:
                streams = await connect(port)

            async def dribble() -> None:
                while not streams[1].is_closing():
                    streams[1].write(b"G")
                    await asyncio.sleep(0.1)

            task = asyncio.create_task(dribble())
            assert await is_closed(streams, 5)
            task.cancel()
            await close(streams)
            # A request that came in time takes as long as it likes.
            stream = await send(port, "/events")
            assert await read_status(stream) == 200
            assert not await is_closed(stream, 1.0)
            await close(stream)

    asyncio.run(check())


def test_a_connection_without_the_token_ends_with_the_refusal(tmp_path: Path) -> None:
    async def check() -> None:
        async with run_server(tmp_path) as port:
            streams = await send(port, "/", cookie="wrong")
            assert await read_status(streams) == 403
            assert await is_closed(streams, 5)
            await close(streams)

    asyncio.run(check())


def test_the_server_ends_with_open_streams(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        async with run_server(tmp_path) as port:
            streams = [await send(port, "/events") for _ in range(120)]
            statuses = [await read_status(stream) for stream in streams]
            assert (statuses.count(200), statuses.count(503)) == (100, 20)
        assert all([await is_closed(stream, 1) for stream in streams])
        for stream in streams:
            await close(stream)

    asyncio.run(check())
    # A traceback for each stream would fill the pipe that a launcher of the server may not read.
    assert "Traceback" not in capfd.readouterr().err
