"""The page on the files of a run names every file and key that a real run writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from preheat.core import run_records
from tests.unit.docs.test_site import builder

from .conftest import Command


@pytest.fixture(scope="module")
def page() -> str:
    return builder().run_folder_page()


def keys(page: str, record: str) -> set[str]:
    """The keys in the table of a record."""
    table = page.partition(f"### {record}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_the_page_has_each_file_and_key_that_a_run_writes(page: str, preheat: Command, tmp_path: Path) -> None:
    samples = ("--set", "sample.prompts=[the quick]", "--set", "sample.max_new_tokens=4")
    preheat("train", "r.yaml", "--out", "run", "--set", "checkpoint.every=2", *samples)
    run = tmp_path / "run"

    listed = set(re.findall(r"[\w.]+", " ".join(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))))
    assert {path.name for path in run.iterdir()} - listed == set()

    records: list[tuple[str, Mapping[str, object]]] = [
        (record.__name__, json.loads((run / name).read_text()))
        for name, record in (
            ("environment.json", run_records.Environment),
            ("data.json", run_records.DataRecord),
            ("evaluation.json", run_records.Evaluation),
        )
    ]
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        records.append((run_records.event_type(event["kind"]).__name__, event))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        records.append(("StepMetrics" if "loss" in metrics else "EvaluationMetrics", metrics))
    names = {name for name, _ in records}
    assert {"Started", "Checkpoint", "SampleEvent", "Measured", "Finished", "EvaluationMetrics"} <= names
    for name, record in records:
        assert set(record) - keys(page, name) == set(), name


def test_types_are_written_as_json(page: str) -> None:
    assert "| `loss_by_source` | object of number; may be missing |" in page
    assert "| `value` | number or null |" in page
    assert "| `kind` | text | `out_of_memory` |" in page
    assert "| `spread` | list of number or null; may be missing | 10th and 90th percentile" in page
    assert "None" not in page.partition("## environment.json")[2]
