"""Plan of a recipe: predicted memory and speed, from a dry run and the measured rates of the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from preheat.core import Searchable, Stage, Tag, Technique
from preheat.core.plan import Interval, Parameters, Plan, SpeedNow
from preheat.errors import RecipeError
from preheat.hardware.cpu_allocator import unavailable_reason
from preheat.hardware.plausibility import doubt_without_data_sheet, find_data_sheet
from preheat.hardware.rates import Present
from preheat.models import moe
from preheat.planning.dry_run import observe
from preheat.planning.layer_extrapolation import observe_few_layers
from preheat.planning.memory.overhead import SOURCES, estimate_export, needs_allocator_retries, observe_process_overhead
from preheat.planning.observation import CATEGORIES, FROM_OTHERS, Observation
from preheat.planning.recurrent_kernels import list_packages
from preheat.planning.request import Request
from preheat.planning.speed.kernel_sizes import find_faster_sizes, list_free_sizes
from preheat.planning.speed.roofline import Roofline, Seconds
from preheat.planning.speed.step_time import estimate_step_seconds, find_limiting_host
from preheat.planning.speed.time_by_kind import split_step
from preheat.recipe import Recipe

__all__ = ["count_steps", "describe", "find_settled", "plan", "resolve_auto"]

GIB = 2**30

# Measured over predicted, of nine in ten. On a CPU of the recipes of benchmarks/results/plan_vs_measured.json and
# plan_vs_measured-drawn.md, on accelerators of the catalogue of published runs (benchmarks/results/published.md).
_MEMORY = {"measured": (0.9, 1.1), "catalogue": (0.88, 1.12), "catalogue, little known": (0.8, 1.4)}
# The host of a device of the catalogue is not known: one took 4.7 times as long for an operator as another.
_SPEED = {
    "measured": (0.65, 1.2),
    "catalogue": (0.67, 1.17),
    "catalogue, little known": (0.53, 1.6),
    "catalogue, unknown host": (0.2, 1.6),
}
_WELL_MEASURED = ("ampere", "hopper", "ada")  # generations with many published measurements
# Parameters below which launch overhead may dominate a step, and fixed costs of a framework may dominate memory.
_SMALL = 10**9
# Of a step's time that the device waits for the host, above which the host decides the speed.
_BY_HOST = 0.3


# Of the device's memory: closer to it, few layers do not decide whether a plan fits, and all are observed.
_CLOSE = 0.02


def _interval_keys(observation: Observation, spent: Seconds, rates: Roofline) -> tuple[str, str]:
    """Returns the keys of the intervals of memory and speed.

    Less is known of small models and of accelerators with few measurements; of speed also if a pipeline has a bubble or
    the host link is used, and least if the host decides.
    """
    little = observation.parameters < _SMALL or rates.device.generation not in _WELL_MEASURED
    names = ("catalogue", "catalogue, little known")
    if spent.host > _BY_HOST * spent.total:
        return names[little], "catalogue, unknown host"
    return names[little], names[bool(little or spent.idle or spent.link)]


def count_steps(recipe: Recipe, rows: int | None) -> int | None:
    """Returns the optimizer steps of the whole run; None if only time limits it, or if epochs need unknown rows."""
    stop, batch = recipe.stop, recipe.batch
    limits = []
    if stop.max_steps:
        limits.append(stop.max_steps)
    if stop.tokens:
        limits.append(math.ceil(stop.tokens / (batch.size * batch.seq_len)))
    if stop.epochs and rows:
        limits.append(max(1, math.ceil(stop.epochs * rows / batch.size)))
    return min(limits) if limits else None


def plan(request: Request) -> Plan:
    """Predicts the memory per device and the speed of a recipe, extrapolated from few layers if possible.

    Raises:
        RecipeError: the recipe cannot be built.
    """
    # Few layers first: seconds, whatever the depth of the model.
    observation = observe_few_layers(request)
    result = describe(request, observation)
    # Extrapolation errs by less than this margin, so only close verdicts need all layers.
    near = abs(result.peak_gib / result.available_gib - 1) < _CLOSE
    if not observation.log and (near or needs_allocator_retries(observation, request.room)):
        result = describe(request, observe(request))
    return result


def resolve_auto(request: Request) -> Request:
    """Resolves the settings that the recipe's techniques leave to the planner (`Searchable.resolve_auto`)."""
    # Compilation first: compiled layers save fewer activations, which decides recomputation and micro-batch size.
    techniques = request.recipe.techniques
    # In turn, so that each choice is planned with those before it.
    for name in sorted(techniques, key=lambda name: (type(techniques[name]).stage != Stage.COMPILE, name)):
        context, technique = request.context, request.recipe.techniques[name]
        if isinstance(technique, Searchable):

            def plan_with(other: Technique, name: str = name, request: Request = request) -> Plan:
                return plan(_add_technique(request, name, other))

            request = _add_technique(request, name, technique.resolve_auto(context, plan_with))
    return request


def find_settled(as_written: Recipe, resolved: Recipe) -> dict[str, object]:
    """Returns {technique.setting: value} of the settings that `resolve_auto` chose."""
    return {
        f"{name}.{key}": value
        for name, t in resolved.techniques.items()
        for key, value in vars(t).items()
        if key != "on_gpu" and value != getattr(as_written.techniques[name], key)
    }


def _add_technique(request: Request, name: str, technique: Technique) -> Request:
    recipe = request.recipe
    return replace(request, recipe=replace(recipe, techniques={**recipe.techniques, name: technique}))


def _estimate_speed_now(present: Present, tokens: int, seconds: float) -> SpeedNow:
    """Returns the speed now of a step that takes `seconds` if it has the machine to itself."""
    return SpeedNow(tokens / seconds * present.share, seconds / present.share, present.machine)


def _convert_to_gib(sizes: Mapping[str, int], added: int, categories: Sequence[str]) -> dict[str, float]:
    """Returns GiB by category; the allocator's rounding and `added` bytes count as overhead."""
    return {c: sizes[c] / GIB for c in categories} | {"overhead": (sizes["rounding"] + added) / GIB}


def count_active_parameters(request: Request, observation: Observation) -> int:
    """Returns the weights that compute for a token: all but those of the experts that it is not sent to."""
    count, chosen, _ = moe.sizes_of(request.config.get_text_config())
    return observation.parameters - (round(observation.experts * (1 - chosen / count)) if count else 0)


def describe(request: Request, observation: Observation) -> Plan:
    """Turns an observation into a plan."""
    recipe, device, rates = request.recipe, request.room, request.rates
    assert rates is not None, "a plan needs the rates of its device"
    # Memory = tensors of the dry run at the peak + overhead of the process.
    more = observe_process_overhead(recipe, observation, device)
    added = sum(more.values())
    # The same categories in all phases; those of several devices only if there are any.
    others = [c for c in FROM_OTHERS if any(sizes[c] for sizes in observation.categories.values())]
    categories = (*CATEGORIES, *others)
    phases = {phase: _convert_to_gib(sizes, added, categories) for phase, sizes in observation.categories.items()}
    lines = {"rounding": observation.categories[observation.peak_phase]["rounding"]} | more
    exported = estimate_export(recipe, observation, device)
    lines = {line: size for line, size in lines.items() if size}
    peak = (observation.peak[observation.peak_phase] + added) / GIB
    # A limit may be below what the process already holds; at least 1 byte, because plans divide by this.
    available = max(request.device.memory - request.in_use, 1) / GIB
    sheet = rates.device if isinstance(rates, Roofline) else find_data_sheet(rates)
    if isinstance(rates, Roofline):
        spent = rates.seconds(observation)
        seconds, (of_memory, of_speed) = spent.total, _interval_keys(observation, spent, rates)
        host, doubt = rates.limiting_host(observation), rates.doubt
        faster = find_faster_sizes(observation, rates, seconds, list_free_sizes(recipe, request.config))
    else:
        seconds, of_memory, of_speed = estimate_step_seconds(observation, rates), "measured", "measured"
        host, doubt = find_limiting_host(observation, rates), doubt_without_data_sheet(rates)
        faster = ()
    # MFU is relative to the rate of the dtype that the recipe's matmuls compute in.
    tags = frozenset[Tag]().union(*(t.provided() for t in recipe.techniques.values()))
    by_tag = {Tag.BF16_COMPUTE: "bf16", Tag.FP16_COMPUTE: "fp16", Tag.TF32_PRODUCTS: "tf32"}
    dtype = next((dtype for tag, dtype in by_tag.items() if tag in tags), "fp32")
    if dtype == "fp16" and dtype not in rates.peak_matrix_rate:  # a CPU's, which is not measured
        dtype = "fp32"
    ceiling = rates.peak_matrix_rate.get(dtype)
    if not ceiling:
        raise RecipeError(
            f"--gpu: {device.name} has no rate for {dtype}, in which the recipe computes; add {dtype}=TFLOP/s"
        )
    steps = count_steps(recipe, request.rows)
    start = math.fsum(t.startup_seconds(device) for t in recipe.techniques.values())
    # Without steps or hours the length of the run is unknown: None.
    total = seconds * steps + start if steps else float((recipe.stop.hours or 0) * 3600) or None
    speed = observation.tokens / seconds
    fp32_rate = rates.peak_matrix_rate.get("fp32", 0.0)
    return Plan(
        peak_gib=peak,
        peak_gib_interval=Interval.from_spread(peak, _MEMORY[of_memory]),
        available_gib=available,
        in_use_gib=request.in_use / GIB,
        allocator_retries=peak <= available and needs_allocator_retries(observation, device),
        memory=phases[observation.peak_phase],
        overhead={line: size / GIB for line, size in lines.items()},
        overhead_sources={line: SOURCES[line] for line in lines},
        allocated_gib=observation.peak[observation.peak_phase] / GIB,
        reserved_gib=(observation.peak[observation.peak_phase] + more["allocator"]) / GIB,
        phases={phase: (size + added) / GIB for phase, size in observation.peak.items()},
        phase_memory=phases,
        export=exported
        and _convert_to_gib(
            exported, sum(size for line, size in more.items() if line not in ("allocator", "saving")), categories
        ),
        peak_phase=observation.peak_phase,
        seconds_per_step=seconds,
        tokens_per_second=speed,
        tokens_per_second_interval=Interval.from_spread(speed, _SPEED[of_speed]),
        mfu=observation.model_flops / seconds / ceiling,
        matrix_rate=ceiling,
        fp32_rate=fp32_rate if dtype == "bf16" and fp32_rate > 1.2 * ceiling else None,
        flops_per_step=float(sum(observation.flops.values())),
        model_flops_per_step=float(observation.model_flops),
        tokens_per_step=observation.tokens,
        parameters=Parameters(
            observation.parameters, count_active_parameters(request, observation), observation.trained
        ),
        steps=steps,
        seconds_to_start=start,
        seconds_total=total,
        slots=observation.slots,
        packages=tuple(list_packages(observation)),
        device=request.device,
        watts=sheet.watts if sheet else None,
        contended=rates.contended,
        pace=rates.pace,
        now=None if rates.now is None else _estimate_speed_now(rates.now, observation.tokens, seconds),
        devices=request.devices,
        heap=unavailable_reason() if device.kind == "cpu" and device.at_hand else None,
        host=host,
        split=split_step(
            observation,
            rates,
            seconds,
            length=recipe.batch.seq_len,
            vocabulary=request.config.get_text_config().vocab_size,
        ),
        faster_sizes=faster,
        doubt=doubt,
    )
