"""The search for an arm's learning rate, the verdicts on claims, and the page of the stored figures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module("_claims.arms"), importlib.import_module("_claims.table")


@pytest.mark.parametrize("optimum", [0.001, 0.004, 0.009])
def test_the_search_ends_at_the_best_rate_between_two_worse_ones(parts: tuple[Any, Any], optimum: float) -> None:
    arms, _ = parts
    result = arms.ArmResult("an arm", lowest=0.003)
    while (lr := arms._choose_rate(result)) is not None:
        run = arms.ArmRun(seed=0, lr=lr, loss=abs(lr / optimum - optimum / lr), training_loss=0, tokens_per_second=1)
        result = arms.ArmResult("an arm", lowest=0.003, search=(*result.search, run))
    best, tried = result.find_best().lr, sorted(run.lr for run in result.search)
    assert optimum / 2**0.5 <= best <= optimum * 2**0.5  # the nearest of the rates 0.003 times a power of two
    assert tried[0] < best < tried[-1]
    assert len(set(tried)) == len(tried)


def test_a_claim_holds_only_if_all_seeds_agree(parts: tuple[Any, Any]) -> None:
    _, table = parts
    assert table.judge([-0.03, -0.01, -0.02], -1) == "yes"
    assert table.judge([-0.03, 0.01, -0.02], -1) == "not shown"
    assert table.judge([-0.03, -0.01, -0.02], 1) == "no"
    assert table.judge([-0.30, 0.01, table.LITTLE], 0) == "yes"
    assert table.judge([0.03, 0.05, 0.04], 0) == "no"
    assert table.judge([0.01, 0.03, 0.04], 0) == "not shown"


def test_results_of_a_changed_arm_are_measured_again(parts: tuple[Any, Any], tmp_path: Path) -> None:
    from preheat.files import to_json

    arms, table = parts
    runs = tuple(arms.ArmRun(seed, 0.001, 3.0 + seed / 100, 2.9, 1.0) for seed in arms.SEEDS)
    heads = {
        name: arms.ArmResult(arms._describe(arms.ARMS[name]), "2026-01-02", 2_000_000, 0.5, 0.001, runs[:1], runs)
        for name in ("base", "4 heads, 1 shared")
    }
    stored = tmp_path / "claims-arms.json"
    stored.write_text(to_json({**heads, "GELU": arms.ArmResult("as it was defined before", runs=runs)}))
    assert arms.load_arms(stored) == heads
    page = table.render(tmp_path)
    assert "4 heads, 1 shared less base: +0.000 (+0.000 to +0.000) | yes | 2.0M, 3 seeds |" in page
    foot = page.split("Not measured yet:")[1].splitlines()
    assert "- `--part feed_forward`: GELU against base; ReLU against base" in foot
    heads_left = next(line for line in foot if "--part heads" in line)
    assert "4 heads, 1 shared" not in heads_left
    assert "32 heads, 8 shared against 32 heads" in heads_left


def test_each_arm_is_a_valid_recipe_and_is_compared(parts: tuple[Any, Any]) -> None:
    from preheat import recipe as recipes

    arms, table = parts
    for arm in arms.ARMS.values():
        recipes.check(recipes.override(recipes.parse(arms.BASE), *arm.settings))
    compared = [name for part in {claim.part for claim in table.LOSS_CLAIMS} for name in table.list_arms(part)]
    assert set(compared) == set(arms.ARMS)
