from __future__ import annotations

from dataclasses import replace

import pytest

from preheat.core.device import MachineUse
from preheat.core.run_records import Fallback, MachineLoad, Measured, SystemMetrics
from preheat.core.step_profile import Part, PhasePeak, StepProfile
from preheat.web.judgement import Evidence, judge

from ..plans import plan_of, values_of

PLAN = plan_of(values_of(20.0, 24.0))
PROFILE = StepProfile(
    rank=0,
    ranks=1,
    device="RTX-4090",
    first_step=4,
    steps=5,
    seconds=14.4,
    seconds_unprofiled=14.3,
    seconds_planned=13.8,
    phases=(),
    gradients=Part("gradients", 13.0, 0.9),
    kinds=(
        Part("matmul", 10.0, 0.7, 9.9),
        Part("attention", 2.0, 0.14, 2.0),
        Part("copies", 1.0, 0.07, 0.2),
        Part("host only", 1.0, 0.07),
    ),
    operators=(),
    launch_bound=None,
    waiting_for_data=0.06,
    transfers=(),
    stores_scores=False,
    machine=None,
    findings=(),
    memory=(PhasePeak("forward", 20.1, 20.0), PhasePeak("backward", 21.0, 20.0)),
)


def test_a_profile_names_the_parts_that_differ_the_largest_first() -> None:
    speed = 0.96 * PLAN.tokens_per_second
    judgement = judge(Evidence(plan=PLAN, tokens_per_second=speed, profile=PROFILE))
    # (1.0 - 0.2) / 13.8 = 6 %; the matmuls differ by 0.1 s, less than 2 % of the step, and take the most.
    assert judgement.speed == (
        "4 % slower than planned: data waits 6 %, copies +6 % of the step, matmul as planned; "
        "2,284 tokens/s, planned 2,379 (1,594 to 2,784 in nine of ten runs)."
    )
    assert not judgement.is_slow
    assert judgement.unknown == ()


def test_parts_profiled_on_a_busy_machine_are_not_compared() -> None:
    busy = replace(PROFILE, machine=MachineUse(10, own_cores=1.0, other_cores=1.0, cpus=2, threads=2))
    speed = judge(Evidence(plan=PLAN, tokens_per_second=0.5 * PLAN.tokens_per_second, profile=busy)).speed
    assert "data waits 6 %, other processes used 1.0 of 2 cores while it was profiled;" in speed
    assert "copies" not in speed


@pytest.mark.parametrize(
    ("ratio", "head", "is_slow"),
    [
        (1.01, "As fast as planned: 2,403", False),
        (1.2, "20 % faster than planned: ", False),
        (0.5, "50 % slower than planned: ", True),
    ],
)
def test_without_a_profile_it_says_what_is_not_recorded(ratio: float, head: str, is_slow: bool) -> None:
    judgement = judge(Evidence(plan=PLAN, tokens_per_second=ratio * PLAN.tokens_per_second))
    assert judgement.speed.startswith(head)
    assert judgement.is_slow == is_slow
    assert bool(judgement.unknown) == (ratio < 1)


def test_a_fallback_and_other_processes_are_causes() -> None:
    fallback = Fallback(step=40, changed=("batch.micro=1",), set=("batch.micro=1",), seconds_per_step=(10.0, 12.0))
    slow = 0.8 * PLAN.tokens_per_second
    judgement = judge(Evidence(plan=PLAN, tokens_per_second=slow, fallbacks=[fallback]))
    assert "since step 40 it runs with batch.micro=1 after an out-of-memory error (planned +20 % per step)" in (
        judgement.speed
    )
    device = replace(PLAN.device, kind="cpu")
    measured = Measured(machine=MachineLoad(other_cores=1.1, cpus=2, alone=False))
    judgement = judge(Evidence(plan=replace(PLAN, device=device), tokens_per_second=slow, measured=measured))
    assert "other processes used 1.1 of 2 cores" in judgement.speed
    idle = [SystemMetrics(1.0, 1, figures={"gpu_0/utilization_percent": 40.0, "gpu_1/utilization_percent": 60.0})]
    judgement = judge(Evidence(plan=PLAN, tokens_per_second=slow, system=idle, is_live=True))
    assert "its GPUs are busy 50 % of the time" in judgement.speed


def test_memory_is_split_as_the_allocator_counts_it() -> None:
    predicted = PLAN.predicted
    assert predicted.allocated_gib is not None
    assert predicted.reserved_gib is not None
    assert predicted.context_gib is not None
    measured = Measured(
        peak_gib=PLAN.peak_gib + 0.5,
        allocated_gib=predicted.allocated_gib + 0.1,
        reserved_gib=predicted.reserved_gib + 0.5,
        context_gib=predicted.context_gib,
    )
    judgement = judge(Evidence(plan=PLAN, measured=measured, profile=PROFILE))
    assert judgement.memory == (
        "512 MiB more memory than planned: tensors as planned, cached by torch's allocator 410 MiB more, the context "
        "as planned, most of it in backward (+1.00 GiB); 20.50 GiB, planned 20.00 GiB of 24.00 GiB."
    )
    assert not judgement.is_large
    large = judge(Evidence(plan=PLAN, measured=Measured(peak_gib=23.0)))
    assert large.is_large
    assert large.unknown == ("Which part of the memory differs is not known: a CPU measures the whole process only.",)


def test_a_small_run_is_judged_by_the_same_tolerance() -> None:
    plan = replace(PLAN, peak_gib=14.1 / 1024)
    assert " more memory than planned" in judge(Evidence(plan=plan, measured=Measured(peak_gib=16.7 / 1024))).memory
    assert judge(Evidence(plan=plan, measured=Measured(peak_gib=14.2 / 1024))).memory.startswith("As much memory as")


def test_nothing_is_claimed_without_a_plan_or_a_measurement() -> None:
    assert "no plan" in judge(Evidence(tokens_per_second=10.0)).speed
    judgement = judge(Evidence(plan=PLAN))
    assert judgement.speed == "Speed: no step is measured yet."
    assert judgement.memory == "Memory: planned 20.00 GiB of 24.00 GiB; the peak is measured when the session ends."
