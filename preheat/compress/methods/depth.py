"""Depth pruning: removes whole layers; the result is an ordinary, shallower model of the family.

What: each layer is scored over calibration sequences by how much it rotates the residual stream (1 - cosine of its
input and output), or by how much the loss rises without it. The layers with the lowest scores are removed.
Helps: saves the most time per parameter, above all when decoding single tokens; supports every family, experts too.
Hurts: layers are a coarse unit, and a shallow model needs each of them; after recovery, width keeps more quality at
equal parameters. Scoring by loss takes a pass over the sequences for each layer, and is more accurate for small models.
Source: ShortGPT, Men et al. 2024 (arXiv:2403.03853); by loss: Kim et al. 2024 (arXiv:2402.02834).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts
from preheat.recipe import Bound

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Depth", "prune_depth"]


def prune_depth(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    *,
    layers: float = 0.75,
    by: Literal["influence", "loss"] = "influence",
) -> tuple[str, int]:
    """Removes layers of a transformers model and adapts its configuration, in place.

    Args:
        rows: calibration sequences, [1, length] tokens each.
        layers: fraction of the layers to keep, to the nearest whole number.
        by: score of a layer: its `influence` on the residual stream, or the `loss` without it.

    Returns:
        A description, and the number of removed layers.

    Raises:
        RecipeError: no rows; no layer would stay, or all; the family's layers depend on their index.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 96}
        >>> config = LlamaConfig(num_hidden_layers=4, **sizes)
        >>> prune_depth(LlamaForCausalLM(config), [torch.arange(20)[None]], layers=0.5)[1]
        2
    """
    from preheat.compress import structured_pruning
    from preheat.errors import RecipeError
    from preheat.models.conversions import slicing
    from preheat.models.hf import find_anatomy
    from preheat.models.layerwise import require_rows
    from preheat.ops.pruning_scores import find_highest

    require_rows(rows, "depth")
    count = len(find_anatomy(model).layers)
    wanted = structured_pruning.count_of("layers", layers, count, "layers")
    if wanted == count:
        raise RecipeError(f"layers: {layers:g} keeps all {count} layers; {(count - 1) / count:.3g} removes one")
    # Higher is more important for both: a large rotation, or a large loss without the layer.
    scores = (
        structured_pruning.compute_influences(model, rows)
        if by == "influence"
        else structured_pruning.compute_losses_without(model, rows)
    )
    remaining = find_highest(scores, wanted)
    before = model.num_parameters()
    # A new model with copies, so that the original can still be compared with it.
    smaller = slicing.build_smaller(model, slicing.KeptIndices(layers=remaining))
    # Before the model is changed, since this compares with it.
    structured_pruning.require_skipped(model, smaller, remaining, rows)
    slicing.replace_in_place(model, smaller)
    removed = sorted(set(range(count)) - set(remaining.tolist()))
    after = model.num_parameters()
    return (
        f"layers {count} -> {wanted} (without {', '.join(map(str, removed))}, by {by}); {before:,} -> "
        f"{after:,} parameters ({after / before:.1%})",
        len(removed),
    )


@dataclass(frozen=True, kw_only=True)
class Depth(Method):
    reads_rows: ClassVar[bool] = True

    layers: Annotated[float, Bound(0, 1, open_low=True)] = 0.75
    """Fraction of the layers to keep, to the nearest whole number."""
    by: Literal["influence", "loss"] = "influence"
    """Score of a layer: how much it rotates the residual stream, or the loss without it (one pass per layer)."""

    def check(self, model: ModelFacts) -> list[str]:
        if not 0 < self.layers < 1:
            return [f"layers: {self.layers} must remove some layers and keep some; use a fraction such as 0.75"]
        return []

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(*prune_depth(model, rows, layers=self.layers, by=self.by))
