"""Generated programs: each way out of the sandbox is closed, and pass@k is that of all subsets of the answers."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preheat.errors import RecipeError, RunError
from preheat.evaluation import execution, sandbox
from preheat.evaluation.best import scores_of
from preheat.evaluation.execution import (
    Attempt,
    compute_pass_rates,
    estimate_pass_at_k,
    extract_code,
    require_sandbox_for,
)
from preheat.evaluation.prompts import read_items
from preheat.evaluation.results import describe_result
from preheat.evaluation.run_task import measure_items
from preheat.evaluation.sandbox import Limits, Outcome, require_sandbox, run_program, run_programs
from preheat.evaluation.tasks import Task, find_tasks
from preheat.recipe import parse


def gives_sandbox() -> bool:
    try:
        require_sandbox("test")
    except RecipeError:
        return False
    return True


needs_sandbox = pytest.mark.skipif(not gives_sandbox(), reason="this machine allows no user namespaces")

SYSTEM_CALL = (
    "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nassert c.{} == 0, os.strerror(ctypes.get_errno())"
)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("assert 1 + 1 == 2", "passed", ""),
        ("assert 1 + 1 == 3", "failed", "AssertionError"),
        ("def f(:", "failed", "SyntaxError"),
        # Ends that a program's own tests do not reach.
        ("raise SystemExit(0)", "failed", "ended before its last line"),
        ("import os; os._exit(0)", "failed", "ended before its last line"),
        ("print = None", "passed", ""),
        # Processes.
        ("import os; os.fork()", "failed", "Operation not permitted"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', ''], stdin=0, stdout=1)", "failed", "Operation not permitted"),
        ("import multiprocessing as m; p = m.Process(target=print); p.start()", "failed", "Operation not permitted"),
        ("import threading; t = threading.Thread(target=len, args=('',)); t.start(); t.join()", "passed", ""),
        ("import os; assert os.getpid() < 5 and not os.listdir('/proc')", "passed", ""),
        ("import os; os.kill(-1, 9)", "failed", "No such process"),
        # Time and memory.
        ("while True: pass", "timed out", "ran longer than 1 s"),
        ("import time; time.sleep(60)", "timed out", "ran longer than 1 s"),
        ("import os, signal\nos.setsid()\nsignal.signal(15, signal.SIG_IGN)\nwhile True: print('x' * 999)", "timed out", ""),
        ("x = bytearray(2 ** 31)", "failed", "MemoryError"),
        ("import os; os.memfd_create('a')", "failed", "Operation not permitted"),
        (SYSTEM_CALL.format("msgget(0, 0o1600)"), "failed", "Operation not permitted"),
        *((f"import os; os.chmod('{path}', 0o777); open('{path}/a', 'w')", "failed", "Read-only file system") for path in ("/proc", "/dev/shm")),
        # The network, and sockets of this machine.
        ("import socket; socket.socket()", "failed", "Operation not permitted"),
        ("import socket; socket.socket(socket.AF_UNIX)", "failed", "Operation not permitted"),
        ("import socket; socket.socketpair()", "failed", "Operation not permitted"),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1:80')", "failed", "Operation not permitted"),
        # Files.
        ("open('a', 'w').write('x'); assert open('a').read() == 'x'", "passed", ""),
        ("import tempfile; tempfile.TemporaryFile().write(b'x')", "passed", ""),
        ("open('/etc/preheat', 'w')", "failed", "Read-only file system"),
        ("import os; os.remove('/etc/hostname')", "failed", "Read-only file system"),
        ("import os; os.chmod('/etc', 0)", "failed", "Read-only file system"),
        ("open('/dev/zero')", "failed", "Permission denied"),
        ("f = open('a', 'wb')\nwhile True: f.write(bytes(2 ** 20))", "failed", "File too large"),
        ("for n in range(9): open(str(n), 'wb').write(bytes(2 ** 23))", "failed", "No space left"),
        ("import os; assert not {'SECRET', 'HF_TOKEN', 'USER'} & set(os.environ)", "passed", ""),
        # Ways to undo the protection.
        ("import os; os.chroot('/etc')", "failed", "Operation not permitted"),
        (SYSTEM_CALL.format("unshare(0x10000000)"), "failed", "Operation not permitted"),
        (SYSTEM_CALL.format("mount(b'none', b'/etc', b'tmpfs', 0, None)"), "failed", "Operation not permitted"),
        (SYSTEM_CALL.format("mount(None, b'/', None, 32 | 4096, None)"), "failed", "Operation not permitted"),
        (SYSTEM_CALL.format("umount2(b'/proc', 2)"), "failed", "Operation not permitted"),
        (SYSTEM_CALL.format("ptrace(16, 1, 0, 0)"), "failed", "Operation not permitted"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "failed", "not allowed to raise maximum limit"),
        ("import os\nfor n in range(3, 64):\n    try: os.write(n, b'x')\n    except OSError: pass", "passed", ""),
    ],
)  # fmt: skip
def test_a_program_cannot_leave_the_sandbox(
    program: str, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    limits = Limits(seconds=1.0 if kind == "timed out" else 30.0)
    outcome = run_program(program, limits)
    assert outcome.kind == kind, outcome
    assert message in outcome.message


@needs_sandbox
def test_an_ended_program_leaves_no_process(tmp_path: Path) -> None:
    before = count_processes()
    started = time.monotonic()
    outcomes = run_programs(["import os, time\nos.setsid()\ntime.sleep(600)"] * 3, Limits(seconds=1))
    assert {outcome.kind for outcome in outcomes} == {"timed out"}
    assert time.monotonic() - started < 30
    for _ in range(50):
        if count_processes() <= before:
            break
        time.sleep(0.1)
    assert count_processes() <= before


def count_processes() -> int:
    """Processes of the sandbox of this user, by the last argument of their command line."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return sum("-B" in line and "program.py" in line for line in lines)


@pytest.mark.parametrize(("ranks", "workers"), [("", 8), ("2", 4), ("16", 1)])
def test_ranks_of_a_host_share_its_cores(ranks: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, size: int) -> None:
            sizes.append(size)
            super().__init__(size)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(sandbox, "count_cores", lambda: 8)
    monkeypatch.setattr(sandbox, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(sandbox, "run_program", lambda source, limits: Outcome("passed", source))
    assert [outcome.message for outcome in run_programs(["a", "b"])] == ["a", "b"]
    assert sizes == [workers]


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(kind="execution", prompt="a", gold="b", program="{{answer}}", name="mine")
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(RecipeError, match=r"^--tasks mine: generated programs run only in a sandbox, .*darwin has no"):
        require_sandbox_for(["other", task], knob="--tasks")
    require_sandbox_for(["other"], knob="--tasks")
    with pytest.raises(RunError, match="darwin has no namespaces; the program did not run"):
        run_program("")


@needs_sandbox
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs util-linux")
def test_a_machine_that_allows_no_namespaces_runs_nothing(tmp_path: Path) -> None:
    code = (
        "from preheat.evaluation.sandbox import *\n"
        "try: print(require_sandbox('--tasks x'))\n"
        "except ValueError as error: print(error)\n"
        "try: run_program(\"open('" + str(tmp_path / "ran") + "', 'w')\")\n"
        "except ValueError as error: print(error)\n"
    )
    script = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c "$CODE"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", script], capture_output=True, text=True, check=True, env={"CODE": code, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.startswith(
        "--tasks x: generated programs run only in a sandbox, and this machine gives none: user names"
    )
    assert second.endswith("; the program did not run")
    assert not (tmp_path / "ran").exists()


# --- pass@k, and the tasks --------------------------------------------------------------------------------------------


def test_pass_at_k_is_that_of_all_subsets() -> None:
    for samples in range(1, 7):
        for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            subsets = list(itertools.combinations([n < passed for n in range(samples)], k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert estimate_pass_at_k(samples, passed, k) == pytest.approx(expected)
    rows = [[Attempt("", Outcome(kind)) for kind in row] for row in (("passed", "failed"), ("failed", "timed out"))]
    assert {name: metric.value for name, metric in compute_pass_rates(rows, (1, 2)).items()} == {
        "pass@1": 0.25,
        "pass@2": 0.5,
    }


def test_code_of_a_chat_is_its_first_block() -> None:
    assert extract_code("x = 1\n") == "x = 1\n"
    assert extract_code("So:\n```python\nx = 1\n```\nor\n```\ny\n```") == "x = 1\n"
    assert extract_code("```\nx = 1\ny = ") == "x = 1\ny = "
    assert extract_code("```python3\nx = 1\n```\nDone.") == "x = 1\n"
    # Stop strings end a program outside of a block only.
    assert extract_code("```\nimport a\n\ndef b(): ...\n```", ["\ndef"]) == "import a\n\ndef b(): ...\n"
    assert extract_code("    return 1\n\ndef b(): ...", ["\ndef"]) == "    return 1\n"


class Written:
    """The part of a scorer that an execution task uses; draws are the seeds."""

    length, truncated = 64, 0

    def __init__(self, answers: dict[int, list[str]]) -> None:
        self.answers, self.settings, self.say = answers, list[Any](), lambda *_: None
        self.build = type("Build", (), {"tags": frozenset()})

    def encode(self, text: str, complete: bool = False) -> list[int]:
        return [len(text)]

    def write(self, contexts: Any, *, seed: int, **settings: Any) -> list[str]:
        self.settings.append(settings)
        return self.answers[seed]


@needs_sandbox
def test_a_task_is_measured_by_its_tests(tmp_path: Path) -> None:
    rows = [
        {"text": "Add.", "code": "def add(a, b): return a + b", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]},
        {"prompt": "Root.", "code": "def root(a): return math.sqrt(a)", "test_imports": ["import math"], "test_list": ["assert root(4) == 2"]},
    ]  # fmt: skip
    file = tmp_path / "mbpp.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = find_tasks([f"mbpp={file},samples=2,k=[1, 2],temperature=0.8,seed=7"])
    assert isinstance(task, Task)
    items = read_items(task, None)  # type: ignore[arg-type]
    assert [item.answers for item in items] == [(row["code"],) for row in rows]
    assert "your task: Add. Your code should pass these tests:\n\nassert add(1, 2) == 3\nassert add" in items[0].context
    right = [str(row["code"]) for row in rows]
    scorer = Written({7: right, 8: ["def add(a, b): return 3", "import os; os._exit(0)"]})
    samples = tmp_path / "samples.jsonl"
    result = measure_items(task, items, scorer, samples=samples)  # type: ignore[arg-type]
    values = {name: metric.value for name, metric in describe_result(result).metrics.items()}
    assert values == {"pass@1": 0.5, "pass@2": 1.0}
    assert (
        scorer.settings == [{"tokens": 32, "stop": ("[DONE]",), "strip": False, "temperature": 0.8, "top_p": 1.0}] * 2
    )
    first = json.loads(samples.read_text().splitlines()[0])
    assert first["answers"] == [right[0], "def add(a, b): return 3"]
    assert [outcome["kind"] for outcome in first["outcomes"]] == ["passed", "failed"]


def test_a_chat_is_not_stopped_within_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "def one():\n    'One.'\n", "test": "", "entry_point": "one", "canonical_solution": "    return 1"}
    (tmp_path / "h.jsonl").write_text(json.dumps(row) + "\n")
    programs: list[str] = []
    monkeypatch.setattr(
        execution, "run_programs", lambda sources, limits: [Outcome("passed") for source in sources if not programs.append(source)]
    )  # fmt: skip
    for chat, stop in ((False, ("\nclass", "\ndef", "\n#", "\nif", "\nprint")), (True, ())):
        (task,) = find_tasks([f"humaneval={tmp_path / 'h.jsonl'},chat={str(chat).lower()}"])
        assert isinstance(task, Task)
        items = read_items(replace(task, chat=False), None)  # type: ignore[arg-type]
        scorer = Written({0: ["So:\n```python\nimport math\n\ndef one():\n    return 1\n```"]})
        execution.run_attempts(task, items, scorer)  # type: ignore[arg-type]
        assert scorer.settings[0]["stop"] == stop
    assert "\nimport math\n\ndef one():\n    return 1\n\n\ncheck(one)\n" in programs[1]
    # Without stop strings of its own, a program of several lines is whole, and another answer is one line.
    scorer = Written({0: ["a = 1\nb = 2\n"]})
    execution.run_attempts(replace(task, stop=None, chat=False), items, scorer)  # type: ignore[arg-type]
    assert scorer.settings[0]["stop"] == ()
    assert Task(kind="exact_match", prompt="a", gold="b").ends == ("\n",)


@needs_sandbox
def test_published_solutions_of_humaneval_pass(data_folder: Path) -> None:
    (task,) = find_tasks([f"humaneval={data_folder / 'code/HumanEval.jsonl'}"])
    items = read_items(task, None, limit=12)  # type: ignore[arg-type]
    programs = [item.build_program(answer) for item in items for answer in (item.answers[0], "    pass\n")]
    assert [outcome.kind for outcome in run_programs(programs)] == ["passed", "failed"] * 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("humaneval", "names no rows; give them: humaneval=FILE"),
        ("humaneval=a.jsonl,k=[1,5]", "k: 5 is more than samples (1); set samples=5 or more"),
        ("humaneval=a.jsonl,samples=5", "samples: 5 greedy answers are all the same; set a temperature, e.g. 0.8"),
        ("humaneval=a.jsonl,k=[]", "k: needs one or more numbers, each once"),
        ("humaneval=a.jsonl,seconds=0", "seconds: must be at least 0.1, got 0"),
        ("cloze=a.jsonl,samples=3", "samples: means nothing for cloze; remove it"),
    ],
)
def test_wrong_keys_are_one_line(given: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        find_tasks([given])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_program_without_the_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "x"}\n')
    (tmp_path / "a.yaml").write_text("kind: execution\ndata: a.jsonl\nprompt: a\ngold: q\nprogram: 'assert 1'\n")
    (task,) = find_tasks([str(tmp_path / "a.yaml")])
    with pytest.raises(RecipeError, match=r"task a: program: does not contain \{\{answer\}\}"):
        read_items(task, None)  # type: ignore[arg-type]


def test_the_best_checkpoint_may_be_that_of_pass_at_k(tmp_path: Path) -> None:
    recipe = parse("model: {size: 15M}\nstop: {max_steps: 1}\n")
    tasks = find_tasks([f"humaneval={tmp_path / 'a.jsonl'},samples=4,temperature=1,k=[1,4]"])
    assert scores_of(recipe, tasks) == {"validation_loss": False, "humaneval/pass@1": True, "humaneval/pass@4": True}
