"""Checkpointing within a budget of memory."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from preheat.ops.memory.selective_checkpoint import (
    ATTENTION,
    Call,
    LayerTrace,
    keep_matmuls,
    solve_knapsack,
    trace_layer,
)
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.recipe import override

from ...conftest import DEVICE, tiny


def test_the_choice_is_the_best_there_is() -> None:
    draw = random.Random(0)
    for _ in range(20):
        calls = tuple(Call((draw.choice("ab"), i), draw.randrange(1, 60), draw.randrange(1, 1000)) for i in range(9))
        seen = LayerTrace(calls, 200)
        for budget in (0.1, 0.5, 0.9):
            kept = [call for call in calls if call.key in solve_knapsack(seen, budget)]
            assert sum(call.bytes for call in kept) <= budget * 200
            best = max(
                sum(call.cost for call in some)
                for count in range(len(calls) + 1)
                for some in itertools.combinations(calls, count)
                if sum(call.bytes for call in some) <= budget * 200
            )
            assert sum(call.cost for call in kept) == best


def test_what_a_layer_computes_and_saves_is_seen_without_computing_it() -> None:
    layer = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8), torch.nn.ReLU(inplace=True)
    )
    x = torch.full((10, 8), float("nan"), requires_grad=True)
    seen = trace_layer(layer.forward, (x,), {})
    names = [call.key[0]._schema.name.removeprefix("aten::") for call in seen.calls]
    assert names == ["addmm", "gelu"], "the last product is written to in place, so its result cannot be kept"
    assert [call.bytes for call in seen.calls] == [10 * 32 * 4] * 2
    assert seen.calls[0].cost > 2 * 10 * 8 * 32 > 0
    assert seen.saved == 2 * 10 * 32 * 4 + 10 * 8 * 4, (
        "inputs of GELU and of the second product, and ReLU's result; no weight"
    )
    assert layer[0].weight.grad is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace_layer(layer.forward, (x,), {})
        out = layer(x)
    assert type(out) is torch.Tensor, "autocast's cache keeps no fake weights"


@pytest.mark.parametrize("normed", [False, True])
def test_the_last_product_is_kept_only_where_a_gradient_needs_it(normed: bool) -> None:
    """Added to the layer's input it is not needed again; normed first, as in Gemma 2, it is."""
    inner, after = (
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)),
        torch.nn.LayerNorm(8),
    )
    seen = trace_layer(
        lambda x: x + (after(inner(x)) if normed else inner(x)), (torch.zeros(10, 8, requires_grad=True),), {}
    )
    product = torch.ops.aten.addmm.default
    assert [call.key for call in seen.calls if call.key[0] is product] == [(product, i) for i in range(1 + normed)]
    assert keep_matmuls(seen, 1) == {(ATTENTION, -1), *((product, i) for i in range(1 + normed))}


@pytest.mark.parametrize("techniques", ["efficient_attention: {}", "mixed_precision: {}, efficient_attention: {}"])
def test_memory_rises_and_work_falls_with_the_budget(techniques: str) -> None:
    recipe = tiny(f"{{{techniques}}}", rows=8, length=64)
    recipe = override(recipe, "model.num_layers=3")
    none = observe(Request(recipe, DEVICE, vocabulary=96))
    full = observe(Request(override(recipe, "techniques.activation_checkpointing.mode=full"), DEVICE, vocabulary=96))
    budgets = (0.0, 0.4, 0.8)
    by = [
        observe(
            Request(
                override(
                    recipe,
                    "techniques.activation_checkpointing.mode=budget",
                    f"techniques.activation_checkpointing.budget={budget}",
                ),
                DEVICE,
                vocabulary=96,
            )
        )
        for budget in budgets
    ]
    work, peak = [sum(o.flops.values()) for o in (full, *by, none)], [o.peak["backward"] for o in (full, *by, none)]
    assert work[1] == work[0], "a budget of 0 keeps what full keeps"
    assert peak[1] == peak[0]
    assert work == sorted(work, reverse=True)
    assert work[-1] < work[3] < work[0]
    assert peak == sorted(peak)
    layers = peak[-1] - peak[0]
    for budget, held in zip(budgets, peak[1:-1], strict=True):
        assert held - peak[0] <= (budget + 0.1) * layers, "no more than was allowed"
