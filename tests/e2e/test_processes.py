"""`preheat train --nproc`: several processes give the losses of one, any layout goes on from any checkpoint, and what dies is started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from preheat.core.run_records import Checkpoint, Failed, RankState, Resumed, Started
from preheat.run.reader import Reader

from ..fork_server import Fork, command
from .conftest import Command

STEPS = 12
FSDP = "techniques.fsdp={reshard_after_forward: false, reduce: last}"


def losses(run: Path) -> list[float]:
    return [line.loss for line in Reader(run).metrics()]


def cut(run: Path, to: Path) -> Path:
    """The run as it stood after step 10."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "checkpoints" / f"step-{STEPS}")
    return to


def test_two_processes_test_learning_rates_as_one_does(preheat: Command) -> None:
    settings = ("--find-lr", "--lr-range", "1e-4..3", "--lr-steps", "40")
    one = preheat.here.json("train", "r.yaml", *settings, "--out", "test-one")
    two = preheat.json("train", "r.yaml", *settings, "--set", FSDP, "--nproc", "2", "--out", "test-two")
    # Before the rates at which rounding grows.
    first = [[point["loss"] for point in result["points"][:20]] for result in (one, two)]
    assert first[0] == pytest.approx(first[1], rel=1e-2)
    assert first[0][0] == pytest.approx(first[1][0], rel=1e-5)
    assert "Learning-rate range test" in (preheat.folder / "test-two" / "lr-range.html").read_text()
    assert not (preheat.folder / "runs").exists()
    error = preheat.here("train", "r.yaml", *settings, "--resume", code=2)[1]
    assert "--resume: --find-lr tests learning rates and trains no run" in error
    error = preheat.here("train", "r.yaml", "--lr-steps", "40", code=2)[1]
    assert "--lr-steps 40: is of the learning-rate range test; add --find-lr" in error


def test_two_processes_give_the_losses_of_one_and_any_layout_goes_on(preheat: Command) -> None:
    folder = preheat.folder
    settings = ("--set", "evaluate={every: 5, rows: 9}", "--set", "sample={prompts: [the], max_new_tokens: 4}")
    settings += ("--set", "techniques={chunked_loss: {rows: 64}, gradient_accumulation: {steps: 2}}")
    preheat.here("train", "r.yaml", *settings, "--out", "one")
    preheat("train", "r.yaml", *settings, "--set", FSDP, "--nproc", "2", "--out", "two")
    one, two = (Reader(folder / name) for name in ("one", "two"))
    assert losses(two.path) == pytest.approx(losses(one.path), rel=1e-5)
    assert [e.tokens for e in two.evaluations()] == [e.tokens for e in one.evaluations()]
    measured = [[e.validation_loss for e in run.evaluations()] for run in (two, one)]
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)
    assert two.samples() == one.samples()
    assert len(list((two.path / "checkpoints" / f"step-{STEPS}").glob("shard-*"))) == 2
    # two -> one, one -> two in another layout; and one process reads what two wrote
    preheat.here("train", "r.yaml", *settings, "--resume", "--out", str(cut(two.path, folder / "a")))
    layout = ("--set", "techniques.data_parallel={}", "--nproc", "2")
    preheat("train", "r.yaml", *settings, *layout, "--resume", "--out", str(cut(one.path, folder / "b")))
    for name in ("a", "b"):
        assert losses(folder / name) == pytest.approx(losses(one.path), rel=1e-5), name
    evaluated = preheat.here.json("eval", "two", "--rows", "9")
    assert evaluated["loss"] == pytest.approx(measured[0][-1], rel=1e-5)


def test_two_processes_skip_the_same_steps_in_fp16_as_one(preheat: Command) -> None:
    settings = ("--set", "schedule={warmup_ratio: 0.25}", "--set", "stop.max_steps=24", "--set", "checkpoint.every=0")
    scaled = "mixed_precision: {mode: fp16_master, loss_scale: 1.0e+9}"
    preheat.here("train", "r.yaml", *settings, "--set", f"techniques={{{scaled}}}", "--out", "one")
    fsdp = ("--set", f"techniques={{{scaled}, fsdp: {{}}}}", "--nproc", "2")
    preheat("train", "r.yaml", *settings, *fsdp, "--out", "two")
    one, two = ([(m.lr, m.skipped_steps) for m in Reader(preheat.folder / name).metrics()] for name in ("one", "two"))
    assert one == two
    assert 3 < one[-1][1] < 20
    _, error = preheat("train", "r.yaml", *settings, *fsdp, "--set", "stop.max_steps=4", "--out", "none", code=1)
    assert "gradients overflowed in fp16 in all 4 steps" in error


def test_what_dies_is_started_again(preheat: Command) -> None:
    settings = ("--set", "stop.max_steps=60", "--set", "techniques={fsdp: {}}", "--set", "checkpoint.asynchronous=true")
    agent = preheat.start("train", "r.yaml", *settings, "--nproc", "2", "--restarts", "1", "--out", "killed")
    run = preheat.folder / "killed"
    end = time.time() + 250
    while not (run / "checkpoints" / "step-5").is_dir() and time.time() < end and agent.poll() is None:
        time.sleep(0.05)
    workers = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    _, error = agent.communicate(timeout=200)
    assert agent.returncode == 0, error
    assert [e.kind for e in Reader(run).events() if isinstance(e, Started | Resumed)] == ["started", "resumed"]
    preheat.here("train", "r.yaml", "--set", "stop.max_steps=60", "--set", "techniques={}", "--out", "whole")
    assert losses(run) == pytest.approx(losses(preheat.folder / "whole"), rel=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nobody_outside_reaches_the_processes_and_they_end_as_their_launcher_does(preheat: Command) -> None:
    settings = (
        "--set",
        "stop.max_steps=100000",
        "--set",
        "techniques={fsdp: {}}",
        "--set",
        "schedule.kind=constant",
        "--nproc",
        "2",
    )
    launcher = preheat.start_alone("train", "r.yaml", *settings, "--out", "two")
    log = preheat.folder / "two" / "metrics.jsonl"
    try:
        _until(lambda: log.exists() and log.read_text().count("\n") > 6, launcher)
        everyone = _descendants(launcher.pid)
        assert len(everyone) >= 3
        listening = [address for address in _listening(everyone) if address not in ("0100007F", "0" * 24 + "01000000")]
        assert listening == [], "sockets that the network reaches"
    finally:
        launcher.kill()
    launcher.communicate()
    _until(lambda: not any(_alive(pid) for pid in everyone), None, seconds=10)

    resumed = preheat.start("train", "r.yaml", *settings, "--out", "two", "--resume", "--json")
    begun = log.read_text().count("\n")
    _until(lambda: log.read_text().count("\n") > begun + 2, resumed)
    _until(lambda: len(read_ranks(preheat.folder / "two")) == 2, resumed)
    assert [rank.rank for rank in read_ranks(preheat.folder / "two")] == [0, 1]
    assert all(rank.line.startswith("preheat/") for rank in read_ranks(preheat.folder / "two"))
    resumed.send_signal(signal.SIGTERM)
    out, error = resumed.communicate(timeout=100)
    assert resumed.returncode == 143, error
    (line,) = out.splitlines()
    made = json.loads(line)
    assert made["stopped"] == "SIGTERM"
    assert made["resume"].startswith("preheat train r.yaml --set stop.max_steps=100000 ")
    assert made["resume"].endswith(" --nproc 2 --json --out two --resume")
    assert (preheat.folder / f"two/checkpoints/step-{made['steps']}/manifest.json").exists()
    assert Reader(preheat.folder / "two").status() is None


def signalled_after_the_collective(*arguments: str) -> None:
    """`preheat`, but rank 0 gets SIGTERM in step 3, when the processes have just told each other that none did."""
    from preheat.training import loop

    def read(*step: Any) -> Any:
        numbers = read_step_stats(*step)
        steps.append(numbers)
        if os.environ.get("RANK") == "0" and len(steps) == 3:
            signal.raise_signal(signal.SIGTERM)
        return numbers

    steps: list[Any] = []
    read_step_stats = loop.read_step_stats
    with mock.patch.object(loop, "read_step_stats", read):
        command(*arguments)


def test_a_signal_to_one_process_ends_all_after_the_same_step(preheat: Command) -> None:
    function = f"{__name__}:{signalled_after_the_collective.__name__}"
    arguments = ("train", "r.yaml", "--set", "techniques={fsdp: {}}", "--nproc", "2", "--out", "two", "--json")
    run = preheat.start(*arguments, function=function)
    out, error = run.communicate(timeout=100)
    assert run.returncode == 143, error
    assert json.loads(out)["steps"] == len(losses(preheat.folder / "two")) == 4


def asked_to_save_after_the_collective(*arguments: str) -> None:
    """`preheat`, but rank 0 gets SIGUSR2 in step 3, after the message that tells the other ranks of it."""
    from preheat.training import loop

    def read(*step: Any) -> Any:
        numbers = read_step_stats(*step)
        steps.append(numbers)
        if os.environ.get("RANK") == "0" and len(steps) == 3:
            signal.raise_signal(signal.SIGUSR2)
        return numbers

    steps: list[Any] = []
    read_step_stats = loop.read_step_stats
    with mock.patch.object(loop, "read_step_stats", read):
        command(*arguments)


def test_all_ranks_save_when_one_is_asked_to(preheat: Command) -> None:
    function = f"{__name__}:{asked_to_save_after_the_collective.__name__}"
    arguments = ("train", "r.yaml", "--set", "techniques={fsdp: {}}", "--set", "checkpoint.every=0", "--nproc", "2")
    run = preheat.start(*arguments, "--set", "stop.max_steps=8", "--out", "two", "--json", function=function)
    _, error = run.communicate(timeout=100)
    assert run.returncode == 0, error
    assert [event.step for event in Reader(preheat.folder / "two").events(Checkpoint)] == [4, 8]


def _until(done: Callable[[], bool], process: subprocess.Popen[str] | Fork | None, seconds: float = 250) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def read_ranks(run: Path) -> tuple[RankState, ...]:
    status = Reader(run).status()
    return status.ranks if status is not None else ()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _descendants(int(child))
    return found


def _listening(processes: list[int]) -> list[str]:
    """Addresses, in hexadecimal, on which they listen."""
    descriptors = [d for pid in processes for d in Path(f"/proc/{pid}/fd").iterdir()]
    open_files = {os.readlink(d) for d in descriptors if d.is_symlink()}
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in open_files]


@pytest.mark.slow
def test_a_process_that_stands_still_is_named_and_ends_the_run(preheat: Command) -> None:
    """Stopped in the middle of a step, not killed: nothing tells the other, which says after most of the time-out who stands where."""
    preheat.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"  # a stopped process takes no SIGTERM
    settings = ("--set", "stop.max_steps=100000", "--set", "techniques={fsdp: {}}", "--set", "parallel.timeout=10")
    # Not as forks, whose environment in /proc is that of their parent.
    agent = preheat.start_alone("train", "r.yaml", *settings, "--nproc", "2", "--out", "stuck")
    log = preheat.folder / "stuck" / "metrics.jsonl"
    try:
        end = time.time() + 250
        while not (log.exists() and log.read_text().count("\n") > 3) and time.time() < end and agent.poll() is None:
            time.sleep(0.05)
        workers = subprocess.run(
            ["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        (second,) = (w for w in workers if b"\0RANK=1\0" in Path(f"/proc/{w}/environ").read_bytes())
        os.kill(int(second), signal.SIGSTOP)
        _, error = agent.communicate(timeout=120)
    finally:
        agent.kill()
    assert agent.returncode == 1, error
    told = error.splitlines()
    (first,) = (n for n, line in enumerate(told) if "state of each process:" in line)
    assert re.search(r"rank 0: step \d+, .+ for \d+ s, at preheat/\S+\.py:\d+$", told[first + 1]), error
    assert re.search(r"rank 1: step \d+, .+, silent for \d+ s: stopped, or its host is gone$", told[first + 2]), error
    assert re.search(
        r"error: rank 0: lost the other processes in step \d+ \(.*[Tt]imed out.*\); start again with --resume", error
    )
    assert Reader(log.parent).events(Failed)[0].reason.startswith("rank 0: lost the other processes")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--set", "techniques={fsdp: {}}"),
            "techniques.fsdp: shards weights across devices, and there is one; start several with --nproc",
        ),
        (
            ("--set", "parallel.devices=3"),
            "parallel.devices: 3 processes are needed, and 1 was started; start it with --nproc 3",
        ),
        (
            ("--set", "techniques={}", "--nproc", "2"),
            "the recipe's techniques use 1 device, not 2; add data_parallel or fsdp for the others",
        ),
        (("--set", "techniques={fsdp: {replicate: 4}}", "--nproc", "2"), "replicate 4 does not multiply to 2 devices"),
    ],
)
def test_what_cannot_be_shared_out_is_told_in_one_line(
    preheat: Command, arguments: tuple[str, ...], words: str
) -> None:
    preheat.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = (
        "600"  # rank 1, which waits for rank 0, ends when it is told
    )
    run = preheat if "--nproc" in arguments else preheat.here
    _, error = run("train", "r.yaml", *arguments, code=2)
    assert [line for line in error.splitlines() if line.startswith("error: ")] == [
        line for line in error.splitlines() if line
    ]
    assert words in error
    assert not (preheat.folder / "runs").exists()
