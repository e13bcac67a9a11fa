"""Zeros for single weights: which maps, where, and by how much. The methods `magnitude` and `wanda` are scores over these functions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from preheat.errors import RecipeError, nearest
from preheat.models.layerwise import linear_maps, matrix
from preheat.ops.pruning_scores import lowest, two_of_four

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from preheat.core import ModelFacts

__all__ = ["maps_to_prune", "problems", "summary", "zero_lowest"]


def problems(sparsity: float, pattern: str, model: ModelFacts) -> list[str]:
    """Why these settings cannot serve for a model, in words that begin with the knob."""
    found = []
    if not 0 < sparsity < 1:
        found.append(f"sparsity: {sparsity} is no share of weights to make zero; use a number between 0 and 1, as 0.5")
    elif pattern == "2:4" and sparsity != 0.5:
        found.append(
            f"sparsity: {sparsity} and pattern: 2:4 contradict each other: two of each four are 0.5; leave one of them out"
        )
    if model.experts:
        found.append(
            f"method: {model.family} holds all {model.experts} experts of a layer in one parameter, which single weights are not pruned of; use the method depth"
        )
    return found


def maps_to_prune(model: PreTrainedModel, *, keep: str = "", pattern: str = "unstructured") -> dict[str, nn.Module]:
    """The linear maps of a model's layers that are pruned, by name.

    Args:
        keep: a regular expression for the whole names of those that are not.

    Raises:
        RecipeError: `keep` matches none or leaves none; a layer has experts; 2:4, and a map's inputs are no multiple of 4.
    """
    found = linear_maps(model)
    kept = {name for name in found if keep and re.fullmatch(keep, name)}
    if keep and not kept:
        raise RecipeError(f"keep: {keep!r} matches no linear map of the layers; {nearest(keep, list(found)[:20])}")
    chosen = {name: m for name, m in found.items() if name not in kept}
    if not chosen:
        raise RecipeError(f"keep: {keep!r} leaves no linear map to prune")
    for name, module in chosen.items():
        inputs = matrix(module).shape[1]
        if pattern == "2:4" and inputs % 4:
            raise RecipeError(
                f"pattern: 2:4 goes by fours of inputs, and {name} has {inputs}; keep it out (keep: {re.escape(name)}), or use pattern: unstructured"
            )
    return chosen


def zero_lowest(weight: Tensor, scores: Tensor, sparsity: float, pattern: str, *, by_row: bool) -> None:
    """Sets the weights [out, in] of the lowest scores to zero, in place: a share of all or of each row, or two of each four (2:4)."""
    removed = two_of_four(scores) if pattern == "2:4" else lowest(scores, sparsity, by_row=by_row)
    weight.masked_fill_(removed, 0.0)


def summary(maps: dict[str, nn.Module], pattern: str) -> str:
    """What was done, counted: '82,560 of the 165,120 weights of 35 linear maps are zero, 50.0%'."""
    weights = sum(matrix(m).numel() for m in maps.values())
    zeros = sum(int((matrix(m) == 0).sum()) for m in maps.values())
    how = " (two of each four)" if pattern == "2:4" else ""
    return f"{zeros:,} of the {weights:,} weights of {len(maps)} linear maps are zero, {zeros / weights:.1%}{how}"
