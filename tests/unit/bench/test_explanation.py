"""Reasons that a benchmark gives for slow contenders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from preheat.bench.compare import Contender
from preheat.bench.explanation import explain_slowdown, note_busy_machine
from preheat.bench.try_technique import _count_steps, _describe_change, _Group
from preheat.core import MachineUse
from preheat.core.bench import TrialRow
from preheat.core.plan import Plan, StepSeconds
from preheat.recipe import parse

from ..plans import plan_of, values_of


def plan(speed: float, **kinds: float) -> Plan:
    return replace(
        plan_of(values_of(1, 16)),
        tokens_per_step=1000,
        tokens_per_second=speed,
        split=StepSeconds(kinds, sum(kinds.values()), 0.0),
    )


def test_the_kind_of_operator_that_takes_more_time_is_the_reason() -> None:
    baseline, slower = plan(1000, matmul=0.8, copies=0.2), plan(800, matmul=0.85, copies=0.4)
    assert explain_slowdown(slower, baseline) == "planned: 400 us of copies a token, 200 us without it"
    assert explain_slowdown(baseline, slower) == "the plan expected 25 % more speed"
    assert explain_slowdown(baseline, baseline) == "the plan expected no difference"
    assert explain_slowdown(slower, None) == ""


def test_slow_bf16_matmuls_are_the_reason_if_only_the_slower_recipe_uses_them() -> None:
    baseline = plan(1000, matmul=1.0)
    half = replace(plan(100, matmul=10.0), matrix_rate=5e9, fp32_rate=1e11)
    assert explain_slowdown(half, baseline) == "bf16 matmuls are 20 times slower than fp32's on this GPU"
    assert explain_slowdown(half, half) == "the plan expected no difference"


def test_only_slow_rows_that_were_not_run_are_explained_by_the_speed() -> None:
    baseline, slow = plan(1000, matmul=1.0), plan(100, matmul=10.0)
    slow, large = replace(slow, seconds_per_step=60.0), replace(slow, seconds_per_step=0.1)
    recipe = parse("model: {size: 15M}\nstop: {max_steps: 1}\n")
    names = ("without", "slow", "large")
    group = _Group([Contender(name, recipe) for name in names], [replace(baseline, seconds_per_step=0.1), slow, large])
    group.contenders[2].failed = "needs 20.0 GiB, more than the 16.0 GiB that a trial may use"
    _count_steps(group, 20.0)
    rows = [TrialRow(name=c.name, against="without", predicted=None, not_run=c.failed) for c in group.contenders]
    _, text, other = (_describe_change(row, rows, dict(zip(names, group.plans, strict=True))) for row in rows)
    assert text.startswith("slow was not run: a step would take 60 s (planned: 10,000 us of matmul a token, 1,000 us")
    assert other == f"large was not run: {group.contenders[2].failed}"


@pytest.mark.parametrize(("others", "note"), [(0.1, ""), (0.9, "other processes used up to 0.9 of 2 cores in 1 of 3")])
def test_other_processes_are_noted(others: float, note: str) -> None:
    quiet, busy = MachineUse(10, 1.9, 0.1, 2, 2), MachineUse(10, 1.0, others, 2, 2)
    assert note_busy_machine([quiet, None, busy]).startswith(note)
    assert bool(note_busy_machine([quiet, None, busy])) == bool(note)
