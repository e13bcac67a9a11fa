"""Translates a DeepSpeed recipe into one for the native engine. No torch."""

from __future__ import annotations

from preheat.core import Recipe
from preheat.recipe import override

__all__ = ["to_native_engine"]

_SAME = {
    1: ("techniques.data_parallel={}", "techniques.zero1={}"),
    2: ("techniques.fsdp={reshard_after_forward: false}",),
    3: ("techniques.fsdp={}",),
}
"""ZeRO stage -> the techniques that shard the same tensors."""


def to_native_engine(recipe: Recipe) -> Recipe:
    """Returns the recipe for the native engine with the same sharding, since DeepSpeed cannot run on fake tensors.

    Example:
        >>> from preheat.recipe import parse
        >>> deepspeed = parse("stop: {max_steps: 1}\\nparallel: {engine: deepspeed, zero_stage: 3}")
        >>> sorted(to_native_engine(deepspeed).techniques), to_native_engine(deepspeed).parallel.engine
        (['fsdp'], 'native')
    """
    # zero_stage goes back to its default, since only DeepSpeed reads it.
    return override(recipe, "parallel.engine=native", "parallel.zero_stage=1", *_SAME[recipe.parallel.zero_stage])
