"""Runs sent to experiment trackers, read back by each tracker's own reader."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from preheat.run.reader import Reader

from .conftest import RECIPE, Command, losses, write_text

TRACKERS = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")
TRACKED = (
    RECIPE.replace("stop: {max_steps: 12}", "stop: {max_steps: 8}").replace(
        "checkpoint: {every: 5}", "checkpoint: {every: 3}"
    )
    + "evaluate: {every: 4}\nsample: {prompts: [the quick], max_new_tokens: 4}\n"
    + "tracking: {to: [mlflow, swanlab, tensorboard, trackio, wandb], project: tests, tags: [small], folder: local}\n"
)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Command:
    """A run of eight steps that was interrupted after three and resumed, and was sent to all trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    write_text(folder)
    (folder / "r.yaml").write_text(TRACKED)
    command = Command(folder, cache)
    command.environment |= {"HOME": str(folder), "WANDB_MODE": "offline"}
    command("train", "r.yaml", "--set", "stop.max_steps=5")
    command("train", "r.yaml", "--resume")
    return command


def of_mlflow(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "small"
    names = run.data.metrics
    series = {name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} for name in names}
    assert {f.path for f in client.list_artifacts(run.info.run_id)} >= {"report.html", "samples"}
    return series, run.data.params


def of_tensorboard(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard/small"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    series = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    (parameters,) = events.Tensors("parameters.json")
    assert "the quick" in events.Tensors("samples")[-1].tensor_proto.string_val[0].decode()
    return series, json.loads(parameters.tensor_proto.string_val[0])


def of_trackio(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    with mock.patch.dict(os.environ, {"TRACKIO_DIR": str(folder / "trackio")}):
        from trackio.sqlite_storage import SQLiteStorage

        with mock.patch("trackio.sqlite_storage.TRACKIO_DIR", folder / "trackio"):
            assert SQLiteStorage.get_runs("tests") == ["small"]
            logs = SQLiteStorage.get_logs("tests", "small", max_points=None)
            config = SQLiteStorage.get_run_config("tests", "small")
    series: dict[str, dict[int, float]] = {}
    for log in logs:
        for name, value in log.items():
            if isinstance(value, int | float) and name != "step":
                series.setdefault(name, {})[log["step"]] = value
    return series, config


def records(file: Path) -> Iterator[bytes]:
    """Yields the records of a file in LevelDB's log format, which W&B's offline files have after seven bytes."""
    data, block = file.read_bytes(), 1 << 15
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # too little for a header: the block is padded
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            yield parts
            parts = b""


def of_wandb(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    from wandb.proto.wandb_internal_pb2 import Record

    series: dict[str, dict[int, float]] = {}
    config: dict[str, str] = {}
    ids = set()
    for file in sorted(folder.glob("wandb/wandb/offline-run-*/run-*.wandb")):
        for content in records(file):
            record = Record.FromString(content)
            if record.run.run_id:
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            values = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
            for name, value in values.items():
                if isinstance(value, int | float):
                    series.setdefault(name, {})[values["step"]] = value
            for item in record.summary.update:
                name = item.key or item.nested_key[0]
                if name.startswith("measured/"):
                    series[name] = {0: json.loads(item.value_json)}
    assert len(ids) == 1, "both sessions are one run"
    return series, config


def of_swanlab(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    series: dict[str, dict[int, float]] = {}
    config: dict[str, str] = {}
    for run in sorted(folder.glob("swanlab/run-*")):
        reader = DataStoreReader()
        reader.open(next(run.glob("run-*.swanlab")))
        for content in reader:
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "scalar":
                series.setdefault(record.scalar.key, {})[record.scalar.step] = record.scalar.value.number
        reader.close()
        config |= {
            key: entry["value"] for key, entry in yaml.safe_load((run / "files/config.yaml").read_text()).items()
        }
    return series, config


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_each_metric_parameter_and_prediction_after_a_resume(tracked: Command, name: str) -> None:
    series, parameters = globals()[f"of_{name}"](tracked.folder / "local")
    run = Reader(tracked.folder / "runs/small")
    lines = run.metrics()
    assert [line.step for line in lines] == list(range(1, 9))
    for key in ("loss", "lr", "gradient_norm", "tokens_per_second", "tokens"):
        assert series[f"train/{key}"] == pytest.approx({line.step: getattr(line, key) for line in lines}, rel=1e-6), key
    evaluations = {e.step: e.validation_loss for e in run.evaluations()}
    assert series["validation/loss"] == pytest.approx(evaluations, rel=1e-6)
    plan = run.plan
    assert plan is not None
    for key, value in plan.predicted.known().items():
        assert set(series[f"plan/{key}"]) >= {1, 8}
        assert series[f"plan/{key}"][8] == pytest.approx(value, rel=1e-6)
    (measured,) = list(series["measured/peak_gib"].values())[-1:]
    assert measured == pytest.approx(run.measured().peak_gib, rel=1e-6)
    assert float(parameters["batch.size"]) == 4
    assert parameters["data.source"].endswith("text")


BROKEN = """
import time

from preheat.tracking.tracker import Tracker


class Broken(Tracker):
    name, package, pip = "broken", "json", "nothing"

    def start(self, start, known):
        return "run"

    def metrics(self, step, values):
        raise OSError(28, "No space left on device")

    def table(self, step, name, table): ...
    def summary(self, values): ...
    def artifact(self, file): ...
    def finish(self, status): ...


class Hanging(Broken):
    name = "hanging"

    def start(self, start, known):
        time.sleep(60)
"""


def test_a_tracker_that_fails_or_hangs_changes_no_loss(preheat: Command) -> None:
    (preheat.folder / "bad.py").write_text(BROKEN)
    preheat("train", "r.yaml", "--out", "alone")
    trackers = ("--track", "broken", "--track", "hanging", "--set", "tracking.wait=10")
    printed = "".join(preheat("--plugin", "bad", "train", "r.yaml", "--out", "tracked", *trackers))
    assert losses(preheat.folder / "tracked") == losses(preheat.folder / "alone")
    told = [line for line in printed.splitlines() if "tracking:" in line]
    assert len(told) == 2, printed
    assert "broken ended: OSError: [Errno 28] No space left on device" in printed
    assert "preheat track tracked --to hanging" in printed
    # What failed is sent later, by a tracker that works, and the run has the trackers in its recipe.
    sent = preheat.here.json("track", "tracked", "--to", "tensorboard")["sent"]
    assert [(row["tracker"], row["step"]) for row in sent] == [("tensorboard", 12)]


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
        BROKEN.replace('"broken", "json", "nothing"', '"absent", "absent_package", "preheat[absent]"')
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
