"""Fast estimates of memory and speed, which order the candidates of a search; verdicts come from dry runs.

Dry runs of one layer and of two, on one device with one sequence, give the cost of a layer (their difference) and of
the ends (embedding, head, loss). An estimate scales these by layers, rows and devices, and computes the communication
from the sizes of weights and hidden states.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from preheat.core import DATA, Axis, ModelFacts, Phase, Tag
from preheat.errors import RecipeError
from preheat.hardware.rates import Rates
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.layer_extrapolation import of_layers
from preheat.planning.observation import Observation
from preheat.planning.observation_cache import observe_cached
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline
from preheat.planning.speed.step_time import step_seconds
from preheat.recipe import Batch

__all__ = ["Guess", "LayerCost", "estimate", "observe_layer", "seconds"]


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer and of the ends (embedding, head, loss), on one device for one sequence, in bytes and seconds.

    Each attribute is a pair (layer, ends).

    Attributes:
        states: weights, gradients and optimizer states.
        weights: the weights alone.
        saved: activations that a layer saves for backward; for the ends everything else that is alive at the peak.
        seconds: forward and backward.
        update: optimizer update, which does not depend on the batch size.
    """

    states: tuple[float, float]
    weights: tuple[float, float]
    saved: tuple[float, float]
    seconds: tuple[float, float]
    update: tuple[float, float]

    def with_change(self, other: LayerCost, base: LayerCost) -> LayerCost:
        """Applies the change from `base` to `other` to this cost: combines two changes that were observed separately.

        Bytes change by the difference, because savings are independent of each other; seconds change by the ratio.
        """

        def by(name: str) -> tuple[float, float]:
            triples = zip(getattr(self, name), getattr(other, name), getattr(base, name), strict=True)
            if name in ("seconds", "update"):
                layer, ends = (a * (b / c if c > 0 else 1.0) for a, b, c in triples)
            else:
                layer, ends = (max(a + b - c, 0.0) for a, b, c in triples)
            return layer, ends

        return LayerCost(by("states"), by("weights"), by("saved"), by("seconds"), by("update"))


@dataclass(frozen=True)
class Guess:
    """Estimate of a candidate: peak bytes of a device, seconds per step, tokens/s of all devices together."""

    bytes: float
    seconds: float
    tokens_per_second: float


def seconds(observation: Observation, rates: Rates | Roofline) -> float:
    """Returns the seconds of one optimizer step."""
    return rates.seconds(observation).total if isinstance(rates, Roofline) else step_seconds(observation, rates)


def _of_update(observation: Observation, rates: Rates | Roofline) -> float:
    """Returns the device seconds of the update; the host launches its kernels while earlier ones still run."""
    only = replace(
        observation, kernels=Counter({kernel: n for kernel, n in observation.kernels.items() if kernel.alone})
    )
    if isinstance(rates, Roofline):
        parts = rates.seconds(only)
        return parts.total - parts.host
    return step_seconds(only, rates)


def observe_layer(request: Request, *, layer: LayerCost | None = None) -> LayerCost:
    """Observes the model with one layer and with two, on one device with one sequence.

    Args:
        request: for one device, with batch size 1 and no parallelism (`Space.single`).
        layer: cost of the same layers, if only embedding, head and loss differ: one dry run is then enough.

    Raises:
        RecipeError: the recipe cannot be built.
    """
    rates = request.rates
    assert rates is not None, "an estimate needs the rates of its device"

    def numbers(layers: int) -> tuple[float, ...]:
        # `step`: an estimate needs neither evaluation nor checkpoints.
        observation = observe_cached(of_layers(request, layers), how="step")
        at = observation.categories[Phase.UPDATE]
        update = _of_update(observation, rates)
        states = at["parameters"] + at["gradients"] + at["optimizer"]
        return states, at["parameters"], observation.passing, max(seconds(observation, rates) - update, 0.0), update

    fewest = 1
    try:
        first = numbers(fewest)
    except RecipeError:  # a setting that leaves the last layer as it is has no effect on one
        first = numbers(fewest := 2)
    if layer is not None:
        of_layer = [layer.states[0], layer.weights[0], layer.saved[0], layer.seconds[0], layer.update[0]]
    else:
        of_layer = [max(b - a, 0.0) for a, b in zip(first, numbers(fewest + 1), strict=True)]
    ends = [max(a - fewest * b, 0.0) for a, b in zip(first, of_layer, strict=True)]
    return LayerCost(*zip(of_layer, ends, strict=True))


def estimate(
    cost: LayerCost,
    batch: Batch,
    model: ModelFacts,
    sizes: Mapping[Axis, int],
    micros: int,
    tags: frozenset[Tag],
    rates: Rates | Roofline,
    idle: float = 0.0,
) -> Guess:
    """Estimates a step on a mesh.

    Args:
        cost: cost of the same techniques on one device.
        micros: micro-batches per device.
        tags: tags of all techniques.
        idle: the pipeline's bubble, a fraction of the time in which a device works.
    """
    pipeline, tensor, context = (sizes[axis] for axis in (Axis.PIPELINE, Axis.TENSOR, Axis.CONTEXT))
    # Layers of this stage, and rows of this data-parallel rank.
    layers, rows = model.layers / pipeline, batch.size / math.prod(sizes[axis] for axis in DATA)
    micro = math.ceil(rows / micros)
    # Ranks of context parallelism hold the same weights, so FSDP shards across them, too.
    sharded = sizes[Axis.SHARD] * context if Tag.SHARDED_WEIGHTS in tags else 1

    def of_all(pair: tuple[float, float]) -> float:
        return (pair[0] * layers + pair[1]) / tensor

    weights = of_all(cost.weights)
    # fp32 weights are gathered as bf16; the modes with an update of their own hold half-precision weights already.
    half = 0.5 if Tag.BF16_ALL_GATHER in tags and Tag.ELEMENTWISE_UPDATE not in tags else 1.0
    gathered = 0.0
    if sharded > 1:  # the weights of a layer and of the next one, or of the ends, the largest FSDP group
        again = Tag.RESHARD_AFTER_FORWARD in tags
        gathered = half * ((cost.weights[0] + max(cost.weights)) / tensor if again else weights)
        if micros > 1 and Tag.REDUCE_EACH_MICRO_BATCH not in tags:
            gathered += half * weights  # unsharded gradients accumulate until the last micro-batch
    flowing = tensor if Tag.SEQUENCE_PARALLEL in tags else 1 + 0.6 * (tensor - 1)  # norms and residuals are replicated
    # A stage of 1F1B holds the activations of at most as many micro-batches as there are stages.
    alive = min(pipeline, micros) * layers * cost.saved[0] / flowing + cost.saved[1] / tensor
    # Bytes: states + gathered weights + activations of a micro-batch.
    memory = of_all(cost.states) / sharded + gathered + micro * alive / context
    # Seconds: computation + exposed communication, times the pipeline's bubble, plus the update.
    working = rows * (cost.seconds[0] * layers + cost.seconds[1] / pipeline) / (tensor * context)
    waiting, hidden = _sent(batch, model, sizes, micros, micro, weights, half, tags, rates)
    time = (working + waiting + max(hidden - working, 0.0)) * (1 + idle) + of_all(cost.update) / sharded
    return Guess(memory, time, batch.size * batch.seq_len / time)


def _sent(
    batch: Batch,
    model: ModelFacts,
    sizes: Mapping[Axis, int],
    micros: int,
    micro: int,
    weights: float,
    half: float,
    tags: frozenset[Tag],
    rates: Rates | Roofline,
) -> tuple[float, float]:
    """Returns the seconds of exposed and of overlapped communication; zeros for a measured machine (unknown links).

    Args:
        weights: bytes of this stage's weights, of which the fraction `half` is gathered.
    """
    if not isinstance(rates, Roofline):
        return 0.0, 0.0
    order = list(Axis)

    def once(kind: str, size: float, axis: Axis) -> float:
        if sizes[axis] == 1:
            return 0.0
        # Ranks along an axis are as far apart as the product of the axes inside of it.
        stride = math.prod(sizes[inner] for inner in order[order.index(axis) + 1 :])
        return rates.collective(Kernel(kind, "bf16", 0, int(size), int(size), (), group=(sizes[axis], stride)))

    # Bytes of the hidden states of a micro-batch in bf16.
    hidden = micro * batch.seq_len / sizes[Axis.CONTEXT] * model.width * 2
    layers = model.layers / sizes[Axis.PIPELINE]
    # Megatron (arXiv:1909.08053): two all-reduces per layer in forward and two in backward.
    waiting = micros * layers * 4 * once("all_reduce", hidden, Axis.TENSOR)
    waiting += micros * layers * 4 * once("all_to_all_single", hidden / sizes[Axis.TENSOR], Axis.CONTEXT)
    # Resharded weights are gathered once for forward and once for backward.
    gathers = micros * (2 if Tag.RESHARD_AFTER_FORWARD in tags else 1)
    overlapped = gathers * once("all_gather_into_tensor", weights * half, Axis.SHARD)
    overlapped += (micros if Tag.REDUCE_EACH_MICRO_BATCH in tags else 1) * once(
        "reduce_scatter_tensor", weights, Axis.SHARD
    )
    overlapped += once("all_reduce", weights / sizes[Axis.SHARD], Axis.REPLICATE)
    return waiting, overlapped
