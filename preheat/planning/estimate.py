"""What a candidate may need, in microseconds of a guess: for the order in which a search looks at candidates, never for its verdicts.

One layer and two are observed on one device with one row; the difference is a layer, the rest embedding, head and loss. Layers, rows and devices
are multiplied and divided from there; what devices send each other is taken from the sizes of weights and hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from preheat.hardware.rates import Rates
from preheat.planning.observe import Observation
from preheat.planning.predict import step_seconds
from preheat.planning.recall import recall
from preheat.planning.recorder import Kernel
from preheat.planning.roofline import Roofline
from preheat.recipe import Batch, Recipe
from preheat.technique import DATA, Axis, Device, ModelFacts, Tag

__all__ = ["Guess", "Look", "guess", "look", "seconds"]


@dataclass(frozen=True)
class Look:
    """What a model needs on one device for one row: of a layer, and of its ends (embedding, head, loss). Bytes and seconds.

    Attributes:
        states: weights, gradients and optimizer states.
        weights: of these.
        kept: what a layer keeps for its backward pass; of the ends whatever else is alive at the peak.
        seconds: forward and backward.
        update: seconds of the optimizer's, whatever the rows.
    """

    states: tuple[float, float]
    weights: tuple[float, float]
    kept: tuple[float, float]
    seconds: tuple[float, float]
    update: tuple[float, float]

    def times(self, other: Look, base: Look) -> Look:
        """This look, changed as `other` is from `base`: two changes that were seen apart, taken together."""

        def by(name: str) -> tuple[float, float]:
            mine, theirs, plain = getattr(self, name), getattr(other, name), getattr(base, name)
            layer, ends = (a * (b / c if c > 0 else 1.0) for a, b, c in zip(mine, theirs, plain, strict=True))
            return layer, ends

        return Look(by("states"), by("weights"), by("kept"), by("seconds"), by("update"))


@dataclass(frozen=True)
class Guess:
    """Of one device: bytes at the peak, seconds of a step, tokens a second of all devices together."""

    bytes: float
    seconds: float
    tokens_per_second: float


def seconds(seen: Observation, rates: Rates | Roofline) -> float:
    """Of one optimizer step, without what a CPU has from the system anew."""
    return rates.seconds(seen).total if isinstance(rates, Roofline) else step_seconds(seen, rates)


def look(
    recipe: Recipe,
    *,
    vocabulary: int | None,
    device: Device,
    rates: Rates | Roofline,
    like: Look | None = None,
    same_layers: bool = False,
) -> Look:
    """Looks at one layer and at two of a model, on one device with one row; and at one with two rows, for which the update is the same.

    Args:
        recipe: with one row, and nothing that shares it out.
        like: a look with the same update, which is not looked at again.
        same_layers: with the same layers too, where only embedding, head and loss differ: then one look is enough.

    Raises:
        RecipeError: the recipe cannot be built.
    """

    def few(layers: int, rows: int = 1) -> Observation:
        model = replace(recipe.model, config={**recipe.model.config, "num_hidden_layers": layers})
        some = replace(recipe, model=model, batch=replace(recipe.batch, size=rows))
        return recall(some, vocabulary=vocabulary, device=device, world=1, how="whole")

    def numbers(seen: Observation) -> tuple[float, float, float, float]:
        at = seen.categories["update"]
        # Also where a backward pass has just ended: the next micro-batch finds its gradients there.
        before = max(
            (seen.categories[phase] for phase in ("forward", "head and loss", "update")), key=lambda c: sum(c.values())
        )
        states = at["parameters"] + at["gradients"] + at["optimizer"]
        alive = sum(before.values()) - before["parameters"] - before["optimizer"]
        return states, at["parameters"], alive, seconds(seen, rates)

    one = few(1)
    states, weights, alive, time = numbers(one)
    if like is not None and same_layers:
        of_layer = [like.states[0], like.weights[0], like.kept[0], like.seconds[0] + like.update[0]]
    else:
        of_layer = [max(b - a, 0.0) for a, b in zip((states, weights, alive, time), numbers(few(2)), strict=True)]
    peak = one.peak[one.peak_phase] - states
    ends = [max(a - b, 0.0) for a, b in zip((states, weights, peak, time), of_layer, strict=True)]
    if like is not None:
        update = like.update
    else:
        whole = max(2 * time - seconds(few(1, rows=2), rates), 0.0)
        update = (whole * of_layer[0] / states, whole * ends[0] / states)
    timed = (max(of_layer[3] - update[0], 0.0), max(ends[3] - update[1], 0.0))
    return Look((of_layer[0], ends[0]), (of_layer[1], ends[1]), (of_layer[2], ends[2]), timed, update)


def guess(
    seen: Look,
    batch: Batch,
    model: ModelFacts,
    sizes: Mapping[Axis, int],
    micros: int,
    tags: frozenset[Tag],
    rates: Rates | Roofline,
) -> Guess:
    """Of a batch on this mesh, a device's rows cut into so many micro-batches.

    Args:
        seen: the same techniques on one device.
        tags: of all techniques.
    """
    pipeline, tensor, context = (sizes[axis] for axis in (Axis.PIPELINE, Axis.TENSOR, Axis.CONTEXT))
    layers, rows = model.layers / pipeline, batch.size / math.prod(sizes[axis] for axis in DATA)
    micro = math.ceil(rows / micros)
    sharded = sizes[Axis.SHARD] * context if Tag("sharded-weights") in tags else 1

    def of_all(pair: tuple[float, float]) -> float:
        return (pair[0] * layers + pair[1]) / tensor

    weights = of_all(seen.weights)
    gathered = 0.0
    if sharded > 1:  # a layer's weights and the next one's, or the ends', which are the largest group
        gathered = (seen.weights[0] + max(seen.weights)) / tensor if Tag("gathers-again") in tags else weights
    flowing = tensor if Tag("sequence-parallel") in tags else 1 + 0.6 * (tensor - 1)  # norms and residuals stay whole
    alive = min(pipeline, micros) * layers * seen.kept[0] / flowing + seen.kept[1] / tensor
    memory = of_all(seen.states) / sharded + gathered + micro * alive / context
    working = rows * (seen.seconds[0] * layers + seen.seconds[1] / pipeline) / (tensor * context)
    waiting, beside = _sent(batch, model, sizes, micros, micro, weights, tags, rates)
    time = (working + waiting + max(beside - working, 0.0)) * (1 + (pipeline - 1) / micros) + of_all(seen.update) / sharded
    return Guess(memory, time, batch.size * batch.length / time)


def _sent(
    batch: Batch,
    model: ModelFacts,
    sizes: Mapping[Axis, int],
    micros: int,
    micro: int,
    weights: float,
    tags: frozenset[Tag],
    rates: Rates | Roofline,
) -> tuple[float, float]:
    """Seconds of a step that stand in the way, and those beside the computing. Nothing is known of the links of a measured machine."""
    if not isinstance(rates, Roofline):
        return 0.0, 0.0
    order = list(Axis)

    def once(kind: str, size: float, axis: Axis) -> float:
        if sizes[axis] == 1:
            return 0.0
        stride = math.prod(sizes[inner] for inner in order[order.index(axis) + 1 :])
        return rates.collective(Kernel(kind, "bf16", 0, int(size), int(size), (), 0, group=(sizes[axis], stride)))

    hidden = micro * batch.length / sizes[Axis.CONTEXT] * model.width * 2
    layers = model.layers / sizes[Axis.PIPELINE]
    waiting = micros * layers * 4 * once("all_reduce", hidden, Axis.TENSOR)
    waiting += micros * layers * 4 * once("all_to_all_single", hidden / sizes[Axis.TENSOR], Axis.CONTEXT)
    half = 0.5 if Tag("bf16-gather") in tags else 1.0
    gathers = micros * (2 if Tag("gathers-again") in tags else 1)
    beside = gathers * once("all_gather_into_tensor", weights * half, Axis.SHARD)
    beside += (micros if Tag("reduces-each") in tags else 1) * once("reduce_scatter_tensor", weights, Axis.SHARD)
    beside += once("all_reduce", weights / sizes[Axis.SHARD], Axis.REPLICATE)
    return waiting, beside
