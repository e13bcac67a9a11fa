"""Fast estimates of memory and speed, which order the candidates of a search; verdicts come from dry runs.

Dry runs of few layers and of a sample of layers more (`choose_sampled_layers`), on one device with one sequence, give
the mean cost of a layer (by their difference) and that of the ends (embedding, head, loss). An estimate scales these by
layers, rows and devices, and computes the communication from the sizes of weights and hidden states.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from preheat.core import DATA, Axis, ModelFacts, Phase, Tag
from preheat.errors import RecipeError
from preheat.hardware.rates import Rates
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.layer_extrapolation import choose_sampled_layers, set_layers
from preheat.planning.observation import Observation
from preheat.planning.observation_cache import observe_cached
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline
from preheat.planning.speed.step_time import estimate_step_seconds
from preheat.recipe import Batch

__all__ = ["Guess", "LayerCost", "estimate", "estimate_gathered_share", "observe_layer", "estimate_seconds"]


@dataclass(frozen=True)
class LayerCost:
    """Mean cost of a layer, and that of the ends (embedding, head, loss), on one device for one sequence.

    Each attribute is a pair (layer, ends), in bytes or seconds.

    Attributes:
        states: weights, gradients and optimizer states.
        weights: the weights alone.
        parameters: number of weights.
        optimizer: the optimizer states alone.
        trained: gradients of all trained weights in fp32, as they are reduced.
        saved: activations that a layer saves for backward; for the ends everything else that is alive at the peak.
        seconds: forward and backward.
        update: optimizer update, which does not depend on the batch size.
        once: the part of `estimate_seconds` that a micro-batch takes however many rows it has, where that is known.
        experts: number of the weights that belong to experts.
    """

    states: tuple[float, float]
    weights: tuple[float, float]
    parameters: tuple[float, float]
    optimizer: tuple[float, float]
    trained: tuple[float, float]
    saved: tuple[float, float]
    seconds: tuple[float, float]
    update: tuple[float, float]
    once: tuple[float, float] = (0.0, 0.0)
    experts: tuple[float, float] = (0.0, 0.0)

    def with_change(self, other: LayerCost, base: LayerCost) -> LayerCost:
        """Applies the change from `base` to `other` to this cost: combines two changes that were observed separately.

        Bytes change by the difference, because savings are independent of each other; seconds change by the ratio.
        """

        def by(name: str) -> tuple[float, float]:
            triples = zip(getattr(self, name), getattr(other, name), getattr(base, name), strict=True)
            if name in ("seconds", "update", "once"):
                layer, ends = (a * (b / c if c > 0 else 1.0) for a, b, c in triples)
            else:
                layer, ends = (max(a + b - c, 0.0) for a, b, c in triples)
            return layer, ends

        return LayerCost(*(by(each.name) for each in fields(self)))


@dataclass(frozen=True)
class Guess:
    """Estimate of a candidate: peak bytes of a device, seconds per step, tokens/s of all devices together."""

    bytes: float
    seconds: float
    tokens_per_second: float


def estimate_seconds(observation: Observation, rates: Rates | Roofline) -> float:
    """Returns the seconds of one optimizer step."""
    return (
        rates.seconds(observation).total if isinstance(rates, Roofline) else estimate_step_seconds(observation, rates)
    )


def _estimate_update(observation: Observation, rates: Rates | Roofline) -> float:
    """Returns the device seconds of the update; the host launches its kernels while earlier ones still run."""
    only = replace(
        observation, kernels=Counter({kernel: n for kernel, n in observation.kernels.items() if kernel.alone})
    )
    if isinstance(rates, Roofline):
        parts = rates.seconds(only)
        return parts.total - parts.host
    return estimate_step_seconds(only, rates)


def observe_layer(request: Request, *, layer: LayerCost | None = None) -> LayerCost:
    """Observes the model with a few layers and with a sample of its layers more.

    Args:
        request: for one device without parallelism (`Space.single`, of one row), or for two with one row each.
        layer: cost of the same layers, if only embedding, head and loss differ: one dry run is then enough.

    Raises:
        RecipeError: the recipe cannot be built.
    """
    rates = request.rates
    assert rates is not None, "an estimate needs the rates of its device"

    tags = frozenset(tag for t in request.recipe.techniques.values() for tag in t.provided())
    recomputes = Tag.RECOMPUTATION in tags and bool({Tag.BF16_COMPUTE, Tag.FP16_COMPUTE} & tags)

    def scale_costs(layers: int) -> tuple[float, ...]:
        # `step`: an estimate needs neither evaluation nor checkpoints.
        observation = observe_cached(set_layers(request, layers), how="step")
        at = observation.categories[Phase.UPDATE]
        update = _estimate_update(observation, rates)
        states = at["parameters"] + at["gradients"] + at["optimizer"]
        # Without communication, which is estimated for each mesh.
        alone = replace(
            observation, kernels=Counter({k: count for k, count in observation.kernels.items() if k.group is None})
        )
        computing = max(estimate_seconds(alone, rates) - update, 0.0)
        weights, trained = (at["parameters"], observation.parameters), 4 * observation.trained
        passing = observation.passing
        head = observation.categories[Phase.HEAD_AND_LOSS]
        if recomputes and head["activations"] + head["temporary"] >= passing and weights[0] > 3 * weights[1]:
            # Autocast caches copies of fp32 weights until the loss: they do not grow with rows, and FSDP has none.
            passing = max(passing - 2 * weights[1], 0)
        # In the order of the fields of LayerCost.
        return states, *weights, at["optimizer"], trained, passing, computing, update, 0.0, observation.experts

    fewest, more = choose_sampled_layers(request)
    try:
        first = scale_costs(fewest)
    except RecipeError:  # a setting that leaves the last layer as it is has no effect on one
        fewest, more = fewest + 1, more + 1
        first = scale_costs(fewest)
    if layer is not None:
        of_layer = [getattr(layer, each.name)[0] for each in fields(layer)]
    else:
        of_layer = [max(b - a, 0.0) / (more - fewest) for a, b in zip(first, scale_costs(more), strict=True)]
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
    expert_degree: int = 1,
    in_flight: float = 1.0,
    stages: int = 1,
    all_logits: bool = True,
) -> Guess:
    """Estimates a step on a mesh.

    Args:
        cost: cost of the same techniques on one device.
        micros: micro-batches per device.
        tags: tags of all techniques.
        idle: the pipeline's bubble, a fraction of the time in which a device works.
        expert_degree: data-parallel devices that split the experts of a layer.
        in_flight: micro-batches whose activations the first device of a pipeline holds at most.
        stages: of a pipeline on each device.
        all_logits: False if the layout computes logits some rows at a time, as `cost` does not.
    """
    pipeline, tensor, context = (sizes[axis] for axis in (Axis.PIPELINE, Axis.TENSOR, Axis.CONTEXT))
    # Layers of this stage, and rows of this data-parallel rank.
    layers, rows = model.layers / pipeline, batch.size / math.prod(sizes[axis] for axis in DATA)
    micro = math.ceil(rows / micros)
    # Ranks of context parallelism hold the same weights, so FSDP shards across them, too, and ZeRO-1 the states.
    sharded = sizes[Axis.SHARD] * context if Tag.SHARDED_WEIGHTS in tags else 1
    updating = sizes[Axis.REPLICATE] * context if Tag.SHARDED_STATES in tags else sharded

    # Devices that split the experts hold and gather only their part of them: the share of a layer that others have.
    elsewhere = (1 - 1 / expert_degree) * cost.experts[0] / max(cost.parameters[0], 1.0)

    # A stage at an end of a pipeline has embedding or head; a tied matrix is in both.
    ends_here = 1.0 if pipeline == 1 or model.tied else 0.5

    def divide_among_all(pair: tuple[float, float]) -> float:
        return (pair[0] * layers + pair[1] * ends_here) / tensor

    def divide_among_part(pair: tuple[float, float]) -> float:
        return divide_among_all((pair[0] * (1 - elsewhere), pair[1]))

    weights, trained, optimizer = (
        divide_among_part(cost.weights),
        divide_among_part(cost.trained),
        divide_among_all(cost.optimizer),
    )
    half = estimate_gathered_share(cost, tags)
    # Gathered weights: those of all stages of the device while a pipeline drains, and those while it fills.
    gathered = filling = 0.0
    # The peak is at the head, or in the backward pass of a layer: what each has beside the activations of all layers.
    hidden_bytes = batch.seq_len * model.width * (2 if {Tag.BF16_COMPUTE, Tag.FP16_COMPUTE} & tags else 4)
    at_end = cost.saved[1] / tensor
    if not all_logits:
        at_end = min(at_end, 4 * hidden_bytes)  # the head's input, its gradient, and those of the last norm
    at_head, in_layer = at_end * micro / context, 0.0
    if sharded > 1:
        layer, ends = (half * size / tensor for size in (cost.weights[0] * (1 - elsewhere), cost.weights[1]))
        if Tag.RESHARD_AFTER_FORWARD in tags and pipeline == 1:
            # The weights of a layer and of the next one, or of the ends, the largest FSDP group.
            at_head += layer + max(layer, ends)
            in_layer += 3 * layer  # its weights, the next one's, and the buffer from which those are copied
        else:
            # A pipeline keeps all of a stage from a backward pass to the next forward pass.
            gathered = half * weights
            filling = gathered / (stages if Tag.RESHARD_AFTER_FORWARD in tags else 1)
        if micros > 1 and Tag.REDUCE_EACH_MICRO_BATCH not in tags:
            # Unsharded gradients accumulate until the last micro-batch.
            gathered, filling = gathered + trained, filling + trained
        else:
            reduced = cost.trained[0] * (1 - elsewhere) / tensor
            in_layer += min(layer, reduced) + reduced  # a layer's gradients, and the buffer in which they are reduced
    elif Tag.REPLICATED_WEIGHTS in tags:
        gathered = filling = weights  # torch's `replicate` computes with a second copy
    alive = micro * layers * _estimate_saved_bytes(cost.saved[0], hidden_bytes, tensor, tags) / context
    # The first device of a pipeline holds the most micro-batches, the last one the head. While the pipeline drains, a
    # micro-batch of each device remains when the weights of all stages are gathered.
    first = max(in_flight * alive + filling, min(pipeline, in_flight) * alive + gathered) + in_layer
    last = max(in_flight - pipeline + 1, 1.0) * alive + filling + max(at_head, in_layer)
    # Bytes: states + gathered weights + activations.
    if sharded > 1:
        states = (divide_among_all(cost.states) - optimizer) / sharded + optimizer / updating
    else:
        local_optimizer = divide_among_part(cost.optimizer)
        states = divide_among_part(cost.states) - local_optimizer + min(optimizer / updating, local_optimizer)
    memory = states + max(first, last)
    # Weights and gradients are cast once per micro-batch, but the cost of a layer is that of a single row: 4 + 2 bytes
    # of each weight, 2 + 4 of each gradient. Without recomputation the casts are saved for backward.
    casts = divide_among_part(cost.parameters) if _is_casting_weights(cost, tags) else 0.0
    if Tag.RECOMPUTATION not in tags:
        memory -= 2 * casts * (micro - 1)
    # Seconds: computation + exposed communication, times the pipeline's bubble, plus the update.
    layer_seconds, end_seconds = cost.seconds
    if _counts_tokens_first(model, sizes, micros):
        layer_seconds *= 1 + 1 / (4 if Tag.RECOMPUTATION in tags else 3)  # one more forward pass
    working = rows * _estimate_busiest_stage(model.layers, (layer_seconds, end_seconds), pipeline) / (tensor * context)
    # Rows of all devices that split the experts meet at each expert.
    working -= (rows - micros / expert_degree) * cost.once[0] * layers / (tensor * context)
    if isinstance(rates, Roofline):
        working -= (rows - micros) * rates.moving(int(12 * casts))
        passes = rows * layers * _count_hidden_passes(tensor, tags)
        working += rates.moving(int(passes * hidden_bytes / context))
    expert_bytes = cost.weights[0] * cost.experts[0] / max(cost.parameters[0], 1.0) * layers / expert_degree / tensor
    split = expert_degree, min(expert_bytes / weights, 1.0) if expert_degree > 1 else 0.0
    copying, waiting, hidden, after = _estimate_communication(
        batch, model, sizes, micros, micro, weights, weights * half, trained, tags, rates, split
    )
    # Copies run on the device as the computation does, and hide as much.
    working += copying
    time = (working + waiting + max(hidden - working, 0.0)) * (1 + idle)
    update = divide_among_all(cost.update) / updating if updating > 1 else divide_among_part(cost.update)
    time += update + after
    return Guess(memory, time, batch.size * batch.seq_len / time)


def _counts_tokens_first(model: ModelFacts, sizes: Mapping[Axis, int], micros: int) -> bool:
    """True if a pass over all micro-batches counts the tokens of experts before the step (engine/moe_aux_loss.py)."""
    return model.balance_loss and (micros > 1 or sizes[Axis.PIPELINE] > 1)


def _estimate_saved_bytes(saved: float, hidden: int, tensor: int, tags: frozenset[Tag]) -> float:
    """Returns the bytes that a layer saves of a row, on each of `tensor` devices that split its products.

    Hidden states between products are on all of these devices: inputs of the two norms and their outputs, or with
    recomputation the layer's input and the results of two products. Sequence parallelism splits all but what the
    products read, which is gathered for them.

    Args:
        saved: the bytes on one device.
        hidden: bytes of a row's hidden states.
    """
    count = min(2 if Tag.RECOMPUTATION in tags else 4, saved // hidden)
    whole = hidden * (count // 2 if Tag.SEQUENCE_PARALLEL in tags else count)
    return whole + (saved - whole) / tensor


def _estimate_busiest_stage(layers: int, seconds: tuple[float, float], pipeline: int) -> float:
    """Returns the seconds of a row on the device of a pipeline that computes the most; each has whole layers.

    Args:
        seconds: of a layer, and of embedding, head and loss, most of which the last device has.
    """
    layer, ends = seconds
    if pipeline == 1:
        return layers * layer + ends
    # Each device has at least one layer, the last one those that the others leave.
    mean = layers / pipeline + ends / max(layer, 1e-12) / pipeline
    counts = {min(max(count, 1), layers) for count in (math.floor(mean), math.ceil(mean))}
    return min(max(count * layer, max(layers - (pipeline - 1) * count, 1) * layer + ends) for count in counts)


def _count_hidden_passes(tensor: int, tags: frozenset[Tag]) -> float:
    """Returns how often a layer reads or writes hidden states beyond the `1 / tensor` of what it does on one device.

    Counted in dry runs of Llama: norms (10 times) and residuals and sums of gradients (21) pass over all of them on
    each device, recomputation over 7 more. With sequence parallelism only the sums of the products' gradients (9) do;
    but the sequence, which is not the first dimension, is copied before or after each collective (16, or 22).
    """
    if tensor == 1:
        return 0.0
    if Tag.SEQUENCE_PARALLEL in tags:
        return (22 if Tag.RECOMPUTATION in tags else 16) + 9 * (1 - 1 / tensor)
    return (38 if Tag.RECOMPUTATION in tags else 31) * (1 - 1 / tensor)


def estimate_gathered_share(cost: LayerCost, tags: frozenset[Tag]) -> float:
    """Returns the bytes of gathered weights over those of the shards: fp32 weights may be gathered in bf16."""
    return min(2 * sum(cost.parameters) / sum(cost.weights), 1.0) if Tag.BF16_ALL_GATHER in tags else 1.0


def _is_casting_weights(cost: LayerCost, tags: frozenset[Tag]) -> bool:
    """True if layers cast fp32 weights to half precision, and those are not gathered so."""
    half = bool({Tag.BF16_COMPUTE, Tag.FP16_COMPUTE} & tags)
    return half and estimate_gathered_share(cost, tags) == 1.0 and sum(cost.weights) > 3 * sum(cost.parameters)


def _estimate_communication(
    batch: Batch,
    model: ModelFacts,
    sizes: Mapping[Axis, int],
    micros: int,
    micro: int,
    weights: float,
    gathered: float,
    trained: float,
    tags: frozenset[Tag],
    rates: Rates | Roofline,
    experts: tuple[int, float],
) -> tuple[float, float, float, float]:
    """Returns the seconds of copies around collectives, of exposed and of overlapped communication, and of that in the
    update; zeros for a measured machine (unknown links).

    Args:
        experts: data-parallel devices that split the experts, and the experts' share of a device's weights.
    """
    if not isinstance(rates, Roofline):
        return 0.0, 0.0, 0.0, 0.0
    order = list(Axis)
    degree, expert_share = experts
    layers = model.layers / sizes[Axis.PIPELINE]
    # Collectives that pass all weights: one for each layer, and one for the ends.
    groups = layers + 1
    # The axes along which experts are split, as in techniques/expert_parallel.py.
    splitting = (Axis.SHARD if sizes[Axis.SHARD] > 1 else Axis.REPLICATE, Axis.CONTEXT)

    def count_copied(size: float) -> float:
        return rates.moving(2 * int(size))  # read and written

    def time_between(kind: str, size: float, devices: int, stride: int) -> float:
        return rates.collective(Kernel(kind, "bf16", 0, int(size), int(size), (), group=(devices, stride)))

    def find_span(*axes: Axis) -> tuple[int, int]:
        """Returns the number of ranks along axes, and how far these are apart."""
        used = [axis for axis in axes if sizes[axis] > 1]
        # Ranks along an axis are as far apart as the product of the axes inside of it.
        inner = order[max(map(order.index, used)) + 1 :] if used else []
        return math.prod(sizes[axis] for axis in used), math.prod(sizes[axis] for axis in inner)

    def time_once(kind: str, size: float, *axes: Axis, groups: float = groups) -> float:
        devices, stride = find_span(*axes)
        if devices == 1:
            return 0.0
        if degree == 1 or not {*splitting} & {*axes}:
            return groups * time_between(kind, size / groups, devices, stride)
        rest = groups * time_between(kind, size * (1 - expert_share) / groups, devices, stride)
        if Axis.CONTEXT not in axes:
            return rest  # replicas of FSDP that split the experts too, whose gradients are reduced with the shards
        # The devices that split the experts are neighbours; devices with the same experts are that far apart.
        alike = find_span(*splitting)[0] // degree
        return rest + groups * time_between(kind, size * expert_share / groups, alike, stride * degree)

    # Bytes of the hidden states of a micro-batch in bf16.
    hidden = micro * batch.seq_len / sizes[Axis.CONTEXT] * model.width * 2
    # Megatron (arXiv:1909.08053): two all-reduces per layer in forward and two in backward; recomputation repeats one.
    reduced = 5 if Tag.RECOMPUTATION in tags else 4
    counted = _counts_tokens_first(model, sizes, micros)
    waiting = micros * layers * reduced * time_between("all_reduce", hidden, *find_span(Axis.TENSOR))
    waiting += (
        micros * layers * 4 * time_between("all_to_all_single", hidden / sizes[Axis.TENSOR], *find_span(Axis.CONTEXT))
    )
    if degree > 1:
        # Each token goes to the devices of its experts, and back; recomputation sends it once more.
        times, routed = 6 if Tag.RECOMPUTATION in tags else 4, hidden * model.experts_per_token
        times += 2 if counted else 0
        exchange = time_between("all_to_all_single", routed, degree, find_span(*splitting)[1])
        waiting += micros * model.expert_layers * times * exchange
    reductions = micros if Tag.REDUCE_EACH_MICRO_BATCH in tags else 1
    # Gradients of later micro-batches are added to those of earlier ones: two are read, one is written.
    copying = (micros - reductions) * count_copied(1.5 * trained)
    after = 0.0
    # Expert parallelism shards weights too, but gathers none on replicas.
    if Tag.SHARDED_WEIGHTS in tags and sizes[Axis.SHARD] * sizes[Axis.CONTEXT] > 1:
        # Resharded weights are gathered once for forward and once for backward; a stage of a pipeline keeps them from
        # a backward pass to the next forward pass. All others are gathered once a step.
        again = (2 * micros if sizes[Axis.PIPELINE] == 1 else micros + 1) + (micros if counted else 0)
        gathers = again if Tag.RESHARD_AFTER_FORWARD in tags else 1
        shards = (Axis.SHARD, Axis.CONTEXT)
        # FSDP copies weights out of the buffer of a gather, and gradients into that of a reduction.
        copying += gathers * count_copied(gathered) + reductions * count_copied(trained)
        overlapped = gathers * time_once("all_gather_into_tensor", gathered, *shards)
        overlapped += reductions * time_once("reduce_scatter_tensor", trained, *shards)
        # A device's shard of all gradients: that of the experts is of as many devices, those that split them included.
        more = expert_share * (degree - 1) if Axis.SHARD in splitting else 0.0
        shard = trained * (1 + more) / (sizes[Axis.SHARD] * sizes[Axis.CONTEXT])
        overlapped += reductions * time_once("all_reduce", shard, Axis.REPLICATE)
    else:
        replicas = (Axis.REPLICATE, Axis.CONTEXT)
        if Tag.REPLICATED_WEIGHTS in tags:
            # The second copy of the weights passes through such a buffer in each micro-batch.
            copying += micros * count_copied(2 * weights) + count_copied(trained)
        overlapped = time_once("all_reduce", trained, *replicas)
        if Tag.SHARDED_STATES in tags:
            # Each rank sends the weights that it updated; half-precision weights are smaller than their gradients.
            after = time_once("all_gather_into_tensor", min(weights, trained), *replicas, groups=1)
    return copying, waiting, overlapped, after
