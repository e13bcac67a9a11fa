"""`preheat try`, and a run in fp16 whose gradients overflow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command


@pytest.mark.slow
def test_a_technique_against_without_it(preheat: Command) -> None:
    common = ("--model-size", "tiny", "--seq_len", "32", "--batch-size", "2", "--accumulation_steps", "2")
    made = preheat.here.json("try", "--technique", "gradient-accumulation", *common)
    rows = {row["name"]: row for row in made["rows"]}
    assert list(rows) == ["without", "gradient_accumulation"]
    assert all(row["tokens_per_second"] > 0 and row["peak_gib"] > 0 for row in rows.values())
    assert rows["gradient_accumulation"]["loss"] == pytest.approx(rows["without"]["loss"], rel=1e-3)
    assert rows["gradient_accumulation"]["gradient_cosine"] == pytest.approx(1, abs=1e-6)
    assert made["verdicts"][0].startswith("gradient_accumulation: ")
    assert set(made["gpu"]) == set(rows)


@pytest.mark.slow
def test_zero_shares_out_the_states(preheat: Command) -> None:
    asked = ("--technique", "zero", "--seq-len", "32", "--batch-size", "1", "--zero-stage", "3", "--cpu-offload")
    made = preheat.here.json("try", *asked)
    assert "has no effect here" in str(made)
    assert "8 GPUs with ZeRO stage 3" in str(made)
    plain, zero = made["rows"]
    assert zero["optimizer_gib"] == pytest.approx(plain["optimizer_gib"] / 2, rel=0.05)
    assert zero["loss"] == pytest.approx(plain["loss"], rel=1e-3)


def test_what_cannot_be_tried_is_said(preheat: Command) -> None:
    for arguments, words in (
        (("--technique", "magic"), "use gradient_accumulation, mixed_precision, zero"),
        (("--technique", "zero", "--zero-stage", "4"), "use 1, 2, 3"),
        (("--technique", "gradient_accumulation", "--accumulation-steps", "1"), "use 2 or more"),
        (("--technique", "integration", "--model-size", "huge"), "use tiny, small, medium, large"),
    ):
        assert words in preheat.here("try", *arguments, code=2)[1]


def test_a_run_goes_on_after_an_overflow_and_keeps_its_scale(preheat: Command) -> None:
    fp16 = "techniques={mixed_precision: {mode: fp16, loss_scale: 1.0e+9}}"
    made = preheat.here.json("train", "r.yaml", "--set", fp16, "--set", "stop.max_steps=24", "--out", "whole")
    events = [json.loads(line) for line in (preheat.folder / "whole" / "events.jsonl").read_text().splitlines()]
    overflows = [e["step"] for e in events if e["kind"] == "overflow"]
    assert made["steps"] == 24
    assert overflows[:5] == [1, 2, 3, 4, 5]
    assert len(overflows) < 20, "until the scale serves"
    state = json.loads((preheat.folder / "whole" / "checkpoints" / "step-24" / "state.json").read_text())
    assert state["build"]["mixed_precision"]["scale"] == 1e9 / 2 ** len(overflows)


def test_endless_overflow_ends_a_run(preheat: Command, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat import recipe as recipes
    from preheat.errors import RunError
    from preheat.training import loop

    real = loop.gradients

    def overflowing(build: Any, batches: Any, lr: float) -> Any:
        loss = real(build, batches, lr)
        build.parameters()[0][1].grad.fill_(float("inf"))
        return loss

    monkeypatch.setenv("PREHEAT_CACHE", str(cache))
    monkeypatch.chdir(preheat.folder)
    monkeypatch.setattr(loop, "gradients", overflowing)
    recipe = recipes.load("r.yaml", ["techniques={mixed_precision: {mode: fp16, loss_scale: 4.0}}"])
    with pytest.raises(RunError, match=r"step 3: the loss is .* and the gradients' norm inf"):
        loop.train(recipe, out="endless")
    assert os.path.exists("endless/events.jsonl")
