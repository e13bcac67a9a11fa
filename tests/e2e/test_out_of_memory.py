"""Runs whose address space is capped go on where they would have died, and go on as if resumed with the rung."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.core.run_records import Fallback, OutOfMemory
from preheat.run.reader import Reader

from .conftest import Command

RECIPE = """\
name: wide
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 16384}
data: {source: text, vocab_size: 300, validation: 0.1}
batch: {size: 8, seq_len: 128}
optimizer: {lr: 0.01}
stop: {max_steps: 8}
evaluate: {rows: 16}
checkpoint: {every: 3, keep: 9}
"""  # logits of 64 MiB: most of what it needs
LONGER = "length_curriculum: {start: 32, until: 0.5, keep: rows}"

LONG = pytest.mark.skipif(os.environ.get("PREHEAT_SCALE") != "all", reason="takes minutes: make test-scale")


def run_capped(preheat: Command, moment: str, mib: int, *settings: str) -> subprocess.CompletedProcess[str]:
    (preheat.folder / "wide.yaml").write_text(RECIPE)
    command = [
        sys.executable,
        str(Path(__file__).with_name("capped.py")),
        "wide.yaml",
        "capped",
        moment,
        str(mib),
        *settings,
    ]
    return subprocess.run(
        command, cwd=preheat.folder, env=preheat.environment, capture_output=True, text=True, timeout=300
    )


def capped(preheat: Command, moment: str, mib: int, *settings: str) -> tuple[Path, Fallback, str]:
    """A run in a capped process: its folder, its last rung, and what it said."""
    done = run_capped(preheat, moment, mib, *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    run = preheat.folder / "capped"
    rungs = Reader(run).events(Fallback)
    assert rungs, f"it had memory enough\n{done.stderr[-2000:]}"
    return run, rungs[-1], done.stderr


def resumed_from(preheat: Command, run: Path, step: int, *settings: str) -> Path:
    """A copy of the run that has lost all after a step, and went on from there with all the memory there is."""
    other = run.with_name("resumed")
    shutil.copytree(run, other)
    for saved in (other / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    (other / "metrics.jsonl").unlink(missing_ok=True)
    preheat.here(
        "train", "wide.yaml", "--out", other.name, "--resume", *(part for s in settings for part in ("--set", s))
    )
    return other


def steps(run: Path) -> dict[int, tuple[float, int]]:
    """Step -> (loss, tokens read by then); none may have been taken twice."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if "loss" in line]
    assert len({line["step"] for line in taken}) == len(taken)
    return {line["step"]: (line["loss"], line["tokens"]) for line in taken}


def whole(preheat: Command, *settings: str) -> dict[int, tuple[float, int]]:
    """The steps of a run that was never short of memory."""
    preheat.here("train", "wide.yaml", "--out", "whole", *(part for s in settings for part in ("--set", s)))
    return steps(preheat.folder / "whole")


def same_rows(got: dict[int, tuple[float, int]], wanted: dict[int, tuple[float, int]]) -> None:
    assert got.keys() == wanted.keys()
    for step, (loss, tokens) in wanted.items():
        assert got[step] == (pytest.approx(loss, rel=1e-4), tokens)


@LONG
@pytest.mark.parametrize(
    ("mib", "techniques", "took"),
    [
        (110, LONGER, "chunked_loss"),  # built anew from a checkpoint that is saved for it
        (
            60,
            f"{LONGER}, chunked_loss: {{rows: 64}}, activation_checkpointing: {{}}",
            "gradient_accumulation",
        ),  # in place
    ],
)
def test_a_longer_batch_in_the_middle(preheat: Command, mib: int, techniques: str, took: str) -> None:
    more = [
        f"techniques={{{techniques}}}",
        *(["batch.size=128", "checkpoint.every=1"] if "chunked" in techniques else []),
    ]
    run, rung, said = capped(preheat, "training", mib, *more)
    assert 2 <= rung.step <= 4, "rows grow until there"
    assert took in rung.changed[0]
    assert rung.changed[0] in said
    assert took in json.loads((run / "checkpoints" / "step-8" / "state.json").read_text())["recipe"]
    other = resumed_from(preheat, run, rung.step, *more)
    assert steps(other) == {step: taken for step, taken in steps(run).items() if step > rung.step}, "bit for bit"
    same_rows(steps(run), whole(preheat, *more))


def test_the_first_step(preheat: Command) -> None:
    run, rung, _ = capped(preheat, "training", 130)
    assert rung.step == 0
    assert rung.peak_gib < rung.was_gib
    assert rung.skipped
    assert rung.skipped[0].reason
    failure = Reader(run).events(OutOfMemory)[0]
    assert failure.phase == "gradients"
    assert failure.requested == 8 * 128 * 16384 * 4, "the logits"
    same_rows(steps(run), whole(preheat))
    found = preheat.here.json("doctor", "oom", "capped")
    assert found["options"][0]["peak_gib"] < found["room_gib"] < found["peak_gib"]
    assert found["in_use"]["parameters"] == pytest.approx(rung_parameters(run), rel=1e-6)
    assert "fixes, the cheapest first" in preheat.here("doctor", "oom", "capped")[0]


def rung_parameters(run: Path) -> float:
    plan = Reader(run).plan
    assert plan is not None
    return plan.parameters.total * 4 / 2**30


@LONG
def test_evaluation_takes_fewer_rows_at_a_time(preheat: Command) -> None:
    for file in sorted((preheat.folder / "text").glob("*.txt")):  # enough rows to be read by eight
        lines = file.read_text().splitlines()
        file.write_text("\n".join(f"{line} {again}" for again in range(7) for line in lines))
    more = [
        f"techniques={{{LONGER.replace('0.5', '0.8')}}}",
        "data.validation=0.5",
        "evaluate.rows=512",
        "evaluate.every=2",
    ]
    run, _, _ = capped(preheat, "step 1", 12, *more, "stop.max_steps=5")
    rung = Reader(run).events(Fallback)[0]
    assert (rung.step, rung.cause) == (2, "evaluation")
    assert rung.changed[0].startswith("evaluate.micro_batch_size=")
    assert [e.step for e in Reader(run).evaluations()] == [2, 4, 5]


def test_a_copy_to_save_is_done_without(preheat: Command) -> None:
    more = [
        "model.hidden_size=128",
        "checkpoint.asynchronous=true",
        "checkpoint.every=2",
        "techniques={chunked_loss: {rows: 64}}",
    ]
    # Between what the copy takes and what writing takes lie few MiB, and where they lie hangs on how the heap and threads lie: one of these caps shows it.
    run = preheat.folder / "capped"
    for mib in (46, 45, 47, 44):
        shutil.rmtree(run, ignore_errors=True)
        done = run_capped(preheat, "step 1", mib, *more, "stop.max_steps=5")
        rungs = Reader(run).events(Fallback) if done.returncode == 0 else []
        if rungs and rungs[-1].cause == "saving":
            break
    assert rungs, f"it had memory enough, or died of it\n{done.stderr[-2000:]}"
    rung = rungs[-1]
    assert (rung.cause, rung.changed) == ("saving", ("checkpoint.asynchronous=false",))
    assert (run / "checkpoints" / "step-5" / "manifest.json").exists()
    assert sorted(steps(run)) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_where_no_rung_suffices_it_saves_and_ends_and_goes_on_with_memory(preheat: Command) -> None:
    longer = LONGER.replace("32", "256")
    more = [
        f"techniques={{{longer}, chunked_loss: {{rows: 64}}, activation_checkpointing: {{}}, fused_operators: {{}}}}",
        "batch={size: 1, seq_len: 2048}",
    ]
    more += ["model.vocab_size=512", "checkpoint.every=0"]
    done = run_capped(preheat, "step 1", 20, *more)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert re.search(r"It has no fallback; another run with batch.seq_len=(1024|512|256) would need", said)
    run = preheat.folder / "capped"
    last = max(steps(run))
    assert [saved.name for saved in run.glob("checkpoints/step-*")] == [f"step-{last}"]
    preheat.here("train", "wide.yaml", "--out", "capped", "--resume", *(part for s in more for part in ("--set", s)))
    assert sorted(steps(run)) == [1, 2, 3, 4, 5, 6, 7, 8]


CAP_A_WORKER = """
import os, threading
if os.environ.get("RANK") == "1":
    def watch():  # once the run has begun, this worker gets no more than it has and a little
        import resource, time
        from pathlib import Path
        events, begun = Path("two/events.jsonl"), 0 if not Path("two/events.jsonl").exists() else Path("two/events.jsonl").stat().st_size
        while not (events.exists() and any(word in events.read_bytes()[begun:] for word in (b'"started"', b'"resumed"'))):
            time.sleep(0.002)
        size = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
        limit = (int(size.split()[1]) << 10) + (60 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    threading.Thread(target=watch, daemon=True).start()
"""


@LONG
def test_of_two_processes_both_are_started_again_with_the_rung(preheat: Command) -> None:
    (preheat.folder / "wide.yaml").write_text(RECIPE)
    (preheat.folder / "sitecustomize.py").write_text(CAP_A_WORKER)
    path = os.pathsep.join(filter(None, (str(preheat.folder), os.environ.get("PYTHONPATH"))))
    preheat.environment["PYTHONPATH"] = path
    more = [f"techniques={{data_parallel: {{}}, {LONGER}}}", "batch.size=16", "checkpoint.every=1"]
    sets = [part for s in more for part in ("--set", s)]
    out, error = preheat("train", "wide.yaml", "--nproc", "2", "--out", "two", *sets)
    run = preheat.folder / "two"
    rungs = Reader(run).events(Fallback)
    assert rungs, out + error
    assert "rank 1: out of memory" in error
    assert Reader(run).events(OutOfMemory)[0].rank == 1
    assert not list(run.glob("out-of-memory-*"))
    taken = Reader(run).metrics()  # what was taken again stands as last taken
    assert [line.step for line in taken] == list(range(1, 9))
    # From the checkpoint that the last rung holds from, two processes with all the memory there is:
    (preheat.folder / "sitecustomize.py").unlink()
    other, last = run.with_name("other"), rungs[-1].step
    shutil.copytree(run, other)
    for saved in (other / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > last:
            shutil.rmtree(saved)
    (other / "metrics.jsonl").unlink()
    preheat("train", "wide.yaml", "--nproc", "2", "--out", "other", "--resume", *sets)
    assert steps(other) == {line.step: (line.loss, line.tokens) for line in taken if line.step > last}, "bit for bit"
