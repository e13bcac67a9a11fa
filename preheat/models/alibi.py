"""ALiBi (Press et al. 2021, arXiv:2108.12409) by any attention kernel: as further dimensions of queries and keys.

Each head subtracts its slope times the distance from a score. Softmax ignores a summand that is equal for all keys of a
query, so that adding slope * (position of the key) is the same function. This product is a part of q . k if the query
has slope / scale in a further dimension, and the key has its position there. So no kernel needs a bias, whose
[heads, queries, keys] would be as large as the scores.

Half precision holds neither a slope nor a position exactly. A slope is the sum of three numbers, and a position that
of two digits, each of which bf16 holds exactly: six of the eight dimensions, and kernels multiply them in fp32.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.errors import RecipeError
from preheat.models.token_mixers import ATTENTION
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import Cache, PretrainedConfig, PreTrainedModel

    from preheat.core import MaskSpec

__all__ = ["EXTRA_DIM", "FAMILIES", "LONGEST", "refuse_variants", "replace_alibi"]

FAMILIES = ("bloom", "mpt")
EXTRA_DIM = 8
"""Dimensions that queries and keys get: kernels want multiples of 8."""
LONGEST = 65_536
"""Tokens whose positions are exact: two digits to the base 256, each of 8 bits, which bf16 holds."""
_BASE = 256
# Keys of MPT's `attn_config` that transformers does not read, with the values of the model that it computes.
_MPT_ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
}


class _Dimensions(NamedTuple):
    """The further dimensions: of the queries [heads, EXTRA_DIM], and of the keys [rows or 1, length, EXTRA_DIM]."""

    queries: Tensor
    keys: Tensor


class _Alibi(NamedTuple):
    """ALiBi's dimensions and the mask, passed to attention in the argument of transformers' bias."""

    attend: Callable[..., Tensor]
    mask: MaskSpec
    dimensions: _Dimensions


def refuse_variants(text: PretrainedConfig) -> None:
    """Raises RecipeError for a variant of MPT whose configuration transformers reads without computing it."""
    if text.model_type != "mpt":
        return
    settings = {f"attn_config.{key}": getattr(text.attn_config, key) for key in _MPT_ATTENTION}
    expected = {f"attn_config.{key}": value for key, value in _MPT_ATTENTION.items()} | {"logit_scale": None}
    for key, value in (settings | {"logit_scale": text.logit_scale}).items():
        if value != expected[key]:
            raise RecipeError(
                f"model: mpt has {key} {quote_value(value)}, which transformers ignores; only {expected[key]} can be "
                "trained here"
            )


def replace_alibi(model: PreTrainedModel) -> None:
    """Lets the layers of a BLOOM or MPT call preheat's attention, in place; other models are not changed.

    transformers' own forward, with or without a cache, remains that of a call without preheat's attention.
    """
    family = model.config.model_type
    if family not in FAMILIES:
        return
    base = model.base_model
    code = importlib.import_module(type(base).__module__)
    base.preheat_slopes = _scaled_slopes(model.config, code)
    mixins: dict[str, type] = {
        "BloomModel": _BloomBase,
        "BloomBlock": _BloomLayer,
        "BloomAttention": _BloomAttention,
        "MptModel": _MptBase,
        "MptBlock": _MptLayer,
        "MptAttention": _MptAttention,
    }
    # Subclasses under the same names, by which transformers finds its rules for a model's files.
    kinds = {
        getattr(code, name): type(name, (mixin, getattr(code, name)), {"__module__": mixin.__module__})
        for name, mixin in mixins.items()
        if hasattr(code, name)
    }
    for module in base.modules():
        module.__class__ = kinds.get(type(module), type(module))


def _scaled_slopes(config: PretrainedConfig, code: Any) -> tuple[float, ...]:
    """The slope of each head by transformers' own function, divided by the factor on the scores."""
    import torch

    heads = config.num_attention_heads
    with torch.device("cpu"):
        if config.model_type == "bloom":
            slopes = code.build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]
        else:
            slopes = -code.build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    return tuple(slope / _scale(config) for slope in slopes.tolist())


def _scale(config: PretrainedConfig) -> float:
    """The factor on the scores, before the bias is added."""
    stated = config.attn_config.softmax_scale if config.model_type == "mpt" else None
    return float(stated or (config.hidden_size // config.num_attention_heads) ** -0.5)


def _query_dimensions(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _cached_query_dimensions()(slopes, dtype, device)


@functools.cache
def _cached_query_dimensions() -> Callable[..., Tensor]:
    # Imported here: a stored plan is printed without torch.
    from preheat.hardware.transfers import cache_tensors

    return cache_tensors(maxsize=8)(_build_query_dimensions)


def _build_query_dimensions(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[heads, EXTRA_DIM]: three numbers whose sum is the slope, each times the two digits' weights."""
    import torch

    rest, parts = torch.tensor(slopes, dtype=torch.float64), list[torch.Tensor]()
    for _ in range(2):
        parts.append(rest.bfloat16().double())
        rest = rest - parts[-1]
    weighted = [part * weight for part in (*parts, rest) for weight in (_BASE, 1)]
    zeros = [torch.zeros_like(rest)] * (EXTRA_DIM - len(weighted))
    from preheat.hardware.transfers import to_device

    return to_device(torch.stack([*weighted, *zeros], dim=-1).to(dtype), device)


def _build_dimensions(slopes: tuple[float, ...], hidden: Tensor, positions: Tensor) -> _Dimensions:
    """Builds the further dimensions for hidden states [rows, length, width] at `positions` [rows or 1, length]."""
    import torch

    digits = [positions.div(_BASE, rounding_mode="floor"), positions.remainder(_BASE)]
    zeros = [torch.zeros_like(positions)] * (EXTRA_DIM - 3 * len(digits))
    keys = torch.stack([*digits * 3, *zeros], dim=-1).to(hidden.dtype)
    return _Dimensions(_query_dimensions(slopes, hidden.dtype, hidden.device), keys)


def _attend(module: Any, alibi: _Alibi, query: Tensor, key: Tensor, value: Tensor, scale: float, p: float) -> Tensor:
    """Attention of [rows, heads, length, head_dim] by the build's kernel; returns [rows, length, width]."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    rows, heads, length, _ = query.shape
    queries, keys = (t.to(query.dtype) for t in alibi.dimensions)
    queries, keys = (t.expand(rows, heads, length, -1) for t in (queries[None, :, None], keys[:, None]))
    # The values get zeros there, as those of latent attention do.
    out, _ = ALL_ATTENTION_FUNCTIONS[ATTENTION](
        module,
        torch.cat([query, queries], dim=-1),
        torch.cat([key, keys], dim=-1),
        value,
        None,
        scaling=scale,
        dropout=p,
        preheat_attention=alibi.attend,
        preheat_mask=alibi.mask,
    )
    merged: Tensor = out.flatten(2)
    return merged


# Mixins in front of transformers' classes, which are imported when such a model is built. Without preheat's attention
# (generation with a cache, calibration), they call transformers' own forward.


class _Base:
    """Hands preheat's attention to the layers, as other families' models do with arguments that they do not know."""

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        *args: Any,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        if kwargs.get("preheat_attention") is None:
            return super().forward(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc]
        assert position_ids is not None
        hidden = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        dimensions = _build_dimensions(self.preheat_slopes, hidden, position_ids)
        given = {key: kwargs[key] for key in ("preheat_attention", "preheat_mask")}
        return BaseModelOutputWithPast(last_hidden_state=self._run_layers(hidden, dimensions, **given))


class _BloomBase(_Base):
    def _run_layers(self: Any, hidden: Tensor, alibi: _Dimensions, **given: Any) -> Tensor:
        hidden = self.word_embeddings_layernorm(hidden)
        for layer in self.h:
            hidden = layer(hidden, alibi=alibi, attention_mask=None, **given)[0]
        normed: Tensor = self.ln_f(hidden)
        return normed


class _MptBase(_Base):
    def _run_layers(self: Any, hidden: Tensor, alibi: _Dimensions, **given: Any) -> Tensor:
        for layer in self.blocks:
            hidden = layer(hidden, position_bias=alibi, attention_mask=None, **given)[0]
        normed: Tensor = self.norm_f(hidden)
        return normed


class _BloomLayer:
    def forward(
        self: Any,
        hidden_states: Tensor,
        *args: Any,
        preheat_attention: Callable[..., Tensor] | None = None,
        preheat_mask: MaskSpec | None = None,
        **kwargs: Any,
    ) -> Any:
        if preheat_attention is not None and preheat_mask is not None:
            kwargs["alibi"] = _Alibi(preheat_attention, preheat_mask, kwargs["alibi"])
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


class _MptLayer:
    def forward(
        self: Any,
        hidden_states: Tensor,
        *args: Any,
        preheat_attention: Callable[..., Tensor] | None = None,
        preheat_mask: MaskSpec | None = None,
        **kwargs: Any,
    ) -> Any:
        if preheat_attention is not None and preheat_mask is not None:
            kwargs["position_bias"] = _Alibi(preheat_attention, preheat_mask, kwargs["position_bias"])
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


class _BloomAttention:
    preheat_attends = True  # `token_mixers.ATTENDS`

    def forward(
        self: Any,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: _Alibi | Tensor,
        attention_mask: Tensor | None,
        layer_past: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        from torch.nn.functional import dropout

        if not isinstance(alibi, _Alibi):
            return super().forward(  # type: ignore[misc]
                hidden_states, residual, alibi, attention_mask, layer_past=layer_past, **kwargs
            )
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        out = _attend(self, alibi, q, k, v, self.inv_norm_factor, self.attention_dropout.p)
        return residual + dropout(self.dense(out), self.hidden_dropout, self.training), None


class _MptAttention:
    preheat_attends = True

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: _Alibi | Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(position_bias, _Alibi):
            return super().forward(  # type: ignore[misc]
                hidden_states, position_bias, past_key_values, attention_mask, **kwargs
            )
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (t.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for t in qkv.chunk(3, dim=2))
        return self.out_proj(_attend(self, position_bias, q, k, v, self.softmax_scale, self.attn_dropout_p)), None
