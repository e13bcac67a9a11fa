"""Tells the kinds of a model's layers apart, from its configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from preheat.models.moe import layers_have_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["layer_kinds"]

_OF_NUMBERS = ("moe_layers", "mlp_only_layers", "attn_layer_indices", "kv_sharing_modes")
"""Lists that name layers by their numbers, or restate other keys."""


def layer_kinds(text: PretrainedConfig) -> list[tuple[Any, ...]]:
    """Returns what distinguishes each layer from others: layers of equal kinds have modules of equal shapes.

    Everything that a configuration states per layer counts (types, windows, widths), whether a layer has experts, and
    whether it takes keys and values of another layer.
    """
    layers: int = text.num_hidden_layers
    # Types may be computed from other keys, and are not among the values then.
    values = text.to_dict() | {key: getattr(text, key, None) for key in ("layer_types", "layers_block_type")}
    # Keys in sorted order, and compared by repr: entries may be lists or dictionaries, which are not hashable.
    listed = [
        value
        for key, value in sorted(values.items())
        if isinstance(value, list | tuple) and len(value) == layers and key not in _OF_NUMBERS
    ]
    own: list[tuple[Any, ...]] = [()] * layers
    if getattr(text, "is_heterogeneous", False):
        keys = sorted(text.per_layer_attributes or ())
        own = [tuple(getattr(layer, key, None) for key in keys) for layer in text.per_layer_config]
    # Gemma 3n: the last layers have no keys and values of their own.
    first_shared = layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    experts = layers_have_experts(text)
    return [(*(repr(values[n]) for values in listed), own[n], experts[n], n >= first_shared) for n in range(layers)]
