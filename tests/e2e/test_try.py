"""`preheat try`, and a run in fp16 whose gradients overflow."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from preheat.core import Batch, Build, LossSum
from preheat.recipe import Recipe, override

from ..conftest import DEVICE
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


FP16 = "techniques={{mixed_precision: {{mode: fp16, loss_scale: {}}}}}"
WARM = "schedule={warmup_ratio: 0.25}"


@pytest.fixture
def fp16(preheat: Command, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Recipes with a loss scale, to train in this process."""
    from preheat import recipe as recipes

    monkeypatch.setenv("PREHEAT_CACHE", str(cache))
    monkeypatch.chdir(preheat.folder)
    return lambda scale, *more: recipes.load("r.yaml", [FP16.format(scale), WARM, *more])


def steps(run: str) -> list[dict[str, Any]]:
    """The lines of a run's steps, without what depends on the clock or on the process."""
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "tokens", "loss", "lr", "gradient_norm", "skipped_steps", "loss_scale")
    return [{key: line[key] for key in keys} for line in lines if "loss" in line]


def events(run: str, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


def overflowing(monkeypatch: pytest.MonkeyPatch, at: Container[int]) -> None:
    """Makes the gradients of these steps overflow at any scale."""
    from preheat.training import loop

    def gradients(build: Build, batches: list[Batch], lr: float) -> LossSum:
        loss = real(build, batches, lr)
        if build.state.step + 1 in at:
            build.parameters()[0][1].grad.fill_(float("inf"))
        return loss

    real = loop.accumulate_gradients
    monkeypatch.setattr(loop, "accumulate_gradients", gradients)


def test_a_run_goes_on_after_an_overflow_and_trains_as_a_plain_loop_does(
    fp16: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own scaler, AdamW and schedule, which the loop steps only if the scaler has not skipped the update."""
    from preheat.engine.builder import build
    from preheat.engine.step import forward
    from preheat.ops.optim.optimizers import group_by_decay
    from preheat.training import loop
    from preheat.training.lr_schedule import compute_lr_factor

    read: list[list[Batch]] = []
    real = loop.accumulate_gradients
    monkeypatch.setattr(
        loop, "accumulate_gradients", lambda b, batches, lr: read.append(batches) or real(b, batches, lr)
    )
    recipe = fp16(1e9, "stop.max_steps=24", "optimizer.max_grad_norm=0.5")
    result = loop.train(recipe, out="whole")

    plain = override(recipe, "techniques={mixed_precision: {mode: fp32}}")
    reference = build(plain, vocabulary=300, device=DEVICE)
    model, decay = reference.trained[0], recipe.optimizer.weight_decay
    optimizer = torch.optim.AdamW(
        group_by_decay(model.named_parameters(), decay), lr=0.01, betas=recipe.optimizer.betas, eps=recipe.optimizer.eps
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1e9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: compute_lr_factor(recipe.schedule, n, 24))
    rates, means = [], []
    for batches in read:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = sum(forward(reference, b).total for b in batches) / sum(b.weight for b in batches)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before, rate = scaler.get_scale(), schedule.get_last_lr()[0]
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
        rates.append(rate)
        means.append(float(loss.detach()))

    lines = steps("whole")
    skipped = [e["step"] for e in events("whole", "overflow")]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-12)
    assert [line["loss"] for line in lines] == pytest.approx(means, rel=1e-3)
    assert rates[0] == rates[4] < max(rates) == 0.01, "the warm-up begins after the skipped steps and is complete"
    assert skipped[:5] == [1, 2, 3, 4, 5]
    assert lines[-1]["loss_scale"] == scaler.get_scale() == 1e9 / 2 ** len(skipped)
    assert result["skipped_steps"] == lines[-1]["skipped_steps"] == len(skipped)
    assert [line["tokens"] for line in lines] == [128 * n for n in range(1, 25)], "the rows of a skipped step are read"
    assert not events("whole", "overflows"), "a search for the scale is no alarm"


def test_a_run_that_dies_amid_or_after_skipped_steps_resumes_bit_for_bit(
    fp16: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat.training import loop

    # APOLLO draws its projections by the number of updates.
    recipe = fp16(1e9, "stop.max_steps=24", "checkpoint.every=3", "techniques.apollo={every: 2}")
    loop.train(recipe, out="whole")
    skipped = [event["step"] for event in events("whole", "overflow")]
    assert {5, 6, 7} < set(skipped) < set(range(20))
    real, died = loop.accumulate_gradients, [7, 22]

    def dying(build: Build, batches: list[Batch], lr: float) -> LossSum:
        if build.state.step in died:
            died.remove(build.state.step)
            raise RuntimeError("dies")
        return real(build, batches, lr)

    monkeypatch.setattr(loop, "accumulate_gradients", dying)
    for resume in (False, True):
        with pytest.raises(RuntimeError, match="dies"):
            loop.train(recipe, out="died", resume=resume)
    loop.train(recipe, out="died", resume=True)
    # Steps 7 and 22 are logged twice: they were trained, but not saved.
    assert len(steps("died")) == 26
    assert {line["step"]: line for line in steps("died")} == {line["step"]: line for line in steps("whole")}


def test_a_run_that_skips_every_step_fails_and_can_be_trained_longer(preheat: Command) -> None:
    settings = ("train", "r.yaml", "--set", FP16.format(1e9), "--out", "run")
    for more in ((), ("--resume",)):
        error = preheat.here(*settings, "--set", "stop.max_steps=8", *more, code=1)[1]
        assert "no weight has changed" in error
        assert "all 8 steps" in error
        assert "the loss scale is 3,906,250 now" in error
        assert "techniques.mixed_precision.mode: bf16" in error
    run = str(preheat.folder / "run")
    assert len(events(run, "failed")) == 2
    assert not events(run, "finished")
    result = preheat.here.json(*settings, "--set", "stop.max_steps=24", "--resume")
    assert 8 < result["skipped_steps"] < 20


@pytest.mark.parametrize(
    ("scale", "at", "alarm"),
    [
        (65536, range(4, 12), 11),  # 8 in a row after an update
        (65536, range(4, 11), None),  # 7
        (65536, {*range(4, 11), *range(12, 19)}, None),  # 7 twice
        (2.0**20, range(1, 12), None),  # a search for the scale, down to 2 ** 9
        (2.0**20, range(1, 15), 12),  # down to 2 ** 8 in step 12, and on
    ],
)
def test_a_long_run_of_skipped_steps_is_an_alarm(
    fp16: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    scale: float,
    at: Container[int],
    alarm: int | None,
) -> None:
    from preheat.training import loop
    from preheat.training.observer import Watch

    class Alarms(Watch):
        said: ClassVar[list[str]] = []

        def alarm(self, words: str) -> None:
            self.said.append(words)

    overflowing(monkeypatch, at)
    Alarms.said.clear()
    loop.train(fp16(scale, "stop.max_steps=20", "checkpoint.every=0"), out="run", watch=Alarms())
    logged = events("run", "overflows")
    assert [event["step"] for event in logged] == ([] if alarm is None else [alarm])
    assert len(Alarms.said) == len(logged)
    assert all(f"step {alarm}: {logged[0]['steps']} steps in a row were skipped" in words for words in Alarms.said)


def test_endless_overflow_ends_a_run(fp16: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.errors import RunError
    from preheat.training import loop

    overflowing(monkeypatch, range(1, 100))
    with pytest.raises(RunError, match=r"step 3: the loss is .* and the gradients' norm inf.* in 3 steps in a row"):
        loop.train(fp16(4.0), out="endless")
    assert events("endless", "failed")
