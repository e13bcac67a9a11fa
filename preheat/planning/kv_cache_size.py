"""Bytes of the cache that a decoder keeps while it generates: keys and values of tokens, states of recurrent layers.

The layers are observed: the model reads a few tokens on the meta device, which computes shapes only, and its cache is
measured. So a layer that shares another's keys, that has heads of its own or a recurrent state needs no formula.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.errors import RecipeError
from preheat.model_folder import FAULTS, describe_fault, silence_transformers
from preheat.models import hf
from preheat.models.token_mixers import find_cache

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache, PretrainedConfig

__all__ = ["CACHES", "LayerCache", "count_cache_bytes", "observe_layer_caches"]

CACHES: Mapping[str, tuple[float, float]] = {"bf16": (2.0, 0.0), "int8": (1.0, 4.0)}
"""Bytes of a cache element, and of the scale of each vector (fp32 in models/generation/kv_cache.py)."""

_TOKENS = 13
"""Length of the observed text; a prime, so that no other dimension of a cache is likely to equal it."""


@dataclass(frozen=True)
class LayerCache:
    """Size of one layer's cache.

    Attributes:
        elements, vectors: of the keys and values of one token; a vector is one head's key or value. 0: no attention,
            or that of another layer's keys and values.
        window: tokens whose keys and values are kept; None: all.
        state: elements of recurrent and convolutional states of one row, in the precision of the weights.
        state_fp32: the same in fp32, whatever the weights are in.
    """

    elements: int = 0
    vectors: int = 0
    window: int | None = None
    state: int = 0
    state_fp32: int = 0


def count_cache_bytes(
    config: PretrainedConfig,
    length: int,
    rows: int = 1,
    size: float = 2,
    *,
    scale: float = 0,
    window: int | None = None,
    latent: bool = True,
) -> float:
    """Returns the bytes of the cache of a batch.

    Sliding-window layers cache the tokens of their window only. Recurrent layers have a state, whose size does not
    depend on the length.

    Args:
        config: transformers' configuration of the model.
        size: bytes of an element. scale: bytes of the scale of each vector (one head's keys or values of a token).
        window: maximum number of cached tokens, regardless of the model's own windows.
        latent: latent attention (MLA) caches one latent vector and one rotary key per token, as serving engines do;
            False: the keys and values of all heads, as transformers does.

    Raises:
        RecipeError: the model cannot be observed.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=6144, num_attention_heads=48, num_hidden_layers=118)
        >>> round(count_cache_bytes(config, 2048, rows=512) / 1e12, 2)  # PaLM 540B, multi-head (arXiv:2211.05102)
        3.04
    """
    limit = min(length, window or length)
    total = 0.0
    for layer in observe_layer_caches(config, latent=latent):
        tokens = min(limit, layer.window or limit)
        # States are not quantized with the keys: codes of one byte mean weights of two.
        total += tokens * (layer.elements * size + layer.vectors * scale)
        total += layer.state * max(size, 2) + layer.state_fp32 * 4
    return rows * total


def observe_layer_caches(config: PretrainedConfig, *, latent: bool = True) -> tuple[LayerCache, ...]:
    """Returns the size of each layer's cache, observed once for each configuration.

    Raises:
        RecipeError: the model cannot be observed.

    Example:
        >>> from transformers import Gemma3TextConfig
        >>> layers = observe_layer_caches(Gemma3TextConfig(num_hidden_layers=6, vocab_size=64))
        >>> [layer.window for layer in layers], layers[0].elements
        ([4096, 4096, 4096, 4096, 4096, None], 2048)
    """
    layers = _observe_caches(_Config(config))
    text = config.get_text_config()
    width = getattr(text, "kv_lora_rank", None)
    if not latent or width is None:
        return layers
    width += text.qk_rope_head_dim
    return tuple(LayerCache(width, 2, layer.window) if layer.elements else layer for layer in layers)


class _Config:
    """A configuration as a key: equal if the same model is built from it."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.key = (type(config), json.dumps(config.to_dict(), sort_keys=True, default=str))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=8)
def _observe_caches(key: _Config) -> tuple[LayerCache, ...]:
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    config = copy.deepcopy(key.config)
    text = config.get_text_config()
    text.pad_token_id = None  # the check for padding tokens would read values
    try:
        with torch.device("meta"), torch.no_grad(), _disable_value_checks(), silence_transformers():
            kind = getattr(transformers, hf.auto_class(config))
            model: nn.Module = kind.from_config(
                config,
                dtype=torch.bfloat16,
                attn_implementation="eager",
                experts_implementation="batched_mm",  # its shapes do not depend on the router's choice
            )
            ids = torch.zeros(1, _TOKENS, dtype=torch.long)
            more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
            result = model.eval()(input_ids=ids, use_cache=True, **more)
    except (*FAULTS, StrictDataclassError, RuntimeError) as error:
        raise RecipeError(
            f"model: {config.model_type}: its cache cannot be sized: {describe_fault(error, 200)}"
        ) from None
    cache = find_cache(result)
    if cache is None:
        raise RecipeError(f"model: {config.model_type}: it has no cache, so generating from it cannot be planned")
    return tuple(_iterate_layers(cache))


@contextlib.contextmanager
def _disable_value_checks() -> Iterator[None]:
    """Context manager in which distributions (Gemma 3n's activations) do not check values, which meta tensors lack."""
    from torch.distributions import Distribution

    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _iterate_layers(cache: Cache) -> Iterator[LayerCache]:
    import torch

    from preheat.models.generation.kv_cache import cache_tensors, cache_windows

    cache = getattr(cache, "self_attention_cache", cache)  # of an encoder-decoder model: the decoder's own tokens
    for layer, tensors, window in zip(cache.layers, cache_tensors(cache), cache_windows(cache), strict=True):
        keys = getattr(layer, "keys", None)
        # A window shorter than the text keeps fewer tokens of it.
        tokens = keys.shape[-2] if keys is not None and keys.numel() else _TOKENS
        states = [t for t in tensors if tokens not in t.shape and t.dim()]  # scalars count tokens
        per_token = [t for t in tensors if tokens in t.shape]
        yield LayerCache(
            elements=sum(t.numel() // tokens for t in per_token),
            vectors=sum(t.numel() // tokens // t.shape[-1] for t in per_token),
            window=window,
            state=sum(t.numel() for t in states if t.dtype != torch.float32),
            state_fp32=sum(t.numel() for t in states if t.dtype == torch.float32),
        )
