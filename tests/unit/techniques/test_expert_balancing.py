"""Experts balanced by a bias: what it moves by, where it is kept, and what a folder and a checkpoint hold of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from preheat.core import Build
from preheat.engine import checkpoint
from preheat.engine.step import accumulate_gradients, update
from preheat.models.moe import biases, routers
from preheat.training.recovery.oom import StepSnapshot

from ...conftest import difference, split, uneven
from ..ops.test_experts import made

FAST = "{expert_balancing: {rate: 0.01}}"


def skewed(family: str, techniques: str = FAST) -> Build:
    """A model whose routers all like the same experts."""
    b = made(family, techniques, strong=False)
    with torch.no_grad():
        for router in routers(b.trained[0]):
            router.weight *= torch.linspace(0.5, 12, 8)[:, None]  # type: ignore[operator]
    return b


def train(b: Build, steps: int, first: int = 0, *, lr: float = 0.001, seed: int | None = None) -> list[float]:
    loads = []
    for n in range(first, first + steps):
        loss = accumulate_gradients(b, split(uneven(seed=n if seed is None else seed), [2, 2]), lr)
        loads.append(b.loss.scores(loss.metrics, float(loss.weight))["expert_load"])
        update(b, lr)
    return loads


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_load_becomes_even_and_without_it_does_not(family: str) -> None:
    """On the same rows, with weights that hardly move; on other rows and over a training: benchmarks/experts.py."""
    plain = train(skewed(family, "{}"), 2, lr=1e-9, seed=0)
    balanced = train(skewed(family), 24, lr=1e-9, seed=0)
    assert plain[0] == plain[1] == balanced[0]
    assert balanced[-1] - 1 < 0.5 * (plain[1] - 1), (plain, balanced)


def test_a_skipped_step_moves_no_bias() -> None:
    b = skewed("qwen3_moe", "{expert_balancing: {rate: 0.01}, mixed_precision: {mode: fp16, loss_scale: 1.0e+9}}")
    finite = []
    while not any(finite):
        accumulate_gradients(b, [uneven()], 0.001)
        finite.append(bool(update(b, 0.001)[1]))
        assert all(bool(bias.any()) == finite[-1] for bias in biases(b.trained[0]).values())
    assert len(finite) > 1, "the first step overflowed"


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_it_moves_by_the_global_batch_and_a_checkpoint_goes_on_alike(family: str, tmp_path: Path) -> None:
    a = skewed(family)
    accumulate_gradients(a, split(uneven(), [1, 3]), 0.001)
    counts = a.loss.metrics["expert_tokens"].clone()
    update(a, 0.001)
    for bias, row in zip(biases(a.trained[0]).values(), counts, strict=True):
        torch.testing.assert_close(bias, 0.01 * (row.mean() - row).sign())
    train(a, 2, first=1)
    checkpoint.save(a, checkpoint.Progress(step=3), tmp_path, keep=1)
    b = made(family, FAST, strong=False)
    (found, _) = checkpoint.find(tmp_path)
    assert found is not None
    checkpoint.load(b, found)
    assert train(a, 2, first=3) == train(b, 2, first=3)
    assert difference(dict(biases(a.trained[0])), dict(biases(b.trained[0]))) == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_folder_holds_it_where_the_family_has_a_place(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    b, tokens = skewed(family), uneven().tokens
    train(b, 10)
    model: Any = b.trained[0]
    told = b.changes["expert_balancing"][0].what
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    kept = {name: bias for name, bias in theirs.named_buffers() if "correction" in name}
    if family == "glm4_moe":
        assert "part of the model" in told
        assert difference(kept, biases(model)) == 0
    else:
        assert "evaluations and exports route without it" in told
        assert not kept
    # What an evaluation here computes is what the folder computes there.
    from preheat.models import hf

    a, c = hf.compute_reference_logits(model, tokens), theirs(tokens).logits.detach()
    assert float((a - c).norm() / c.norm()) < 1e-5


def test_a_failed_attempt_leaves_it_alone() -> None:
    b = skewed("qwen3_moe")
    train(b, 2)
    kept = {name: bias.clone() for name, bias in biases(b.trained[0]).items()}
    guard = StepSnapshot(b)
    accumulate_gradients(b, split(uneven(seed=2), [2, 2]), 0.001)
    guard.restore()
    assert difference(dict(biases(b.trained[0])), kept) == 0
    again = skewed("qwen3_moe")
    assert train(again, 3)[2] == train(b, 1, first=2)[0]


def test_the_loss_is_the_other_method() -> None:
    b = made("mixtral", "{expert_balancing: {method: loss, coefficient: 0.2}}", strong=False)
    loss = accumulate_gradients(b, [uneven()], 0.001)
    assert b.trained[0].config.router_aux_loss_coef == 0.2  # type: ignore[union-attr]
    assert "balance_loss" in b.loss.scores(loss.metrics, float(loss.weight))
    assert not biases(b.trained[0])
