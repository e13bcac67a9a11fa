"""Width pruning: fewer heads, feed-forward channels and hidden dimensions; the result is an ordinary, narrower model.

What: over calibration sequences, each head and channel is scored by its contribution to the residual stream, each
hidden dimension by its magnitude after the norms. The least important are cut out of every matrix, and the maps that
read the remaining heads and channels are refitted to the full model's outputs (least squares over the sequences). Query
heads stay with their key-value head; each layer selects its own heads and channels, the hidden dimensions are the same
for all.
Helps: fewer parameters, operations and bytes in every step, on any machine and with any kernel; of the ways to cut a
model by a third it keeps the most quality after recovery. Hurts: quality falls at once and must be recovered: continue
training from the written folder (`model.path`), by distillation from the larger model if possible. Hidden dimensions
cost the most quality per parameter.
Serves llama, mistral, qwen2, qwen3 and gpt2; not experts.
Source: Minitron, Muralidharan et al. 2024 (arXiv:2407.14679); the fit: Kurtic et al. 2023 (arXiv:2302.04089).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts
from preheat.recipe import Bound, Count

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Width", "prune_width"]


def prune_width(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    *,
    heads: float = 1.0,
    channels: float = 1.0,
    hidden: float = 1.0,
    multiple: int = 8,
    refit: bool = True,
) -> tuple[str, int]:
    """Makes a transformers model narrower and adapts its configuration, in place.

    Args:
        rows: calibration sequences, [1, length] tokens each.
        heads: fraction of the heads to keep, in whole key-value groups.
        channels: fraction of the feed-forward channels to keep.
        hidden: fraction of the hidden dimensions to keep.
        multiple: channels and hidden dimensions are multiples of it.
        refit: refit the maps that read the remaining heads and channels to the full model's outputs.

    Returns:
        A description, and the number of removed parameters.

    Raises:
        RecipeError: no rows; a fraction that leaves nothing, or changes nothing; a family that cannot be sliced, or
            that transformers does not support in this shape.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 96}
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> prune_width(model, [torch.arange(20)[None]], channels=0.5)
        ('channels 64 -> 32; 16,480 -> 13,408 parameters (81.4%)', 3072)
    """
    from preheat.compress import structured_pruning
    from preheat.errors import RecipeError
    from preheat.models.conversions import slicing
    from preheat.models.layerwise import require_rows

    require_rows(rows, "width")
    current = slicing.sizes_of(model.config)
    wanted = structured_pruning.choose_sizes(
        current, model.config, heads=heads, channels=channels, hidden=hidden, multiple=multiple
    )
    # Rounding to groups and multiples may undo a fraction near 1.
    if wanted == current:
        raise RecipeError(
            f"heads: {heads:g}, channels: {channels:g}, hidden: {hidden:g}: leave the model unchanged, rounded to the "
            "next multiple; use smaller fractions"
        )
    before, importance = model.num_parameters(), structured_pruning.measure(model, rows, products=refit)
    # In place, because callers have references to the model.
    slicing.replace_in_place(model, structured_pruning.build_pruned(model, importance, wanted, refit=refit))
    after = model.num_parameters()
    return structured_pruning.describe_change(current, wanted, before, after), before - after


@dataclass(frozen=True, kw_only=True)
class Width(Method):
    reads_rows: ClassVar[bool] = True

    heads: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Fraction of the heads to keep in each layer, in whole key-value groups."""
    channels: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Fraction of the feed-forward channels to keep in each layer."""
    hidden: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Fraction of the hidden dimensions to keep, the same in all layers."""
    multiple: Count = 8
    """Channels and dimensions come in multiples of it: 64 or 128 for a GPU's kernels."""

    refit: bool = True
    """Refit the maps that read heads and channels to the full model's outputs over the calibration sequences, by least
    squares; false: only slice. It takes about the model's memory again."""

    def check(self, model: ModelFacts) -> list[str]:
        errors = [
            f"{knob}: {share} is not a fraction to keep; use a number above 0 and at most 1"
            for knob, share in (("heads", self.heads), ("channels", self.channels), ("hidden", self.hidden))
            if not 0 < share <= 1
        ]
        if not errors and self.heads == self.channels == self.hidden == 1:
            errors.append(
                "channels: 1.0, heads: 1.0 and hidden: 1.0 prune nothing; lower one of them, e.g. channels: 0.7"
            )
        return errors

    def require(self, model: PreTrainedModel) -> None:
        from preheat.models.conversions.slicing import sizes_of

        sizes_of(model.config)  # raises for a family that cannot be sliced

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(
            *prune_width(
                model,
                rows,
                heads=self.heads,
                channels=self.channels,
                hidden=self.hidden,
                multiple=self.multiple,
                refit=self.refit,
            )
        )
