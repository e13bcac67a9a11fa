"""Wanda: the weights that matter least to what passes through them become zero.

What: a weight counts by its magnitude times the norm of the input that it multiplies, over calibration rows; of each output's weights the
given share that counts least is set to zero, or two of each four neighbours (2:4). Layer by layer: the rows that a layer is judged by come
through the layers before it as they are after pruning. No weight is changed otherwise, and nothing is trained. Embedding, head, norms
and biases stay.
Helps: at half of the weights a large model keeps most of its quality where magnitude alone ruins it, for two passes over a few rows.
Hurts: as with every pruning of single weights the folder is no smaller, and only sparse kernels are quicker (2:4 on NVIDIA's GPUs); models
of less than a billion weights lose more. Training goes on with the zeros kept by the technique `sparse_weights`.
Source: Sun et al. 2023 (arXiv:2306.11695).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts
from preheat.recipe import Share

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Wanda", "prune_by_wanda"]


def prune_by_wanda(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    *,
    sparsity: float = 0.5,
    pattern: str = "unstructured",
    keep: str = "",
) -> tuple[str, int]:
    """Sets the weights of a transformers model's linear maps to zero that matter least over the rows, in place.

    Args:
        rows: calibration rows, [1, length] tokens each.
        sparsity: share of each output's weights that become zero; 2:4 is half of them by itself.
        pattern: unstructured, or 2:4 along the inputs.
        keep: a regular expression for the names of maps that stay as they are.

    Returns:
        What was done, in words, and the number of maps pruned.

    Raises:
        RecipeError: no rows; `keep` matches no linear map or all, experts, inputs that fours do not divide.

    Example:
        >>> prune_by_wanda(model, rows, sparsity=0.6)                                               # doctest: +SKIP
        ('99,072 of the 165,120 weights of 35 linear maps are zero, 60.0%', 35)
    """
    from preheat.compress import unstructured_pruning
    from preheat.models.layerwise import hooked, layer_by_layer, matrix, plainly, require_rows
    from preheat.ops.pruning_scores import wanda

    require_rows(rows, "wanda")
    maps = unstructured_pruning.maps_to_prune(model, keep=keep, pattern=pattern)

    def summing(squares: Tensor) -> Callable[[Tensor, Tensor], object]:
        return lambda before, after: squares.add_(before.float().square().flatten(0, -2).sum(0))

    with plainly(model):
        for name, _, run in layer_by_layer(model, rows):
            here = [m for found, m in maps.items() if found.startswith(f"{name}.")]
            squares = [matrix(m).new_zeros(matrix(m).shape[1]) for m in here]
            with hooked([(m, summing(own)) for m, own in zip(here, squares, strict=True)]):
                run()
            for module, own in zip(here, squares, strict=True):
                weight = matrix(module)
                unstructured_pruning.zero_lowest(weight, wanda(weight, own), sparsity, pattern, by_row=True)
    return unstructured_pruning.summary(maps, pattern), len(maps)


@dataclass(frozen=True, kw_only=True)
class Wanda(Method):
    reads_rows: ClassVar[bool] = True

    sparsity: Share = 0.5
    """Share of each output's weights that become zero; 2:4 is half by itself."""
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    """Where zeros may be: anywhere in an output's weights, or two of each four neighbouring inputs."""
    keep: str = ""
    """Linear maps that stay as they are: a regular expression for their whole names."""

    def check(self, model: ModelFacts) -> list[str]:
        from preheat.compress.unstructured_pruning import problems

        return problems(self.sparsity, self.pattern, model)

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(*prune_by_wanda(model, rows, sparsity=self.sparsity, pattern=self.pattern, keep=self.keep))
