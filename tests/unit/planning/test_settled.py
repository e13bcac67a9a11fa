"""What recipes leave to a plan: compiling, what is computed again and micro-batches on a GPU; nothing of it on a CPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import preheat
from preheat import recipe as recipes
from preheat.core.plan import Plan
from preheat.engine.builder import build, build_context
from preheat.errors import RecipeError
from preheat.hardware.probe import probe
from preheat.models import hf
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.observation import Observation
from preheat.planning.plan import resolve_auto
from preheat.planning.request import Request
from preheat.planning.search.candidates import Space
from preheat.planning.speed.roofline import Roofline
from preheat.recipe import Stop
from preheat.techniques.activation_checkpointing import ActivationCheckpointing
from preheat.techniques.compile import Compile
from preheat.techniques.gradient_accumulation import GradientAccumulation
from tests.conftest import DEVICE, tiny
from tests.unit.plans import plan_of, values_of

GPU = Roofline.of("H100").as_device


def context(techniques: str, device: Any = GPU, **batch: int) -> Any:
    recipe = tiny(techniques)
    recipe = replace(recipe, batch=replace(recipe.batch, **batch))
    return build_context(recipe, hf.configure(recipe, 96), device)


def plans(**of: tuple[float, float, float | None]) -> Any:
    """Plans by `when` or `mode`: (share of the memory, seconds a step, seconds of the whole run)."""

    def plan(other: Any) -> Plan:
        share, seconds, total = of[getattr(other, "when", None) or other.mode]
        start = 60.0 if getattr(other, "when", "") == "always" else 0.0
        times = {"seconds_per_step": seconds, "tokens_per_second": 1 / seconds, "seconds_total": total}
        return plan_of(values_of(share, 1.0, **times, seconds_to_start=start))

    return plan


@pytest.mark.parametrize(
    ("never", "always", "chosen"),
    [
        ((0.5, 1.0, 100.0), (0.5, 0.7, 130.0), "never"),  # 100 steps
        ((0.5, 1.0, 1000.0), (0.5, 0.7, 760.0), "always"),
        ((0.5, 1.0, None), (0.5, 0.7, None), "always"),  # nobody knows how long the run is
        ((0.5, 1.0, 150.0), (0.5, 0.7, 150.0), "never"),  # 150 s end it: 150 tokens, or 90 / 0.7
        ((0.5, 1.0, 3600.0), (0.5, 0.7, 3600.0), "always"),
        ((1.1, 1.0, 100.0), (0.9, 0.7, 130.0), "always"),  # only compiled layers fit
    ],
)
def test_layers_are_compiled_where_the_run_ends_sooner_so(never: Any, always: Any, chosen: str) -> None:
    found = Compile(when="auto").resolve_auto(context("{compile: {when: auto}}"), plans(never=never, always=always))
    assert isinstance(found, Compile)
    assert found.when == chosen


@pytest.mark.parametrize(
    ("techniques", "device"),
    [
        ("{compile: {when: auto}}", probe("cpu")),
        ("{compile: {when: auto}, fused_operators: {}}", GPU),  # gives way to what excludes it
        ("{compile: {when: auto}, length_curriculum: {lengths: [8]}}", GPU),  # a graph for each shape
    ],
)
def test_nothing_is_compiled_or_planned_where_it_cannot_serve(techniques: str, device: Any) -> None:
    def plan(other: Any) -> Any:
        raise AssertionError("nothing is to be planned")

    found = Compile(when="auto").resolve_auto(context(techniques, device), plan)
    assert found == Compile(when="never")


def test_what_is_left_to_a_plan_changes_no_number_on_a_cpu() -> None:
    auto = "{gradient_accumulation: {steps: 2, on_gpu: auto}, compile: {when: auto}}"
    cpu = probe("cpu")
    recipe = resolve_auto(Request(tiny(auto), cpu, vocabulary=96)).recipe  # type: ignore[arg-type]  # nothing is planned
    assert recipe.techniques["gradient_accumulation"] == GradientAccumulation(steps=2)
    made = build(recipe, vocabulary=96, device=cpu)
    assert made.state.accumulation == 2
    assert "uncompiled" in made.changes["compile"][0].what
    assert "recompilations" not in made.state.counters


@pytest.mark.parametrize(
    ("none", "selective", "full", "mode"),
    [
        ((0.9, 1.0, None), (0.5, 1.1, None), (0.3, 1.3, None), "none"),
        ((0.95, 1.0, None), (0.5, 1.1, None), (0.3, 1.3, None), "selective"),
        (
            (1.5, 1.0, None),
            (0.8, 1.4, None),
            (0.3, 1.3, None),
            "full",
        ),  # small layers, where Python decides what is kept
        ((1.5, 1.0, None), (1.4, 1.4, None), (1.3, 1.3, None), "full"),  # as stated
    ],
)
def test_no_more_is_computed_again_than_memory_asks_for(none: Any, selective: Any, full: Any, mode: str) -> None:
    stated = ActivationCheckpointing(on_gpu="auto")
    found = stated.resolve_auto(
        context("{activation_checkpointing: {on_gpu: auto}}"), plans(none=none, selective=selective, full=full)
    )
    assert found == ActivationCheckpointing(mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "fitting", "steps"),
    [(1024, 8, 2), (4096, 8, 8), (1024, 2, 8), (16384, 1, 16), (1024, 0, 16)],  # of 16 rows
)
def test_a_gpu_s_micro_batch_has_8192_tokens_if_they_fit(length: int, fitting: int, steps: int) -> None:
    def plan(other: GradientAccumulation) -> Plan:
        return plan_of(values_of(16 / other.steps, fitting / 0.9))

    where = context("{gradient_accumulation: {steps: 4, on_gpu: auto}}", size=16, seq_len=length)
    assert GradientAccumulation(steps=4, on_gpu="auto").resolve_auto(where, plan) == GradientAccumulation(steps=steps)


def test_a_search_decides_what_the_recipe_leaves_open() -> None:
    recipe = tiny("{gradient_accumulation: {steps: 2, on_gpu: auto}, compile: {when: auto}, lora: {}}")
    space = Space(Request(recipe, GPU, vocabulary=96, world=1), "exact")
    assert set(space.recipe.techniques) == {"lora"}
    assert {"compile", "gradient_accumulation"} <= {cls.name() for cls in space.searched()}
    assert space.is_allowed(Compile())  # as the recipe does, although it rounds
    assert set(Space(Request(recipe, probe("cpu"), vocabulary=96, world=1), "exact").recipe.techniques) == {
        "gradient_accumulation",
        "compile",
        "lora",
    }


def test_built_in_recipes_compile_on_a_gpu_unless_the_run_is_short() -> None:
    rates = Roofline.of("H100")
    recipe = recipes.load("fine-tune")
    for rows, when in ((20_000, "always"), (200, "never")):
        found = resolve_auto(Request(recipe, rates.as_device, vocabulary=151_936, rates=rates, rows=rows)).recipe
        assert isinstance(compiled := found.techniques["compile"], Compile)
        assert compiled.when == when
        assert found.techniques["gradient_accumulation"] == GradientAccumulation(steps=2)  # 8 rows of 1,024


def test_a_plan_without_room_for_its_error_says_so() -> None:
    from io import StringIO

    from rich.console import Console

    from preheat.cli.views.console import build_answer
    from preheat.planning.plan import plan

    rates = Roofline.of("H100")
    whole = plan(Request(tiny("{}"), rates.as_device, vocabulary=96, rates=rates))

    def told(available: float) -> str:
        page = StringIO()
        Console(file=page, width=300).print(build_answer(replace(whole, available_gib=available), "tiny"))
        return page.getvalue()

    assert "little room" in told(whole.peak_gib / 0.98)
    assert "little room" not in told(whole.peak_gib * 2)


def test_lengths_over_two_orders_of_magnitude_have_bars_of_equal_ratios() -> None:
    import numpy as np

    from preheat.data.preview import _summarize_lengths

    sizes = np.array([3, 5, 9, 20, 40, 80, 160, 320, 640, 1000])
    bars = _summarize_lengths(sizes, 1024)["bars"]
    assert sum(bar["count"] for bar in bars) == 10
    assert max(bar["count"] for bar in bars) <= 2  # of equal width the first would hold 5
    assert bars[0]["from"] <= 3
    for same in (np.full(4, 7), np.full(4, 90)):  # all alike, and all longer than a row by half
        assert sum(bar["count"] for bar in _summarize_lengths(same, 32)["bars"]) == 4
    even = _summarize_lengths(np.arange(100, 200), 1024)["bars"]
    assert {bar["to"] - bar["from"] for bar in even} <= {7, 8}


def test_the_roof_is_the_rate_of_the_recipe_s_dtype() -> None:
    from preheat.planning.dry_run import observe
    from preheat.planning.explain import _build_roofline

    rates = Roofline.of("H100")
    seen = observe(Request(tiny("{}"), rates.as_device, vocabulary=96))
    assert _build_roofline(seen, rates, 5.0).peak == 5.0


def test_attention_is_drawn_at_the_rate_of_its_unmasked_products() -> None:
    from preheat.planning.explain import _build_roofline

    rates = Roofline.of("H100")
    kernel = Kernel("_scaled_dot_product_flash_attention", "bf16", 10**14, 1, 1, ((1, 8, 8192, 128),))
    seen = Observation({}, {}, Counter({kernel: 1}), {}, 0, 0, 0, 0)
    (point,) = _build_roofline(seen, rates, rates.peak_matrix_rate["bf16"]).points
    assert point.flops == pytest.approx(0.38 * rates.peak_matrix_rate["bf16"], rel=0.01)  # FlashAttention-2 on an H100


def test_a_search_keeps_the_settings_of_a_technique_that_is_left_open() -> None:
    recipe = tiny("{mixed_precision: {}, compile: {when: auto, dynamic: true, limit: 4, fullgraph: false}}")
    device = Roofline.of("H100").as_device
    space = Space(Request(recipe, device, vocabulary=96, world=1), "rounding")
    (compiled,) = space.settings_of(Compile).options(build_context(space.recipe, space.request.config, device))
    assert compiled == Compile(when="always", dynamic=True, limit=4, fullgraph=False)


def test_settings_of_what_does_nothing_are_refused() -> None:
    for techniques, reason in (
        ("{activation_checkpointing: {mode: none, budget: 0.5}}", "budget: 0.5 with mode: none"),
        ("{activation_checkpointing: {mode: none, every: 2}}", "every: 2 with mode: none"),
        ("{compile: {when: never, limit: 4}}", "when: never compiles nothing"),
    ):
        with pytest.raises(RecipeError, match=reason):
            build(tiny(techniques), vocabulary=96, device=DEVICE)


def test_a_recipe_made_in_python_is_checked_before_anything_is_done(tmp_path: Path) -> None:
    for bad in ({"stop": Stop()}, {"data": replace(tiny("{}").data, source=())}):
        recipe = replace(tiny("{}"), **bad)
        with pytest.raises(RecipeError, match=r"no stopping condition|data\.source: is empty"):
            preheat.plan(recipe)
        with pytest.raises(RecipeError, match=r"no stopping condition|data\.source: is empty"):
            preheat.train(recipe, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
