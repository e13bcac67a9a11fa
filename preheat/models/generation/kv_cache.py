"""KV caches by name: transformers' dynamic and static ones, and an int8 cache; each optionally with a sliding window.

The int8 cache stores each head's key and value of a token as int8 with one scale, and returns all of them dequantized,
including those of the tokens just read: results do not depend on the chunks in which a text was read.
Source of quantized KV caches: KIVI (Liu et al. 2024, arXiv:2402.02750), which uses groups at 2 bits; 8 bits need none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from preheat.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from preheat.recipe import Sample

__all__ = [
    "Int8Layer",
    "register_cache_attention",
    "cache_nbytes",
    "cache_tensors",
    "cache_windows",
    "has_token_cache",
    "dequantize",
    "has_recurrent_state",
    "make_cache",
    "quantize",
    "cache_capacity",
]

_PLAIN = ("full_attention", "sliding_attention")
"""Layer types whose cache is the keys and values of tokens, and nothing else."""
_STATEFUL = ("linear_attention", "hybrid", "hybrid_sliding")
"""Layer types with a recurrent state, which has no tokens that could be taken out again."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes the last dimension to 8 bits: [..., width] -> int8 [..., width] and fp32 scales [..., 1].

    The scale is the vector's absolute maximum over 127, so the error is at most half a scale.

    Example:
        >>> quantize(torch.tensor([[1.0, -127.0, 0.4]]))
        (tensor([[   1, -127,    0]], dtype=torch.int8), tensor([[1.]]))
    """
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    tiny = torch.finfo(torch.float32).tiny  # keeps a zero vector zero instead of dividing by its zero scale
    return (x.float() / scale.clamp(min=tiny)).round_().to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverts `quantize`, up to half a scale (and the rounding of `dtype`)."""
    # int8 * fp32 is fp32, so the only rounding is the last one.
    return (codes * scale).to(dtype)


class Int8Layer(CacheLayerMixin):
    """An int8 KV cache layer, optionally with a sliding window.

    Args:
        sliding_window: tokens that a token attends to, itself included; None: all before it.
    """

    is_croppable = True

    def __init__(self, sliding_window: int | None = None):
        super().__init__()
        self.sliding_window, self.is_sliding = sliding_window, sliding_window is not None
        self.parts: list[Tensor] = []
        """Codes and scales of the keys, then of the values, each [rows, heads, tokens, width or 1]."""
        # `seen` counts every token that was read, also those that left the window: positions follow from it.
        self.seen, self.record_past = 0, False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends [rows, heads, tokens, width] and returns all that these tokens attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        # Codes [rows, heads, tokens, width] and scales [rows, heads, tokens, 1], of the keys and of the values.
        fresh = [*quantize(key_states), *quantize(value_states)]
        self.parts = [torch.cat(pair, dim=-2) for pair in zip(self.parts, fresh, strict=True)] if self.parts else fresh
        self.seen += count
        shown = self.parts
        if self.sliding_window is not None:
            # The first of the new tokens sees window - 1 tokens before itself; no later one sees an older token.
            shown = self._copy_last(self.sliding_window - 1 + count)
            # The next token sees window - 1 of these at most, so older ones are dropped unless a crop may need them.
            if not self.record_past:
                self.parts = self._copy_last(self.sliding_window - 1)
        keys, key_scales, values, value_scales = shown
        return dequantize(keys, key_scales, self.dtype), dequantize(values, value_scales, self.dtype)

    def _copy_last(self, count: int, before: int = 0) -> list[Tensor]:
        """The parts' last tokens, without the very last `before`; copied if a view would keep much memory alive."""
        available = self.parts[0].shape[-2] - before
        # A view keeps the memory of the whole tensor alive.
        tail = [part.narrow(-2, max(available - count, 0), min(count, available)) for part in self.parts]
        return [part.clone() for part in tail] if available > 2 * count else tail

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.sliding_window or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that the next tokens get, and the position of the first."""
        # The next query has position `seen` and sees keys from position seen - window + 1 on.
        offset = max(self.seen - self.sliding_window + 1, 0) if self.sliding_window else 0
        return self.seen - offset + query_length, offset

    def activate_past_recording(self) -> None:
        """Keeps tokens that leave the window until `crop`, so that tokens can be rolled back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; the number is negative, as in transformers."""
        assert tokens_to_remove <= 0, "the number of tokens to remove is given as a negative one"
        if not self.parts:
            return
        wanted, removed = self.seen + tokens_to_remove, -tokens_to_remove
        # After a crop a layer with a window needs the last window - 1 tokens, for the next query.
        window = wanted if self.sliding_window is None else min(self.sliding_window - 1, wanted)
        assert self.parts[0].shape[-2] - removed >= window, "tokens have left the window that would have to come back"
        self.parts, self.seen = self._copy_last(window, removed), wanted

    def reset(self) -> None:
        self.parts, self.seen = [], 0

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.parts = [change(part) for part in self.parts]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda part: part[indices])


def make_cache(config: PretrainedConfig, settings: Sample, length: int) -> Cache:
    """Creates an empty cache for a model.

    Args:
        config: of the model, whose layers may have windows of their own.
        settings: `cache`, `window` and `compile` are used.
        length: capacity of a static cache in tokens.

    Raises:
        RecipeError: layers with other state than the keys and values of tokens.
    """
    cache = settings.cache_kind
    # transformers' own factory knows all layer types, including those with recurrent state.
    if cache == "dynamic" and settings.window is None:
        return DynamicCache(config=config)
    # One entry per layer: its type, and arguments such as its window.
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if cache != "static" and (others := sorted(set(kinds) - set(_PLAIN))):
        name = "window" if cache == "dynamic" else "cache"
        raise RecipeError(
            f"sample.{name}: {getattr(settings, name)}: layers of this model are {', '.join(others)}, which keep "
            "more than keys and values of tokens; leave it out"
        )
    layers = []
    for kind, more in zip(kinds, options, strict=True):
        # A further window never widens a layer's own.
        if settings.window is not None:
            kind, more = (
                "sliding_attention",
                {**more, "sliding_window": min(settings.window, more.get("sliding_window", settings.window))},
            )
        if cache == "int8":
            layers.append(Int8Layer(**more))
        elif cache == "static":
            layers.append(STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=cache_capacity(settings, length), **more))
        else:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**more))
    return Cache(layers=layers)


def has_recurrent_state(config: PretrainedConfig) -> bool:
    """True if the cache of a model has recurrent states, which cannot be cut back to earlier tokens."""
    return not _layer_types(config).isdisjoint(_STATEFUL)


def has_token_cache(config: PretrainedConfig) -> bool:
    """True if the cache of a model has keys and values of tokens, and not recurrent states alone."""
    return _layer_types(config) != {"linear_attention"}


def _layer_types(config: PretrainedConfig) -> set[str]:
    return set(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0])


_STEP = 128
"""A compiled model's cache capacity is rounded up to this multiple: each capacity needs another compilation."""


def cache_capacity(settings: Sample, length: int) -> int:
    """The capacity, in tokens, of a cache for `length` tokens."""
    return -(-length // _STEP) * _STEP if settings.compile is True else length


def cache_tensors(cache: Cache) -> list[list[Tensor]]:
    """Returns the tensors of each layer: keys and values, recurrent and convolutional states."""

    def tensors(values: Iterable[object]) -> Iterator[Tensor]:
        for value in values:
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, dict | list):
                yield from tensors(value.values() if isinstance(value, dict) else value)

    linear = getattr(cache, "linear_cache", [])  # MiniMax keeps its states beside the layers
    return [
        list(tensors([*vars(layer).values(), *linear[number : number + 1]]))
        for number, layer in enumerate(cache.layers)
    ]


def cache_windows(cache: Cache) -> list[int | None]:
    """Returns each layer's sliding window in tokens; None without one."""
    return [getattr(layer, "sliding_window", None) for layer in cache.layers]


def cache_nbytes(cache: Cache) -> int:
    """Bytes that a cache occupies now; scalars, which count tokens, are left out."""
    return sum(t.untyped_storage().nbytes() for layer in cache_tensors(cache) for t in layer if t.dim())


@functools.cache
def register_cache_attention(window: int | None = None) -> str:
    """Registers sdpa with our kernel for few queries on CPU (`decode_attention.py`) in transformers; returns its name.

    Args:
        window: tokens attend to that many back in all layers; None: to all, or as far as their layer allows.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    # A window is part of the mask, which transformers looks up by the attention's name, so each window has a name.
    name = "preheat-cache" if window is None else f"preheat-window-{window}"
    AttentionInterface.register(name, _attend_cache)
    AttentionMaskInterface.register(
        name, sdpa_mask if window is None else functools.partial(_build_window_mask, window)
    )
    return name


def _attend_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from preheat.models.generation.decode_attention import attend_cache, is_supported

    # The kernel has no dropout, cap or additive bias, and returns no attention weights.
    plain = (
        not any(more.get(name) for name in ("dropout", "softcap", "output_attentions"))
        and more.get("position_bias") is None
    )
    if plain and is_supported(query, key, value, attention_mask):
        return attend_cache(
            query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling
        ), None
    # Prompts and everything else that the kernel does not cover.
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)


def _build_window_mask(
    window: int, *, mask_function: Callable[..., Tensor], local_size: int | None = None, **more: object
) -> Tensor | None:
    from transformers.masking_utils import and_masks, sdpa_mask, sliding_window_overlay

    return sdpa_mask(
        mask_function=and_masks(sliding_window_overlay(window), mask_function),
        local_size=min(window, local_size or window),
        **more,
    )
