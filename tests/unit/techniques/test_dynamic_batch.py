"""The micro-batch that grows as far as memory allows."""

from __future__ import annotations

import json
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from preheat.core.plan import Plan
from preheat.engine.builder import build, build_context
from preheat.engine.step import accumulate_gradients
from preheat.hardware import probe
from preheat.models import hf
from preheat.techniques.dynamic_batch import DynamicBatch, MicroBatch, candidate_sizes, predict_peak, regroup_batches
from tests.unit.plans import plan_of, values_of

from ...conftest import DEVICE, difference, split, tiny, uneven


def test_regrouped_batches_have_the_same_rows_and_gradients() -> None:
    whole = uneven(rows=8)
    given = split(whole, [3, 3, 2])
    assert list(regroup_batches(given, 3)) == given, "what has the size already passes as it is"
    b = build(tiny(rows=8), vocabulary=96, device=DEVICE)
    accumulate_gradients(b, [whole])
    right = {n: p.grad.clone() for n, p in b.parameters()}
    for rows in (1, 2, 4, 5, 8):
        made = list(regroup_batches(given, rows))
        assert [m.tokens.shape[0] for m in made] == [rows] * (8 // rows) + ([8 % rows] if 8 % rows else [])
        assert torch.equal(torch.cat([m.labels for m in made]), whole.labels)
        assert tuple(d for m in made for d in m.mask.documents or ()) == whole.mask.documents
        assert tuple(n for m in made for n in m.rows) == whole.rows
        b.optimizer.zero_grad()
        accumulate_gradients(b, made)
        assert difference({n: p.grad for n, p in b.parameters()}, right) < 1e-6


def test_no_phase_of_a_step_lies_above_what_is_foreseen() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        floor = draw.random() * 5
        phases = [(floor + draw.random() * 5, draw.random()) for _ in range(4)]
        rows, more = sorted(draw.integers(1, 64, 2).tolist())
        peaks = [max(a + b * n for a, b in phases) for n in (rows, more)]
        assert predict_peak(floor, peaks[0], rows, more) >= peaks[1] - 1e-9


def test_sizes_grow_while_they_fit_halve_when_short_and_then_stay() -> None:
    state = MicroBatch(2, 16, limit=100, alarm=110, floor=20)
    assert state.decide(30)  # 4 rows: 40 foreseen
    assert state.decide(40)  # 8 rows: 60
    assert state.rows == 8
    assert state.decide(61) is None, "16 rows: 102 foreseen"
    assert (state.rows, state.most) == (8, 8)
    assert state.decide(30) is None, "not asked again: what a checkpoint keeps decides the rest"
    kept = json.loads(json.dumps(state.state_dict()))
    assert state.decide(111)
    assert (state.rows, state.most) == (4, 4)
    assert state.decide(21) is None
    state.load_state_dict(kept)
    assert state.rows == 8
    assert candidate_sizes(12) == [12, 6, 3, 2, 1]


def test_auto_starts_at_the_most_that_is_predicted_to_fit() -> None:
    recipe = tiny("{dynamic_batch: {target: 0.5}}", rows=16)
    context = build_context(recipe, hf.configure(recipe, 96), DEVICE)
    asked = []

    def plan(other: Any) -> Plan:
        asked.append(other.start)
        return plan_of(values_of(float(other.start), 10.0))

    technique = recipe.techniques["dynamic_batch"]
    assert technique.resolve_auto(context, plan) == DynamicBatch(start=4, target=0.5)
    assert asked == [16, 8, 4]
    assert technique.resolve_auto(context, lambda other: plan_of(values_of(9.0, 1.0))) == DynamicBatch(
        start=1, target=0.5
    )
    assert DynamicBatch(start=3).resolve_auto(context, plan) == DynamicBatch(start=3)


def test_a_mark_begun_anew_forgets_no_peak() -> None:
    if not probe.reset_peak():
        pytest.skip("the system does not let us begin the high-water mark anew")
    before = probe.resident_bytes()
    with mmap.mmap(-1, 48 << 20) as block:  # pages of its own: a kept heap would hand out resident ones
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    probe.start_peak("cpu")
    assert probe.peak_bytes("cpu", since_begun=True) - before < 32 << 20
    assert probe.peak_bytes("cpu") - before > 40 << 20
    probe.reset_peak()
    assert probe.peak_bytes("cpu") - before < 32 << 20


# --- resumed ------------------------------------------------------------------------------------------------------------
