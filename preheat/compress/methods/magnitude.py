"""Magnitude pruning: the smallest weights of each linear map become zero.

What: in each linear map of the layers the given share of the weights with the smallest magnitudes is set to zero, or two of each four
neighbours (2:4). Embedding, head, norms and biases stay.
Helps: the simplest measure there is, and it reads no data; 2:4 is what NVIDIA's sparse matrix units run faster. Hurts: of large language
models far more than Wanda at the same share. Zeros are stored like other numbers: the folder is no smaller, and nothing but
sparse kernels is quicker for them; for an ordinary smaller model use `width`, `depth` or `lottery`. Training goes on with the zeros kept
by the technique `sparse_weights`.
Source: Han et al. 2015 (arXiv:1506.02626); 2:4: Mishra et al. 2021 (arXiv:2104.08378).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts
from preheat.recipe import Share

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Magnitude", "prune_by_magnitude"]


def prune_by_magnitude(
    model: PreTrainedModel, *, sparsity: float = 0.5, pattern: str = "unstructured", keep: str = ""
) -> tuple[str, int]:
    """Sets the smallest weights of a transformers model's linear maps to zero, in place.

    Args:
        sparsity: share of each map's weights that become zero; 2:4 is half of them by itself.
        pattern: unstructured, or 2:4 along the inputs.
        keep: a regular expression for the names of maps that stay as they are.

    Returns:
        What was done, in words, and the number of maps pruned.

    Raises:
        RecipeError: `keep` matches no linear map or all, experts, inputs that fours do not divide.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=16)
        >>> model = LlamaForCausalLM(config)
        >>> prune_by_magnitude(model, pattern="2:4")
        ('896 of the 1,792 weights of 7 linear maps are zero, 50.0% (two of each four)', 7)
    """
    from preheat.compress import unstructured_pruning
    from preheat.models.layerwise import matrix

    maps = unstructured_pruning.maps_to_prune(model, keep=keep, pattern=pattern)
    for module in maps.values():
        weight = matrix(module)
        unstructured_pruning.zero_lowest(weight, weight.abs(), sparsity, pattern, by_row=False)
    return unstructured_pruning.summary(maps, pattern), len(maps)


@dataclass(frozen=True, kw_only=True)
class Magnitude(Method):
    sparsity: Share = 0.5
    """Share of each map's weights that become zero; 2:4 is half by itself."""
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    """Where zeros may be: anywhere, or two of each four neighbouring inputs."""
    keep: str = ""
    """Linear maps that stay as they are: a regular expression for their whole names."""

    def check(self, model: ModelFacts) -> list[str]:
        from preheat.compress.unstructured_pruning import problems

        return problems(self.sparsity, self.pattern, model)

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(*prune_by_magnitude(model, sparsity=self.sparsity, pattern=self.pattern, keep=self.keep))
