"""The places of a model that lose most when they are rounded: embedding, head, first and last layer, by the names of their modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.models.hf import anatomy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["layer_names", "roles"]


def layer_names(model: PreTrainedModel) -> list[str]:
    """Names of the transformer layers, in order."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in anatomy(model).layers]


def roles(model: PreTrainedModel) -> dict[str, list[str]]:
    """What `embedding`, `head`, `first` and `last` (layer) stand for: names of modules, those inside the layers included.

    `auto` are all of these, without the layers where there are two or fewer: nothing would lie between.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=16)
        >>> roles(LlamaForCausalLM(config))["head"]
        ['lm_head']
    """
    parts, layers = anatomy(model), layer_names(model)
    everything = list(model.named_modules())
    found = {
        "embedding": [name for name, m in everything if m is parts.embedding],
        "head": [name for name, m in everything if m is parts.head],
        "first": [name for name, _ in everything if name.startswith(f"{layers[0]}.")],
        "last": [name for name, _ in everything if name.startswith(f"{layers[-1]}.")],
    }
    kept = found if len(layers) > 2 else ("embedding", "head")
    return found | {"auto": [name for role in kept for name in found[role]]}
