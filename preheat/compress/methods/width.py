"""Width pruning: fewer heads, feed-forward channels and stream dimensions; an ordinary, narrower model of the family.

What: over calibration rows each head and channel counts by what it adds to the residual stream, each dimension of the stream by its size
behind the norms. The least are cut out of every matrix, and the maps that read the heads and channels that stay are fitted to what all of
them wrote (least squares over the rows). Query heads go with their key-value head; each layer chooses its own heads and channels, the
stream is one for all.
Helps: fewer parameters, operations and bytes in every step, on any machine and under any kernel; of the ways to cut a model by a third it
keeps the most after recovery. Hurts: quality falls at once and must be trained back: go on from the written folder (`model.path`), by
distillation from the larger model if there is one to spare. Dimensions of the stream cost the most quality for each parameter.
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
    """Makes a transformers model narrower, configuration and all, in place.

    Args:
        rows: calibration rows, [1, length] tokens each.
        heads: share of the heads that stay, by whole key-value groups.
        channels: share of the feed-forward channels that stay.
        hidden: share of the stream's dimensions that stay.
        multiple: channels and dimensions are multiples of it.
        refit: fit what the heads and channels that stay write to what all of them wrote.

    Returns:
        What was done, in words, and the number of parameters that went away.

    Raises:
        RecipeError: no rows; a share that leaves nothing, or changes nothing; a family that cannot be sliced, or has no such model.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=96)
        >>> prune_width(LlamaForCausalLM(config), [torch.arange(20)[None]], channels=0.5)
        ('channels 64 -> 32; 16,480 -> 13,408 parameters (81.4%)', 3072)
    """
    from preheat.compress import structured_pruning
    from preheat.errors import RecipeError
    from preheat.models.conversions import slicing
    from preheat.models.layerwise import require_rows

    require_rows(rows, "width")
    now = slicing.sizes_of(model.config)
    wanted = structured_pruning.shares(
        now, model.config, heads=heads, channels=channels, hidden=hidden, multiple=multiple
    )
    if wanted == now:
        raise RecipeError(
            f"heads: {heads:g}, channels: {channels:g}, hidden: {hidden:g}: leave the model as it is, to the next multiple; ask for smaller shares"
        )
    before, importance = model.num_parameters(), structured_pruning.measure(model, rows, products=refit)
    slicing.become(model, structured_pruning.pruned(model, importance, wanted, refit=refit))
    after = model.num_parameters()
    return structured_pruning.told(now, wanted, before, after), before - after


@dataclass(frozen=True, kw_only=True)
class Width(Method):
    reads_rows: ClassVar[bool] = True

    heads: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Share of the heads that stay in each layer, by whole key-value groups."""
    channels: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Share of the feed-forward channels that stay in each layer."""
    hidden: Annotated[float, Bound(0, 1, open_low=True)] = 1.0
    """Share of the stream's dimensions that stay, the same in all layers."""
    multiple: Count = 8
    """Channels and dimensions come in multiples of it: 64 or 128 for a GPU's kernels."""

    refit: bool = True
    """Fit the maps behind heads and channels to what all of them wrote over the calibration rows, by least squares; false: plain slices. It takes about the model's memory again."""

    def check(self, model: ModelFacts) -> list[str]:
        found = [
            f"{knob}: {share} is no share that stays; use a number above 0 and at most 1"
            for knob, share in (("heads", self.heads), ("channels", self.channels), ("hidden", self.hidden))
            if not 0 < share <= 1
        ]
        if not found and self.heads == self.channels == self.hidden == 1:
            found.append(
                "channels: 1.0, heads: 1.0 and hidden: 1.0 prune nothing; give one of them a share, as channels: 0.7"
            )
        return found

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(
            *prune_width(
                model, rows, heads=self.heads, channels=self.channels, hidden=self.hidden, multiple=self.multiple
            )
        )
