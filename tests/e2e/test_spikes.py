"""A run that goes back from a spike equals, bit for bit, one that was told to leave its batches out from the start."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from preheat.core.run_records import Failed, RemovedRows, Rewound, Spike
from preheat.engine.step import Numbers
from preheat.run.reader import Reader
from preheat.training import loop

from .conftest import Command, write_text

STEPS = 44
RECIPE = f"""\
name: small
model: {{num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 320}}
data: {{source: text, vocab_size: 300, validation: 0.1}}
batch: {{size: 2, seq_len: 32}}
optimizer: {{lr: 0.005}}
stop: {{max_steps: {STEPS}}}
evaluate: {{every: 7, rows: 4}}
checkpoint: {{every: 10, keep: 20, best: validation_loss}}
hardware: {{threads: 1}}
techniques: {{neftune: {{}}}}
"""  # noise from the generator in each step


PLUGIN = """\
import itertools
import sys
from preheat.engine import step

read, calls = step.read_step_stats, itertools.count(1)


def read_spoiled(*arguments):
    numbers = read(*arguments)
    norm, *rest = numbers.more
    return numbers._replace(more=[1000 * norm if next(calls) == 25 else norm, *rest])


for module in (step, sys.modules.get("preheat.training.loop")):  # which may be imported already
    if module is not None:
        module.read_step_stats = read_spoiled
"""


@contextmanager
def spoiled(change: Callable[[int, float], tuple[float, float]]) -> Iterator[None]:
    """Changes the gradient norm and its finiteness that the loop reads after each step, by the number of steps taken."""
    read, calls = loop.read_step_stats, itertools.count(1)

    def read_spoiled(*arguments: Any) -> Numbers:
        numbers = read(*arguments)
        norm, finite, *rest = numbers.more
        changed, still_finite = change(next(calls), norm)
        return numbers._replace(more=[changed, finite * still_finite, *rest])

    with mock.patch.object(loop, "read_step_stats", read_spoiled):
        yield


@pytest.fixture(scope="module")
def spiking(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Command:
    """A folder with the run `back`, which goes back from spikes at the 25th and the 39th step that it takes."""
    folder = tmp_path_factory.mktemp("spikes")
    write_text(folder)
    (folder / "r.yaml").write_text(RECIPE)
    preheat = Command(folder, cache)
    with spoiled(lambda step, norm: (1000 * norm if step in (25, 39) else norm, 1.0)):
        preheat.here("train", "r.yaml", "--out", "back", "--set", "checkpoint.rewinds=2")
    return preheat


def state(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint: weights, optimizer states, generators."""
    files = (run / "checkpoints" / f"step-{STEPS}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal(run: Path, other: Path) -> None:
    a, b = state(run), state(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    runs = [Reader(run), Reader(other)]
    for lines in ([(m.step, m.loss, m.tokens) for m in r.metrics()] for r in runs):
        assert len(lines) == STEPS
    assert [(m.loss, m.tokens) for m in runs[0].metrics()] == [(m.loss, m.tokens) for m in runs[1].metrics()]
    assert [e.validation_loss for e in runs[0].evaluations()] == [e.validation_loss for e in runs[1].evaluations()]


def skip(run: Path) -> tuple[str, ...]:
    return tuple(
        part for event in Reader(run).events(Rewound) for part in ("--skip-rows", "{}..{}".format(*event.rows))
    )


def test_going_back_is_leaving_the_batches_out(spiking: Command) -> None:
    back = spiking.folder / "back"
    run = Reader(back)
    # Step 21 was saved as the best. 14 steps after the return to it is step 35; the rows after step 30 begin at 68.
    events = [(event.step, event.spike, event.rows) for event in run.events(Rewound)]
    assert events == [(21, 25, (42, 50)), (30, 35, (68, 78))]
    spiking.here("train", "r.yaml", "--out", "told", *skip(back))
    assert_equal(back, spiking.folder / "told")
    # Without the key, the spike is reported; going back by hand has the same end.
    plain = spiking.folder / "plain"
    with spoiled(lambda step, norm: (1000 * norm if step == 25 else norm, 1.0)):
        spiking.here("train", "r.yaml", "--out", "plain")
    assert [(event.step, event.rows) for event in Reader(plain).events(Spike)] == [(25, (48, 50))]
    assert not Reader(plain).events(Rewound)
    spiking.here("train", "r.yaml", "--out", "plain", "--resume", "--checkpoint", "21", *skip(back))
    assert_equal(plain, back)
    assert [e.rows for e in Reader(plain).events(RemovedRows)] == [e.rows for e in run.events(Rewound)]
    # A run that ended right after it went back has the rows on record.
    cut = spiking.folder / "cut"
    shutil.copytree(back, cut)
    for saved in (cut / "checkpoints").glob("step-*"):
        if int(saved.name.removeprefix("step-")) > 30:
            shutil.rmtree(saved)
    spiking.here("train", "r.yaml", "--out", "cut", "--resume")
    assert_equal(cut, back)


def test_two_processes_go_back_together(spiking: Command) -> None:
    """With weights in shards; the plugin changes what each process reads, as `spoiled` does."""
    (spiking.folder / "spike_at_step_25.py").write_text(PLUGIN)
    settings = ("--set", "techniques.fsdp={}", "--nproc", "2")
    with mock.patch.dict(spiking.environment, {"PYTHONPATH": f"{spiking.folder}:{os.environ.get('PYTHONPATH', '')}"}):
        spiking(
            "--plugin",
            "spike_at_step_25",
            "train",
            "r.yaml",
            "--out",
            "two",
            *settings,
            "--set",
            "checkpoint.rewinds=1",
        )
    two = spiking.folder / "two"
    assert [event.rows for event in Reader(two).events(Rewound)] == [(42, 50)]
    spiking("train", "r.yaml", "--out", "two-told", *settings, *skip(two))
    assert_equal(two, spiking.folder / "two-told")


def test_a_loss_that_is_not_finite_is_gone_back_from_until_no_rewind_is_left(spiking: Command) -> None:
    """Gradients of two batches become infinite: the first is left out, the second ends the run as without the key."""
    settings = ("--set", "checkpoint.rewinds=1", "--set", "evaluate.every=0", "--set", "checkpoint.best=null")
    with spoiled(lambda step, norm: (norm, float(step not in (25, 36)))):
        error = spiking.here("train", "r.yaml", "--out", "infinite", *settings, code=1)[1]
    run = Reader(spiking.folder / "infinite")
    (event,) = run.events(Rewound)
    assert (event.step, event.spike, event.rows) == (20, 25, (40, 50))
    assert all(math.isnan(spike.value) for spike in run.events(Spike))
    assert "no rewind is left of checkpoint.rewinds 1" in error
    assert run.events(Failed)
    # 11 steps after going back to step 20, of which the last is not committed.
    assert [
        line["step"]
        for line in map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ][-1] == 30


def test_rows_that_are_trained_already_are_refused(spiking: Command) -> None:
    error = spiking.here(
        "train", "r.yaml", "--out", "back", "--resume", "--set", "stop.max_steps=70", "--skip-rows", "0..4", code=1
    )[1]
    assert "--skip-rows 0..4: the run has read the rows up to" in error
    error = spiking.here("train", "r.yaml", "--skip-rows", "4..4", code=2)[1]
    assert "--skip-rows: '4..4': must be A..B with A below B" in error
    error = spiking.here("train", "r.yaml", "--set", "checkpoint.every=0", "--set", "checkpoint.rewinds=1", code=2)[1]
    assert "set checkpoint.every, or leave it out" in error
