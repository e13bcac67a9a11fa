"""An image classifier made narrower inside its inverted residual blocks.

Which channels stay is decided by what each adds to what the 1x1 convolution behind them writes, over images; that convolution is then fitted by
least squares to what it wrote from all of them, as `preheat compress --method width` does for the feed-forward channels of a language model.
Source of the fit: Kurtic et al. 2023 (arXiv:2302.04089).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from preheat.errors import RecipeError
from preheat.models.image_classifiers import matrix, narrow_config, readers, scores, smaller
from preheat.models.layerwise import hooked
from preheat.ops.pruning_scores import added, highest, moments, refit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["narrower"]


def narrower(model: PreTrainedModel, batches: Iterable[Tensor], channels: float) -> tuple[PreTrainedModel, str]:
    """A new model with a share of the channels inside each inverted residual block; `model` stays as it is, set to evaluation.

    Args:
        batches: calibration images, [n, channels, height, width] each.
        channels: the share, above 0 and below 1; to the nearest that the family's configuration can say.

    Returns:
        The model, an ordinary one of its family, set to evaluation; and what was done, in words.

    Raises:
        RecipeError: another family; the share changes nothing.

    Example:
        >>> from transformers import MobileNetV2Config, MobileNetV2ForImageClassification
        >>> model = MobileNetV2ForImageClassification(MobileNetV2Config(depth_multiplier=0.25, image_size=32))
        >>> small, words = narrower(model, [torch.randn(4, 3, 32, 32)], 0.5)
        >>> small.config.expand_ratio
        3.0
    """
    config, told = narrow_config(model.config, channels)
    with torch.random.fork_rng():  # its values are drawn, and then replaced
        made: Any = type(model)(config).eval()
    after = {name: matrix(reader).shape[1] for name, reader in readers(made).items()}
    blocks = {name: reader for name, reader in readers(model).items() if matrix(reader).shape[1] != after[name]}
    if not blocks:
        raise RecipeError(f"width: channels: {channels:g} leaves all blocks as they are; ask for a smaller share")
    products: dict[str, Any] = dict.fromkeys(blocks, 0.0)

    def watch(name: str) -> Callable[[Tensor, Tensor], None]:
        def tell(read: Tensor, _: Tensor) -> None:
            products[name] = products[name] + moments(read.movedim(1, -1).double(), 1)[0]

        return tell

    model.eval()
    with torch.no_grad(), hooked([(reader, watch(name)) for name, reader in blocks.items()]):
        for pixels in batches:
            scores(model, pixels)
        kept = {
            name: highest(added(matrix(reader).double(), products[name].diagonal()[:, None, None]), after[name])
            for name, reader in blocks.items()
        }
        smaller(model, made, kept)
        for name, reader in readers(made).items():
            if name in blocks:
                matrix(reader).copy_(refit(matrix(blocks[name]), products[name], kept[name]))
    now, then = model.num_parameters(), made.num_parameters()
    return made, f"{told} in {len(blocks)} blocks; {now:,} -> {then:,} parameters ({then / now:.1%})"
