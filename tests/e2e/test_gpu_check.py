"""The check that one GPU session runs, tried on a CPU at tiny sizes; and that no case can take the others with it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
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
    return [Case(name, run) for name, run in named.items()] + [Case("hang", hang, seconds=0.5), Case("e", process), Case("long", hang, seconds=99)]
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the check's cases."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return lambda name: importlib.import_module(f"_gpu.{name}")


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


def test_a_process_that_does_not_start_takes_no_more_than_the_budget(tmp_path: Path) -> None:
    slow = "import time\nfrom pathlib import Path\n" + CASES.replace(
        "def cases(where):", "def cases(where):\n    if where.folder and Path('slow').exists(): time.sleep(60)"
    )
    (tmp_path / "mine.py").write_text(slow + "\n")
    script = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import gpu_check as g\n"
        "where = g.Where('cpu', True, '.'); cases = g.cases_of('mine', where)[:3]; Path('slow').touch()\n"
        "begun = time.monotonic(); rows = list(g.results('mine', where, cases, 6, open('log', 'w')))\n"
        "print(time.monotonic() - begun, [row['result'] for row in rows])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", script, str(SCRIPT.parent)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    seconds, _, results = done.stdout.partition(" ")
    assert float(seconds) < 12
    assert results.strip() == "['failed', 'left out', 'left out']"


def _figures(**off: float) -> dict[str, float]:
    return {"allocated off": 0.01, "reserved off": -0.09, "memory off": 0.1, "speed off": -0.2} | off


def test_plans_that_are_far_off_are_wrong(gpu: Any) -> None:
    memory = gpu("memory")
    assert memory.within_bounds(_figures()) == _figures()
    for key, value in {"allocated off": -0.06, "reserved off": 0.2, "memory off": 0.2, "speed off": 5.5}.items():
        for figure in (value, float("nan")):
            with pytest.raises(gpu("case").Wrong, match=key):
                memory.within_bounds(_figures(**{key: figure}))


def test_a_rung_that_trains_otherwise_is_wrong(gpu: Any, tmp_path: Path) -> None:
    like, wrong, file = gpu("ladder").like_the_first, gpu("case").Wrong, tmp_path / "losses.json"
    with pytest.raises(wrong, match="not finite"):
        like({"first loss": 12.2, "last loss": float("nan")}, file)
    like({"first loss": 12.2, "last loss": 7.5}, file)
    like({"first loss": 12.21, "last loss": 7.6}, file)
    for key, value in {"first loss": 12.5, "last loss": 8.5}.items():
        with pytest.raises(wrong, match=key):
            like({"first loss": 12.2, "last loss": 7.5} | {key: value}, file)


def test_all_recipes_exist_at_the_sizes_of_a_gpu(gpu: Any) -> None:
    where, recipe_of = gpu("case").Where("cuda", False, ""), gpu("shapes").recipe_of
    for _, *of in gpu("memory").RECIPES:
        assert recipe_of(where, *of, 3)
    for shape, rows, length, rungs in gpu("ladder").TASKS.values():
        for techniques in rungs.values():
            assert recipe_of(where, shape, rows, length, techniques, 3)


def test_only_known_refusals_are_skipped(gpu: Any) -> None:
    correct, case = gpu("correct"), gpu("case")
    refuse = correct._refusal
    assert isinstance(refuse("techniques.fp8: needs torchao, which is not installed", {"fp8": {}}), case.Skip)
    assert isinstance(refuse("techniques.liger: Liger's kernels need a CUDA device", {"liger": {}}), case.Skip)
    assert isinstance(refuse("batch.seq_len: 128 is longer than the model's 64 positions", {"lora": {}}), case.Wrong)


@pytest.mark.parametrize(
    ("said", "code", "fault"),
    [
        ("LIMIT\nout of memory in forward", 3, ""),
        ("LIMIT\ntechniques.lora: no such key", 2, "another error"),
        ("LIMIT", 1, "another error"),
        ("", 0, "never set"),
        ("LIMIT\nTraceback (most recent call last):\nValueError", 1, "a traceback"),
        ("LIMIT", 0, "the limit was not met"),
    ],
)
def test_out_of_memory_needs_a_limit_and_its_error(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int, fault: str
) -> None:
    correct, case = gpu("correct"), gpu("case")
    result = subprocess.CompletedProcess([], code, "", said.replace("LIMIT", correct.LIMITED))
    monkeypatch.setattr(correct.subprocess, "run", lambda *_, **__: result)
    where = case.Where("cpu", True, str(tmp_path))
    if fault:
        with pytest.raises(case.Wrong, match=fault):
            correct._short("forward", where)
    else:
        assert correct._short("forward", where)["exit code"] == code
    assert "vocab_size: 16384" in (tmp_path / "short-forward.yaml").read_text(), "logits are most of its memory"


def test_the_phases_that_are_limited_exist(gpu: Any) -> None:
    for owner, name in gpu("short_of_memory").places().values():
        assert callable(getattr(owner, name))


@pytest.mark.parametrize(
    ("part", "only", "least"),
    [
        ("correct", ["operators/", "techniques/lora {", "techniques/neftune", "recipes/fine-tune", "collectives/"], 12),
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
