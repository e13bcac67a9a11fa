"""Depth pruning: whole layers are taken out; an ordinary, shallower model of the family.

What: over calibration rows each layer counts by how much it turns the residual stream (1 - cosine of what goes in and comes out), or by how
much the loss rises without it. Those that count least go.
Helps: of all ways to cut, it saves the most time a parameter, above all where single tokens are decoded; serves every family, experts too.
Hurts: a layer is a coarse unit, and a model that is shallow already misses each; after recovery, width keeps more quality at equal
parameters. By loss takes a pass over the rows for each layer, and sees better what a small model can do without.
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
    """Takes layers out of a transformers model, configuration and all, in place.

    Args:
        rows: calibration rows, [1, length] tokens each.
        layers: share of the layers that stay, to the nearest whole number.
        by: what a layer counts by: `influence` on the stream, or the `loss` without it.

    Returns:
        What was done, in words, and the number of layers that went away.

    Raises:
        RecipeError: no rows; no layer would stay, or all; the family tells layers apart by their number.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, vocab_size=96)
        >>> prune_depth(LlamaForCausalLM(config), [torch.arange(20)[None]], layers=0.5)[1]
        2
    """
    from preheat.compress import structured_pruning
    from preheat.errors import RecipeError
    from preheat.models.conversions import slicing
    from preheat.models.hf import anatomy
    from preheat.models.layerwise import require_rows
    from preheat.ops.pruning_scores import highest

    require_rows(rows, "depth")
    count = len(anatomy(model).layers)
    wanted = structured_pruning.count_of("layers", layers, count, "layers")
    if wanted == count:
        raise RecipeError(f"layers: {layers:g} keeps all {count} layers; {(count - 1) / count:.3g} takes one out")
    scores = (
        structured_pruning.influences(model, rows)
        if by == "influence"
        else structured_pruning.losses_without(model, rows)
    )
    kept = highest(scores, wanted)
    before = model.num_parameters()
    made = slicing.smaller(model, slicing.Kept(layers=kept))
    structured_pruning.require_skipped(model, made, kept, rows)
    slicing.become(model, made)
    gone = sorted(set(range(count)) - set(kept.tolist()))
    after = model.num_parameters()
    return (
        f"layers {count} -> {wanted} (without {', '.join(map(str, gone))}, by {by}); {before:,} -> {after:,} parameters ({after / before:.1%})",
        len(gone),
    )


@dataclass(frozen=True, kw_only=True)
class Depth(Method):
    reads_rows: ClassVar[bool] = True

    layers: Annotated[float, Bound(0, 1, open_low=True)] = 0.75
    """Share of the layers that stay, to the nearest whole number."""
    by: Literal["influence", "loss"] = "influence"
    """What a layer counts by: how much it turns the stream, or how much the loss rises without it (a pass for each layer)."""

    def check(self, model: ModelFacts) -> list[str]:
        if not 0 < self.layers < 1:
            return [f"layers: {self.layers} takes no layer out and leaves some; use a number between 0 and 1, as 0.75"]
        return []

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(*prune_depth(model, rows, layers=self.layers, by=self.by))
