"""Closed forms: model states, KV caches, what serving needs, and how large a model a budget of FLOPs is best spent on.

They hold exactly where they hold at all; what a step needs beside states is for the dry run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from preheat.errors import RecipeError
from preheat.model_folder import FAULTS, fault
from preheat.models import configs, hf
from preheat.recipe import Recipe

__all__ = [
    "CACHES",
    "Optimal",
    "Serving",
    "cache_bytes",
    "compute_optimal",
    "parameters_of",
    "prefill_flops",
    "serving",
    "state_bytes",
]


def parameters_of(recipe: Recipe) -> tuple[Any, int, int]:
    """transformers' configuration of the recipe's model, its parameters, and those of them in embedding and head; of models that cannot be trained too.

    Raises:
        RecipeError: no such model, or none that transformers can build.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    config = configs.of(recipe, recipe.data.vocabulary)
    configs.change(config, recipe.model.config)
    try:
        with torch.device("meta"):
            factory = getattr(transformers, hf.auto_class(config))
            model = factory.from_config(
                config, trust_remote_code=configs.runs_code(config, recipe.model.trust_remote_code)
            )
    except (*FAULTS, StrictDataclassError) as error:
        raise RecipeError(f"model: {config.model_type}: {fault(error, 200)}") from None
    ends = {
        id(m.weight): m.weight.numel()
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        if m is not None
    }
    return config, sum(p.numel() for p in model.parameters()), sum(ends.values())


def state_bytes(
    parameters: int,
    *,
    weights: float = 2,
    gradients: float = 2,
    optimizer: float = 12,
    zero: Literal[0, 1, 2, 3] = 0,
    devices: int = 1,
) -> float:
    """Bytes of weights, gradients and optimizer states on a device.

    Args:
        weights, gradients, optimizer: bytes a parameter. By default those of AdamW in mixed precision: half weights and gradients, fp32 masters and
            two moments (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 16 in all).
        zero: what is shared out among the devices: nothing; optimizer states; gradients too; weights too (the stages of ZeRO).

    Example:
        >>> round(state_bytes(176_247_271_424) / 1e12, 2)  # BLOOM
        2.82
        >>> state_bytes(8, zero=1, devices=4) / 8  # 4 + 12 / devices
        7.0
    """
    sizes = (optimizer, gradients, weights)
    return parameters * sum(size / devices if stage < zero else size for stage, size in enumerate(sizes))


def cache_bytes(
    config: Any, length: int, rows: int = 1, size: float = 2, *, scale: float = 0, window: int | None = None
) -> float:
    """Bytes of the KV cache of some rows.

    Layers with a window keep the keys and values of its tokens; latent attention (DeepSeek) keeps one latent vector and one rotary key a token.

    Args:
        config: transformers' configuration of the model.
        size: bytes of a number. scale: bytes beside each vector (a head's keys of a token, or its values).
        window: tokens that are kept at most, whatever the model has.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=6144, num_attention_heads=48, num_hidden_layers=118)
        >>> round(cache_bytes(config, 2048, rows=512) / 1e12, 2)  # multihead at PaLM 540B's depth: 3 TB (arXiv:2211.05102)
        3.04
    """
    text = config.get_text_config()
    if (latent := getattr(text, "kv_lora_rank", None)) is not None:
        cached = min(length, window or length)
        return float(rows * cached * text.num_hidden_layers * ((latent + text.qk_rope_head_dim) * size + 2 * scale))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    own, most = hf.facts(config).window, min(length, window or length)
    kinds: Sequence[str] = getattr(text, "layer_types", None) or (
        ["sliding_attention" if own else "full_attention"] * text.num_hidden_layers
    )
    tokens = sum(min(most, own) if own and kind == "sliding_attention" else most for kind in kinds)
    return float(rows * tokens * 2 * heads * (width * size + scale))


@dataclass(frozen=True)
class Serving:
    """What serving a model needs on each of some devices.

    Attributes:
        format, kept: of the weights, and of the keys and values.
        weights, cache: bytes; the cache is that of one row of the length asked for.
        rows: of that length that fit at the same time; 0: the weights leave no room for one.
        longest: tokens of a single row that fit.
        tokens_per_second: at most, of all rows together: every weight and cache is read once for each token. None: the bandwidth is not known.
        alone: the same for a single row.
        first_token: seconds at least until a row of that length is read: its FLOPs over the matrix rate, or its weights over the bandwidth. None: not known.
    """

    format: str
    kept: str
    weights: float
    cache: float
    rows: int
    longest: int
    tokens_per_second: float | None
    alone: float | None
    first_token: float | None


_FORMATS = {"bf16": 2.0, "int8": 1.0, "4 bits": 0.516}  # bytes a weight; 4 bits with scales in 8 (arXiv:2305.14314)
CACHES: Mapping[str, tuple[float, float]] = {"bf16": (2.0, 0.0), "int8": (1.0, 4.0)}
"""Bytes of a number of the cache, and of the scale beside each vector (models/generation/kv_cache.py: fp32)."""


def serving(
    config: Any,
    parameters: int,
    ends: int,
    *,
    memory: int,
    length: int,
    devices: int = 1,
    bandwidth: float | None = None,
    matrix_rate: float | None = None,
    kept: str = "bf16",
    reserved: int = 2**29,
) -> list[Serving]:
    """Weights, KV cache, the batch that fits and how fast it can be at best, by the weights' format.

    Args:
        parameters, ends: number of weights, and how many of these are embedding and head, which stay in bf16.
        memory: of a device, bytes. `beside`: what is not for tensors (the driver's context and workspaces).
        length: tokens of a row, prompt and answer together.
        devices: among which weights are shared out, and the cache by its heads.
        bandwidth: of a device's memory, bytes a second. matrix_rate: FLOP/s of a device.
        kept: the cache's format, of `CACHES`.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
        >>> [(s.format, s.rows) for s in serving(config, 8_030_261_248, 1_050_673_152, memory=24 * 2**30, length=8192)]
        [('bf16', 8), ('int8', 15), ('4 bits', 18)]
    """
    heads = (
        getattr(config.get_text_config(), "num_key_value_heads", None) or config.get_text_config().num_attention_heads
    )
    apart = min(devices, heads)
    size, scale = CACHES[kept]
    servings = []
    for name, bytes in _FORMATS.items():
        weights = ((parameters - ends) * bytes + ends * 2) / devices
        cache = cache_bytes(config, length, size=size, scale=scale) / apart
        room = memory - reserved - weights
        rows = max(0, math.floor(room / cache))

        def speed(rows: int, weights: float = weights, cache: float = cache) -> float | None:
            return bandwidth * rows / (weights + rows * cache) if bandwidth and rows else None

        first = None
        if bandwidth and matrix_rate and rows:
            first = max(prefill_flops(config, parameters, ends, length) / devices / matrix_rate, weights / bandwidth)
        longest = _longest(lambda n: cache_bytes(config, n, size=size, scale=scale), room * apart)
        servings.append(Serving(name, kept, weights, cache, rows, longest, speed(rows), speed(min(rows, 1)), first))
    return servings


def prefill_flops(config: Any, parameters: int, ends: int, length: int) -> float:
    """FLOPs of reading a prompt: two a weight and token, and causal attention; the head makes logits of the last token alone, and of experts the chosen ones count.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
        >>> round(prefill_flops(config, 8_030_261_248, 1_050_673_152, 8192) / 1e12)
        132
    """
    model = hf.facts(config)
    idle = 0.0
    if model.experts and model.experts_per_token:
        idle = (
            3.0
            * model.expert_layers
            * (model.experts - model.experts_per_token)
            * model.width
            * (model.expert_width or 0)
        )
    scores = 2 * model.layers * model.heads * model.head_dim * length * length  # q k and p v, half of each hidden
    return 2 * (parameters - ends - idle) * length + scores


def _longest(cache: Callable[[int], float], room: float) -> int:
    """Tokens of a row whose cache fits; the cache may grow slower than the row, where layers have windows."""
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache(middle) <= room else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Optimal:
    """The size and the tokens that a budget is best spent on, by one approach; `source` says which table or equation."""

    approach: int
    source: str
    parameters: float
    tokens: float


_SMALLEST, _LARGEST = 1e15, 1e30  # FLOPs: some thousand parameters; far beyond what is fitted


def compute_optimal(flops: float) -> list[Optimal]:
    """The compute-optimal model and number of tokens by Hoffmann et al. 2022 (arXiv:2203.15556), each of its three approaches; FLOPs = 6 N D.

    1, minima of training curves: N grows as C^0.50 (table 2), from 1B parameters at 1.21e20 FLOPs (table 3).
    2, curves of equal FLOPs: N grows as C^0.49 (table 2), from 1B parameters at 1.20e20 FLOPs (table A3).
    3, the fitted loss 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 (equation 10), minimized (equation 4): N = G (C / 6)^(0.28 / 0.62). Besiroglu et al. 2024
    (arXiv:2404.10102) found that fit not to follow from the data, and one near approaches 1 and 2.

    Raises:
        RecipeError: a budget that nothing can be trained with, or that is far beyond what was fitted.

    Example:
        >>> [f"{o.parameters / 1e9:.0f}B, {o.tokens / 1e12:.1f}T" for o in compute_optimal(5.76e23)]  # Gopher's
        ['69B, 1.4T', '64B, 1.5T', '32B, 3.0T']
    """
    if not _SMALLEST <= flops <= _LARGEST:
        raise RecipeError(
            f"--compute-budget: {flops:g} FLOPs; state between {_SMALLEST:g} and {_LARGEST:g}, such as 1e21 (an H100 does 4e19 in a day at half its peak)"
        )
    alpha, beta, a, b = 0.34, 0.28, 406.4, 410.7
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    sizes = (
        ("minima of training curves, tables 2 and 3", 1e9 * (flops / 1.21e20) ** 0.50),
        ("curves of equal FLOPs, tables 2 and A3", 1e9 * (flops / 1.20e20) ** 0.49),
        ("fitted loss, equations 4 and 10", g * (flops / 6) ** (beta / (alpha + beta))),
    )
    return [Optimal(n, source, size, flops / (6 * size)) for n, (source, size) in enumerate(sizes, 1)]
