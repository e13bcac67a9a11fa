"""Peaks by phase against closed forms, and what is beside weights, gradients, states and activations by name."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from preheat.cli.views.console import build_answer
from preheat.core import STEP, Device
from preheat.engine.async_checkpoint import count_host_bytes
from preheat.engine.builder import build
from preheat.errors import RecipeError, RunError
from preheat.hardware.catalogue import accelerators, find_accelerator, parse_accelerator
from preheat.hardware.probe import probe
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.dry_run import observe
from preheat.planning.explain import estimate_energy
from preheat.planning.memory import overhead
from preheat.planning.memory.overhead import SOURCES, observe_process_overhead
from preheat.planning.observation import BESIDE, CATEGORIES, FROM_OTHERS, Observation
from preheat.planning.plan import GIB, describe, plan
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline, Seconds
from preheat.recipe import override
from preheat.run.writer import check_folder
from tests.unit.plans import plan_of, values_of

from ...conftest import DEVICE, tiny

ACCELERATOR = Device("cuda", "an accelerator", 80 << 30, at_hand=False)
VOCABULARY = 960
PHASES = ["load", "forward", "head and loss", "backward", "update", "saving", "evaluation"]


def seen_of(techniques: str = "{}", *more: str, device: Device = DEVICE, world: int | None = None) -> Observation:
    recipe = override(tiny(techniques, rows=4 * (world or 1), length=64), f"model.vocab_size={VOCABULARY}", *more)
    return observe(Request(recipe, device, vocabulary=VOCABULARY, world=world))


def test_every_phase_has_its_split_and_generation_is_there_where_text_is_written() -> None:
    seen = seen_of()
    assert list(seen.categories) == PHASES
    assert all(set(found) == {*CATEGORIES, *BESIDE} for found in seen.categories.values())
    assert list(seen_of("{}", "sample.prompts=[Once]").categories) == [*PHASES, "generation"]


def test_logits_are_of_head_and_loss_and_a_chunked_loss_takes_them_from_there() -> None:
    whole, chunked = seen_of(), seen_of("{chunked_loss: {rows: 16}}")
    logits = 4 * 64 * VOCABULARY * 4
    assert whole.peak["head and loss"] - whole.peak["forward"] > 1.5 * logits - 4096
    assert chunked.peak["head and loss"] - chunked.peak["forward"] < 0.8 * logits
    assert chunked.peak["forward"] == pytest.approx(whole.peak["forward"], rel=0.01)


def test_between_steps_stand_weights_and_states_and_saving_takes_a_file_of_the_hosts_memory() -> None:
    at = seen_of().categories
    for phase in ("saving", "evaluation"):
        assert at[phase]["gradients"] == 0
        assert at[phase]["optimizer"] == at["update"]["optimizer"]
    made = build(override(tiny(), f"model.vocab_size={VOCABULARY}"), vocabulary=VOCABULARY, device=probe("cpu"))
    assert at["saving"]["temporary"] == pytest.approx(count_host_bytes(made), abs=64)
    assert seen_of(device=ACCELERATOR).categories["saving"]["temporary"] < 64


@pytest.mark.parametrize(
    ("techniques", "held"),
    [
        ("{lora: {rank: 2}, mixed_precision: {mode: bf16_weights}}", "temporary"),  # drawn in fp32
        ("{mixed_precision: {mode: bf16_weights}}", "optimizer"),  # which comes after, and is more
    ],
)
def test_building_holds_what_drawing_takes_or_the_states_that_come_after(techniques: str, held: str) -> None:
    found = seen_of(techniques).categories["load"]
    assert found[held] > 0
    assert found["temporary"] == 0 or found["optimizer"] == 0
    if held == "temporary":
        assert found["temporary"] >= 4 * VOCABULARY * 32, "the embedding in fp32"


def test_gathered_weights_and_what_they_travel_in_are_lines_of_their_own() -> None:
    alone, shared = seen_of(device=ACCELERATOR), seen_of("{fsdp: {}}", device=ACCELERATOR, world=4)
    assert not any(found[what] for found in alone.categories.values() for what in BESIDE[1:])
    at = shared.categories["evaluation"]
    assert at["gathered weights"] > at["parameters"], "of four devices each has a quarter"
    assert any(found["communication buffers"] for found in shared.categories.values())
    assert shared.categories["saving"]["gathered weights"] == 0


def test_gathered_weights_are_a_category_of_a_plan_and_no_overhead() -> None:
    rates = Roofline.of("H100")
    request = Request(
        tiny("{fsdp: {reshard_after_forward: false}}"), rates.as_device, vocabulary=96, rates=rates, world=4
    )
    observed = observe(request)
    made = describe(request, observed)
    for phase, found in made.phase_memory.items():
        for category in FROM_OTHERS:
            assert found[category] * GIB == pytest.approx(observed.categories[phase][category])
        assert sum(found.values()) == pytest.approx(made.phases[phase])
    assert made.phase_memory["evaluation"]["gathered weights"] > 0
    assert sum(made.overhead.values()) == pytest.approx(made.memory["overhead"])
    alone = plan(Request(tiny(), rates.as_device, vocabulary=96, rates=rates)).memory
    assert list(alone) == [*CATEGORIES, "overhead"]


def test_rounding_is_what_sizes_lack_to_the_allocators_grain() -> None:
    fine, coarse = (seen_of(device=device).categories["saving"] for device in (DEVICE, ACCELERATOR))
    assert 0 < fine["rounding"] < coarse["rounding"]
    exact = [sum(found[c] for c in ("parameters", "optimizer")) for found in (fine, coarse)]
    assert exact[0] == exact[1]


def test_a_plan_sums_up_and_says_where_each_line_of_the_overhead_is_from() -> None:
    rates = Roofline.of("H100")
    made = plan(Request(tiny(), rates.as_device, vocabulary=96, rates=rates))
    assert made.memory == made.phase_memory[made.peak_phase]
    for phase, found in made.phase_memory.items():
        assert sum(found.values()) == pytest.approx(made.phases[phase])
    assert sum(made.overhead.values()) == pytest.approx(made.memory["overhead"])
    assert made.peak_gib == max(made.phases.values())
    assert made.overhead_sources == {what: SOURCES[what] for what in made.overhead}
    assert {"context", "workspaces", "rounding"} <= made.overhead.keys()


def test_compiled_products_are_a_line_where_a_cpu_computes_in_bf16() -> None:
    rates = Roofline.of("H100")
    half, fp32 = (
        plan(Request(tiny(f"{{{t}}}"), DEVICE, vocabulary=96, rates=rates)).overhead
        for t in ("mixed_precision: {}", "")
    )
    shapes = half["kernels"] * GIB / overhead._CPU_PRODUCT  # whole: so many products of different shapes
    assert shapes == int(shapes) >= 10  # projections, feed-forward, head, scores: forward and both backward
    assert "kernels" not in fp32
    assert half["process"] == fp32["process"]


def cpu_kernel(operator: str, *shapes: tuple[int, ...], dtype: str = "fp32") -> Kernel:
    return Kernel(operator, dtype, 0, 0, 0, shapes)


def test_code_counts_operators_once_and_onednn_for_convolutions_and_bf16() -> None:
    def mib(*kernels: Kernel) -> float:
        seen = Observation({"forward": 0}, {}, Counter(kernels), {}, 0, 0, 0, 0)
        return observe_process_overhead(tiny(), seen, DEVICE)["code"] / 2**20

    dense = [cpu_kernel("mm", (8, 8), (8, 8)), cpu_kernel("mm", (4, 4), (4, 4)), cpu_kernel("mul", (8,))]
    assert mib(*dense) == 2 / 16
    layer = [cpu_kernel("convolution", (8,)), cpu_kernel("convolution_backward", (8,))]
    # 11.3 MiB with AVX2 and 11.8 with AVX512 or AMX were measured for the first depthwise convolution and its gradient.
    assert mib(*layer) == pytest.approx(11.5, abs=0.3)
    half = cpu_kernel("mm", (8, 8), (8, 8), dtype="bf16")
    assert mib(half) == 4 + 1 / 16
    assert mib(half, *layer) == mib(*layer) + 1 / 16  # oneDNN's own code once


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "measured"),
    [(256, 32, 4096, 0.5), (1024, 256, 1024, 1.4), (2048, 512, 2048, 2.4), (8192, 768, 768, 1.7), (256, 4096, 32, 0.0)],
)
def test_buffers_of_mkl_agree_with_measured_ones(rows: int, inner: int, columns: int, measured: float) -> None:
    for product in (
        cpu_kernel("mm", (rows, inner), (inner, columns)),
        cpu_kernel("addmm", (columns,), (rows, inner), (inner, columns)),
    ):
        assert overhead._estimate_packing_bytes(product) / 2**20 == pytest.approx(measured, abs=0.5)


def test_a_plan_for_this_machine_says_where_the_heap_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preheat.planning.plan.unavailable_reason", lambda: "no compiler")
    rates = Roofline.of("H100")
    here, there = (plan(Request(tiny(), d, vocabulary=96, rates=rates)) for d in (DEVICE, rates.as_device))
    console = Console(width=200, file=io.StringIO())
    for made in (here, there):
        console.print(build_answer(made, "tiny"))
    assert console.file.getvalue().count("no compiler; torch's own allocator will be used") == 1  # type: ignore[attr-defined]
    assert there.heap is None


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_folder(tmp_path / "a" / "run", resume=False)
    monkeypatch.setattr(
        "os.access", lambda where, _: Path(where) != tmp_path
    )  # root may write wherever modes forbid it
    with pytest.raises(RunError, match="cannot write there"):
        check_folder(tmp_path / "a" / "run", resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_beside_the_steps_is_a_line_where_the_device_is_the_hosts() -> None:
    recipe = override(tiny(), "checkpoint.every=1", "checkpoint.asynchronous=true")
    rates = Roofline.of("H100")
    made = plan(Request(recipe, DEVICE, vocabulary=96, rates=rates))
    states = sum(made.phase_memory["saving"][c] for c in ("parameters", "optimizer"))
    assert made.overhead["saving"] == pytest.approx(states, abs=4096 / GIB)
    assert "saving" not in plan(Request(replace(recipe), rates.as_device, vocabulary=96, rates=rates)).overhead


def test_an_export_compares_in_fp64_up_to_a_size() -> None:
    from preheat.compress.export import verify

    assert overhead.EXACT == verify.EXACT
    rates = Roofline.of("H100")
    on_gpu, on_cpu = (plan(Request(tiny(), d, vocabulary=96, rates=rates)).export for d in (rates.as_device, DEVICE))
    weights = on_cpu["parameters"]
    assert on_gpu["parameters"] + on_gpu["temporary"] == pytest.approx(2 * weights, rel=0.01)
    assert on_cpu["temporary"] == pytest.approx(3 * weights, rel=0.01)
    shared_out = plan(
        Request(override(tiny("{fsdp: {}}"), "parallel.devices=2"), rates.as_device, vocabulary=96, rates=rates)
    )
    assert shared_out.export is None


def test_energy_is_at_most_that_of_boards_at_full_power() -> None:
    prediction = plan_of(values_of(1.0, 8.0, watts=700.0, seconds_total=7200.0, tokens_per_second=1e6))
    energy, unknown = estimate_energy(prediction, 8), estimate_energy(replace(prediction, seconds_total=None), 1)
    assert energy is not None
    assert unknown is not None
    assert vars(energy) == pytest.approx({"kilowatts": 5.6, "million_tokens": 5.6 / 3600, "run": 11.2})
    assert unknown.run is None
    assert estimate_energy(replace(prediction, watts=None), 8) is None


def test_power_is_the_data_sheets_or_stated_and_never_guessed() -> None:
    rates = Roofline(parse_accelerator("memory=24GiB,bandwidth=1008,bf16=165,fp32=20,watts=450,host=31.5"))
    assert (rates.device.watts, rates.device.host) == (450, 31.5e9)
    assert plan(Request(tiny(), rates.as_device, vocabulary=96, rates=rates)).watts == 450
    assert find_accelerator("H100").watts == 700
    assert find_accelerator("GB200").watts is None
    assert all(one.watts is None or 50 < one.watts < 2000 for one in accelerators().values())
    with pytest.raises(RecipeError, match="watts: 'much' is not a power; write a number of watts"):
        parse_accelerator("memory=24GiB,bandwidth=1008,bf16=165,watts=much")


def _crossing(techniques: str, world: int = 1) -> tuple[Observation, dict[tuple[str, bool], int]]:
    seen = seen_of(techniques, device=ACCELERATOR, world=world)
    found: dict[tuple[str, bool], int] = defaultdict(int)
    for kernel, count in seen.kernels.items():
        if kernel.where in ("out", "back"):
            found[kernel.where, kernel.alone] += kernel.bytes_written * count
    return seen, found


def test_what_crosses_the_link_is_counted_where_it_crosses() -> None:
    plain, found = _crossing("{}")
    assert not found
    weights = 4 * plain.parameters
    _, found = _crossing("{optimizer_offload: {}}")
    assert found == pytest.approx({("out", True): weights, ("back", True): weights}, rel=0.001)
    _, found = _crossing("{optimizer_offload: {weights: bf16}}")
    assert found == pytest.approx({("out", True): weights / 2, ("back", True): weights / 2}, rel=0.001)
    _, found = _crossing("{activation_offload: {least_kib: 1}}")
    assert found["out", False] == found["back", False] > 0
    assert found.keys() == {("out", False), ("back", False)}
    seen, found = _crossing(
        "{fsdp: {offload: true}}", world=4
    )  # shares: gathered for each pass, the gradients' sent out once
    assert found["out", False] == pytest.approx(weights / 4, rel=0.02)
    assert found["back", False] == pytest.approx(2 * weights / 4, rel=0.02)
    assert any("adamw" in kernel.operator and kernel.where == "host" for kernel in seen.kernels)
    # A shard is on the device while it is copied into the buffer of the gather, in its own precision.
    half, found = _crossing("{fsdp: {offload: true, gather: bf16}, mixed_precision: {}}", world=4)
    assert found["back", False] == pytest.approx(2 * weights / 4, rel=0.02)
    assert [k for k in half.kernels if k.operator == "_to_copy" and k.where == "host" and k.bytes_read > 4] == []
    # Two gathers in bf16, each with the fp32 shard and its bf16 copy beside the buffer.
    taken = sum(n for number, n, phase in half.log if n > 0 and phase in STEP and half.streams.get(number) == "gather")
    assert taken == pytest.approx(2 * weights / 2 + 2 * (weights + weights / 2) / 4, rel=0.05)


def test_activations_that_come_back_stand_on_the_device_again() -> None:
    away = seen_of("{activation_offload: {least_kib: 1}}", device=ACCELERATOR)
    fetched = sum(k.bytes_written * n for k, n in away.kernels.items() if k.where == "back") / 2  # of two layers
    assert away.peak["backward"] > away.peak["head and loss"] - 4 * 64 * VOCABULARY * 4 + fetched / 2


def test_the_device_waits_for_the_update_on_the_host_and_for_copies_that_outlast_the_computing() -> None:
    def seconds(kernels: dict[Kernel, int], host: float) -> Seconds:
        seen = Observation({}, {}, Counter(kernels), {}, 0, 0, 0, 0)
        return Roofline(parse_accelerator(f"memory=24GiB,bandwidth=1000,bf16=100,host={host}")).seconds(seen)

    def copy(where: Any, size: int, *, alone: bool) -> Kernel:
        return Kernel("a copy", "bf16", 0, size, size, (), 0, where=where, alone=alone)

    work = Kernel("mm", "bf16", 10**12, 10**6, 10**6, ((4096, 4096), (4096, 4096)), 0)
    plain = seconds({work: 3}, 10)
    assert plain.link == 0
    both = {copy("out", 10**9, alone=True): 1, copy("back", 2 * 10**9, alone=True): 1}
    assert seconds({work: 3, **both}, 10).link == pytest.approx(2 / 8), "both ways at once, at 0.8 of the link"
    assert seconds({copy("host", 127 * 10**8, alone=True): 1, **both}, 1000).link == pytest.approx(0.2)
    computing = plain.products + plain.attention + plain.moved
    beside = {copy("out", 10**9, alone=False): 1}
    assert seconds({work: 3, **beside}, 1000).link == 0, "hidden behind the forward pass"
    assert seconds({work: 3, **beside}, 1).link == pytest.approx(1 / 0.8 - computing / 3)
    assert seconds({work: 3, **beside}, 1).total == pytest.approx(plain.total + 1 / 0.8 - computing / 3)
