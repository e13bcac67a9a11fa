"""The records of a run folder: files of earlier runs are read and written again as they were, without their damage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from preheat.core import Phase
from preheat.core.run_records import (
    Checkpoint,
    EvaluationMetrics,
    Event,
    Fallback,
    Finished,
    Measured,
    OtherEvent,
    OutOfMemory,
    SkippedFallback,
    StepMetrics,
    event_type,
)
from preheat.errors import RunError
from preheat.files import to_json, to_plain_data
from preheat.run.reader import Reader

ESTIMATE = {"value": 6.5, "low": 6.25, "high": 6.75}
RESULT = {"rows": 8, "tokens": 99, "truncated": 0, "no_room": 0, "unread_rows": 3, "metrics": {"loss": ESTIMATE}}
NEEDLE = {**RESULT, "tokens": None, "parts": [{"length": 64, "depth": 0.5, "value": 1.0, "low": None, "high": None}]}
STORED = {"rows": 1, "identity": "5f", "tokens": None, "truncated": 0, "no_room": 0, "unread_rows": 0, "alone": {"acc": 0.5},
          "metrics": {"accuracy": {"kind": "ratio", "higher": True, "rows": [[1.0, 1.0]]}},
          "parts": [{"place": {"length": 64, "depth": 0.5}, "metric": {"kind": "ratio", "higher": True, "rows": [[0.0, 1.0]]}}]}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "environment.json": {"command": "preheat train r.yaml", "device": "cuda", "segments": "fixed", "threads": 2,
                         "machine": {"device": "H200", "memory_gib": 139.8, "cores": 16, "system": "Linux"},
                         "versions": {"python": "3.11.7", "torch": "2.13.0"}, "processes": 1, "repeats": "bit for bit"},
    "changes.json": {"lora": [{"what": "adapters on 6 layers", "count": 24, "kernel": "peft", "detail": ""}]},
    "data.json": {"source": "text", "layout": "text, stated", "layout_kind": "text", "layout_reason": "stated",
                  "template": None, "classes": [], "counts": {"read": 9, "train": {"documents": 8, "tokens": 99}},
                  "preflight": [], "fingerprint": "4c", "chat": False},
    "evaluation.json": {"step": 12, "after": {"texts": {"validation": RESULT}, "tasks": {"needle": NEEDLE}},
                        "before": {"texts": {"validation": RESULT}, "tasks": {}},
                        "difference": {"texts": {"validation": {"paired": True, "metrics": {"loss": ESTIMATE}}}, "tasks": {}}},
    "before.json": {"texts": {}, "tasks": {"needle": STORED}},
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"kind": "started", "step": 0},
    {"kind": "notice", "step": 0, "message": "the teacher read 9 rows"},
    {"kind": "overflow", "step": 1, "loss_scale": 1024.0},
    {"kind": "overflows", "step": 3, "steps": 3, "loss_scale": 1.0},
    {"kind": "micro_batch", "step": 4, "rows": 4, "was": 2, "why": "there is room"},
    {"kind": "checkpoint", "step": 4, "path": "checkpoints/step-4", "wait_seconds": 0.07, "seconds": 0.1},
    {"kind": "out_of_memory", "phase": "gradients", "step": 4, "rank": 0, "message": "no memory", "requested": None, "room": None,
     "overhead": 7, "in_use": {"other": 9}, "allocator": {}},
    {"kind": "fallback", "step": 4, "cause": "gradients", "changed": ["batch.size=1"], "set": ["batch.size=1"], "peak_gib": 1.5,
     "was_gib": 2.5, "skipped": [{"set": ["a=b"], "reason": "too large"}], "seconds_per_step": [0.5, 0.75]},
    {"kind": "fallback", "step": 4, "cause": "saving", "changed": [], "set": []},
    {"kind": "best", "step": 4, "score": "validation_loss", "value": 2.5},
    {"kind": "set_aside", "step": 4, "checkpoints": ["step-6.aside-1"]},
    {"kind": "put_back", "checkpoints": ["step-6"]},
    {"kind": "spike", "step": 5, "score": "loss", "value": None, "median": 2.5, "threshold": 3.5, "rows": [16, 20]},
    {"kind": "rewound", "step": 4, "spike": 5, "rows": [16, 20]},
    {"kind": "removed_rows", "step": 4, "rows": [40, 44]},
    {"kind": "unsaved", "step": 5, "reason": "no memory"},
    {"kind": "unevaluated", "step": 5},
    {"kind": "damaged", "checkpoint": "step-6", "problem": "cut"},
    {"kind": "damaged", "file": "before.json", "problem": "cut"},
    {"kind": "stopping", "signal": "SIGTERM", "step": 6},
    {"kind": "resumed", "step": 4},
    {"kind": "measured", "peak_gib": 0.5, "allocated_gib": 0.25, "tokens_per_second": 9.5, "seconds_per_step": 0.5, "mfu": None,
     "spread": [9.0, 9.75], "machine": {"seconds": 9.5, "own_cores": 1.5, "other_cores": None, "cpus": 2, "threads": 2, "alone": None},
     "usage": {"device_hours": 2.5, "energy_kwh": 1.5, "energy_sources": ["nvml"], "cost": 5.0, "currency": "EUR", "price_per_hour": 2.0},
     "recompilations": 3},
    {"kind": "baseline", "vocabulary": 4096, "unigram": 6.5, "bigram": 4.25},
    {"kind": "sample", "step": 6, "prompt": [{"role": "user", "content": "Hi"}], "text": "Ho", "ended": "stop", "expected": "Ha"},
    {"kind": "finished", "steps": 6, "loss": 2.5, "validation_loss": None, "tokens": 600, "seconds": 3.5, "skipped_steps": 0},
    {"kind": "finished", "steps": 6, "reason": "patience", "best": {"step": 4, "value": 2.5, "name": "validation_loss"}},
    {"kind": "failed", "reason": "out of memory"},
    {"kind": "of a later version", "step": 6, "values": [1, {"a": None}]},
]  # fmt: skip
METRICS: list[dict[str, Any]] = [
    {"step": 0, "validation_loss": 3.5, "forgetting_loss": 2.5, "tokens": 99, "validation_accuracy": 0.5, "tasks": {"t": {"acc": 0.5}},
     "validation_loss_by_source": {"a.txt": 3.5}},
    {"step": 1, "tokens": 64, "loss": None, "lr": 0.004, "gradient_norm": None, "seconds": 0.5, "tokens_per_second": 128.0,
     "memory": 4096, "elapsed": 0.5, "length": 32, "skipped_steps": 1, "loss_scale": 512.0, "loss_by_source": {"a.txt": 2.5}, "accuracy": 0.5, "expert_load": 1.5,
     "expert_loads": [1.5, 1.25], "recompilations": 2},
]  # fmt: skip


def write_run(path: Path, events: list[Any], metrics: list[Any]) -> Reader:
    path.mkdir()
    (path / "recipe.yaml").write_text("name: r\n")
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", metrics)):
        (path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return Reader(path)


def test_a_run_of_an_earlier_version_is_written_again_with_the_same_keys(tmp_path: Path) -> None:
    events = [{"time": 1795856981.5, **event} for event in EVENTS]
    run = write_run(tmp_path / "run", events, METRICS)
    for name, content in FILES.items():
        (run.path / name).write_text(json.dumps(content))
    records = (run.environment, run.changes, run.data, run.evaluation, run.before)
    assert [to_json(record) for record in records] == [json.dumps(content) for content in FILES.values()]
    assert [to_json(event) for event in run.events()] == [json.dumps(event) for event in events]
    assert [to_json(line) for line in (*run.evaluations(), *run.metrics())] == [json.dumps(line) for line in METRICS]
    assert run.damage_notes == []
    kinds = {event["kind"] for event in EVENTS[:-1]}
    assert kinds == {kind.kind for kind in Event.__subclasses__() if kind is not OtherEvent}


def test_values_have_types(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", EVENTS, METRICS)
    (failure,) = run.events(OutOfMemory)
    assert failure.phase is Phase.GRADIENTS
    assert run.events(Fallback)[0].skipped == (SkippedFallback(("a=b",), "too large"),)
    assert run.measured().counters == {"recompilations": 3}
    assert math.isnan(run.events(Finished)[0].validation_loss or 0)
    assert run.events(OtherEvent)[0].values == {"values": [1, {"a": None}]}
    (line,) = run.metrics()
    assert line.loss is not None
    assert math.isnan(line.loss), "null is a loss that was not finite"
    assert line.expert_loads == [1.5, 1.25]
    assert line.scores["accuracy"] == 0.5


@pytest.mark.parametrize(
    "line",
    [
        *({"kind": "checkpoint", "step": step} for step in (-1, 2**53, True, "4", None, 1.5)),
        *(
            {"kind": kind, "step": 1, "time": time}
            for kind in ("checkpoint", "new")
            for time in (-1, 253402300800, "x")
        ),
        {"kind": "new", "step": 2**53},
        {"kind": "checkpoint"},
        {"kind": 3},
        {"kind": "fallback", "step": 1, "changed": [], "set": [1]},
        {"kind": "finished", "steps": 2**70},
        {"kind": "out_of_memory", "phase": "lunch"},
        [],
        None,
    ],
)
def test_a_damaged_event_is_left_out_and_named(line: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"kind": "started"}, line, {"kind": "checkpoint", "step": 2}], [])
    assert [event.kind for event in run.events()] == ["started", "checkpoint"]
    assert run.damaged["events.jsonl"].startswith("left out line 2 (")


@pytest.mark.parametrize(
    "line",
    [
        *({"step": step, "loss": 1.0} for step in (-1, 2**53, True, "4", None, 1.5)),
        *({"step": 1, "loss": loss} for loss in ("x", True, [], 2**63)),
        {"step": 1, "loss": 1.0, "expert_loads": [None]},
        {"step": 1, "validation_loss": "x"},
        {"step": 1, "loss": 1.0, "loss_by_source": [1.0]},
        {"step": 1, "validation_loss_by_source": {"a": "x"}},
        {"step": 1, "tasks": {"t": 3}},
        {"step": 1, "tasks": {"t": {"acc": "x"}}},
        3,
    ],
)
def test_a_damaged_line_of_metrics_is_left_out_and_named(line: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [{"step": 1, "loss": 1.0}, line, {"step": 2, "loss": 2.0}])
    assert [(line.step, line.loss) for line in run.metrics()] == [(1, 1.0), (2, 2.0)]
    assert run.evaluations() == []
    assert run.damaged["metrics.jsonl"].startswith("left out line 2 (")


def test_a_repeated_step_counts_once_and_half_a_line_is_no_damage(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", [], [{"step": n, "loss": loss} for n, loss in ((1, 1.0), (2, 2.0), (1, 3.0), (2, 4.0))]
    )
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": NaN, "lr": Infinity, "note": "of a later version"}\n{"step": 4, "lo')
    assert [line.step for line in run.metrics()] == [1, 2, 3]
    assert run.metrics()[0] == StepMetrics(1, loss=3.0)
    assert to_plain_data(run.metrics()[2]) == {"step": 3, "loss": None}
    assert run.damage_notes == []


def test_keys_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [])
    (run.path / "environment.json").write_text(
        '{"device": "cpu", "threads": "x", "machine": 3, "of": "a later version"}'
    )
    (run.path / "changes.json").write_text('{"lora": [{"what": "w", "count": 0}], "muon": [{"what": "w", "count": 1}]}')
    assert to_plain_data(run.environment) == {"device": "cpu"}
    assert list(run.changes) == ["muon"]
    assert run.damaged == {
        "environment.json": "left out threads, machine, whose values are invalid",
        "changes.json": "left out lora, whose values are invalid",
    }


@pytest.mark.parametrize("counts", [3, {"train": 3}, {"train": {"documents": 1, "tokens": "x"}}])
def test_damaged_data_is_an_error(counts: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [])
    (run.path / "data.json").write_text(json.dumps({**FILES["data.json"], "counts": counts}))
    with pytest.raises(RunError, match=r"data\.json: is damaged \(left out counts"):
        _ = run.data


def test_defaults_say_what_is_unknown() -> None:
    assert event_type("measured") is Measured
    assert to_plain_data(Checkpoint(step=3)) == {"kind": "checkpoint", "step": 3}
    assert to_plain_data(EvaluationMetrics(3, validation_loss=math.nan)) == {"step": 3, "validation_loss": None}


def test_steps_that_a_run_went_back_from_are_left_out(tmp_path: Path) -> None:
    def trained(*steps: int) -> list[dict[str, Any]]:
        return [{"step": step, "loss": float(step)} for step in steps]

    metrics = [
        *trained(1, 2), {"step": 2, "validation_loss": 1.0}, *trained(3, 4), {"step": 4, "validation_loss": 2.0},
        *trained(3), {"step": 3, "validation_loss": 3.0},
    ]  # fmt: skip
    run = write_run(tmp_path / "run", [], metrics)
    assert [line.step for line in run.metrics()] == [1, 2, 3]
    assert [(line.step, line.validation_loss) for line in run.evaluations()] == [(2, 1.0), (3, 3.0)]
