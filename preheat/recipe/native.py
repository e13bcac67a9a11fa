"""What a recipe for DeepSpeed would be with our own engine. No torch."""

from __future__ import annotations

from preheat.core import Recipe
from preheat.recipe import override

__all__ = ["native"]

_SAME = {
    1: ("techniques.data_parallel={}", "techniques.zero1={}"),
    2: ("techniques.fsdp={reshard: false}",),
    3: ("techniques.fsdp={}",),
}
"""Stage of ZeRO -> the techniques that shard the same."""


def native(recipe: Recipe) -> Recipe:
    """The recipe for the native engine that shards what this one's DeepSpeed does: DeepSpeed cannot run on fake tensors.

    Example:
        >>> from preheat.recipe import parse
        >>> deepspeed = parse("model: {size: 15M}\\nstop: {steps: 1}\\nparallel: {engine: deepspeed, zero: 3}")
        >>> sorted(native(deepspeed).techniques), native(deepspeed).parallel.engine
        (['fsdp'], 'native')
    """
    return override(recipe, "parallel.engine=native", "parallel.zero=1", *_SAME[recipe.parallel.zero])
