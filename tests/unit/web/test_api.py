"""The JSON API and the server-sent events, through the app."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from preheat.core.run_records import Checkpoint, Started, StepMetrics
from preheat.run.writer import Writer
from preheat.web import events, index
from preheat.web.app import create_app
from preheat.web.settings import Settings

from .test_runs_page import connect


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    # Enough for all runs, however busy the machine is.
    monkeypatch.setattr(index, "_INLINE_S", 1e6)
    folder = tmp_path / "runs"
    for name in ("a", "<script>b"):
        writer = Writer(folder / name)
        writer.write_text("recipe.yaml", "name: a\n")
        writer.write_event(Checkpoint(step=1))
        for number in range(1, 11):
            writer.write_metric(StepMetrics(number, loss=3.0 - number / 10, lr=0.1, scores={"=f()": 1.0}))
        writer.close()
    return folder


@pytest.fixture
def client(runs: Path) -> TestClient:
    client = TestClient(create_app(Settings((runs,), "secret", 80)), base_url="http://127.0.0.1")
    client.get("/", params={"token": "secret"})
    return client


def test_runs_curves_and_events(client: TestClient) -> None:
    second, first = client.get("/api/runs").json()["runs"]
    assert (first["name"], second["name"], first["step"]) == ("a", "<script>b", 10)
    url = f"/api/runs/{first['id']}"
    assert client.get(url).json()["keys"] == ["loss", "lr", "=f()"]
    curve = client.get(f"{url}/curves", params={"key": "loss", "first": "2", "last": "4"}).json()
    assert (curve["x"], curve["mean"]) == ([2, 3, 4], [2.8, 2.7, 2.6])
    assert "low" not in curve
    coarse = client.get(f"{url}/curves", params={"points": "2"}).json()
    assert (coarse["low"], coarse["high"]) == ([2.5, 2.0], [2.9, 2.4])
    assert [event["kind"] for event in client.get(f"{url}/events").json()["events"]] == ["checkpoint"]


def test_events_are_placed_over_tokens_and_hours(runs: Path) -> None:
    writer = Writer(runs / "c")
    writer.write_text("recipe.yaml", "name: c\n")
    writer.write_event(Started())
    for step in (2, 4, 6):  # logged at every second step
        writer.write_metric(StepMetrics(step, loss=1.0, tokens=100 * step, elapsed=1800.0 * step))
    for step in (0, 3, 6, 7):
        writer.write_event(Checkpoint(step=step))
    writer.close()
    client = connect(runs)
    (run,) = [run for run in client.get("/api/runs").json()["runs"] if run["name"] == "c"]
    marks = client.get(f"/api/runs/{run['id']}/events").json()["events"]
    places = [(mark["step"], mark["tokens"], mark["hours"]) for mark in marks]
    assert places == [(None, None, None), (0, 0, 0), (3, 300, 1.5), (6, 600, 3), (7, 600, 3)]


def test_the_table_is_csv_that_computes_nothing(client: TestClient) -> None:
    run = client.get("/api/runs").json()["runs"][1]
    answer = client.get(f"/api/runs/{run['id']}/curves.csv")
    header, first, *_ = answer.text.splitlines()
    assert header == "step,loss,lr,'=f()"
    assert first == "1,2.9,0.1,1"
    assert answer.headers["content-disposition"] == 'attachment; filename="a.csv"'


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs/0123456789abcdef", 404, "does not exist"),
        ("/api/runs/..%2f..%2fetc/events", 404, "Not Found"),
        ("/api/runs/ID/curves?x=miles", 400, "x=miles: is not an axis; use step, tokens, hours"),
        ("/api/runs/ID/curves?first=nan", 400, "first=nan: is not a number"),
        ("/api/runs/ID/curves?points=1e9", 400, "points=1000000000: must be from 1 to 5,000"),
    ],
)
def test_bad_requests_get_a_sentence(client: TestClient, path: str, status: int, text: str) -> None:
    id = client.get("/api/runs").json()["runs"][0]["id"]
    answer = client.get(path.replace("ID", id))
    assert answer.status_code == status
    assert text in answer.json()["error"]


async def open_stream(client: TestClient, query: str, events_of: asyncio.Queue[str]) -> None:
    """Reads a stream of the app in this loop: the test client waits for the end of an answer, which has none."""

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            body = message["body"]
            assert isinstance(body, bytes)
            events_of.put_nowait(body.decode())
        else:
            events_of.put_nowait(str(message["status"]))

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/events",
        "raw_path": b"/events",
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1"), (b"cookie", b"preheat-ui-80=secret")],
    }
    await client.app(scope, receive, send)


def test_a_stream_has_the_changes_of_its_runs(client: TestClient, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_POLL_S", 0.05)
    monkeypatch.setattr(events, "_HEARTBEAT_S", 0.2)
    other, run = client.get("/api/runs").json()["runs"]

    async def watch() -> list[str]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        task = asyncio.create_task(open_stream(client, f"runs={run['id']}", queue))
        received = [await queue.get() for _ in range(3)]  # begun, hello, and nothing new: the first look is over
        for name in ("<script>b", "a"):
            with (runs / name / "metrics.jsonl").open("a") as file:
                file.write('{"step": 11, "loss": 1}\n')
            await asyncio.sleep(0.5)
        while not any("change" in text for text in received):
            received.append(await queue.get())
        task.cancel()
        return received

    received = asyncio.run(asyncio.wait_for(watch(), 30))
    assert received[:3] == ["200", "event: hello\ndata: {}\n\n", ": nothing new\n\n"]
    changes = [json.loads(text.split("data: ")[1])["ids"] for text in received if "change" in text]
    assert changes == [[run["id"]]]
    assert other["id"] != run["id"]


def test_streams_are_limited_and_slow_readers_dropped(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_STREAMS", 1)
    monkeypatch.setattr(events, "_SLOW_S", 0.1)

    async def stuck(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    async def check() -> list[str]:
        streams: set[events._Stream] = set()
        stream = events._Stream(None)
        streams.add(stream)
        await asyncio.wait_for(events._EventStream(stream, streams)({}, receive, stuck), 10)
        assert not streams
        first: asyncio.Queue[str] = asyncio.Queue()
        second: asyncio.Queue[str] = asyncio.Queue()
        task = asyncio.create_task(open_stream(client, "", first))
        assert await first.get() == "200"
        await open_stream(client, "", second)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [second.get_nowait(), second.get_nowait()]

    status, text = asyncio.run(asyncio.wait_for(check(), 30))
    assert status == "503"
    assert "1 pages are open already" in text
