"""The techniques that preheat adds to a run of another trainer: they change no result but by rounding. No torch."""

from __future__ import annotations

from dataclasses import replace

from preheat.core import registry
from preheat.recipe import Recipe

__all__ = ["add_own_techniques"]

_LOSS = ("chunked_loss", "liger", "pipeline_parallel")
"""Techniques with which the head and the loss are in chunks already, or cannot be."""


def add_own_techniques(recipe: Recipe, *, fused: bool = True) -> Recipe:
    """Returns the recipe as preheat would run it: chunked loss, fused operators, and no more recomputation than needed.

    Args:
        fused: with fused operators, which not every family has.

    Example:
        >>> from preheat.recipe import parse
        >>> trained = parse("{model: {size: 15M}, stop: {max_steps: 1}, techniques: {activation_checkpointing: {}}}")
        >>> {name: vars(t).get("on_gpu") for name, t in add_own_techniques(trained).techniques.items()}
        {'activation_checkpointing': 'auto', 'chunked_loss': None, 'fused_operators': None}
    """
    known, techniques = registry(), dict(recipe.techniques)
    if "activation_checkpointing" in techniques and "activation_offload" not in techniques:
        techniques["activation_checkpointing"] = known["activation_checkpointing"](on_gpu="auto")  # type: ignore[call-arg]
    if not any(name in techniques for name in _LOSS):
        techniques["chunked_loss"] = known["chunked_loss"]()
    if fused:
        techniques["fused_operators"] = known["fused_operators"]()
    return replace(recipe, techniques=techniques)
