"""Attention of transformers models: patterns on single layers, and a switch of a model's attention to our function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from preheat.core import MaskSpec
from preheat.models.hf import PATTERN, STANDALONE, find_anatomy
from preheat.models.token_mixers import ATTENTION

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = ["is_transformers_model", "limit_layers", "switch_attention"]

_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")  # arguments of other models that our kernels ignore


def is_transformers_model(model: object) -> bool:
    # Without this module there is no such model, and importing it takes seconds.
    models = sys.modules.get("transformers.modeling_utils")
    return models is not None and isinstance(model, models.PreTrainedModel)


def limit_layers(
    model: PreTrainedModel,
    pattern: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
    *,
    attend: Callable[..., Tensor],
    every: int | None = None,
) -> int:
    """Wraps the attention of each layer, except every `every`-th, in a pattern (kernel -> kernel), in place.

    The pattern belongs to the layer: it wraps whatever kernel the model uses, also when the layer is recomputed.

    Args:
        attend: the attention function for a model that does not use preheat's yet (see `switch_attention`).

    Returns:
        The number of limited layers.

    Raises:
        ValueError: the layers have a pattern already.
    """
    # Counted from 1: of every=4, layers 4, 8, ... keep full attention.
    chosen = [m for index, m in enumerate(find_anatomy(model).attentions) if every is None or (index + 1) % every]
    if any(hasattr(m, PATTERN) for m in chosen):
        raise ValueError("the layers already have an attention pattern, and there is one per layer")
    _register(attend)  # generation needs it, even if training uses the build's slots
    # A model built by preheat already reads the pattern, in `hf._attend`.
    if model.config._attn_implementation not in (ATTENTION, STANDALONE):
        switch_attention(model, attend)
    for module in chosen:
        setattr(module, PATTERN, pattern)
    return len(chosen)


def switch_attention(model: PreTrainedModel, attend: Callable[..., Tensor]) -> None:
    """Switches a transformers model to the attention function `attend`, in place; its forward does not change.

    Args:
        attend: (q, k, v, mask, scale, *, dropout, bias) -> out, the bias bool or float, broadcast to [rows, heads,
            queries, keys].

    Raises:
        ValueError: the model's attention cannot be chosen, or it has two kinds (encoder and decoder).
    """
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{kind} has an encoder, a decoder and attention between them: only models with one of them are converted"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{kind} does not call its attention through transformers' AttentionInterface, so it cannot be replaced"
        )
    _register(attend)
    model.set_attn_implementation(STANDALONE)


@functools.cache
def _register(attend: Callable[..., Tensor]) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(STANDALONE, functools.partial(_attend, attend))
    AttentionMaskInterface.register(STANDALONE, _prepare_mask)


def _attend(
    attend: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [rows, heads, length, head_dim] in, [rows, length, heads, head_dim] out."""
    if refused := [name for name in _REFUSED if more.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} hands {', '.join(refused)} to its attention, which preheat's kernels do not "
            "support"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    bias = attention_mask
    if bias is not None and bias.ndim == 2:  # padding mask: true for visible keys
        bias = bias[:, None, None, :]  # [rows, 1, 1, keys]
    elif bias is not None:  # a full mask already includes causality and window
        causal, sliding_window = False, None
    pattern = getattr(module, PATTERN, None)
    kernel = functools.partial(attend, dropout=dropout, bias=bias)
    out = (kernel if pattern is None else pattern(kernel))(
        query, key, value, MaskSpec(causal, sliding_window), scaling if scaling is not None else query.shape[-1] ** -0.5
    )
    return out.transpose(1, 2), None


def _prepare_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **more: object,
) -> Tensor | None:
    """transformers' mask interface: None, [rows, keys] if only padding is masked, else a full mask."""
    from transformers.masking_utils import sdpa_mask

    # A square pass without padding needs no mask in memory: the kernel applies causality and window itself. If only
    # padding is masked, the [rows, keys] mask suffices instead of [rows, 1, queries, keys].
    chunk = getattr(more.get("config"), "attention_chunk_size", None)
    square = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0
    fits = attention_mask is None or attention_mask.shape[-1] == kv_length
    if square and fits and chunk is None and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return attention_mask if attention_mask is not None and not bool(attention_mask.all()) else None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **more,
    )
