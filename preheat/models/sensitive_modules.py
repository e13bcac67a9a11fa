"""The modules of a model that lose most when quantized: embedding, head, first and last layer, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.models.hf import find_anatomy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["layer_names", "roles"]


def layer_names(model: PreTrainedModel) -> list[str]:
    """Names of the transformer layers, in order."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in find_anatomy(model).layers]


def roles(model: PreTrainedModel) -> dict[str, list[str]]:
    """Module names of the roles `embedding`, `head`, `first` and `last` (layer), including modules inside the layers.

    `auto` is all of these, without the layers if there are two or fewer: no layer would be left.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 16}
        >>> config = LlamaConfig(num_hidden_layers=2, **sizes)
        >>> roles(LlamaForCausalLM(config))["head"]
        ['lm_head']
    """
    parts, layers = find_anatomy(model), layer_names(model)
    # By identity, because adapters and wrappers change names.
    everything = list(model.named_modules())
    by_role = {
        "embedding": [name for name, m in everything if m is parts.embedding],
        "head": [name for name, m in everything if m is parts.head],
        "first": [name for name, _ in everything if name.startswith(f"{layers[0]}.")],
        "last": [name for name, _ in everything if name.startswith(f"{layers[-1]}.")],
    }
    # With two layers, both are first or last.
    chosen = by_role if len(layers) > 2 else ("embedding", "head")
    return by_role | {"auto": [name for role in chosen for name in by_role[role]]}
