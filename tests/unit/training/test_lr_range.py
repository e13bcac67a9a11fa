"""The learning-rate range test suggests a rate by its stated rule, or says why it cannot; the test itself trains as the recipe does."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.cli.find_lr import LrTest, parse_lr_test
from preheat.core.lr_range import LrRange
from preheat.errors import RecipeError, RunError
from preheat.files import read_record, to_json
from preheat.report.lr_range_page import write_lr_range
from preheat.training.lr_range import FIGURES, _find_problem, _has_diverged, find_lr, read_suggestion, space_rates
from preheat.training.observer import Watch

from ...conftest import tiny


def curve(noise: float = 0.0, floor: float = 1.0) -> list[tuple[float, float, float]]:
    """Losses with their minimum at 1e-2 and their steepest fall at 1e-3, over six decades in 121 steps."""
    draw = random.Random(0)
    rates = space_rates(1e-6, 1.0, 121)
    losses = [
        10 - (10 - floor) / (1 + math.exp(-4 * (math.log10(lr) + 3))) + max(0, math.log10(lr) + 2) ** 2 * 20
        for lr in rates
    ]
    return [(lr, loss + draw.gauss(0, noise), 1.0) for lr, loss in zip(rates, losses, strict=True)]


def test_the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss() -> None:
    result = read_suggestion(curve(), steps=121, present=0.5)
    step = 10 ** (6 / 120)
    assert result.lowest == pytest.approx(1e-2, rel=step - 1)
    assert result.suggested == pytest.approx(result.lowest / 10)
    assert result.steepest == pytest.approx(1e-3, rel=step - 1)
    # The mean of 7 losses around each: closed form at one of them.
    window = [loss for _, loss, _ in curve()[47:54]]
    assert result.points[50].smoothed == pytest.approx(sum(window) / 7)
    assert _find_problem(result) is None
    assert read_suggestion(curve(0.3), steps=121, present=0.5).lowest == pytest.approx(1e-2, rel=1.0)


def test_a_gradient_norm_that_overflowed_is_stored_as_such(tmp_path: Path) -> None:
    """As fp16's are until the loss scale has adapted."""
    points = [(lr, loss, math.inf if n < 2 else norm) for n, (lr, loss, norm) in enumerate(curve())]
    result = read_suggestion(points, steps=121, present=0.5)
    file = tmp_path / FIGURES
    file.write_text(to_json(result))
    again = read_record(LrRange, json.loads(file.read_text()))
    assert [point.gradient_norm for point in again.points[:3]] == [None, None, 1.0]
    assert write_lr_range(file).read_text().count(">overflow<") == 2


def test_losses_that_suggest_no_rate_are_reported() -> None:
    flat = read_suggestion(curve(0.3, floor=10.0)[:80], steps=80, present=0.5)
    assert "no rate lowers the loss by more than its noise" in str(_find_problem(flat))
    falling = read_suggestion(curve()[:70], steps=70, present=0.5)
    assert "still falls at the last rate" in str(_find_problem(falling))


def test_the_test_stops_at_divergence() -> None:
    assert not _has_diverged([10.0, 9.0, 8.0, 7.0, 6.0, 7.0, 8.0, 9.0], half=1)
    assert _has_diverged([10.0, 4.0, 4.0, 4.0, 8.1, 8.1, 8.1], half=1)
    assert not _has_diverged([10.0, 4.0, 4.0, 4.0, 4.0, 4.0, 20.0][:-1], half=1)
    assert _has_diverged([math.nan], half=1)


@pytest.mark.parametrize("text", ["0..1", "1..1e-3", "1..1", "1e-3", "a..b", "-1..2", "1e-3..1e999"])
def test_a_range_that_does_not_rise_is_refused(text: str) -> None:
    with pytest.raises(
        RecipeError, match=r"--lr-range.*LOW\.\.HIGH|--lr-range.*must rise from a rate above 0"
    ) as error:
        parse_lr_test(text, None)
    assert "\n" not in str(error.value)


def test_the_steps_of_a_test_are_at_least_ten() -> None:
    with pytest.raises(RecipeError, match="--lr-steps 9: must be at least 10"):
        parse_lr_test(None, 9)
    assert parse_lr_test(" 1e-5 .. .1", None) == LrTest(1e-5, 0.1, 100)


def test_a_test_takes_the_steps_of_a_run_with_its_rates(tmp_path: Path) -> None:
    """Compared with a loop by hand over the same rows: the same losses, bit for bit, also with rates of their own for some weights."""
    from preheat.engine.builder import build
    from preheat.engine.device import resolve_device
    from preheat.engine.step import accumulate_gradients, update
    from preheat.planning.plan_request import data_of

    (tmp_path / "text").mkdir()
    for n in range(60):
        text = " ".join(f"{n * m} wizards jump over {m} lazy dogs." for m in range(20))
        (tmp_path / "text" / f"{n}.txt").write_text(text)
    base = tiny("{chunked_loss: {rows: 64}}", more="seed: 3")
    recipe = replace(
        base,
        model=replace(base.model, vocab_size=320),
        data=replace(base.data, source=str(tmp_path / "text"), vocab_size=300, validation=0.2),
        optimizer=replace(base.optimizer, groups={"embeddings": {"lr_scale": 0.1}}),
        hardware=replace(base.hardware, device="cpu", threads=1),
    )
    out = tmp_path / "test"
    result = find_lr(recipe, out=out, low=1e-4, high=1.0, steps=30, watch=Watch())
    assert sorted(p.name for p in out.iterdir()) == [FIGURES, "preheat.json"]
    assert json.loads((out / FIGURES).read_text())["suggested"] == result.suggested

    from preheat.core import Shape
    from preheat.data import batches

    device, _ = resolve_device(recipe)
    data = data_of(recipe)
    b = build(recipe, vocabulary=320, device=device)
    stream = batches(data.train, seed=3, committed=0, shape=lambda step: Shape(4, 32, 4))
    for point, lr in zip(result.points, space_rates(1e-4, 1.0, 30), strict=False):
        loss = accumulate_gradients(b, next(stream), lr)
        update(b, lr)
        assert (point.lr, point.loss) == (lr, float(loss.total) / float(loss.weight))
    # A run there is not overwritten, nor is any other file.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: mine")
    with pytest.raises(RunError, match="holds files that preheat did not write"):
        find_lr(recipe, out=tmp_path / "run", low=1e-4, high=1.0, steps=10, watch=Watch())
