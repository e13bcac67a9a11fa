"""Closed-form estimates: model states, KV cache, serving memory and speed, and compute-optimal model sizes.

Activations and temporaries of a training step have no closed form; the dry run observes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from preheat.errors import RecipeError
from preheat.model_folder import FAULTS, describe_fault
from preheat.models import configs, hf, moe
from preheat.models.layer_sizes import max_over_layers
from preheat.planning.kv_cache_size import CACHES, count_cache_bytes, observe_layer_caches
from preheat.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "ModelSize",
    "Optimal",
    "Serving",
    "ServingBatch",
    "compute_optimal",
    "estimate_prefill_flops",
    "estimate_serving",
    "count_model_parameters",
    "estimate_state_bytes",
]


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts of a model.

    Attributes:
        config: transformers' configuration.
        parameters: all of them, tied ones once. ends: those of embedding and head.
        experts: those of all experts. routed: fraction of a layer's experts that a token is sent to.
    """

    config: PretrainedConfig
    parameters: int
    ends: int
    experts: int = 0
    routed: float = 1.0

    @property
    def active(self) -> int:
        """Parameters that compute for a token."""
        return self.parameters - round(self.experts * (1 - self.routed))


def count_model_parameters(recipe: Recipe) -> ModelSize:
    """Returns the parameter counts of the recipe's model, also of one that preheat cannot train.

    Raises:
        RecipeError: the model does not exist, or transformers cannot build it.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    config = configs.of(recipe, recipe.data.vocab_size)
    configs.apply_changes(config, recipe.model.config)
    try:
        # Parameters on the meta device have shapes and no memory, so a model of any size can be counted.
        with torch.device("meta"):
            factory = getattr(transformers, hf.auto_class(config))
            model = factory.from_config(
                config, trust_remote_code=configs.is_remote_code(config, recipe.model.trust_remote_code)
            )
    except (*FAULTS, StrictDataclassError) as error:
        raise RecipeError(f"model: {config.model_type}: {describe_fault(error, 200)}") from None
    # By id, because tied embedding and head are one weight, which counts once.
    ends = {
        id(m.weight): m.weight.numel()
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        if m is not None
    }
    count, chosen, _ = moe.sizes_of(config.get_text_config())
    experts = sum(p.numel() for m in moe.all_experts(model) for p in m.parameters())
    parameters = sum(p.numel() for p in model.parameters())
    return ModelSize(config, parameters, sum(ends.values()), experts, chosen / count if count else 1.0)


def estimate_state_bytes(
    parameters: int,
    *,
    weights: float = 2,
    gradients: float = 2,
    optimizer: float = 12,
    zero: Literal[0, 1, 2, 3] = 0,
    devices: int = 1,
) -> float:
    """Returns the bytes of weights, gradients and optimizer states on one device.

    Args:
        weights, gradients, optimizer: bytes per parameter. The defaults are AdamW in mixed precision: half-precision
            weights and gradients, fp32 master weights and two moments (Rajbhandari et al. 2020, arXiv:1910.02054,
            section 3.1: 16 in total).
        zero: ZeRO stage: 0 shards nothing, 1 the optimizer states, 2 also the gradients, 3 also the weights.

    Example:
        >>> round(estimate_state_bytes(176_247_271_424) / 1e12, 2)  # BLOOM
        2.82
        >>> estimate_state_bytes(8, zero=1, devices=4) / 8  # 4 + 12 / devices
        7.0
    """
    sizes = (optimizer, gradients, weights)
    # sizes[stage] is sharded from ZeRO stage + 1 on: optimizer states first, weights last.
    return parameters * sum(size / devices if stage < zero else size for stage, size in enumerate(sizes))


@dataclass(frozen=True)
class Serving:
    """Memory and speed of serving a model, per device.

    Attributes:
        format: weight format; cache_dtype: format of keys and values.
        weights, cache: bytes; the cache is that of one sequence of the requested length.
        rows: largest batch of such sequences; 0 if the weights leave no room for one.
        longest: tokens of the longest single sequence that fits.
        tokens_per_second: upper bound for the whole batch: each pass reads the cache and the weights once, but only the
            experts that are chosen. None if the bandwidth is unknown.
        alone: the same for a single sequence.
        first_token: lower bound in seconds of the prefill of such a sequence: its FLOPs over the matmul rate, or the
            weights over the bandwidth. None if unknown.
        batch: the batch that was asked for; None: none was.
    """

    format: str
    cache_dtype: str
    weights: float
    cache: float
    rows: int
    longest: int
    tokens_per_second: float | None
    alone: float | None
    first_token: float | None
    batch: ServingBatch | None = None


@dataclass(frozen=True)
class ServingBatch:
    """A batch of sequences of the requested length.

    Attributes:
        cache: bytes of its cache, over all devices.
        devices: fewest devices that hold it and the weights, if each has a share of the weights and of the key-value
            heads; None: no number of devices, because a head's cache is not divided.
        tokens_per_second: as in `Serving`, for this batch; None if it does not fit, or the bandwidth is unknown.
    """

    cache: float
    devices: int | None
    tokens_per_second: float | None


_FORMATS = {"bf16": 2.0, "int8": 1.0, "4 bits": 0.516}  # bytes per weight; 4 bits with 8-bit scales (arXiv:2305.14314)


def estimate_serving(
    model: ModelSize,
    *,
    memory: int,
    length: int,
    devices: int = 1,
    bandwidth: float | None = None,
    matrix_rate: float | None = None,
    kept: str = "bf16",
    reserved: int = 2**29,
    batch: int | None = None,
) -> list[Serving]:
    """Returns weights, KV cache, batch size and the best possible speed for each weight format.

    Args:
        model: its embedding and head stay in bf16.
        memory: bytes of a device. reserved: bytes that are not for tensors (driver context and workspaces).
        length: tokens of a sequence, prompt and answer together.
        devices: number of devices across which the weights and the heads of the cache are split.
        bandwidth: memory bandwidth of a device, bytes/s. matrix_rate: FLOP/s of a device.
        kept: cache format, one of `CACHES`.
        batch: sequences to plan for; None: as many as fit.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
        >>> model = ModelSize(config, 8_030_261_248, ends=1_050_673_152)
        >>> [(s.format, s.rows) for s in estimate_serving(model, memory=24 * 2**30, length=8192)]
        [('bf16', 8), ('int8', 15), ('4 bits', 18)]
    """
    text = model.config.get_text_config()
    heads = max_over_layers(text, "num_key_value_heads") or max_over_layers(text, "num_attention_heads") or devices
    apart = heads / math.ceil(heads / devices)  # whole heads: with 8 heads, one of 3 devices has 3
    size, scale = CACHES[kept]
    servings = []
    for name, bytes in _FORMATS.items():
        weights = ((model.parameters - model.ends) * bytes + model.ends * 2) / devices
        experts = model.experts * bytes / devices
        cache = count_cache_bytes(model.config, length, size=size, scale=scale) / apart
        room = memory - reserved - weights
        rows = max(0, math.floor(room / cache))

        def estimate_speed(
            rows: int, weights: float = weights, experts: float = experts, cache: float = cache
        ) -> float | None:
            # A pass reads the experts to which one of its tokens is sent, if each expert is equally likely.
            read = weights - experts * (1 - model.routed) ** rows
            return bandwidth * rows / (read + rows * cache) if bandwidth and rows else None

        first = None
        if bandwidth and matrix_rate and rows:
            first = max(estimate_prefill_flops(model, length) / devices / matrix_rate, weights / bandwidth)
        longest = _find_longest(lambda n: count_cache_bytes(model.config, n, size=size, scale=scale), room * apart)
        planned = None
        if batch is not None:
            whole = batch * cache * apart
            least = _count_serving_devices(weights * devices, whole, heads, memory - reserved)
            planned = ServingBatch(whole, least, estimate_speed(batch) if rows >= batch else None)
        speeds = estimate_speed(rows), estimate_speed(min(rows, 1))
        servings.append(Serving(name, kept, weights, cache, rows, longest, *speeds, first, planned))
    return servings


def _count_serving_devices(weights: float, cache: float, heads: int, room: float) -> int | None:
    """Returns the fewest devices with `room` bytes for the weights and the cache, of which each has whole heads."""
    for devices in range(1, heads + 1):
        if weights / devices + cache * math.ceil(heads / devices) / heads <= room:
            return devices
    # More devices than heads: each has the cache of one head, and a smaller share of the weights.
    left = room - cache / heads
    return math.ceil(weights / left) if left > 0 else None


_STATE_FLOPS = 6
"""FLOPs of an element of a recurrent state for each token: decay, add an outer product, multiply by the query."""


def estimate_prefill_flops(model: ModelSize, length: int) -> float:
    """Returns the FLOPs of a prefill: two per active weight and token, plus causal attention and recurrent states.

    The head computes logits for the last token only.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
        >>> round(estimate_prefill_flops(ModelSize(config, 8_030_261_248, ends=1_050_673_152), 8192) / 1e12)
        132
    """
    facts, caches = hf.read_facts(model.config), observe_layer_caches(model.config)
    # Layers that attend to another layer's keys and values have no cache, and compute as the layers that have one do.
    shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", None) or 0
    attending = [cache for cache in caches if cache.elements]
    scores = 0.0
    for cache in attending:
        window = min(length, cache.window or length)
        pairs = window * length - window * window / 2  # the first tokens see fewer than a window
        scores += 4 * facts.heads * facts.head_dim * pairs  # QK^T and PV
    scores *= (len(attending) + shared) / max(1, len(attending))
    states = sum(cache.state + cache.state_fp32 for cache in caches) * length
    return 2.0 * (model.active - model.ends) * length + scores + _STATE_FLOPS * states


def _find_longest(cache: Callable[[int], float], room: float) -> int:
    """Returns the most tokens whose cache fits, by bisection: with windows the cache is not linear in the length."""
    # 2^30 tokens: beyond any context length.
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache(middle) <= room else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Optimal:
    """Compute-optimal model size and tokens by one approach; `source` names the table or equation."""

    approach: int
    source: str
    parameters: float
    tokens: float


_SMALLEST, _LARGEST = 1e15, 1e30  # FLOPs: a few thousand parameters; far beyond the fitted range


def compute_optimal(flops: float) -> list[Optimal]:
    """Returns the compute-optimal model size and tokens by Hoffmann et al. 2022 (arXiv:2203.15556), with FLOPs = 6 N D.

    The paper has three approaches:
    1. Minima of training curves: N grows as C^0.50 (table 2), from 1B parameters at 1.21e20 FLOPs (table 3).
    2. IsoFLOP curves: N grows as C^0.49 (table 2), from 1B parameters at 1.20e20 FLOPs (table A3).
    3. The fitted loss 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 (equation 10), minimized (equation 4):
       N = G (C / 6)^(0.28 / 0.62). Besiroglu et al. 2024 (arXiv:2404.10102) could not reproduce this fit; theirs is
       close to approaches 1 and 2.

    Raises:
        RecipeError: the budget is too small to train anything, or far beyond the fitted range.

    Example:
        >>> [f"{o.parameters / 1e9:.0f}B, {o.tokens / 1e12:.1f}T" for o in compute_optimal(5.76e23)]  # Gopher's
        ['69B, 1.4T', '64B, 1.5T', '32B, 3.0T']
    """
    if not _SMALLEST <= flops <= _LARGEST:
        raise RecipeError(
            f"--compute-budget: {flops:g} FLOPs; state between {_SMALLEST:g} and {_LARGEST:g}, such as 1e21 "
            "(an H100 does 4e19 in a day at half its peak)"
        )
    # N = G (C / 6)^(beta / (alpha + beta)), G = (alpha A / (beta B))^(1 / (alpha + beta)).
    alpha, beta, a, b = 0.34, 0.28, 406.4, 410.7
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    sizes = (
        ("minima of training curves, tables 2 and 3", 1e9 * (flops / 1.21e20) ** 0.50),
        ("curves of equal FLOPs, tables 2 and A3", 1e9 * (flops / 1.20e20) ** 0.49),
        ("fitted loss, equations 4 and 10", g * (flops / 6) ** (beta / (alpha + beta))),
    )
    # C = 6 N D gives the tokens: D = C / (6 N).
    return [Optimal(n, source, size, flops / (6 * size)) for n, (source, size) in enumerate(sizes, 1)]
