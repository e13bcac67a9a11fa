"""Wanda: zeroes the weights with the smallest products of magnitude and input norm.

What: a weight's score is its magnitude times the norm of its input over calibration sequences; the given fraction of
each output's weights with the lowest scores is set to zero, or two of each four neighbours (2:4). Layers are processed
in order: each is scored with its inputs after pruning of the preceding ones. No other weight changes, and nothing is
trained. Embedding, head, norms and biases are unchanged.
Helps: at half of the weights a large model keeps most of its quality, which magnitude alone destroys, for two passes
over a few sequences. Hurts: as with all unstructured pruning, the folder is no smaller, and only sparse kernels are
faster (2:4 on NVIDIA's GPUs); models with less than a billion weights lose more. The technique `sparse_weights` keeps
the zeros in further training.
Source: Sun et al. 2023 (arXiv:2306.11695).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts
from preheat.recipe import Fraction

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
    """Zeroes the weights of a transformers model's linear maps with the lowest Wanda scores, in place.

    Args:
        rows: calibration sequences, [1, length] tokens each.
        sparsity: fraction of each output's weights to zero; 2:4 implies one half.
        pattern: unstructured, or 2:4 along the inputs.
        keep: a regular expression for the names of maps to leave unchanged.

    Returns:
        A description, and the number of pruned maps.

    Raises:
        RecipeError: no rows; `keep` matches no linear map or all; experts; inputs that are no multiple of 4.

    Example:
        >>> prune_by_wanda(model, rows, sparsity=0.6)                                               # doctest: +SKIP
        ('99,072 of the 165,120 weights of 35 linear maps are zero, 60.0%', 35)
    """
    from preheat.compress import unstructured_pruning
    from preheat.models.layerwise import hook_hidden_states, iterate_layers, matrix, plain_forward, require_rows
    from preheat.ops.pruning_scores import score_wanda

    require_rows(rows, "wanda")
    maps = unstructured_pruning.find_maps_to_prune(model, keep=keep, pattern=pattern)

    def accumulate(squares: Tensor) -> Callable[[Tensor, Tensor], None]:
        # (in): sum of squares of each input over all tokens
        def add(before: Tensor, after: Tensor) -> None:
            squares.add_(before.float().square().flatten(0, -2).sum(0))

        return add

    # Layer by layer: each is scored with the inputs that the pruned layers before it give.
    with plain_forward(model):
        for name, _, run in iterate_layers(model, rows):
            layer_maps = [m for map_name, m in maps.items() if map_name.startswith(f"{name}.")]
            # One sum per map; hooks add to it in place.
            squares = [matrix(m).new_zeros(matrix(m).shape[1]) for m in layer_maps]
            with hook_hidden_states([(m, accumulate(own)) for m, own in zip(layer_maps, squares, strict=True)]):
                run()
            for module, own in zip(layer_maps, squares, strict=True):
                weight = matrix(module)
                # By row: the score compares weights of one output only (Sun et al., section 3).
                unstructured_pruning.zero_lowest(weight, score_wanda(weight, own), sparsity, pattern, by_row=True)
    return unstructured_pruning.summarize_zeros(maps, pattern), len(maps)


@dataclass(frozen=True, kw_only=True)
class Wanda(Method):
    reads_rows: ClassVar[bool] = True

    sparsity: Fraction = 0.5
    """Fraction of each output's weights to zero; 2:4 implies one half."""
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    """Where zeros may be: anywhere in an output's weights, or two of each four neighbouring inputs."""
    keep: str = ""
    """Linear maps to leave unchanged: a regular expression for their whole names."""

    def check(self, model: ModelFacts) -> list[str]:
        from preheat.compress.unstructured_pruning import find_problems

        return find_problems(self.sparsity, self.pattern, model)

    def require(self, model: PreTrainedModel) -> None:
        from preheat.compress.unstructured_pruning import find_maps_to_prune

        find_maps_to_prune(model, keep=self.keep, pattern=self.pattern)

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(*prune_by_wanda(model, rows, sparsity=self.sparsity, pattern=self.pattern, keep=self.keep))
