"""Width pruning of image classifiers inside their inverted residual blocks.

Channels are scored over images by their contribution to the output of the following 1x1 convolution. That convolution
is then refitted by least squares to its original outputs, as `preheat compress --method width` does for the
feed-forward channels of a language model.
Source of the fit: Kurtic et al. 2023 (arXiv:2302.04089).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from preheat.errors import RecipeError
from preheat.models.image_classifiers import (
    build_narrow_config,
    compute_scores,
    copy_kept_channels,
    find_readers,
    matrix,
)
from preheat.models.layerwise import hook_hidden_states
from preheat.ops.pruning_scores import find_highest, refit, score_contribution, sum_moments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["build_narrower"]


def build_narrower(model: PreTrainedModel, batches: Iterable[Tensor], channels: float) -> tuple[PreTrainedModel, str]:
    """Returns a new model with a fraction of the channels inside each inverted residual block; `model` is only set to
    eval mode.

    Args:
        batches: calibration images, [n, channels, height, width] each.
        channels: the fraction, above 0 and below 1; rounded to what the family's configuration can express.

    Returns:
        The model, an ordinary one of its family, in eval mode; and a description.

    Raises:
        RecipeError: another family; the fraction changes nothing.

    Example:
        >>> from transformers import MobileNetV2Config, MobileNetV2ForImageClassification
        >>> model = MobileNetV2ForImageClassification(MobileNetV2Config(depth_multiplier=0.25, image_size=32))
        >>> small, description = build_narrower(model, [torch.randn(4, 3, 32, 32)], 0.5)
        >>> small.config.expand_ratio
        3.0
    """
    config, description = build_narrow_config(model.config, channels)
    with torch.random.fork_rng():  # random initialization; all values are replaced below
        small: PreTrainedModel = type(model)(config).eval()
    # Inputs of each 1x1 convolution in the smaller model.
    widths = {name: matrix(reader).shape[1] for name, reader in find_readers(small).items()}
    blocks = {name: reader for name, reader in find_readers(model).items() if matrix(reader).shape[1] != widths[name]}
    if not blocks:
        raise RecipeError(f"width: channels: {channels:g} leaves all blocks unchanged; use a smaller fraction")
    # Gram matrices of the inputs, (channels, channels); 0.0 until the first batch.
    products: dict[str, Any] = dict.fromkeys(blocks, 0.0)

    def watch(name: str) -> Callable[[Tensor, Tensor], None]:
        def record(read: Tensor, _: Tensor) -> None:
            # (n, channels, height, width) -> (n, height, width, channels): each pixel counts as a token.
            products[name] = products[name] + sum_moments(read.movedim(1, -1).double(), 1)[0]

        return record

    model.eval()
    with torch.no_grad(), hook_hidden_states([(reader, watch(name)) for name, reader in blocks.items()]):
        for pixels in batches:
            compute_scores(model, pixels)
        # The diagonal as units of one channel: (channels, 1, 1).
        indices = {
            name: find_highest(
                score_contribution(matrix(reader).double(), products[name].diagonal()[:, None, None]), widths[name]
            )
            for name, reader in blocks.items()
        }
        # Copies the remaining channels; the convolutions that read them are then refitted.
        copy_kept_channels(model, small, indices)
        for name, reader in find_readers(small).items():
            if name in blocks:
                matrix(reader).copy_(refit(matrix(blocks[name]), products[name], indices[name]))
    before, count = model.num_parameters(), small.num_parameters()
    return small, f"{description} in {len(blocks)} blocks; {before:,} -> {count:,} parameters ({count / before:.1%})"
