"""Extrapolates the observation of a deep model from dry runs of few layers.

Only the number of layers is extrapolated, never batch size, sequence length or devices. Allocated bytes are affine in
the number of layers at each place of a step (the first and last two layers, forward and backward, head and loss, the
update). The peak may move from one place to another, so each place is extrapolated separately and the largest is the
peak. Kernel counts are affine.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from preheat.core import STEP, Axis, Device, Phase, Searchable, Technique, conflicts_of
from preheat.engine.builder import list_techniques
from preheat.models import hf
from preheat.models.layer_kinds import layer_kinds
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.dry_run import allocator_rounding, build_dry, categorize_peaks, observe
from preheat.planning.log_extrapolation import extrapolate_log
from preheat.planning.memory.cpu_heap import hold
from preheat.planning.observation import Observation
from preheat.planning.request import Request
from preheat.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.planning.dispatch_recorder import Place
    from preheat.planning.worker_pool import Task

__all__ = [
    "extrapolate_all_layers",
    "find_fullest_ranks",
    "observe_few_layers",
    "set_layers",
    "require_buildable",
    "choose_sampled_layers",
]

# (fewest, apart): the two layer counts. Allocated bytes are affine from 4 layers on; the GPU allocator's reserved
# memory is affine from 8 on, and noisy, so its layer counts are further apart.
FEW, ENOUGH = (4, 1), (8, 4)
_LONGEST_PATTERN = 6  # layers in the longest repeating pattern of layer types
_MOST_SAMPLED = 8  # layers of a sample whose kinds do not repeat: more would take a search longer than they improve it
_ALL = 256  # up to this many layers a model on one CPU is observed in full; more would take minutes


def observe_few_layers(
    request: Request,
    *,
    heap: bool = True,
    quick: bool = False,
    observe_all: Callable[[list[Task]], list[Observation]] | None = None,
) -> Observation:
    """Observes a recipe, extrapolating from two models of few layers if possible.

    Extrapolation needs many identical layers, and a GPU, several devices, or more than 256 layers on one CPU. Otherwise
    this is `observe`; of a pipeline, the rank that needs the most memory.

    An extrapolated observation has no log and no `changes` (they would be those of the few layers). The CPU heap's
    fragmentation is not affine and not in `reserved`, so processes about to run on CPUs (`world` is given) have all
    their layers observed. The reserved memory of a GPU's allocator is extrapolated.

    Args:
        heap: False if the CPU heap's fragmentation is not needed: one CPU is then extrapolated too.
        quick: use half as many layers; the GPU allocator's overhead is then that of the few layers.
        observe_all: observes several argument sets of `observe`; by default one after the other.
    """
    observe_all = observe_all or (lambda calls: [observe(**each) for each in calls])
    recipe, device, config = request.recipe, request.device, request.config
    devices = request.world or recipe.parallel.devices or 1
    cpu = device.kind == "cpu"
    layers, few = (
        config.get_text_config().num_hidden_layers,
        _choose_layer_counts(recipe, config, *(FEW if quick or cpu else ENOUGH)),
    )
    if (
        few is None
        or (cpu and devices == 1 and heap and layers <= _ALL)
        or layers <= sum(few)
        or (cpu and request.world is not None)
    ):
        # The full model is small enough, or its layers are not alike: nothing is extrapolated.
        observations = observe_all([{"request": request, "rank": rank} for rank in find_fullest_ranks(request)])
        return max(observations, key=lambda one: one.peak[one.peak_phase])
    fewer, more = few
    one, two = observe_all([{"request": set_layers(request, count), "by_layer": True} for count in (fewer, more)])
    # Two points determine an affine function; the first observation is its offset, their difference its slope.
    result = _extrapolate(one, two, (layers - fewer) / (more - fewer))
    if not cpu:
        # A CPU's heap is replayed from a log, which an extrapolated observation lacks.
        result.reserved = _extrapolate_reserved(one, two, result, device, layers, None if quick else (fewer, more))
    return result


def extrapolate_all_layers(
    request: Request, observe_logged: Callable[[Request], Observation] | None = None
) -> Observation | None:
    """Observes a recipe for a GPU with all its layers, and the log of their allocations, from two models of few layers.

    The log is that of a dry run of all layers, event by event, but for the order of frees between two allocations. A
    kernel that takes the tensors of all layers at once has their average size, as in `observe_few_layers`.

    Args:
        observe_logged: observes a request by layer, with its log; by default `observe`.

    Returns:
        None if layers are not alike, or if the logs of few do not repeat from layer to layer.
    """
    observe_logged = observe_logged or (lambda few: observe(few, by_layer=True))
    device, layers = request.device, request.config.get_text_config().num_hidden_layers
    few = _choose_layer_counts(request.recipe, request.config)
    if device.kind == "cpu" or few is None or layers <= sum(few):
        return None
    one, two = (observe_logged(set_layers(request, count)) for count in few)
    times = (layers - few[0]) // (few[1] - few[0])
    extrapolated = extrapolate_log(one, two, times, allocator_rounding(device))
    if extrapolated is None:
        return None
    result = _extrapolate(one, two, times)
    result.log, result.streams = extrapolated
    result.reserved = None  # a replay of the log gives it
    return result


def require_buildable(request: Request) -> None:
    """Builds a request's recipe on fake tensors, with few layers if they are alike: a plan without its step.

    Raises:
        RecipeError: the recipe cannot be built; an error that needs values is not found.
    """
    techniques = list_techniques(request.recipe)
    # Settings that the plan chooses: it may choose others than those that conflict.
    undecided = any(isinstance(t, Searchable) and t.left_open(request.device) for t in techniques)
    if undecided and conflicts_of(techniques, request.context):
        return
    few = _choose_layer_counts(request.recipe, request.config)
    build_dry(set_layers(request, few[1]) if few else request)


def find_fullest_ranks(request: Request) -> list[int]:
    """Returns the ranks of which one needs the most memory: several of a pipeline; otherwise all ranks are alike."""
    context = request.context
    devices, pipeline = math.prod(context.sizes.values()), context.sizes[Axis.PIPELINE]
    if pipeline == 1:
        return [0]
    splitting = [t for t in request.recipe.techniques.values() if Axis.PIPELINE in t.degrees()]
    fullest = {device for t in splitting for device in t.fullest_devices(context, request.config)}
    # Pipeline is the outermost axis, so the ranks of a device along it follow those before it.
    return [devices // pipeline * device for device in sorted(fullest)]


def set_layers(request: Request, layers: int) -> Request:
    """Returns the request for the same model with the given number of layers."""
    model = request.recipe.model
    model = replace(model, config={**model.config, "num_hidden_layers": layers})
    return replace(request, recipe=replace(request.recipe, model=model))


def choose_sampled_layers(request: Request) -> tuple[int, int]:
    """Returns two layer counts whose difference is a sample of the model's layers, for estimates.

    The sample is a period of the model's pattern of layers, after the irregular first ones; if nothing repeats, the
    next layers up to one of each kind, at most eight.

    Example:
        >>> from preheat.core import Device
        >>> from preheat.recipe import parse
        >>> recipe = parse("model: {preset: qwen3.5-0.8b}\\nstop: {max_steps: 1}")  # every fourth layer has attention
        >>> choose_sampled_layers(Request(recipe, Device("cpu", "a processor", 2**34)))
        (1, 5)
    """
    kinds = layer_kinds(request.config.get_text_config())
    first, period = _find_pattern(kinds)
    if period > _LONGEST_PATTERN:
        rest = kinds[1:]
        covering = (n for n in range(1, len(rest)) if set(rest[:n]) == set(rest))
        period = min(next(covering, len(rest)), _MOST_SAMPLED)
    return first + 1, first + 1 + period


def _choose_layer_counts(
    recipe: Recipe, config: PretrainedConfig, fewest: int = FEW[0], apart: int = FEW[1]
) -> tuple[int, int] | None:
    """Returns two layer counts, a multiple of the pattern apart; None if layers differ or are selected by number."""
    techniques = list(recipe.techniques.values())
    # A technique's period: checkpointing every second layer has 2.
    period = math.lcm(*(t.period() for t in techniques))
    # The model's period: windows in five of six layers have 6.
    first, turn = _find_pattern(layer_kinds(config.get_text_config()))
    if period > 2 or turn > _LONGEST_PATTERN or "layer_types" in recipe.model.config or config.is_encoder_decoder:
        return None
    period = math.lcm(period, turn)
    # The stages of a pipeline hold different layers, and a module named by its number may not exist in few layers.
    if any(Axis.PIPELINE in t.degrees() or _selects_by_number(t) for t in techniques):
        return None
    layers = config.get_text_config().num_hidden_layers
    # The first layers of some vision models also take features of the vision tower (DeepStack).
    fewest += vision.deep if (vision := hf.read_facts(config).vision) else 0
    # Both models must contain the irregular first layers and as many of the pattern as `FEW` has: with fewer than two
    # layers of experts, for example, the prefetched one is missing from the peak.
    fewest = max(fewest, first + FEW[0])
    # Whole periods apart, so that the difference is the cost of whole periods.
    apart = -(-apart // period) * period
    if layers < fewest + apart:
        return None
    # Both counts must end at the same point of the pattern as the full model does.
    fewer = fewest + (layers - fewest) % period
    return fewer, fewer + apart


def _find_pattern(kinds: Sequence[object]) -> tuple[int, int]:
    """Returns the number of layers before a repeating pattern, and its period: (0, 6) in Gemma 3, (3, 1) in DeepSeek.

    A pattern that does not repeat has the length of all layers.
    """
    for first in range(_LONGEST_PATTERN + 1):
        rest = kinds[first:]
        # The smallest n by which the list can be shifted onto itself.
        period = next((n for n in range(1, _LONGEST_PATTERN + 1) if n < len(rest) and rest[n:] == rest[:-n]), None)
        if period is not None:
            return first, period
    return 0, len(kinds)


def _selects_by_number(technique: Technique) -> bool:
    """True if a setting selects modules by a pattern that may contain layer numbers."""
    values = [getattr(technique, f.name) for f in fields(technique)]
    texts = [text for value in values for text in (value if isinstance(value, list | tuple) else [value])]
    return any(isinstance(text, str) and re.search(r"\.\W*\d|\\d", text) for text in texts)


def _extrapolate(one: Observation, two: Observation, times: float) -> Observation:
    """Adds `times` the difference between two observations to the first."""

    def count_on_rank(a: int, b: int) -> int:
        return round(a + (b - a) * times)

    at = {
        # A category may shrink from one count to the next; extrapolated far, it must not become negative.
        key: {category: max(count_on_rank(size, two.at[key][category]), 0) for category, size in sizes.items()}
        for key, sizes in one.at.items()
    }
    categories = categorize_peaks(at)
    peak = {phase: sum(sizes.values()) for phase, sizes in categories.items()}
    return Observation(
        peak=peak,
        categories=categories,
        kernels=_extrapolate_kernels(one.kernels, two.kernels, count_on_rank),
        flops={dtype: count_on_rank(one.flops.get(dtype, 0), count) for dtype, count in two.flops.items()},
        model_flops=count_on_rank(one.model_flops, two.model_flops),
        parameters=count_on_rank(one.parameters, two.parameters),
        trained=count_on_rank(one.trained, two.trained),
        experts=count_on_rank(one.experts, two.experts),
        tokens=one.tokens,
        passing=count_on_rank(one.passing, two.passing),
        slots=one.slots,
        at=at,
        reserved=max(peak.values()),  # without the CPU heap's fragmentation, which is not affine
        groups=two.groups,
        compiled=two.compiled,
        cudnn=two.cudnn,
        slowed=one.slowed,
        idle=one.idle,
    )


def _training_ranks(peak: Mapping[str, int]) -> list[int]:
    return [size for phase, size in peak.items() if phase in (Phase.LOAD, *STEP)]


def _step_ranks(peak: Mapping[str, int]) -> list[int]:
    return [size for phase, size in peak.items() if phase in STEP]


def _extrapolate_reserved(
    one: Observation, two: Observation, all_: Observation, device: Device, layers: int, counts: tuple[int, int] | None
) -> int:
    """Extrapolates the bytes that the GPU allocator reserves: the peak of all layers plus the extrapolated overhead.

    Segments have fixed sizes and each layer leaves some of them unfilled. In replays of 4 to 32 layers the overhead was
    affine from 8 layers on, except for jumps of one segment. The result is therefore clamped: at least the overhead of
    the larger model, at most the same fraction of the peak.

    Args:
        counts: the two layer counts; None if they are too small and too close for a difference.
    """
    # Allocated bytes: of the two small models and of the extrapolated one.
    peaks = [max(_step_ranks(o.peak)) for o in (one, two, all_)]
    cached = [(o.reserved or hold(o.log, o.streams, device)) - peak for o, peak in zip((one, two), peaks, strict=False)]
    ahead = max(cached)
    if counts:
        fewer, more = counts
        # Linear from the two small models on: overhead(L) = c2 + (c2 - c1) (L - L2) / (L2 - L1).
        ahead = cached[1] + (cached[1] - cached[0]) * (layers - more) // (more - fewer)
        # Clamped, because a difference of one segment would be multiplied by all remaining layers.
        ahead = min(max(ahead, cached[1]), cached[1] * peaks[2] // peaks[1])
    return max(*_training_ranks(all_.peak), peaks[2] + ahead)


def _extrapolate_kernels(one: Counter[Kernel], two: Counter[Kernel], on: Callable[[int, int], int]) -> Counter[Kernel]:
    # Kernels of both models: their counts grow with the layers.
    kernels = Counter({kernel: on(count, two[kernel]) for kernel, count in one.items() if kernel in two})
    # Some kernels take all layers at once (a norm over all gradients): their sizes grow, not their count.
    sums: dict[tuple[str, str, Place, bool], list[list[int]]] = defaultdict(lambda: [[0] * 4, [0] * 4])
    like: dict[tuple[str, str, Place, bool], Kernel] = {}
    # Kernels of one model only, summed by operator: their shapes depend on the number of layers.
    for side, (mine, other) in enumerate(((one, two), (two, one))):
        for kernel in mine.keys() - other.keys():
            key, n = (kernel.operator, kernel.dtype, kernel.where, kernel.alone), mine[kernel]
            values = (1, kernel.flops, kernel.bytes_read, kernel.bytes_written)
            sums[key][side] = [a + n * b for a, b in zip(sums[key][side], values, strict=True)]
            like[key] = kernel
    for key, (first, second) in sums.items():
        count, *sizes = (max(on(a, b), 0) for a, b in zip(first, second, strict=True))
        # Count and total size are extrapolated, and each call gets the average size.
        if count:
            flops, read, written = (size // count for size in sizes)
            kernels[replace(like[key], flops=flops, bytes_read=read, bytes_written=written)] += count
    return kernels
