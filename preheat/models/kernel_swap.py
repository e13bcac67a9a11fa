"""Replaces the kernels of one model's small operators: norms, rotary embedding, gated activation."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.models.hf import find_anatomy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = ["KERNEL_FAMILIES", "swap_forwards", "find_forwards", "is_gated_silu", "use_kernels"]

Forwards = list[tuple["nn.Module", Callable[..., object]]]
"""Modules, each with another `forward`."""
Rotary = Callable[..., tuple["Tensor", "Tensor"]]
"""Rotates queries and keys; arguments as of `use_kernels`."""

# Their RMSNorm, rotary embedding (rotated halves) and gated SiLU are identical in transformers' sources.
KERNEL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def use_kernels(
    model: PreTrainedModel,
    *,
    norm: Callable[..., Tensor] | None = None,
    rotary: Rotary | None = None,
    gate: Callable[..., Tensor] | None = None,
) -> dict[str, int]:
    """Replaces the functions of a model's small operators, in place, for this model only.

    Args:
        norm: (x [..., width], weight [width], eps) -> RMSNorm of x.
        rotary: (q, k [rows, heads, length, head_dim], cos, sin [rows or 1, length, head_dim]) -> rotated q and k.
        gate: (a, b [..., feed_forward]) -> silu(a) * b.

    Returns:
        The number of modules that use each.

    Raises:
        RecipeError: a family whose operators may differ.
    """
    # All forwards are made before any is set, so that an error leaves the model unchanged.
    modules_by_kind = find_forwards(model, norm=norm, rotary=rotary, gate=gate)
    for modules in modules_by_kind.values():
        for module, forward in modules:
            module.forward = forward  # type: ignore[method-assign, assignment]
    return {name: len(modules) for name, modules in modules_by_kind.items()}


def find_forwards(
    model: PreTrainedModel,
    *,
    norm: Callable[..., Tensor] | None = None,
    rotary: Rotary | None = None,
    gate: Callable[..., Tensor] | None = None,
) -> dict[str, Forwards]:
    """The modules that would be changed, each with its new `forward`; arguments and errors as of `use_kernels`."""
    family = model.config.model_type
    if family not in KERNEL_FAMILIES:
        raise RecipeError(f"model: the kernels are for {', '.join(KERNEL_FAMILIES)}, not {family}")
    if gate is not None and not is_gated_silu(model):
        raise RecipeError(f"model: its activation is {model.config.hidden_act}, the kernel's a gated silu")
    parts = find_anatomy(model)
    modules_by_kind: dict[str, Forwards] = {}
    # On instances rather than classes: other models of the family in this process keep their operators.
    if norm is not None:
        modules_by_kind["norms"] = [
            (module, types.MethodType(_build_norm_forward(norm), module)) for module in parts.norms.values()
        ]
    if rotary is not None:
        modules_by_kind["rotary embeddings"] = [(module, _bind_rotary(module, rotary)) for module in parts.attentions]
    if gate is not None:
        blocks: list[Any] = [layer.mlp for layer in parts.layers]
        modules_by_kind["gated activations"] = [
            (block, types.MethodType(_build_gated_forward(gate), block)) for block in blocks
        ]
    return modules_by_kind


def is_gated_silu(model: PreTrainedModel) -> bool:
    """True if its feed-forward blocks are down(silu(gate(x)) * up(x))."""
    return model.config.hidden_act in ("silu", "swish") and all(
        hasattr(layer.mlp, "gate_proj") for layer in find_anatomy(model).layers
    )


@contextmanager
def swap_forwards(modules: Forwards) -> Iterator[None]:
    """Context manager in which these modules run the given `forward` functions."""
    before = []
    for module, forward in modules:
        # A forward of the instance hides the class's. If it had none, deleting ours uncovers the class's again.
        before.append((module, vars(module).get("forward")))
        module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                module.forward = own


def _build_norm_forward(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # All of KERNEL_FAMILIES name it `variance_epsilon`.
    return lambda module, x: function(x, module.weight, module.variance_epsilon)


def _build_gated_forward(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda module, x: module.down_proj(function(module.gate_proj(x), module.up_proj(x)))


def _bind_rotary(attention: nn.Module, rotary: Rotary) -> Callable[..., object]:
    """Rebinds the rotary function, which transformers calls by a global name, in a copy of this module's `forward`."""
    plain: Any = inspect.unwrap(type(attention).forward)  # without decorators, which do not call the function
    name = "apply_rotary_pos_emb"
    if name not in plain.__code__.co_names:
        raise RecipeError(f"model: {type(attention).__name__} does not call {name}; switch the rotary kernel off")
    # The same code with other globals: rebinding the name in the module would change every model of the family.
    copy = types.FunctionType(
        plain.__code__, plain.__globals__ | {name: rotary}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return types.MethodType(copy, attention)
