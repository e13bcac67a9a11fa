"""kill -9 at random steps, resume each time: every logged loss is bit for bit that of the run never killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from preheat.core.run_records import Checkpoint, EvaluationMetrics, StepMetrics
from preheat.run.reader import Reader
from preheat.run.writer import Writer

from .conftest import Command, losses

KILLS = int(os.environ.get("PREHEAT_KILLS", "2"))  # 10 by hand: a start takes seconds


@pytest.mark.parametrize(("workers", "beside"), [pytest.param(1, "false", marks=pytest.mark.slow), (4, "true")])
def test_killed_and_resumed_every_loss_is_the_same(preheat: Command, workers: int, beside: str) -> None:
    more = ["--set", "stop.max_steps=60", "--set", "checkpoint.every=7", "--set", f"data.workers={workers}"]
    more += ["--set", f"checkpoint.asynchronous={beside}"]
    preheat.here("train", "r.yaml", "--out", "whole", "--set", "data.workers=0", *more[:4])
    wanted = losses(preheat.folder / "whole")
    run = preheat.folder / "killed"
    draw = random.Random(workers)
    targets = sorted(draw.sample(range(3, 58), KILLS))
    for number, target in enumerate(targets):
        resume = ["--resume"] if number else []
        process = preheat.start("train", "r.yaml", "--out", "killed", *more, *resume)
        for _ in range(3000):
            if (run / "metrics.jsonl").exists() and max(losses(run), default=0) >= target:
                break
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.kill()
        process.communicate()
    preheat.here("train", "r.yaml", "--out", "killed", *more, "--resume")
    got = losses(run)
    assert got.keys() == wanted.keys()
    assert [step for step in wanted if got[step] != wanted[step]] == []


def hash_weights(run: Path) -> dict[str, str]:
    """Name of each tensor of the last checkpoint -> hash of its bytes; a file may hold them in any order."""
    (file,) = (run / "checkpoints/step-12").glob("*.safetensors")
    return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in load_file(file).items()}


def test_a_checkpoint_on_request_disturbs_nothing_and_can_be_resumed(
    preheat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--set", "checkpoint.every=0", "--set", "techniques={}")
    preheat.here("train", "r.yaml", "--out", "whole", *more)
    write_metric = Writer.write_metric

    def request(self: Writer, line: StepMetrics | EvaluationMetrics) -> None:
        write_metric(self, line)
        if line.step == 4:
            signal.raise_signal(signal.SIGUSR2)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "write_metric", request)
        preheat.here("train", "r.yaml", "--out", "saved", *more)
    saved, whole = preheat.folder / "saved", preheat.folder / "whole"
    assert [event.step for event in Reader(saved).events(Checkpoint)] == [5, 12]
    assert losses(saved) == losses(whole)
    assert hash_weights(saved) == hash_weights(whole)
    preheat.here("train", "r.yaml", "--out", "saved", *more, "--resume", "--checkpoint", "5")
    assert losses(saved) == losses(whole)
    assert hash_weights(saved) == hash_weights(whole)
