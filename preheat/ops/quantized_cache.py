"""A KV cache in eight bits: half of bf16's memory, a scale for each token of each head.

Codes and scale of a token lie in one row of bytes, so that all that transformers does to a cache (growing, cropping, reordering for
beams, a sliding window) moves both together. What attention reads are the rounded keys and values from the first token on, so that a
text does not depend on where its prompt was cut. Source: scales by token as in Sheng et al. 2023, FlexGen (arXiv:2303.06865), section 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from preheat.ops.quantized import HALF

__all__ = ["from_bytes", "int8_cache", "to_bytes"]

_SCALE = 2  # bytes


def to_bytes(states: Tensor) -> Tensor:
    """Keys or values [rows, heads, tokens, width] as int8 [rows, heads, tokens, width + 2]: codes, then the scale's bf16."""
    wide = states.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-30).to(HALF)
    codes = (wide / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def from_bytes(held: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_bytes` holds, in `dtype`.

    Example:
        >>> from_bytes(to_bytes(torch.tensor([[[[127.0, -64.0]]]])), torch.float32).tolist()
        [[[[127.0, -64.0]]]]
    """
    scale = held[..., -_SCALE:].contiguous().view(HALF)
    return held[..., :-_SCALE].to(dtype) * scale.to(dtype)


class Int8Layer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(to_bytes(key_states), to_bytes(value_states), *args, **kwargs)
        return from_bytes(keys, key_states.dtype), from_bytes(values, value_states.dtype)


class Int8SlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Those of a layer that forgets what its window has left."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(to_bytes(key_states), to_bytes(value_states), *args, **kwargs)
        return from_bytes(keys, key_states.dtype), from_bytes(values, value_states.dtype)


def int8_cache(config: Any) -> DynamicCache:
    """An empty cache for a model, to be given to its forward or `generate` as `past_key_values`.

    Args:
        config: the model's configuration.

    Raises:
        ValueError: a layer of another kind than full or sliding attention.

    Example:
        >>> model.generate(ids, past_key_values=int8_cache(model.config))                           # doctest: +SKIP
    """
    cache = DynamicCache(config=config)
    for n, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[n] = Int8Layer()
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[n] = Int8SlidingLayer(sliding_window=layer.sliding_window)
        else:
            raise ValueError(f"layer {n} keeps a {type(layer).__name__}, which has no form in eight bits; use the plain cache")
    return cache
