"""Selects parameters of a model by kind or by a pattern of their names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from preheat.models.module_lookup import find_anatomy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

__all__ = ["KINDS", "find_layer_names", "find_split_names", "select_parameters"]

KINDS = ("embeddings", "head", "norms", "biases")
"""Kinds of parameters; every other text is a regular expression."""


def select_parameters(model: PreTrainedModel, pattern: str) -> set[str]:
    """Returns the names of the parameters that a kind or a regular expression selects.

    A tied parameter has several names, of which each is selected by itself.

    Args:
        pattern: one of `KINDS`, or a regular expression that is searched in the names.

    Raises:
        ValueError: the pattern is not a regular expression.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8, vocab_size=8
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> sorted(select_parameters(model, "head")), len(select_parameters(model, r"layers\\.1\\..*_proj"))
        (['lm_head.weight'], 7)
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if pattern == "biases":
        return {name for name in names if name.rpartition(".")[2] == "bias"}
    if pattern not in KINDS:
        try:
            return {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"is not a regular expression ({error})") from None
    anatomy = find_anatomy(model)
    if pattern == "norms":
        modules: Iterable[nn.Module] = anatomy.norms.values()
    elif pattern == "head":
        modules = [anatomy.head]
    else:
        # Positions too, where they are learned.
        modules = [m for m in anatomy.base.modules() if isinstance(m, nn.Embedding)]
    chosen = {id(m) for m in modules}
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if id(module) in chosen
        for name, _ in module.named_parameters()
    }


def find_layer_names(model: PreTrainedModel) -> list[set[str]]:
    """Returns the names of the parameters of each layer, from the first to the last."""
    prefixes = {id(module): prefix for prefix, module in model.named_modules()}
    return [
        {f"{prefixes[id(layer)]}.{name}" for name, _ in layer.named_parameters()}
        for layer in find_anatomy(model).layers
    ]


def find_split_names(model: PreTrainedModel, names: set[str]) -> tuple[str, str] | None:
    """Returns a name that is in `names` and one that is not, of one tied parameter; None if there is no such pair."""
    inside: dict[int, str] = {}
    outside: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        (inside if name in names else outside)[id(p)] = name
    return next(((inside[key], outside[key]) for key in inside if key in outside), None)
