"""Attacks on a dashboard that serves real run folders: links, scripts, damaged files, and forms that smuggle options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from starlette.testclient import TestClient

from preheat.core.run_records import Notice, SampleEvent, Started, StepMetrics
from preheat.errors import RunError
from preheat.run.removal import remove_run
from preheat.run.writer import Writer
from preheat.web.app import create_app
from preheat.web.settings import Settings

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)><b hx-get='/x' hx-trigger=load>{{7*7}}"


def write_run(folder: Path) -> Path:
    writer = Writer(folder)
    writer.write_text("recipe.yaml", f"name: {json.dumps(SCRIPT)}\n")
    writer.write_event(Started(step=0))
    writer.write_metric(StepMetrics(1, 32, 3.0, 1e-3, 1.0, 0.1, 1903.4, 1 << 30, 0.1, 32))
    writer.write_event(Notice(step=1, message=SCRIPT))
    writer.write_event(SampleEvent(step=1, prompt=SCRIPT, text=SCRIPT))
    writer.close()
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    write_run(tmp_path / "outside" / "run")
    (tmp_path / "outside" / "secret").write_text("name: SECRET\n")
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def client(runs: Path) -> Iterator[TestClient]:
    settings = Settings((runs,), "token", 1, frozenset({"testserver"}))
    with TestClient(create_app(settings)) as client:
        client.cookies.set(settings.cookie, "token")
        client.headers["x-csrf-token"] = settings.csrf_token
        yield client


def list_ids(client: TestClient) -> dict[str, str]:
    return {entry.path.name: entry.id for entry in client.app.state.ui.catalogue.list_runs()}  # type: ignore[attr-defined]


def test_nothing_is_read_through_links_out_of_the_folders(client: TestClient, runs: Path) -> None:
    outside = runs.parent / "outside"
    (runs / "link").symlink_to(outside / "run")
    for name, target in (("recipe.yaml", "secret"), ("events.jsonl", "run/events.jsonl"), ("labels.json", "new")):
        file = write_run(runs / f"with-{name}") / name
        file.unlink(missing_ok=True)
        file.symlink_to(outside / target)
    profile = write_run(runs / "with-profile") / "profile"
    profile.mkdir()
    (profile / "profile.json").symlink_to(outside / "secret")
    moved = write_run(runs / "moved")
    page = client.get("/").text
    assert page.count("is not shown: its") == 4
    assert list_ids(client).keys() == {"moved"}
    assert "SECRET" not in page
    # A folder that becomes a link after it was listed.
    id = list_ids(client)["moved"]
    moved.rename(runs.parent / "elsewhere")
    moved.symlink_to(outside / "run")
    assert client.get(f"/runs/{id}").status_code == 404
    assert client.post(f"/runs/{id}/delete", data={"typed": "moved"}).status_code == 404
    assert (outside / "run" / "recipe.yaml").exists()
    assert not (outside / "new").exists()


def test_a_page_that_is_a_link_is_not_sent(client: TestClient, runs: Path) -> None:
    (runs / "bench").mkdir()
    (runs / "bench" / "bench.json").write_text("{}")
    (runs / "bench" / "bench.html").symlink_to(runs.parent / "outside" / "secret")
    (entry,) = client.app.state.ui.results.list_results()  # type: ignore[attr-defined]
    for place in ("", "/file", "/profiles/..%2f..%2fsecret"):
        assert "SECRET" not in client.get(f"/results/{entry.id}{place}").text


def test_a_folder_that_becomes_a_link_is_not_emptied(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, outside = write_run(runs / "mine"), runs.parent / "outside" / "run"
    (run / "profile").mkdir()
    (outside / "profile.json").write_text("{}")

    def swap(folder: Path) -> bool:
        """Puts a link in the place of a folder between the check of it and the removal of its files."""
        is_folder = folder.is_dir() and not folder.is_symlink()
        if folder.name == "profile" and is_folder:
            folder.rmdir()
            folder.symlink_to(outside)
        return is_folder

    monkeypatch.setattr("preheat.run.removal._is_folder", swap)
    remove_run(run)
    assert (outside / "profile.json").exists()
    assert not (run / "recipe.yaml").exists()
    linked = write_run(runs / "linked")
    (linked / "lock").unlink(missing_ok=True)
    (linked / "lock").symlink_to(runs.parent / "outside" / "created")
    with pytest.raises(RunError, match="cannot be removed"):
        remove_run(linked)
    assert not (runs.parent / "outside" / "created").exists()


def test_texts_of_runs_are_shown_and_not_executed(client: TestClient, runs: Path) -> None:
    run = write_run(runs / "x<script>alert(1)<b>")
    (run / "labels.json").write_text(json.dumps({"name": SCRIPT, "note": SCRIPT + "\ud800", "tags": [SCRIPT]}))
    os.rename(write_run(runs / "latin"), os.fsencode(runs) + b"/latin-\xff")
    (runs / (SCRIPT.replace("/", "")[:60] + ".jsonl")).write_text("{}\n")
    pages = ["/", "/results", "/data", "/chat", "/start"]
    for id in list_ids(client).values():
        pages += [f"/runs/{id}{part}" for part in ("", "/live", "/timeline", "/details", "/labels")]
        pages += [f"/compare?run={id}"]
    for place in pages:
        answer = client.get(place)
        assert answer.status_code == 200, place
        for markup in ("<script>alert", "<img src=x", "<b hx-get", ">49"):
            assert markup not in answer.text, place


def test_damaged_files_of_gigabytes_take_no_memory_and_pipes_do_not_block(client: TestClient, runs: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "labels.json", "plan.json", "status.json", "evaluation.json"):
        with (write_run(runs / name) / name).open("ab") as file:
            file.truncate(200 << 20 if name.endswith(".json") else 2 << 30)
    pipes = write_run(runs / "pipes")
    for name in ("status.json", "system.jsonl", "labels.json"):
        (pipes / name).unlink(missing_ok=True)
        os.mkfifo(pipes / name)
    process = psutil.Process()
    before = process.memory_info().rss
    assert client.get("/").status_code == 200
    for id in list_ids(client).values():
        for part in ("", "/live", "/timeline", "/details"):
            assert client.get(f"/runs/{id}{part}").status_code == 200
    assert process.memory_info().rss - before < 100 << 20


def test_what_is_typed_into_forms_is_no_option_and_no_path(client: TestClient, runs: Path) -> None:
    outside = runs.parent / "outside"
    for form in (
        {"model": "--help"},
        {"model": "../outside/run"},
        {"model": str(outside / "secret")},
        {"local": str(outside / "secret")},
        {"model": "1M", "data": str(outside / "secret")},
        {"model": "1M", "device": "--out=/x"},
        {"model": "1M", "steps": "-1"},
    ):
        answer = client.post("/plan", data=form)
        assert 'class="notice bad"' in answer.text, form
        assert "SECRET" not in answer.text
    (runs / "taken.log").symlink_to(outside / "log")
    for name in ("../x", "-x", "a/b", "x\ny", "x" * 81, "taken", "."):
        answer = client.post("/start", data={"recipe": "demo", "name": name})
        assert 'class="notice bad"' in answer.text, name
    assert client.post("/start", content=b"a=%ff\xff").status_code == 400
    for value in ("a\0b", "x" * 2001):
        assert client.post("/start", data={"recipe": value}).status_code == 400
    assert not (outside / "log").exists()
    assert client.app.state.ui.jobs.list_trainings() == []  # type: ignore[attr-defined]


def test_cookies_of_other_servers_on_this_host_do_not_lock_out(client: TestClient) -> None:
    client.cookies.clear()
    for other in ("a/b=1", 'x={"y": "z w"}', "expires=1", "\xb2"):
        answer = client.get("/", headers={"cookie": f"{other}; preheat-ui-1=token".encode("latin-1")})
        assert answer.status_code == 200, other
