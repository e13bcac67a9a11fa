"""Unstructured and 2:4 pruning of linear maps; the methods `magnitude` and `wanda` differ in their scores."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from preheat.errors import RecipeError, suggest_nearest
from preheat.models.layerwise import linear_maps, matrix
from preheat.ops.pruning_scores import mask_lowest, mask_two_of_four
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from preheat.core import ModelFacts

__all__ = ["find_maps_to_prune", "find_problems", "summarize_zeros", "zero_lowest"]


def find_problems(sparsity: float, pattern: str, model: ModelFacts) -> list[str]:
    """Returns why these settings cannot be applied to a model, each reason starting with the setting."""
    errors = []
    if not 0 < sparsity < 1:
        errors.append(
            f"sparsity: {sparsity} is not a fraction of weights to zero; use a number between 0 and 1, e.g. 0.5"
        )
    elif pattern == "2:4" and sparsity != 0.5:
        errors.append(
            f"sparsity: {sparsity} and pattern: 2:4 contradict each other: two of each four are 0.5; leave "
            "one of them out"
        )
    if model.experts:
        errors.append(
            f"method: {model.family} holds all {model.experts} experts of a layer in one parameter, from which single "
            "weights cannot be pruned; use the method depth"
        )
    return errors


def find_maps_to_prune(
    model: PreTrainedModel, *, keep: str = "", pattern: str = "unstructured"
) -> dict[str, nn.Module]:
    """Returns the linear maps of a model's layers to prune, by name.

    Args:
        keep: a regular expression for the full names of maps to leave out.
        pattern: unstructured or 2:4.

    Raises:
        RecipeError: `keep` matches no map or all; a layer has experts; with 2:4, a map's inputs are not a multiple of
            4.
    """
    maps = linear_maps(model)
    try:
        expression = re.compile(keep)
    except re.error as error:
        raise RecipeError(f"keep: {quote_value(keep)} is not a regular expression ({error})") from None
    excluded = {name for name in maps if keep and expression.fullmatch(name)}
    if keep and not excluded:
        raise RecipeError(
            f"keep: {quote_value(keep)} matches no linear map of the layers; {suggest_nearest(keep, list(maps)[:20])}"
        )
    chosen = {name: m for name, m in maps.items() if name not in excluded}
    if not chosen:
        raise RecipeError(f"keep: {quote_value(keep)} leaves no linear map to prune")
    for name, module in chosen.items():
        inputs = matrix(module).shape[1]
        # The pattern is along the inputs, which matmuls sum over.
        if pattern == "2:4" and inputs % 4:
            raise RecipeError(
                f"pattern: 2:4 needs inputs in groups of four, and {name} has {inputs}; keep it out (keep: "
                f"{re.escape(name)}), or use pattern: unstructured"
            )
    return chosen


def zero_lowest(weight: Tensor, scores: Tensor, sparsity: float, pattern: str, *, by_row: bool) -> None:
    """Zeroes the weights [out, in] with the lowest scores, in place: a fraction of all or of each row, or two of each
    four."""
    # (out, in)
    removed = mask_two_of_four(scores) if pattern == "2:4" else mask_lowest(scores, sparsity, by_row=by_row)
    weight.masked_fill_(removed, 0.0)


def summarize_zeros(maps: dict[str, nn.Module], pattern: str) -> str:
    """Returns a summary: '82,560 of the 165,120 weights of 35 linear maps are zero, 50.0%'."""
    weights = sum(matrix(m).numel() for m in maps.values())
    # Counted afterwards: weights that were 0 before count too.
    zeros = sum(int((matrix(m) == 0).sum()) for m in maps.values())
    detail = " (two of each four)" if pattern == "2:4" else ""
    return f"{zeros:,} of the {weights:,} weights of {len(maps)} linear maps are zero, {zeros / weights:.1%}{detail}"
