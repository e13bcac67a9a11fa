"""The figures of a profile: of a function with known costs, and of events written by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from preheat.core import Phase
from preheat.core.operator_kinds import kind_of
from preheat.core.plan import StepSeconds
from preheat.core.step_profile import StepProfile
from preheat.files import build_schema, read_record, to_json
from preheat.training.profile_figures import STEP_MARK, Measured, Setting, TraceEvent, figures_of, phase_mark
from preheat.training.step_tracer import read_events, write_profile

SETTING = Setting(0, 1, "a device", length=64, vocabulary=1000)


def figures(events: Sequence[TraceEvent], planned: StepSeconds | None = None, **more: Any) -> StepProfile:
    seconds = sum(planned.kinds.values()) if planned else 1.0
    return figures_of(events, SETTING, Measured(4, more.get("unprofiled")), planned=planned, planned_seconds=seconds)


def seconds_of(found: StepProfile) -> dict[str, float]:
    return {part.name: part.seconds for part in (*found.phases, *found.kinds)}


def profiled_steps() -> profile:
    """Two steps, mostly of matmuls of 600 x 600."""
    a, scores = torch.randn(600, 600, requires_grad=True), torch.randn(1, 2, 64, 64)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for step in (4, 5):
            with record_function(f"{STEP_MARK}{step}"):
                with record_function(phase_mark(Phase.GRADIENTS)):
                    with record_function(phase_mark(Phase.FORWARD)):
                        loss = (a @ a).sum() + torch.softmax(scores, -1).sum() + torch.cat([scores, scores]).sum()
                    loss.backward()
                with record_function(phase_mark(Phase.UPDATE)), torch.no_grad():
                    a.mul_(0.99)
    return recorded


def test_a_large_matmul_dominates_and_the_parts_add_up_to_the_step() -> None:
    found = figures(read_events(profiled_steps()))
    assert (found.first_step, found.steps, found.launch_bound) == (4, 2, None)
    assert sum(part.share for part in found.phases) == pytest.approx(1)
    assert sum(part.share for part in found.kinds) == pytest.approx(1)
    seconds = seconds_of(found)
    # Three products of a step, two of them in backward.
    assert found.operators[0].name == "aten::mm"
    assert (found.operators[0].calls, found.operators[0].kind) == (3, "matmul")
    # The host's time depends on who else uses the machine.
    assert max((part for part in found.kinds if part.name != "host only"), key=lambda p: p.seconds).name == "matmul"
    assert min(seconds[name] for name in ("forward", "backward", "optimizer")) > 0
    assert found.stores_scores
    assert "aten::mul_" in [row.name for row in found.operators if row.kind == "optimizer"]
    assert read_record(StepProfile, json.loads(to_json(found))) == found
    assert build_schema(StepProfile)["properties"].keys() == vars(found).keys()


def exported_events(trace: dict[str, Any]) -> list[TraceEvent]:
    """The events of a trace in Chrome's format."""
    return [
        TraceEvent(
            event["cat"],
            event["name"],
            event["ts"],
            event["ts"] + event["dur"],
            event["tid"],
            tuple(
                () if shape and isinstance(shape[0], list) else tuple(shape)
                for shape in event["args"].get("Input Dims", ())
            ),
            event["args"]["External id"],
        )
        for event in trace["traceEvents"]
        if event.get("cat") in ("cpu_op", "user_annotation")
    ]


def test_events_in_memory_are_those_of_the_exported_trace(tmp_path: Path) -> None:
    traced = profiled_steps()
    written = write_profile(tmp_path, traced, SETTING, Measured(4, None), planned=None, planned_seconds=1.0)
    with gzip.open(tmp_path / "trace.json.gz") as file:
        exported = exported_events(json.load(file))
    in_memory = read_events(traced)

    def without_times(events: Sequence[TraceEvent]) -> list[TraceEvent]:
        return [event._replace(start=0, end=0) for event in sorted(events, key=lambda event: event.operator)]

    assert without_times(in_memory) == without_times(exported)
    assert len({event.shapes for event in in_memory}) > 5
    again = figures(exported)
    assert seconds_of(written) == pytest.approx(seconds_of(again), rel=1e-4)
    assert [(row.name, row.calls) for row in written.operators] == [(row.name, row.calls) for row in again.operators]


def event(
    kind: str, name: str, start: float, end: float, *, shapes: Any = (), operator: int = 0, size: int = 0
) -> TraceEvent:
    return TraceEvent(kind, name, start, end, 1, shapes, operator, size)


def marks(**phases: tuple[float, float]) -> list[TraceEvent]:
    """A step of 1 ms with these phases."""
    named = [event("user_annotation", phase_mark(Phase[name]), *span) for name, span in phases.items()]
    return [event("user_annotation", f"{STEP_MARK}4", 0, 1000), *named]


def operator(name: str, start: float, end: float, number: int = 0, shapes: Any = ()) -> TraceEvent:
    return event("cpu_op", name, start, end, operator=number, shapes=shapes)


def test_an_operator_s_time_is_its_own_and_a_kernel_of_ours_is_one() -> None:
    trace = [
        *marks(DATA=(0, 100), GRADIENTS=(100, 700), FORWARD=(100, 300), UPDATE=(700, 900)),
        operator("aten::linear", 110, 210),
        operator("aten::addmm", 120, 200),
        operator("preheat::causal_attention", 220, 280),
        operator("aten::copy_", 230, 250),
        operator("autograd::engine::evaluate_function: MmBackward0", 350, 650),
        operator("aten::mm", 360, 600),
        operator("aten::mm", 710, 800),
    ]
    seconds = seconds_of(figures(trace))
    assert seconds == pytest.approx(
        {
            "data": 1e-4,
            "forward": 2e-4,
            "backward": 3e-4,
            "optimizer": 9e-5,
            "other": 2e-4,
            "matmul": 3.2e-4,
            "attention": 6e-5,
            "host only": 5.3e-4,
        }
    )


def test_of_kernels_that_run_at_once_computing_counts_and_idle_time_is_the_host_s() -> None:
    trace = [
        *marks(DATA=(0, 100), GRADIENTS=(100, 700), FORWARD=(100, 200), UPDATE=(700, 800)),
        operator("aten::mm", 110, 120, 1),
        operator("autograd::engine::evaluate_function: MmBackward0", 210, 400),
        operator("aten::mm", 220, 230, 2),
        operator("aten::_fused_adamw_", 710, 720, 3),
        event("kernel", "nvjet_1", 150, 350, operator=1),
        event("kernel", "ncclDevKernel_AllReduce", 300, 500),
        event("kernel", "nvjet_2", 400, 600, operator=2),
        event("kernel", "multi_tensor", 750, 850, operator=3),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 340, 380, size=2**20),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 950, 1000, size=16),
    ]
    found = figures(trace)
    seconds = seconds_of(found)
    assert {name: seconds[name] for name in ("matmul", "communication", "optimizer", "copies", "host only")} == (
        pytest.approx({"matmul": 4e-4, "communication": 5e-5, "optimizer": 1e-4, "copies": 5e-5, "host only": 4e-4})
    )
    assert found.waiting_for_data == pytest.approx(0.1)
    assert found.launch_bound == pytest.approx(0.3)
    assert sum(part.share for part in found.phases) == pytest.approx(1)
    assert [(copy.direction, copy.bytes) for copy in found.transfers] == [("HtoD", 2**20), ("DtoH", 16)]


def planned(**kinds: float) -> StepSeconds:
    return StepSeconds({name.replace("_", " "): seconds for name, seconds in kinds.items()}, 0.5, 0.1)


def half_and_half(*events: TraceEvent, data: float = 0) -> list[TraceEvent]:
    phases = marks(DATA=(0, data), GRADIENTS=(data, 700), UPDATE=(700, 1000))
    return [*phases, *events]


@pytest.mark.parametrize(
    ("trace", "plan", "says"),
    [
        (
            half_and_half(operator("aten::mm", 0, 700), operator("aten::add_", 700, 1000)),
            planned(matmul=0.9, optimizer=0.1),
            "The optimizer takes 30 % of the step, planned 10 % (300 µs instead of 100 ms).",
        ),
        (
            half_and_half(operator("aten::mm", 400, 1000), data=400),
            planned(matmul=0.6, optimizer=0.3, host_only=0.1),
            "Waiting for data takes 40 % of the step, which the plan leaves out.",
        ),
        (
            half_and_half(
                operator("aten::_softmax", 0, 300, shapes=((2, 4, 64, 64),)),
                operator("aten::bmm", 300, 500, shapes=((8, 64, 64), (8, 64, 16))),
            ),
            planned(attention=0.5, host_only=0.5),
            "Attention runs with the math kernel, which stores all scores: 50 % of the step, planned 50 % "
            "(500 µs instead of 500 ms); efficient_attention would avoid about 30 % of the step.",
        ),
        (
            half_and_half(operator("aten::mm", 0, 600)),
            planned(matmul=0.58, host_only=0.42),
            "No part has a share that is 5 % of the step above the planned one. Matmuls take 60 % of the step, planned "
            "58 % (600 µs instead of 580 ms).",
        ),
        (
            half_and_half(operator("aten::mm", 0, 600)),
            None,
            "Matmuls take 60 % of the step, the most of all; the plan has no times to compare it with.",
        ),
    ],
)
def test_the_first_finding_is_the_largest_gap(trace: list[TraceEvent], plan: StepSeconds | None, says: str) -> None:
    assert figures(trace, plan).findings[0].text == says


def test_the_time_of_profiling_itself_is_no_gap_of_the_host() -> None:
    trace = half_and_half(operator("aten::mm", 0, 500))
    plan = planned(matmul=0.8, host_only=0.2)
    assert figures(trace, plan).findings[0].part == "host only"
    assert figures(trace, plan, unprofiled=7e-4).findings[0].part != "host only"


@pytest.mark.parametrize(
    ("name", "shapes", "kind"),
    [
        ("aten::bmm", [(8, 16, 64), (8, 64, 32)], "matmul"),
        ("aten::bmm", [(8, 64, 64), (8, 64, 16)], "attention"),
        ("aten::bmm", [(8, 40, 16), (8, 16, 40)], "attention"),
        ("aten::_scaled_dot_product_flash_attention", [(2, 4, 64, 16)], "attention"),
        ("_scaled_mm", [(64, 64), (64, 64)], "matmul"),
        ("aten::mul", [(4, 64, 64)], "elementwise"),
        ("aten::mul", [(4, 2, 64, 64)], "attention"),
        ("aten::exp", [(128, 1000)], "loss"),
        ("aten::mm", [(128, 32), (32, 1000)], "matmul"),
        ("preheat::rms_norm", [(4, 32)], "norm"),
        ("aten::copy_", [(4, 32)], "copies"),
        ("aten::view", [(4, 32)], "host only"),
        ("c10d::allreduce_", [], "communication"),
        ("sm90_xmma_gemm_bf16", [], "matmul"),
    ],
)
def test_the_kind_follows_from_name_and_shapes(name: str, shapes: list[tuple[int, ...]], kind: str) -> None:
    assert kind_of(name, shapes, length=64, vocabulary=1000) == kind
