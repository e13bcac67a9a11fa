"""Updates in the backward pass are those of a step after it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import Build
from preheat.engine.builder import build
from preheat.engine.checkpoint import Progress
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError, RunError
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.training.loop import _Loop

from ...conftest import DEVICE, split, tiny, uneven

IN_BACKWARD = "techniques.optimizer_in_backward={}"


def made(techniques: str, *more: str) -> Build:
    return build(recipes.override(tiny(techniques), "optimizer.max_grad_norm=0", *more), vocabulary=96, device=DEVICE)


@pytest.mark.parametrize("optimizer", ["{}", "{muon: {}}", "{apollo: {}}", "{mixed_precision: {mode: bf16_weights}}"])
@pytest.mark.parametrize("more", [(), ("model.tie_embeddings=true", "techniques.chunked_loss={}")])
def test_weights_are_those_of_a_step_after_the_pass(optimizer: str, more: tuple[str, ...]) -> None:
    if more and "apollo" in optimizer:
        more = more[:1]
    after, within = made(optimizer, *more), made(optimizer, *more, IN_BACKWARD)
    for lr in (0.01, 0.002, 0.02):
        for b in (after, within):
            accumulate_gradients(b, [uneven()], lr)
        stats = [update(b, lr) for b in (after, within)]
        assert torch.allclose(stats[0], stats[1], rtol=1e-5), "the same norm is reported"
    assert all(p.grad is None for _, p in within.parameters())
    for (name, a), (_, b) in zip(after.parameters(), within.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_gradients_never_stand_together() -> None:
    recipe = recipes.override(
        tiny("{chunked_loss: {rows: 8}}"),
        "optimizer.max_grad_norm=0",
        "model.num_layers=8",
        "batch.size=1",
        "batch.seq_len=4",
    )
    after = observe(Request(recipe, DEVICE, vocabulary=96))
    within = observe(Request(recipes.override(recipe, IN_BACKWARD), DEVICE, vocabulary=96))
    spared = max(after.peak["backward"], after.peak["update"]) - max(within.peak["backward"], within.peak["update"])
    assert spared > 0.7 * 4 * after.trained
    assert sum(after.flops.values()) == sum(within.flops.values())


def test_what_is_not_finite_moves_nothing_after_it() -> None:
    b = made("{}", IN_BACKWARD)
    layers = b.trained[0].model.layers  # type: ignore[union-attr]
    before = {n: p.detach().clone() for n, p in b.parameters()}
    hook = layers[1].register_full_backward_pre_hook(lambda _, grads: tuple(g * float("nan") for g in grads))  # type: ignore[union-attr]
    accumulate_gradients(b, [uneven()], 0.01)
    norm, finite = update(b, 0.01).tolist()
    hook.remove()
    assert finite == 0
    assert norm != norm
    moved = {n for n, p in b.parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if ".layers.2." in n or n in ("lm_head.weight", "model.norm.weight")}
    assert all(bool(p.isfinite().all()) for _, p in b.parameters())
    accumulate_gradients(b, [uneven()], 0.01)
    assert update(b, 0.01).tolist()[1] == 1, "the next pass begins anew"


@pytest.mark.parametrize(
    ("techniques", "more", "words"),
    [
        ("{optimizer_in_backward: {}}", [], "set optimizer.max_grad_norm: 0"),
        (
            "{optimizer_in_backward: {}, gradient_accumulation: {steps: 2}}",
            ["optimizer.max_grad_norm=0"],
            "micro-batch-size",
        ),
    ],
)
def test_what_it_excludes_is_refused(techniques: str, more: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(recipes.override(tiny(techniques), *more), vocabulary=96, device=DEVICE)


def test_several_micro_batches_are_refused() -> None:
    with pytest.raises(RecipeError, match="one micro-batch"):
        accumulate_gradients(made("{}", IN_BACKWARD), split(uneven(), [2, 2]), 0.01)


@pytest.mark.parametrize(
    ("techniques", "words"), [("{}", "step 3 are untouched"), (IN_BACKWARD, "from the last checkpoint")]
)
def test_a_run_that_stops_says_what_is_left_of_its_weights(techniques: str, words: str) -> None:
    loop = object.__new__(_Loop)
    build = made("{}", *([techniques] if techniques != "{}" else []))
    loop.session = SimpleNamespace(build=build, progress=Progress(step=3))  # type: ignore[assignment]
    with pytest.raises(RunError, match=words):
        loop._refuse(1.0, float("nan"), [uneven()], 0.1)
