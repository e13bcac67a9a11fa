"""A model of many layers on many devices, observed by few of its layers: what repeats is counted on.

Only the number of layers is extrapolated, never rows, lengths or devices. Bytes alive are affine in it at each place of
a step (the first and last two layers, forward and backward, the head and its loss, the update), not at its peak, which
may move from one place to another: so each place is carried on by itself, and the largest is the peak. Kernels are
affine in their number.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from preheat.core import STEP, Axis, Device, Phase, Technique
from preheat.engine.builder import context_of
from preheat.models import hf
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.dry_run import Observation, observe, peaks
from preheat.planning.memory.cpu_heap import hold
from preheat.recipe import Recipe

__all__ = ["observe_few", "of_layers"]

# (fewest, apart): two numbers of layers. From 4 on a step's places are affine; what a GPU's allocator keeps is from 8
# on, and its noise asks for a distance.
FEW, ENOUGH = (4, 1), (8, 4)
_LONGEST_TURN = 6  # of layers that differ by a pattern
_ALL = 256  # layers of a model on one CPU that are all observed: more take minutes


def observe_few(
    recipe: Recipe,
    *,
    vocabulary: int | None,
    device: Device,
    world: int | None = None,
    heap: bool = True,
    quick: bool = False,
    see: Callable[[list[dict[str, Any]]], list[Observation]] | None = None,
) -> Observation:
    """`observe`, of a pipeline that end which needs more; by two models of few layers where that says the same: GPUs or several devices, many layers, all of them alike.
    One CPU too from 256 layers on, which would take minutes.

    There is no log then, and what a CPU's heap keeps of freed tensors, which is not affine, is not in `held`: processes
    that are about to run on CPUs (`world` is given) have all their layers observed. What a GPU's allocator keeps is
    carried on too. `changes` are left out, since they would be those of the few layers.

    Args:
        heap: False where what a CPU's heap keeps is not asked for: one is then observed by few layers too.
        quick: by half as many layers: what a GPU's allocator keeps is then what it keeps of those.
        see: observes several things, each by its arguments of `observe`; one after the other when not given.
    """
    see = see or (lambda calls: [observe(**each) for each in calls])
    config = hf.configure(recipe, vocabulary)
    devices = world or recipe.parallel.devices or 1
    cpu = device.kind == "cpu"
    layers, few = config.get_text_config().num_hidden_layers, _few(recipe, config, *(FEW if quick or cpu else ENOUGH))
    kwargs: dict[str, Any] = {"vocabulary": vocabulary, "device": device, "world": world}
    if (
        few is None
        or (cpu and devices == 1 and heap and layers <= _ALL)
        or layers <= sum(few)
        or (cpu and world is not None)
    ):
        ends = _ends(recipe, config, device, world)
        observations = see([{"recipe": recipe, "rank": rank, **kwargs} for rank in ends])
        return max(observations, key=lambda one: one.peak[one.peak_phase])
    fewer, more = few
    one, two = see([{"recipe": of_layers(recipe, count), "by_layer": True, **kwargs} for count in (fewer, more)])
    result = _extrapolate(one, two, (layers - fewer) / (more - fewer))
    if not cpu:
        result.held = _held(one, two, result, device, layers, None if quick else (fewer, more))
    return result


def _ends(recipe: Recipe, config: Any, device: Device, world: int | None) -> list[int]:
    """The devices to look at: of a pipeline the first and the last, which has the head; else all are alike."""
    sizes = context_of(recipe, config, device, world).sizes
    return (
        [0]
        if sizes[Axis.PIPELINE] == 1
        else [0, math.prod(sizes.values()) * (sizes[Axis.PIPELINE] - 1) // sizes[Axis.PIPELINE]]
    )


def of_layers(recipe: Recipe, layers: int) -> Recipe:
    """The same with so many layers."""
    return replace(recipe, model=replace(recipe.model, config={**recipe.model.config, "num_hidden_layers": layers}))


def _few(recipe: Recipe, config: Any, fewest: int = FEW[0], apart: int = FEW[1]) -> tuple[int, int] | None:
    """Two numbers of layers, the distance a multiple of what repeats; None where layers differ, or are told apart by number."""
    techniques = list(recipe.techniques.values())
    period = math.lcm(*(t.period() for t in techniques))
    turn = _turn(getattr(config.get_text_config(), "layer_types", None) or [""])
    if period > 2 or turn > _LONGEST_TURN or "layer_types" in recipe.model.config or config.is_encoder_decoder:
        return None
    period = math.lcm(period, turn)
    if any(Axis.PIPELINE in t.degrees() or _by_number(t) for t in techniques):
        return None
    layers = config.get_text_config().num_hidden_layers
    # The first layers of a model that reads images take features of its tower besides.
    fewest += vision.deep if (vision := hf.facts(config).vision) else 0
    apart = -(-apart // period) * period
    if layers < fewest + apart:
        return None
    fewer = fewest + (layers - fewest) % period
    return fewer, fewer + apart


def _turn(kinds: Sequence[str]) -> int:
    """After how many layers their kinds come again: 2 where each second one has a window, 6 in Gemma 3."""
    return next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])


def _by_number(technique: Technique) -> bool:
    """Whether a setting names modules by patterns in which numbers of layers may stand."""
    values = [getattr(technique, f.name) for f in fields(technique)]
    texts = [text for value in values for text in (value if isinstance(value, list | tuple) else [value])]
    return any(isinstance(text, str) and re.search(r"\.\W*\d|\\d", text) for text in texts)


def _extrapolate(one: Observation, two: Observation, times: float) -> Observation:
    """The first observation, and the difference between the two so many times."""

    def on(a: int, b: int) -> int:
        return round(a + (b - a) * times)

    at = {
        key: {category: max(on(size, two.at[key][category]), 0) for category, size in sizes.items()}
        for key, sizes in one.at.items()
    }
    categories = peaks(at)
    peak = {phase: sum(sizes.values()) for phase, sizes in categories.items()}
    return Observation(
        peak=peak,
        categories=categories,
        kernels=_kernels(one.kernels, two.kernels, on),
        flops={dtype: on(one.flops.get(dtype, 0), count) for dtype, count in two.flops.items()},
        model_flops=on(one.model_flops, two.model_flops),
        parameters=on(one.parameters, two.parameters),
        trained=on(one.trained, two.trained),
        tokens=one.tokens,
        passing=on(one.passing, two.passing),
        slots=one.slots,
        at=at,
        held=max(peak.values()),  # what a CPU's heap keeps of freed tensors is not affine, and left out
        groups=two.groups,
        compiled=two.compiled,
        slowed=one.slowed,
        idle=one.idle,
    )


def _of_training(peak: Mapping[str, int]) -> list[int]:
    return [size for phase, size in peak.items() if phase in (Phase.LOAD, *STEP)]


def _of_step(peak: Mapping[str, int]) -> list[int]:
    return [size for phase, size in peak.items() if phase in STEP]


def _held(
    one: Observation, two: Observation, all_: Observation, device: Device, layers: int, counts: tuple[int, int] | None
) -> int:
    """What the allocator holds: beside the peak of all layers what it keeps of few, and more by what each layer added there.

    Its segments are of fixed sizes, and each layer leaves some of them unfilled: by replays of 4 to 32 layers what is
        kept is affine from 8 on, but for
    jumps of a segment. So at least what the more layers keep, and at most as large a share of the peak.

    Args:
        seen: the two numbers of layers; None where they are too few and too near for a difference.
    """
    peaks = [max(_of_step(o.peak)) for o in (one, two, all_)]
    cached = [(o.held or hold(o.log, o.streams, device)) - peak for o, peak in zip((one, two), peaks, strict=False)]
    ahead = max(cached)
    if counts:
        fewer, more = counts
        ahead = cached[1] + (cached[1] - cached[0]) * (layers - more) // (more - fewer)
        ahead = min(max(ahead, cached[1]), cached[1] * peaks[2] // peaks[1])
    return max(*_of_training(all_.peak), peaks[2] + ahead)


def _kernels(one: Counter[Kernel], two: Counter[Kernel], on: Any) -> Counter[Kernel]:
    kernels = Counter({kernel: on(count, two[kernel]) for kernel, count in one.items() if kernel in two})
    # Others take all layers at once, such as a norm over all gradients: their sizes grow, not their number.
    sums: dict[Any, list[list[int]]] = defaultdict(lambda: [[0] * 4, [0] * 4])
    like: dict[Any, Kernel] = {}
    for side, (mine, other) in enumerate(((one, two), (two, one))):
        for kernel in mine.keys() - other.keys():
            key, n = (kernel.operator, kernel.dtype, kernel.where, kernel.alone), mine[kernel]
            values = (1, kernel.flops, kernel.bytes_read, kernel.bytes_written)
            sums[key][side] = [a + n * b for a, b in zip(sums[key][side], values, strict=True)]
            like[key] = kernel
    for key, (first, second) in sums.items():
        count, *sizes = (max(on(a, b), 0) for a, b in zip(first, second, strict=True))
        if count:
            flops, read, written = (size // count for size in sizes)
            kernels[replace(like[key], flops=flops, bytes_read=read, bytes_written=written)] += count
    return kernels
