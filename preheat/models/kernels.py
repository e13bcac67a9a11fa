"""Other kernels for the small operators of one model: norms, rotary embedding, gated activation. Other models of its class keep theirs."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.models.adapter import anatomy

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["KERNEL_FAMILIES", "use_kernels"]

# Their RMSNorm, rotary embedding (halves rotated) and gated SiLU are the same functions, read in transformers' sources.
KERNEL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def use_kernels(
    model: PreTrainedModel,
    *,
    norm: Callable[..., Any] | None = None,
    rotary: Callable[..., Any] | None = None,
    gate: Callable[..., Any] | None = None,
) -> dict[str, int]:
    """Has a model compute its small operators by other functions. In place, for this model only.

    Args:
        norm: (x [..., width], weight [width], eps) -> RMSNorm of x.
        rotary: (q, k [rows, heads, length, head_dim], cos, sin [rows or 1, length, head_dim]) -> q and k, rotated.
        gate: (a, b [..., feed_forward]) -> silu(a) * b.

    Returns:
        How many modules now use each.

    Raises:
        RecipeError: a family whose operators are not known to be these.
    """
    family = model.config.model_type
    if family not in KERNEL_FAMILIES:
        raise RecipeError(f"model: the kernels are for {', '.join(KERNEL_FAMILIES)}, not {family}")
    if gate is not None and model.config.hidden_act not in ("silu", "swish"):
        raise RecipeError(f"model: its activation is {model.config.hidden_act}, the kernel's silu")
    parts = anatomy(model)
    counts = {}
    if norm is not None:
        for module in parts.norms.values():
            module.forward = types.MethodType(_norm(norm), module)  # type: ignore[method-assign]
        counts["norms"] = len(parts.norms)
    if rotary is not None:
        for module in parts.attentions:
            _rotate_by(module, rotary)
        counts["rotary embeddings"] = len(parts.attentions)
    if gate is not None:
        for layer in parts.layers:
            layer.mlp.forward = types.MethodType(_gated(gate), layer.mlp)  # type: ignore[method-assign, union-attr]
        counts["gated activations"] = len(parts.layers)
    return counts


def _norm(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, x: function(x, module.weight, module.variance_epsilon)


def _gated(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, x: module.down_proj(function(module.gate_proj(x), module.up_proj(x)))


def _rotate_by(attention: nn.Module, rotary: Callable[..., Any]) -> None:
    """transformers calls its rotary function by a global name; here a copy of `forward` is bound in which it means another."""
    plain: Any = type(attention).forward
    name = "apply_rotary_pos_emb"
    if name not in plain.__code__.co_names:
        raise RecipeError(f"model: {type(attention).__name__} does not call {name}; switch the rotary kernel off")
    copy = types.FunctionType(
        plain.__code__, plain.__globals__ | {name: rotary}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    attention.forward = types.MethodType(copy, attention)  # type: ignore[method-assign]
