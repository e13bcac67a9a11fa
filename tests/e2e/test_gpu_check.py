"""The check that one GPU session runs, tried on a CPU at tiny sizes; and that no case can take the others with it."""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
    stem = f"gpu_check-{arguments[0]}" + ("-plans" if "--plan-to" in arguments else "")
    lines = (folder / "out" / f"{stem}.jsonl").read_text().splitlines()
    assert rows == [json.loads(line) for line in lines[-len(rows) :]], "commands append"
    table = (folder / "out" / f"{stem}.md").read_text()
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


def test_what_was_not_reached_comes_first_next_time(tmp_path: Path, gpu: Any) -> None:
    (tmp_path / "mine.py").write_text(CASES)
    assert [row["case"] for row in check(tmp_path, "mine", "--only", "skip", "d")] == ["skip", "d"]
    (tmp_path / "elsewhere").mkdir()
    row = {"case": "wrong", "result": "ok", "seconds": 1, "why": "", "figures": {}, "at": "2026-01-01", "code": "older"}
    (tmp_path / "elsewhere/gpu_check-mine.jsonl").write_text(json.dumps(row) + "\n" + '{"case": "cut o')
    only = ("--only", "skip", "d", "wrong", "unusable", "--after", str(tmp_path / "elsewhere"))
    names = [row["case"] for row in check(tmp_path, "mine", *only, code=1)]
    assert names == ["unusable", "wrong", "skip", "d"], "never run, of older code, skipped, of the same code"
    table = (tmp_path / "out/gpu_check-mine.md").read_text()
    assert table.count("| d |") == 1, "its newest result"


def test_results_are_ordered_by_age_and_code(gpu: Any) -> None:
    records, case = gpu("records"), gpu("case")
    cases = [case.Case(name, dict) for name in ("ok", "old", "changed", "unreached", "new", "cut off twice")]

    def row(name: str, result: str, day: int, code: str = "now") -> dict[str, str]:
        return {"case": name, "result": result, "at": f"2026-01-{day:02d}", "code": code}

    earlier = [
        row("ok", "ok", 5), row("ok", "left out", 6), row("old", "ok", 1), row("changed", "ok", 4, code="before"),
        row("unreached", "left out", 2), row("cut off twice", "cut off", 2), row("cut off twice", "cut off", 3),
    ]  # fmt: skip
    ordered = [each.name for each in records.order_cases(cases, earlier, "now")]
    assert ordered == ["unreached", "new", "cut off twice", "changed", "old", "ok"]
    assert records.find_newest(earlier)["ok"]["result"] == "ok", "it was only not reached the last time"


def test_a_process_that_does_not_start_takes_no_more_than_the_budget(tmp_path: Path) -> None:
    slow = "import time\nfrom pathlib import Path\n" + CASES.replace(
        "def cases(where):", "def cases(where):\n    if where.folder and Path('slow').exists(): time.sleep(60)"
    )
    (tmp_path / "mine.py").write_text(slow + "\n")
    script = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import gpu_check as g\n"
        "where = g.Where('cpu', True, '.'); cases = g.list_cases('mine', where)[:3]; Path('slow').touch()\n"
        "begun = time.monotonic(); rows = list(g.run_cases('mine', where, cases, 6, open('log', 'w')))\n"
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
    assert memory.check_bounds(_figures()) == _figures()
    for key, value in {"allocated off": -0.06, "reserved off": 0.2, "memory off": 0.2, "speed off": 5.5}.items():
        for figure in (value, float("nan")):
            with pytest.raises(gpu("case").Wrong, match=key):
                memory.check_bounds(_figures(**{key: figure}))


def test_a_rung_that_trains_otherwise_is_wrong(gpu: Any, tmp_path: Path) -> None:
    like, wrong, file = gpu("ladder").like_the_first, gpu("case").Wrong, tmp_path / "losses.json"
    with pytest.raises(wrong, match="not finite"):
        like({"first loss": 12.2, "last loss": float("nan")}, file)
    like({"first loss": 12.2, "last loss": 7.5}, file)
    like({"first loss": 12.21, "last loss": 7.6}, file)
    for key, value in {"first loss": 12.5, "last loss": 8.5}.items():
        with pytest.raises(wrong, match=key):
            like({"first loss": 12.2, "last loss": 7.5} | {key: value}, file)


TRL = """\
import torch, transformers
__version__ = transformers.__version__
class SFTConfig(dict):
    def __init__(self, **named): super().__init__(named)
class SFTTrainer:
    def __init__(self, model, settings, train_dataset, processing_class, callbacks):
        self.settings, self.train_dataset, self.callbacks = settings, train_dataset, callbacks
    def training_step(self): return torch.tensor(float(len(self.train_dataset[0]["input_ids"])))
    def train(self):
        if not self.settings["gradient_checkpointing"] and FULL: raise torch.OutOfMemoryError("too large")
        if BROKEN: raise ValueError("no out-of-memory error")
        for _ in range(self.settings["max_steps"]):
            self.callbacks[0].on_step_begin(); self.training_step(); self.callbacks[0].on_step_end()
"""


@pytest.mark.parametrize("fault", ["FULL", "BROKEN"])
def test_another_trainer_runs_in_its_own_process_with_its_own_packages(gpu: Any, tmp_path: Path, fault: str) -> None:
    """A stand-in for TRL; below is the real one."""
    sites, folder = tmp_path / "sites", tmp_path / "run"
    (sites / "trl-99.1.dist-info").mkdir(parents=True)
    (sites / "trl-99.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 99.1\n")
    flags = "".join(f"{name} = {name == fault}\n" for name in ("FULL", "BROKEN"))
    (sites / "trl.py").write_text(flags + TRL)
    folder.mkdir()
    ladder, case = gpu("ladder"), gpu("case")
    where = case.Where("cpu", True, str(folder), sites={"trl": str(sites)})
    if fault == "BROKEN":
        with pytest.raises(case.Wrong, match="ended with exit code 1"):
            ladder._peer("1B full", "TRL with Liger", where)
        return
    figures = ladder._peer("1B full", "TRL with Liger", where)
    assert figures["first loss"] == 64, "the rows of the task"
    assert figures["checkpointed"], "without, it does not fit"
    assert "trl 99.1" in figures["versions"]
    assert f"torch {torch.__version__.split('+')[0]}" in figures["versions"]
    assert "trl" not in sys.modules or "sites" not in str(sys.modules["trl"].__file__), "this process has its own"
    with pytest.raises(case.Skip, match="not installed: torchtitan"):
        ladder._peer("1B full", "torchtitan, compiled", where)


def test_trl_trains_on_the_same_rows(gpu: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    where = gpu("case").Where("cpu", True, str(tmp_path), sites={"trl": str(Path(trl.__file__).parents[1])})
    figures = gpu("ladder")._peer("1B full", "TRL with Liger", where)
    assert figures["first loss"] == pytest.approx(math.log(4096), rel=0.02), "drawn weights"
    assert f"trl {trl.__version__}" in figures["versions"]


def test_recipes_are_planned_beforehand_and_trained_as_planned(gpu: Any, tmp_path: Path) -> None:
    plans, only = str(tmp_path / "plans"), ("--only", "1B full/+ chunked loss", "1B full/+ attention")
    planned = check(tmp_path, "ladder", "--plan-to", plans, "--card", "H100", *only[:2])
    assert planned[0]["figures"]["planned for"] == "H100"
    file = gpu("ladder").plan_file(plans, "1B full", "+ chunked loss")
    plan = json.loads(file.read_text())
    plan["recipe"]["batch"]["size"] = 2  # shows that the file decides
    file.write_text(json.dumps(plan))
    rows = {row["case"]: row for row in check(tmp_path, "ladder", "--planned", plans, *only)}
    trained = rows["1B full/+ chunked loss"]
    assert trained["result"] == "ok", trained
    predicted = {name: plan["predicted"][name] for name in gpu("ladder").PREDICTED.values()}
    assert trained["figures"].items() >= predicted.items()
    ratio = predicted["planned tokens/s"] / trained["figures"]["tokens/s"]
    assert trained["figures"]["planned over measured tokens/s"] == pytest.approx(ratio)
    assert rows["1B full/+ attention"]["result"] == "skipped"
    assert "write it with --plan-to" in rows["1B full/+ attention"]["why"]


def test_all_recipes_exist_at_the_sizes_of_a_gpu(gpu: Any) -> None:
    where, recipe_of = gpu("case").Where("cuda", False, ""), gpu("shapes").build_recipe
    for _, *of in gpu("memory").RECIPES:
        assert recipe_of(where, *of, 3)
    for shape, rows, length, rungs in gpu("ladder").TASKS.values():
        for techniques in rungs.values():
            assert recipe_of(where, shape, rows, length, techniques, 3)


def test_only_known_refusals_are_skipped(gpu: Any) -> None:
    correct, case = gpu("correct"), gpu("case")
    refuse = correct._classify_refusal
    assert isinstance(refuse("techniques.fp8: needs torchao, which is not installed", {"fp8": {}}), case.Skip)
    assert isinstance(refuse("techniques.liger: Liger's kernels need a CUDA device", {"liger": {}}), case.Skip)
    assert isinstance(refuse("batch.seq_len: 128 is longer than the model's 64 positions", {"lora": {}}), case.Wrong)


@pytest.mark.parametrize(
    ("phase", "said", "code", "errors", "fault"),
    [
        ("forward", "LIMIT\nout of memory in forward", 3, ["gradients"], ""),
        ("evaluation", "LIMIT", 0, ["evaluation", "gradients"], ""),
        ("forward", "LIMIT\ntechniques.lora: no such key", 2, ["gradients"], "another error"),
        ("forward", "LIMIT", 1, ["gradients"], "another error"),
        ("forward", "", 0, ["gradients"], "never set"),
        ("forward", "LIMIT\nTraceback (most recent call last):\nValueError", 1, ["gradients"], "a traceback"),
        ("saving", "LIMIT\nmemory allocation of 9 bytes failed", -6, [], "it was killed"),
        ("forward", "LIMIT", 0, [], "no out-of-memory error happened in forward"),
        ("update", "LIMIT", 0, [], "no out-of-memory error happened in update"),
        (
            "saving",
            "LIMIT\nout of memory in step 2",
            1,
            ["gradients", "saving"],
            "no out-of-memory error happened in s",
        ),
    ],
)
def test_out_of_memory_needs_a_limit_and_its_error(
    gpu: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    said: str,
    code: int,
    errors: list[str],
    fault: str,
) -> None:
    correct, case = gpu("correct"), gpu("case")
    result = subprocess.CompletedProcess([], code, "", said.replace("LIMIT", correct.LIMITED))
    monkeypatch.setattr(correct.subprocess, "run", lambda *_, **__: result)
    where = case.Where("cpu", True, str(tmp_path))
    (tmp_path / f"short-{phase}").mkdir()
    events = [{"kind": "out_of_memory", "phase": each} for each in errors]
    (tmp_path / f"short-{phase}" / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    if fault:
        with pytest.raises(case.Wrong, match=fault):
            correct._check_short_memory(phase, where)
    else:
        assert correct._check_short_memory(phase, where)["exit code"] == code


def test_the_phases_that_are_limited_exist(gpu: Any) -> None:
    from preheat.core import Phase

    places = gpu("short_of_memory").find_phase_functions()
    for owner, name in places.values():
        assert callable(getattr(owner, name))
    assert places.keys() == gpu("correct").SHORT.keys()
    assert {phase for phases, *_ in gpu("correct").SHORT.values() for phase in phases} <= set(Phase)


@pytest.fixture(scope="module")
def original() -> Any:
    """A small model, as of a run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=96, **sizes)).eval()


def _compressed(gpu: Any, original: Any, method: str) -> dict[str, float]:
    """The figures of a model that is compressed in memory."""
    from preheat.compress.compress import read_variant
    from preheat.compress.save_load import finish

    model = copy.deepcopy(original)
    rows = [torch.randint(96, (1, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    read_variant(method).method.apply(model, rows)
    finish(model)
    module = gpu("compressed")
    figures: dict[str, float] = module.check_bounds(
        module.compare(model, original), {"rounding to int8": module.CLIPPED} if method == "int8_static" else {}
    )
    return figures


@pytest.mark.parametrize(
    "method", ["int8", "int8_dynamic", "int8_static", "int4", "int4,symmetric=false", "awq", "nf4"]
)
def test_compressed_weights_are_within_their_bounds(gpu: Any, original: Any, method: str) -> None:
    figures = _compressed(gpu, original, method)
    assert {"products, few rows", "products, many rows", "logits, few rows", "logits, many rows"} < figures.keys()
    assert all(value > 0 for value in figures.values())


@pytest.mark.parametrize(
    ("method", "change", "fault"),
    [
        # A kernel that loses one group of 32 inputs, at few rows or at many.
        ("int4", "few", "products, few rows"),
        ("int4", "many", "products, many rows"),
        ("int8", "few", "products, few rows"),
        ("int8_dynamic", "rounded", "products, few rows"),
        ("nf4", "forward", "products, few rows"),
        # Codes that are not those of the weight, and are multiplied well.
        ("int4", "codes", "rounding to int4"),
        ("int8", "codes", "rounding to int8"),
    ],
)
def test_a_wrong_product_of_compressed_weights_is_wrong(
    gpu: Any, original: Any, monkeypatch: pytest.MonkeyPatch, method: str, change: str, fault: str
) -> None:
    from preheat.ops.quantization import linear, nf4

    cls: Any = {"int4": linear.Int4Linear, "nf4": nf4.PackedMap}.get(method, linear.Int8Linear)

    def lose(x: Any) -> Any:
        return torch.cat([x[..., :32] * 0, x[..., 32:]], dim=-1)

    if change == "codes":
        of = cls.of.__func__
        monkeypatch.setattr(
            cls, "of", classmethod(lambda c, m, *a, **k: of(c, torch.nn.Linear(*reversed(m.weight.shape), bias=False)))
        )
    else:
        name = {"rounded": "rounded_product", "forward": "forward"}.get(change, "product")
        plain = getattr(cls, name)
        loses = {"few": lambda x: len(x) <= 12, "many": lambda x: len(x) > 12}.get(change, lambda x: True)
        monkeypatch.setattr(cls, name, lambda self, x: plain(self, lose(x) if loses(x) else x))
    with pytest.raises(gpu("case").Wrong, match=fault):
        _compressed(gpu, original, method)


def test_a_signal_ends_all_processes(tmp_path: Path) -> None:
    """Those that a case has started too; and a `kill -9`, after which nothing can clean up."""
    (tmp_path / "mine.py").write_text(
        "import subprocess, sys, time\nfrom pathlib import Path\nfrom _gpu.case import Case\n"
        "from preheat.hardware.child_processes import tie_to_parent\n"
        "def hang(where):\n"
        "    child = subprocess.Popen(tie_to_parent([sys.executable, '-c', 'import time; time.sleep(600)']))\n"
        "    Path('children').write_text(f'{__import__(\"os\").getpid()} {child.pid}')\n"
        "    time.sleep(600)\n"
        "def cases(where): return [Case('first', lambda where: {}), Case('hang', hang, seconds=600)]\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
        started, children = tmp_path / str(int(number)), tmp_path / str(int(number)) / "children"
        started.mkdir()
        process = Fork(
            [str(SCRIPT), "mine", "--device", "cpu", "--out", "out"],
            function="tests.fork_server:script", folder=started, environment=environment,
        )  # fmt: skip
        until = time.monotonic() + 120
        while not (children.exists() and len(children.read_text().split()) == 2):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(process.pid, number)
        out, error = process.communicate(timeout=60)
        until = time.monotonic() + 20  # the kernel needs a moment
        while running := [pid for pid in map(int, children.read_text().split()) if _runs(pid)]:
            assert time.monotonic() < until, f"{number.name} leaves {len(running)} processes behind"
            time.sleep(0.05)
        assert [json.loads(line)["case"] for line in out.splitlines()] == ["first"]
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number
            assert f"interrupted by {number.name} after 1 of 2 cases" in error
            assert "Traceback" not in error
            assert "| first | ok |" in (started / "out" / "gpu_check-mine.md").read_text()


def test_a_signal_ends_a_process_that_has_not_started_yet(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        + CASES.replace(
            "def cases(where):",
            "def cases(where):\n    if '--serve' in sys.argv: Path('child').write_text(str(os.getpid())); time.sleep(600)",
        )
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = Fork(
        [str(SCRIPT), "mine", "--device", "cpu"],
        function="tests.fork_server:script", folder=tmp_path, environment=environment,
    )  # fmt: skip
    until = time.monotonic() + 120
    while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert error.splitlines()[-2] == "0 cases: none ended."
    assert "interrupted by SIGTERM after 0 of" in error
    assert not _runs(int((tmp_path / "child").read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    """As on an image that brings its own torch and lacks pydantic; before anything imports it, and from any folder."""
    needed = runpy.run_path(str(SCRIPT))["NEEDED"]
    for module in needed.keys() - {"pydantic"}:
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('is imported before all are there')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT), "correct", "--list"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "gpu_check: not installed here: pydantic; pip install pydantic\n"
    # And by `make`, which shows the same line first.
    if shutil.which("make"):
        target = subprocess.run(
            ["make", "gpu-check", f"RUN={sys.executable} -S"],
            cwd=SCRIPT.parents[1], env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert target.returncode
        assert target.stderr.startswith("gpu_check: not installed here: pydantic; pip install pydantic\n")


def test_all_packages_that_preheat_needs_are_looked_for() -> None:
    project = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    names = {re.split("[<>=]", requirement)[0] for requirement in project["dependencies"]}
    assert names | {"pytest"} == set(runpy.run_path(str(SCRIPT))["NEEDED"].values())


@pytest.mark.parametrize(
    ("part", "only", "least"),
    [
        ("correct", ["operators/", "techniques/lora {", "techniques/neftune", "recipes/", "collectives/"], 20),
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
        (["memory", "--planned", "."], "only the recipes of ladder are planned"),
        (["ladder", "--plan-to", "plans"], "--plan-to FOLDER and --card NAME belong together"),
        (["ladder", "--planned", "nowhere"], "--planned nowhere: no such folder"),
        (["ladder", "--after", "nowhere"], "--after nowhere: no such file"),
        (["ladder", "--peer-sites", "trll=."], "use NAME=FOLDER with one of trl, torchtitan, unsloth"),
        (["ladder", "--peer-sites", "trl=nowhere"], "no folder 'nowhere'"),
    ):
        process = Fork(
            [str(SCRIPT), *arguments, "--device", "cpu"], function="tests.fork_server:script", folder=tmp_path
        )
        _, error = process.communicate(timeout=120)
        assert process.returncode == 2
        assert words in error
        assert len(error.strip().splitlines()) == 1
