"""Magnitude pruning: zeroes the smallest weights of each linear map.

What: in each linear map of the layers, the given fraction of the weights with the smallest magnitudes is set to zero,
or two of each four neighbours (2:4). Embedding, head, norms and biases are unchanged.
Helps: the simplest score there is, and it reads no data; 2:4 is the pattern that NVIDIA's sparse tensor cores
accelerate. Hurts: large language models lose far more than with Wanda at the same sparsity. Zeros are stored like
other numbers: the folder is no smaller, and only sparse kernels are faster; for an ordinary smaller model use `width`,
`depth` or `lottery`. The technique `sparse_weights` keeps the zeros in further training.
Source: Han et al. 2015 (arXiv:1506.02626); 2:4: Mishra et al. 2021 (arXiv:2104.08378).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts
from preheat.recipe import Fraction

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Magnitude", "prune_by_magnitude"]


def prune_by_magnitude(
    model: PreTrainedModel, *, sparsity: float = 0.5, pattern: str = "unstructured", keep: str = ""
) -> tuple[str, int]:
    """Zeroes the smallest weights of a transformers model's linear maps, in place.

    Args:
        sparsity: fraction of each map's weights to zero; 2:4 implies one half.
        pattern: unstructured, or 2:4 along the inputs.
        keep: a regular expression for the names of maps to leave unchanged.

    Returns:
        A description, and the number of pruned maps.

    Raises:
        RecipeError: `keep` matches no linear map or all; experts; inputs that are no multiple of 4.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 16}
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> prune_by_magnitude(model, pattern="2:4")
        ('896 of the 1,792 weights of 7 linear maps are zero, 50.0% (two of each four)', 7)
    """
    from preheat.compress import unstructured_pruning
    from preheat.models.layerwise import matrix

    maps = unstructured_pruning.find_maps_to_prune(model, keep=keep, pattern=pattern)
    for module in maps.values():
        weight = matrix(module)
        # Over the whole map, as the one threshold per layer of Han et al.
        unstructured_pruning.zero_lowest(weight, weight.abs(), sparsity, pattern, by_row=False)
    return unstructured_pruning.summarize_zeros(maps, pattern), len(maps)


@dataclass(frozen=True, kw_only=True)
class Magnitude(Method):
    sparsity: Fraction = 0.5
    """Fraction of each map's weights to zero; 2:4 implies one half."""
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    """Where zeros may be: anywhere, or two of each four neighbouring inputs."""
    keep: str = ""
    """Linear maps to leave unchanged: a regular expression for their whole names."""

    def check(self, model: ModelFacts) -> list[str]:
        from preheat.compress.unstructured_pruning import find_problems

        return find_problems(self.sparsity, self.pattern, model)

    def require(self, model: PreTrainedModel) -> None:
        from preheat.compress.unstructured_pruning import find_maps_to_prune

        find_maps_to_prune(model, keep=self.keep, pattern=self.pattern)

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(*prune_by_magnitude(model, sparsity=self.sparsity, pattern=self.pattern, keep=self.keep))
