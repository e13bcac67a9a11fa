"""kill -9 at random steps, resume each time: every logged loss is bit for bit that of the run never killed."""

from __future__ import annotations

import os
import random
import time

import pytest

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
