"""Reads a run back by the reader of its tracker: `python -m tests.e2e.tracker_readers TRACKER FOLDER` prints JSON.

In a process of its own, since these packages warn of themselves and leave files open.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Series = dict[str, dict[int, float]]  # metric -> step -> value
Found = tuple[Series, dict[str, Any]]  # with the parameters


def of_mlflow(folder: Path) -> Found:
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


def of_tensorboard(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard/small"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    series = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    (parameters,) = events.Tensors("parameters.json")
    assert "the quick" in events.Tensors("samples")[-1].tensor_proto.string_val[0].decode()
    return series, json.loads(parameters.tensor_proto.string_val[0])


def of_trackio(folder: Path) -> Found:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")  # read when the package is imported
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("tests") == ["small"]
    series: Series = {}
    for log in SQLiteStorage.get_logs("tests", "small", max_points=None):
        for name, value in log.items():
            if isinstance(value, int | float) and name != "step":
                series.setdefault(name, {})[log["step"]] = value
    return series, SQLiteStorage.get_run_config("tests", "small")


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


def of_wandb(folder: Path) -> Found:
    from wandb.proto.wandb_internal_pb2 import Record

    series: Series = {}
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


def of_swanlab(folder: Path) -> Found:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    series: Series = {}
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


if __name__ == "__main__":
    print(json.dumps(globals()[f"of_{sys.argv[1]}"](Path(sys.argv[2]))))
