"""Sizes of a transformers configuration that may differ from layer to layer (Gemma 4's heads, Gemma 3n's widths)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["head_dim", "max_over_layers", "values_per_layer"]


def values_per_layer(text: PretrainedConfig, key: str, default: Any = None) -> list[Any]:
    """Returns the value of a key for each layer, whether the configuration has one value, a list or one per layer.

    Example:
        >>> from transformers import Gemma3nTextConfig
        >>> values_per_layer(Gemma3nTextConfig(num_hidden_layers=2, intermediate_size=[8, 16], num_kv_shared_layers=0,
        ...     layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.0] * 2), "intermediate_size")
        [8, 16]
    """
    layers: int = text.num_hidden_layers
    # transformers keeps the values of heterogeneous layers in one configuration per layer.
    if getattr(text, "is_heterogeneous", False) and key in (text.per_layer_attributes or ()):
        return [getattr(layer, key, default) for layer in text.per_layer_config]
    value = getattr(text, key, default)
    return list(value) if isinstance(value, list | tuple) and len(value) == layers else [value] * layers


def max_over_layers(text: PretrainedConfig, key: str, default: Any = None) -> Any:
    """Returns the largest value of a key over the layers; `default` if the configuration has none."""
    if not (getattr(text, "is_heterogeneous", False) and key in (text.per_layer_attributes or ())):
        value = getattr(text, key, default)
        if not isinstance(value, list | tuple):
            return value
    # Entries that are not numbers mark layers without the size.
    values = [value for value in values_per_layer(text, key) if isinstance(value, int | float)]
    return max(values, default=default)


def head_dim(text: PretrainedConfig) -> int:
    """Returns the dimension of the queries and keys of a head, in the layer with the largest; 0 without attention."""
    # Latent attention (DeepSeek) states qk_head_dim, and its head_dim is only the rotary part.
    if stated := max_over_layers(text, "qk_head_dim") or max_over_layers(text, "head_dim"):
        return int(stated)
    heads = max_over_layers(text, "num_attention_heads", 0)
    return int(text.hidden_size // heads) if heads else 0
