"""Runs sent to experiment trackers, read back by each tracker's own reader."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from preheat.files import to_json
from preheat.run.reader import Reader

from .conftest import RECIPE, Command, losses, write_text

FAULTY = Path(__file__).with_name("faulty_trackers.py")
TRACKERS = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")
TRACKED = (
    RECIPE.replace("stop: {max_steps: 12}", "stop: {max_steps: 8}")
    .replace("checkpoint: {every: 5}", "checkpoint: {every: 3}")
    .replace("source: text", "source: [text, more (1).txt]")
    + "evaluate: {every: 4}\nsample: {prompts: [the quick], max_new_tokens: 4}\n"
    + "tracking: {to: [mlflow, swanlab, tensorboard, trackio, wandb], project: tests, tags: [small], folder: local, wait: 300}\n"
)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Command:
    """A run of eight steps that was interrupted after three and resumed, and was sent to all trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    write_text(folder)
    (folder / "more (1).txt").write_text("\n\n".join(f"the {n} of {n * n}" for n in range(400)))
    (folder / "r.yaml").write_text(TRACKED)
    command = Command(folder, cache)
    command.environment |= {"HOME": str(folder), "WANDB_MODE": "offline"}
    command("train", "r.yaml", "--set", "stop.max_steps=5", "--price", "2USD/h")
    command("train", "r.yaml", "--resume")
    return command


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_each_metric_parameter_and_prediction_after_a_resume(tracked: Command, name: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.e2e.tracker_readers", name, str(tracked.folder / "local")]
    printed = subprocess.run(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    found, parameters = json.loads(printed.splitlines()[-1])
    series = {metric: {int(step): value for step, value in of.items()} for metric, of in found.items()}
    run = Reader(tracked.folder / "runs/small")
    lines = run.metrics()
    assert [line.step for line in lines] == list(range(1, 9))
    for key in ("loss", "lr", "gradient_norm", "tokens_per_second", "tokens"):
        assert series[f"train/{key}"] == pytest.approx({line.step: getattr(line, key) for line in lines}, rel=1e-6), key
    evaluations = {e.step: e.validation_loss for e in run.evaluations()}
    assert series["validation/loss"] == pytest.approx(evaluations, rel=1e-6)
    for source, name in (("text", "text"), ("more (1).txt", "more _1_.txt")):
        by_source = {line.step: line.loss_by_source[source] for line in lines if source in line.loss_by_source}
        assert series[f"train/loss/{name}"] == pytest.approx(by_source, rel=1e-6)
    # The other source is a single document, which is not held out.
    by_source = {e.step: e.validation_loss_by_source["text"] for e in run.evaluations()}
    assert series["validation/loss/text"] == pytest.approx(by_source, rel=1e-6)
    plan = run.plan
    assert plan is not None
    for key, value in plan.predicted.known().items():
        assert set(series[f"plan/{key}"]) >= {1, 8}
        assert series[f"plan/{key}"][8] == pytest.approx(value, rel=1e-6)
    (measured,) = list(series["measured/peak_gib"].values())[-1:]
    assert measured == pytest.approx(run.measured().peak_gib, rel=1e-6)
    usage = run.measured().usage
    assert usage is not None
    assert usage.cost is not None
    (cost,) = list(series["measured/cost"].values())[-1:]
    assert cost == pytest.approx(usage.cost, rel=1e-6)
    assert float(parameters["batch.size"]) == 4
    assert parameters["data.source"].endswith("more (1).txt']")


def test_a_tracker_that_fails_or_hangs_changes_no_loss(preheat: Command) -> None:
    shutil.copy(FAULTY, preheat.folder)
    preheat("train", "r.yaml", "--out", "alone")
    trackers = ("--track", "failing", "--track", "hanging", "--set", "tracking.wait=10")
    printed = "".join(preheat("--plugin", "faulty_trackers", "train", "r.yaml", "--out", "tracked", *trackers))
    assert losses(preheat.folder / "tracked") == losses(preheat.folder / "alone")
    told = [line for line in printed.splitlines() if "tracking:" in line]
    assert len(told) == 2, printed
    assert "failing ended: OSError: [Errno 28] No space left on device" in printed
    assert "preheat track tracked --to hanging" in printed
    # What failed is sent later, by a tracker that works, and the run has the trackers in its recipe.
    sent = preheat.here.json("track", "tracked", "--to", "tensorboard")["sent"]
    assert [(row["tracker"], row["step"]) for row in sent] == [("tensorboard", 12)]


@pytest.mark.skipif(
    shutil.which("mount") is None or os.geteuid() != 0, reason="a disk that fills up needs root and mount"
)
def test_a_full_disk_of_tensorboard_changes_no_loss_and_the_rest_is_sent_later(preheat: Command) -> None:
    disk = preheat.folder / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=8k none {disk} 2>/dev/null") != 0:
        pytest.skip("this container may not mount")
    try:
        preheat("train", "r.yaml", "--out", "alone")
        tracked = ("--track", "tensorboard", "--set", "tracking.folder=disk")
        printed = "".join(preheat("train", "r.yaml", "--out", "run", *tracked))
        assert "tracking: tensorboard ended: OSError: [Errno 28] No space left on device" in printed
        assert losses(preheat.folder / "run") == losses(preheat.folder / "alone")
        assert Reader(preheat.folder / "run").finished() is not None
        assert os.system(f"mount -o remount,size=4m {disk}") == 0
        assert preheat.here.json("track", "run", "--to", "tensorboard")["sent"][0]["step"] == 12
        code = (
            "import json, sys; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
            "events = EventAccumulator(sys.argv[1]); events.Reload()\n"
            "print(json.dumps({e.step: e.value for e in events.Scalars('train/loss')}))"
        )
        command = [sys.executable, "-W", "ignore", "-c", code, str(disk / "tensorboard/run")]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        assert {int(step): loss for step, loss in found.items()} == pytest.approx(losses(preheat.folder / "run"))
    finally:
        os.system(f"umount {disk}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--track", "wandbb"), "tracking.to: 'wandbb': there is no such tracker; did you mean 'wandb'?"),
        (("--track", "absent"), "absent: is not installed; install it with: pip install 'preheat[absent]'"),
        (("--track", "wandb", "--set", "tracking.folder=r.yaml"), "is not a folder; set another tracking.name"),
        (("--track", "trackio", "--set", "tracking.name=small"), "project preheat has a run small already"),
        (("--set", "report_to=wandb"), "tracking.to"),
    ],
)
def test_a_tracker_that_cannot_work_is_told_before_training(
    preheat: Command, arguments: tuple[str, ...], said: str
) -> None:
    (preheat.folder / "bad.py").write_text(
        FAULTY.read_text().replace('"failing", "json", "nothing"', '"absent", "absent_package", "preheat[absent]"')
    )
    preheat.environment |= {"TRACKIO_DIR": str(preheat.folder / "trackio"), "PREHEAT_PLUGINS": "bad"}
    (preheat.folder / "trackio").mkdir()
    with sqlite3.connect(preheat.folder / "trackio/preheat.db") as database:
        database.execute("CREATE TABLE metrics (run_name TEXT)")
        database.execute("INSERT INTO metrics VALUES ('small')")
    database.close()
    _, error = preheat("train", "r.yaml", *arguments, code=2)
    assert said in error
    assert len([line for line in error.splitlines() if line.startswith("error:")]) == 1
    assert not (preheat.folder / "runs").exists()


def test_a_webhook_gets_the_end_of_a_run(tracked: Command) -> None:
    messages: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    # The system's figures are sent after all steps; the last of them may have been taken steps before the end.
    with (tracked.folder / "runs/small/system.jsonl").open("a") as file:
        file.write(to_json({"time": 0, "step": 5, "figures": {"cpu_percent": 1.0}}) + "\n")
    with HTTPServer(("127.0.0.1", 0), Hook) as server, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve_forever, 0.1)
        with mock.patch.dict(tracked.environment, {"PREHEAT_WEBHOOK": f"http://127.0.0.1:{server.server_port}/x"}):
            tracked.here("track", "runs/small", "--to", "webhook")
        server.shutdown()
        serving.result()
    (message,) = messages
    assert (message["run"], message["status"], message["step"]) == ("small", "finished", 8)
    assert message["loss"] == Reader(tracked.folder / "runs/small").metrics()[-1].loss
    assert message["text"] == message["content"] == f"small: finished at step 8, loss {message['loss']:.4f}"
