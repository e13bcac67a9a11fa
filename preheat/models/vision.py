"""Image classifiers of transformers (MobileNetV2, EfficientNet, MobileViT): opened from a folder, and made narrower.

What is narrowed are the channels inside the inverted residual blocks: a 1x1 convolution makes them, a depthwise one and norms look at each by
itself, and another 1x1 convolution reads them. How many there are is the configuration's expansion ratio, so the narrower model is an
ordinary one of its family. Which stay is decided by what each adds to what the reading convolution writes, over images; that convolution
is fitted by least squares to what it wrote from all of them, as for the feed-forward channels of a language model.
Source: Sandler et al. 2018, MobileNetV2 (arXiv:1801.04381); the fit: Kurtic et al. 2023 (arXiv:2302.04089).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["is_classifier", "narrower", "open_classifier", "open_processor", "scores"]


@dataclass(frozen=True)
class _Family:
    """Attributes:
    block: class of its inverted residual blocks.
    reader: in such a block, the convolution that reads the inner channels.
    ratio: key of the configuration: inner channels for each that goes in.
    """

    block: str
    reader: str
    ratio: str


_FAMILIES = {
    "mobilenet_v2": _Family("MobileNetV2InvertedResidual", "reduce_1x1.convolution", "expand_ratio"),
    "mobilevit": _Family("MobileViTInvertedResidual", "reduce_1x1.convolution", "expand_ratio"),
    "efficientnet": _Family("EfficientNetBlock", "projection.project_conv", "expand_ratios"),
}


def is_classifier(folder: Path) -> bool:
    """Whether this is the folder of an image classifier of transformers."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return any(str(name).endswith("ForImageClassification") for name in told.get("architectures") or ())


def open_classifier(folder: Path, *, knob: str = "MODEL") -> PreTrainedModel:
    """The model of a folder in fp32 on the CPU, set to evaluation.

    Raises:
        RecipeError: it is none, or its weights cannot be read; the words begin with `knob`.
    """
    import torch
    from transformers import AutoModelForImageClassification

    if not is_classifier(folder):
        raise RecipeError(
            f"{knob}: {folder} is no folder of an image classifier: its config.json names no class …ForImageClassification; "
            "save one there with transformers' save_pretrained"
        )
    try:
        model: PreTrainedModel = AutoModelForImageClassification.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise RecipeError(f"{knob}: {folder} cannot be opened: {str(error).splitlines()[0][:200]}") from None
    return model.eval()


def open_processor(folder: Path, *, knob: str = "MODEL") -> Any:
    """What makes pixel values of images for the model of a folder, by Pillow.

    Raises:
        RecipeError: the folder says nothing of it.
    """
    from transformers import AutoImageProcessor

    if not (folder / "preprocessor_config.json").is_file():
        raise RecipeError(
            f"{knob}: {folder} has no preprocessor_config.json, so nobody knows how its images are scaled; save the model's image processor there, too"
        )
    return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)


def scores(model: Any, pixels: Tensor) -> Tensor:
    """Scores [n, classes] of images [n, channels, height, width], differentiable."""
    found: Tensor = model(pixel_values=pixels).logits
    return found


def narrower(model: PreTrainedModel, batches: Iterable[Tensor], channels: float) -> tuple[PreTrainedModel, str]:
    """A new model with a share of the channels inside each inverted residual block; `model` stays as it is.

    Args:
        batches: calibration images, [n, channels, height, width] each.
        channels: the share, above 0 and below 1; to the next size that the family's configuration can say.

    Returns:
        The model, an ordinary one of its family, set to evaluation; and what was done, in words.

    Raises:
        RecipeError: another family; the share changes nothing.

    Example:
        >>> from transformers import MobileNetV2Config, MobileNetV2ForImageClassification
        >>> import torch
        >>> model = MobileNetV2ForImageClassification(MobileNetV2Config(depth_multiplier=0.25, image_size=32))
        >>> small, words = narrower(model, [torch.randn(4, 3, 32, 32)], 0.5)
        >>> small.config.expand_ratio
        3.0
    """
    import torch

    from preheat.models.calibration import hooked
    from preheat.ops.importance import added, highest, moments, refit

    family = _FAMILIES.get(model.config.model_type)
    if family is None:
        raise RecipeError(
            f"width: knows the blocks of {', '.join(_FAMILIES)}, and this model is a {model.config.model_type}; leave the step out"
        )
    config = _narrow(model.config, family, channels)
    with torch.random.fork_rng():
        made: Any = type(model)(config)
    before, after = model.state_dict(), made.state_dict()
    blocks = {
        name: block.get_submodule(family.reader)
        for name, block in model.named_modules()
        if type(block).__name__ == family.block
        and before[f"{name}.{family.reader}.weight"].shape != after[f"{name}.{family.reader}.weight"].shape
    }
    if not blocks:
        raise RecipeError(f"width: channels: {channels:g} leaves all blocks as they are; ask for a smaller share")
    products: dict[str, Any] = dict.fromkeys(blocks, 0.0)

    def watch(name: str) -> Any:
        def tell(pixels: Tensor, _: Tensor) -> None:
            products[name] = products[name] + moments(pixels.movedim(1, -1).double(), 1)[0]

        return tell

    was = model.training
    model.eval()
    with torch.no_grad(), hooked([(reader, watch(name)) for name, reader in blocks.items()]):
        for pixels in batches:
            scores(model, pixels)
    model.train(was)
    kept = {}
    for name, reader in blocks.items():
        weight, gram = _matrix(reader).double(), products[name]
        kept[name] = highest(added(weight, gram.diagonal()[:, None, None]), after[f"{name}.{family.reader}.weight"].shape[1])
    values = {name: _sliced(name, before[name], value, kept) for name, value in after.items()}
    for name, reader in blocks.items():
        fitted = refit(_matrix(reader), products[name], kept[name])
        values[f"{name}.{family.reader}.weight"] = fitted[:, :, None, None]
    made.load_state_dict(values)
    now, then = (sum(p.numel() for p in one.parameters()) for one in (model, made))
    words = (
        f"{family.ratio} {getattr(model.config, family.ratio)} -> {getattr(config, family.ratio)} in {len(blocks)} blocks; "
        f"{now:,} -> {then:,} parameters ({then / now:.1%})"
    )
    return made.eval(), words


def _matrix(convolution: Any) -> Tensor:
    """The weight of a 1x1 convolution, [out, in]."""
    weight: Tensor = convolution.weight.detach().flatten(1)
    return weight


def _narrow(config: PretrainedConfig, family: _Family, channels: float) -> Any:
    """The configuration with the expansion ratio that is nearest to this share of what it was."""
    made: Any = copy.deepcopy(config)
    ratio = getattr(config, family.ratio)
    if isinstance(ratio, int | float):
        wanted: Any = float(ratio * channels)
    else:  # whole numbers by stage; 1 would leave the block without the convolution that expands
        wanted = [r if r == 1 else max(2, round(r * channels)) for r in ratio]
    if wanted == ratio or (not isinstance(ratio, int | float) and wanted == list(ratio)):
        raise RecipeError(f"width: channels: {channels:g} leaves {family.ratio} at {ratio}; ask for a smaller share")
    setattr(made, family.ratio, wanted)
    return made


def _sliced(name: str, value: Tensor, like: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the model with the channels that stay, of the shape of `like`."""
    axes = [n for n, (now, then) in enumerate(zip(value.shape, like.shape, strict=True)) if now != then]
    if not axes:
        return value
    (axis,) = axes
    (block,) = (block for block in kept if name.startswith(f"{block}."))
    return value.index_select(axis, kept[block])
