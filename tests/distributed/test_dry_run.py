"""The dry run of several devices, on one process: what each holds is its share, and gathered weights are let go."""

from __future__ import annotations

from typing import Any

import pytest

from preheat import recipe as recipes
from preheat.planning.observe import Observation, observe

from ..conftest import DEVICE, tiny

WORLD = 8


def seen(techniques: str, world: int = WORLD) -> Observation:
    wide = "model={family: llama, layers: 6, width: 128, heads: 4, kv_heads: 2, vocabulary: 256}"  # weights are most of it
    return observe(
        recipes.override(tiny(rows=WORLD), wide, f"techniques={techniques}"), vocabulary=96, device=DEVICE, world=world
    )


@pytest.fixture(scope="module")
def one() -> Observation:
    return seen("{}", world=1)


@pytest.mark.parametrize(
    ("techniques", "weights", "states"),
    [
        ("{fsdp: {}}", WORLD, WORLD),
        ("{fsdp: {replicate: 2}}", WORLD / 2, WORLD / 2),
        ("{data_parallel: {}}", 1, 1),
        ("{data_parallel: {}, zero1: {}}", 1, WORLD),
        ("{tensor_parallel: {degree: 2}, fsdp: {}}", WORLD, WORLD),
    ],
)
def test_each_device_holds_its_share_of_weights_and_states(one: Any, techniques: str, weights: float, states: float) -> None:
    many = seen(techniques)
    for category, share in (("parameters", weights), ("optimizer", states)):
        assert many.categories["forward"][category] == pytest.approx(one.categories["forward"][category] / share, rel=0.05)
    assert many.tokens == one.tokens  # of the whole step


def test_gathered_weights_are_let_go(one: Any) -> None:
    whole = one.categories["forward"]["parameters"]
    kept, let_go = (seen(f"{{fsdp: {{reshard: {reshard}}}}}").peak["forward"] for reshard in ("false", "true"))
    assert kept - let_go > 0.5 * whole


def test_half_precision_copies_do_not_outlive_their_layer(one: Any) -> None:
    plain, cast = (
        seen(f"{{fsdp: {{}}, activation_checkpointing: {{}}{more}}}") for more in ("", ", mixed_precision: {mode: bf16}")
    )
    assert cast.peak["forward"] < plain.peak["forward"] + 0.25 * one.categories["forward"]["parameters"]
