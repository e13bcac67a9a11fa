"""The check that one GPU session runs, tried on a CPU at tiny sizes; and that no case can take the others with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ..fork_server import Fork

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"

CASES = """\
import os, signal, time
from _gpu.case import Case, Skip, Where, Wrong

def wrong(where): raise Wrong("off by one", {"error": 1.0})
def skip(where): raise Skip("no such package")
def crash(where): os.kill(os.getpid(), signal.SIGSEGV)
def hang(where): time.sleep(600)
def unusable(where): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def process(where): return {"process": os.getpid()}

def cases(where):
    named = {"a": process, "wrong": wrong, "skip": skip, "b": process, "crash": crash, "c": process, "unusable": unusable, "d": process}
    return [Case(name, run) for name, run in named.items()] + [Case("hang", hang, seconds=2), Case("e", process), Case("long", hang, seconds=99)]
"""


def check(folder: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1"}
    arguments += ("--device", "cpu", "--out", str(folder / "out"))
    process = Fork(
        [str(SCRIPT), *arguments], function="tests.fork_server:script", folder=folder, environment=environment
    )
    out, error = process.communicate(timeout=600)
    assert process.returncode == code, out + error
    rows = [json.loads(line) for line in out.splitlines()]
    part = arguments[0]
    assert rows == [json.loads(line) for line in (folder / "out" / f"gpu_check-{part}.jsonl").read_text().splitlines()]
    table = (folder / "out" / f"gpu_check-{part}.md").read_text()
    assert all(f"| {row['case']} | {row['result']} |" in table for row in rows)
    return rows


def test_no_case_takes_the_others_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CASES)
    rows = check(tmp_path, "mine", "--only", *"abcde", "wrong", "skip", "unusable", "hang", code=1)
    results = {row["case"]: row["result"] for row in rows}
    assert {results[name] for name in "abcde"} == {"ok"}
    assert {name: results[name] for name in ("wrong", "skip", "crash", "unusable", "hang")} == {
        "wrong": "wrong", "skip": "skipped", "crash": "failed", "unusable": "failed", "hang": "failed",
    }  # fmt: skip
    said = {row["case"]: row["why"] for row in rows}
    assert "SIGSEGV" in said["crash"]
    assert said["hang"] == "took longer than 2 s"
    processes = {row["case"]: row["figures"].get("process") for row in rows}
    assert processes["a"] == processes["b"] != processes["c"], "one process until it ends"
    assert processes["c"] != processes["d"] != processes["e"], "a device that can do nothing more is left"


def test_the_budget_cuts_off_and_what_is_left_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CASES)
    rows = check(tmp_path, "mine", "--only", "long", "--budget", "5.5")
    assert [row["result"] for row in rows] == ["cut off"]
    rows = check(tmp_path, "mine", "--only", "a", "long", "--budget", "0.1")
    assert {row["result"] for row in rows} == {"left out"}


@pytest.mark.parametrize(
    ("part", "only", "least"),
    [
        ("correct", ["operators/", "techniques/lora {", "recipes/fine-tune", "collectives/"], 10),
        ("memory", ["constants", "recipes/1B full, autocast, chunked"], 2),
        ("ladder", ["1B full/+ chunked", "packed functions/attention"], 2),
    ],
)
def test_its_parts_run_on_a_cpu(tmp_path: Path, part: str, only: list[str], least: int) -> None:
    rows = check(tmp_path, part, "--only", *only)
    assert len(rows) >= least
    assert {row["result"] for row in rows} <= {"ok", "skipped"}, rows
    assert sum(row["result"] == "ok" for row in rows) >= least - 2


@pytest.mark.skipif(os.environ.get("PREHEAT_SCALE") != "all", reason="takes minutes: make test-scale")
@pytest.mark.parametrize("part", ["correct", "memory", "ladder"])
def test_every_case_runs_on_a_cpu(tmp_path: Path, part: str) -> None:
    rows = check(tmp_path, part, "--budget", "3000")
    assert {row["result"] for row in rows} <= {"ok", "skipped"}, [
        row for row in rows if row["result"] not in ("ok", "skipped")
    ]


def test_what_is_asked_wrongly_is_said_in_a_line(tmp_path: Path) -> None:
    for arguments, words in (
        (["corect"], "no such part"),
        (["correct", "--only", "nothing"], "--only nothing: no case"),
    ):
        process = Fork(
            [str(SCRIPT), *arguments, "--device", "cpu"], function="tests.fork_server:script", folder=tmp_path
        )
        _, error = process.communicate(timeout=120)
        assert process.returncode == 2
        assert words in error
        assert len(error.strip().splitlines()) == 1
