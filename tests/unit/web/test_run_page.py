"""The page of a run, from a run folder on disk."""

from __future__ import annotations

import html
import json
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from preheat.core.run_records import (
    Checkpoint,
    Environment,
    Finished,
    Notice,
    ProcessStatus,
    RankState,
    SampleEvent,
    Started,
    StepMetrics,
    Stopping,
)
from preheat.files import to_json
from preheat.run.remote_runs import RemoteRuns
from preheat.run.writer import Writer
from preheat.web import index
from preheat.web.app import create_app
from preheat.web.catalogue import Catalogue
from preheat.web.jobs import JobState
from preheat.web.settings import Settings
from preheat.web.templating import _format_whole_seconds

from ..plans import values_of

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on two processes that was stopped; its folder, texts and events hold scripts."""
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))
    # Enough for all that a test reads, however busy the machine is.
    monkeypatch.setattr(index, "_INLINE_S", 1e6)
    folder = tmp_path / "runs" / "it's <b>bold"
    writer = Writer(folder)
    writer.write_json("plan.json", values_of(20.0, 24.0, steps=400))
    writer.write_json("environment.json", Environment(processes=2, command="preheat train --trust-remote-code"))
    writer.write_text("recipe.yaml", f"name: {json.dumps(SCRIPT)}\n")
    writer.write_event(Started(step=0))
    for step in range(1, 41):
        writer.write_metric(StepMetrics(step, 32 * step, 3.0 / step, 1e-3, 1.0, 0.1, 1903.4, 1 << 30, 0.1 * step, 32))
        if step % 5 == 0:
            writer.write_event(Checkpoint(step=step))
    writer.write_event(Notice(step=40, message=SCRIPT))
    writer.write_event(SampleEvent(step=40, prompt=SCRIPT, text=SCRIPT))
    writer.write_event(Stopping(signal="SIGTERM", step=40))
    writer.close()
    return folder


class Client:
    """A browser that is logged in and looks at one run."""

    def __init__(self, run: Path, *, read_only: bool = False):
        self.settings = Settings((run.parent,), "token", 1, frozenset({"testserver"}), read_only=read_only)
        self.http = TestClient(create_app(self.settings))
        self.http.get("/?token=token")
        (entry,) = self.http.app.state.ui.catalogue.list_runs()  # type: ignore[attr-defined]
        self.url = f"/runs/{entry.id}"
        # A thread reads the run where a request has no time to.
        end = time.monotonic() + 30
        while "of its files are read so far" in self.get("/live"):
            assert time.monotonic() < end
            time.sleep(0.05)

    def get(self, part: str = "", status: int = 200) -> str:
        response = self.http.get(self.url + part)
        assert response.status_code == status, response.text
        return response.text

    def post(self, part: str, status: int = 200, **form: str) -> str:
        response = self.http.post(self.url + part, data=form, headers={"X-CSRF-Token": self.settings.csrf_token})
        assert response.status_code == status, response.text
        return response.text


@pytest.fixture
def client(run: Path) -> Client:
    return Client(run)


def test_a_run_that_was_stopped_after_its_last_step_is_not_called_early(run: Path, client: Client) -> None:
    (run / "plan.json").write_text(to_json(values_of(20.0, 24.0, steps=40)))
    page = client.get()
    assert "All 40 steps are done and saved. The run was stopped before its last figures (SIGTERM)." in page
    assert "Stopped early" not in page


def test_the_page_says_state_judgement_and_the_command_that_resumes(run: Path, client: Client) -> None:
    page = client.get()
    assert "Stopped early at step 40 of 400 (SIGTERM)." in page
    assert "20 % slower than planned" in page
    assert "Memory: planned 20.00 GiB of 24.00 GiB; the peak is measured when the session ends." in page
    command = page.partition('<code id="resume-command"')[2].partition(">")[2].partition("</code>")[0]
    assert shlex.split(html.unescape(command)) == [
        *("preheat", "train", str(run / "recipe.yaml"), "--out", str(run), "--resume"),
        *("--nproc", "2", "--trust-remote-code"),
    ]
    # A damaged record of the command.
    (run / "environment.json").write_text(to_json(Environment(command="  ")))
    assert 'id="resume-command"' in client.get()


def test_a_stopped_run_is_queued_again_in_its_folder(run: Path, client: Client) -> None:
    # Its command trusted code; only a user may do that again.
    assert "executes code that is not preheat" in client.post("/resume")
    for environment, obstacle in (
        (Environment(processes=2, command="preheat train r.yaml"), "Another launcher started its processes"),
        (Environment(processes=1, command="my_loop.py"), "nothing to resume here"),
        (Environment(processes=1, command="preheat --plugin mine train r.yaml"), "executes code that is not preheat"),
        (Environment(processes=1, command="preheat --plugin=mine train r.yaml"), "executes code that is not preheat"),
    ):
        (run / "environment.json").write_text(to_json(environment))
        assert obstacle in client.post("/resume")
        assert 'id="resume-here"' not in client.get("/live")
    (run / "environment.json").write_text(to_json(Environment(processes=1, command="__main__.py train r.yaml")))
    assert 'id="resume-here"' in client.get("/live")
    (run.parent / f"{run.name}-resumed-1.log").write_text("an earlier one\n")
    message = html.unescape(client.post("/resume"))
    assert f"its output is in {run.name}-resumed-2.log" in message
    assert "This run waits or trains already" in client.post("/resume")
    assert "a training of it waits or runs; cancel it" in client.post("/delete", 422, typed=run.name)
    jobs = client.http.app.state.ui.jobs  # type: ignore[attr-defined]
    (training,) = jobs.list_trainings()
    assert training.arguments == ("train", str(run / "recipe.yaml"), "--out", str(run), "--resume")
    page = html.unescape(client.get("/live"))
    assert f'<a href="/start/trainings/{training.id}">output</a>' in page
    assert 'id="resume-here"' not in page
    end = time.monotonic() + 90
    while training.state in (JobState.WAITING, JobState.RUNNING):  # the name of the recipe is no name
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "recipe.yaml:1: name" in training.problem
    assert (run.parent / f"{run.name}-resumed-1.log").read_text() == "an earlier one\n"
    jobs.close()


def test_a_finished_run_and_one_that_is_read_only_are_not_resumed(run: Path) -> None:
    assert 'id="resume-here"' not in Client(run, read_only=True).get()
    writer = Writer(run, resume=True)
    writer.write_event(Started(step=40))
    writer.write_event(Finished(steps=400, loss=0.1))
    writer.close()
    client = Client(run)
    assert 'id="resume-here"' not in client.get()
    assert "The run is finished, so there is nothing to resume here" in client.post("/resume")
    assert "run it again with --profile 5" in client.get()


def test_a_run_in_object_storage_is_resumed_by_its_url_and_neither_stopped_nor_deleted_here(
    run: Path,
) -> None:
    remote = RemoteRuns("s3://bucket/runs")
    shutil.copytree(run, remote.folder / run.name)
    client = Client(remote.folder / run.name)
    state = client.http.app.state  # type: ignore[attr-defined]
    state.ui = replace(state.ui, catalogue=Catalogue((), (remote,)))
    url = f"s3://bucket/runs/{run.name}"
    page = html.unescape(client.get())
    assert f"<code>{url}</code>" in page
    assert shlex.join(["preheat", "train", "--resume", url]) in page
    for action in ("/stop", "/save"):
        assert "The run is in object storage: stop it on the machine that trains it." in client.post(action)
    assert "The run is in object storage: resume it in a terminal" in client.post("/resume")
    assert f"delete the folder {url} there" in html.unescape(client.post("/delete", 422))
    assert (remote.folder / run.name / "recipe.yaml").exists()


def test_nothing_of_a_run_is_markup(client: Client) -> None:
    parts = [client.get(part) for part in ("", "/live", "/timeline", "/details")]
    assert not any(SCRIPT in part or "<b>bold" in part for part in parts)
    assert parts[0].count("it&#39;s &lt;b&gt;bold") >= 2
    assert all("&lt;script&gt;alert(1)" in part for part in parts[2:])


def test_checkpoints_in_a_row_are_one_line_of_the_list(client: Client) -> None:
    timeline = client.get("/timeline")
    assert "checkpoint × 8" in timeline
    assert "steps 5 to 40" in timeline


def test_ranks_are_listed_and_silent_ones_are_named(run: Path, client: Client) -> None:
    now = (run / "lock").stat().st_mtime
    state = RankState(
        rank=0, step=41, phase="gradients", since=now - 3, time=now + 1e6, line="preheat/engine/step.py:1"
    )
    ranks = (state, replace(state, rank=1, time=now - 60))
    (run / "status.json").write_text(to_json(ProcessStatus(time=now, host="h", pid=1, started=now, ranks=ranks)))
    live = client.get("/live")
    assert live.count("preheat/engine/step.py:1") == 2
    assert live.count("silent: stopped, or its host is gone") == 1


def test_a_run_that_has_ended_is_not_signalled(client: Client) -> None:
    for request in ("/stop", "/save"):
        assert "No process writes this run: it has ended." in client.post(request)


def test_a_server_that_only_reads_shows_no_buttons_and_refuses_requests(run: Path) -> None:
    client = Client(run, read_only=True)
    assert "Save now" not in client.get()
    assert "--read-only" in client.post("/stop", status=403)


def test_a_run_whose_folder_was_deleted_is_said(run: Path, client: Client) -> None:
    client.get()
    shutil.rmtree(run)
    for part in ("", "/live", "/timeline", "/details"):
        assert "does not exist any more" in client.get(part, status=404)


def test_damaged_files_are_named_and_the_rest_is_shown(run: Path, client: Client) -> None:
    (run / "plan.json").write_text("{")
    (run / "changes.json").write_text('{"x": 3}')
    (run / "status.json").write_text("[]")
    assert "no plan of this version" in client.get()
    assert "plan.json: left out" in client.get("/details")


def test_a_time_that_is_no_number_is_not_shown_as_one() -> None:
    """Files of runs may hold anything; a page must not fail by it."""
    assert [_format_whole_seconds(s) for s in (0.4, 75.2, None, float("nan"), float("inf"))] == [
        *("0 s", "1 min 15 s"),
        *("not recorded",) * 3,
    ]
