"""Image classifiers of transformers (MobileNetV2, EfficientNet, MobileViT): loads them from a folder, and narrows them.

Narrowing prunes channels inside of the inverted residual blocks (Sandler et al. 2018, MobileNetV2, arXiv:1801.04381): a
1x1 convolution creates them, a depthwise convolution and norms process each by itself, and another 1x1 convolution
reads them. The configuration's expansion ratio sets their number, so the narrower model is an ordinary one of its
family.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat import remote_code
from preheat.errors import RecipeError
from preheat.model_folder import (
    FAULTS,
    check_finite,
    describe_fault,
    find_weight_files,
    format_names,
    open_tensors,
    read_object,
    silence_transformers,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel

__all__ = [
    "is_classifier",
    "matrix",
    "build_narrow_config",
    "open_classifier",
    "open_processor",
    "find_readers",
    "compute_scores",
    "copy_kept_channels",
]


@dataclass(frozen=True)
class _Family:
    """A family of image classifiers with inverted residual blocks.

    Attributes:
        block: class of the blocks.
        reader: the convolution of a block that reads the inner channels.
        ratio: key of the configuration: inner channels per input channel.
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
    """True if this is the folder of an image classifier of transformers."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    try:
        # transformers writes the class that saved the folder here; the model type alone does not say what head it has.
        names = read_object(file, "MODEL").get("architectures")
    except RecipeError:
        return False
    return isinstance(names, list) and any(str(name).endswith("ForImageClassification") for name in names)


def open_classifier(folder: Path, *, knob: str = "MODEL") -> PreTrainedModel:
    """Loads the model of a folder in fp32 on the CPU, in eval mode.

    Raises:
        RecipeError: not a classifier, or its weights cannot be read; the message begins with `knob`.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoModelForImageClassification

    if not is_classifier(folder):
        raise RecipeError(
            f"{knob}: {folder} is not a folder of an image classifier: its config.json names no class "
            "…ForImageClassification; save one there with transformers' save_pretrained"
        )
    settings = read_object(folder / "config.json", knob)
    # A known family is opened by transformers' own class, whatever code the folder brings along.
    code = remote_code.find_code_classes(settings) if settings.get("model_type") not in CONFIG_MAPPING else []
    files = find_weight_files(folder, knob, stated=settings.get("transformers_weights"))
    runs = remote_code.may_run(knob, str(folder), code)
    try:
        with silence_transformers():  # transformers prints a table; its content is in our errors and warnings
            model, report = AutoModelForImageClassification.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=runs,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except (*FAULTS, StrictDataclassError) as error:
        raise RecipeError(f"{knob}: {folder} cannot be opened: {describe_fault(error, 200)}") from None
    # transformers would initialize mismatched and missing parameters at random, with a warning only.
    if shapes := sorted(report["mismatched_keys"]):
        name, stored, built = shapes[0]
        raise RecipeError(
            f"{knob}: {folder}: {name} is {tuple(stored)} in the file but {tuple(built)} by config.json; the "
            "folder's files do not belong together"
        )
    if missing := sorted(report["missing_keys"]):
        raise RecipeError(
            f"{knob}: {folder} lacks {format_names(missing)} ({len(missing):,} of the model's parameters)"
        )
    # A value that is not finite would spread through every score; the message names the file that holds it.
    places = _index_tensor_files(files.files, knob)
    rest = files.files[0] if len(files.files) == 1 else folder  # for tensors that transformers renames
    for name, value in model.state_dict().items():
        check_finite(value, name, places.get(name, rest), knob)
    left = sorted(report["unexpected_keys"])
    notes = (
        [
            f"{folder}: {format_names(left)} not used ({len(left):,} tensors): {type(model).__name__} has no such "
            "parameters"
        ]
        if left
        else []
    )
    for message in (*files.notes, *notes):
        logging.getLogger("preheat.weights").warning("%s: %s", knob, message)
    opened: PreTrainedModel = model.eval()
    return opened


def _index_tensor_files(files: Sequence[Path], knob: str) -> dict[str, Path]:
    """The file of each tensor; the last one if several have it."""
    places: dict[str, Path] = {}
    for file in files:
        with open_tensors(file, knob) as opened:
            places |= dict.fromkeys(opened.keys(), file)
    return places


def open_processor(folder: Path, *, knob: str = "MODEL") -> BaseImageProcessor:
    """Loads the image processor of a model's folder, which uses Pillow.

    Raises:
        RecipeError: the folder has none.
    """
    from transformers import AutoImageProcessor

    if not (folder / "preprocessor_config.json").is_file():
        raise RecipeError(
            f"{knob}: {folder} has no preprocessor_config.json, so the scaling of its images is unknown; save the "
            "model's image processor there, too"
        )
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
    except FAULTS as error:
        raise RecipeError(f"{knob}: {folder / 'preprocessor_config.json'}: {describe_fault(error, 200)}") from None


def compute_scores(model: PreTrainedModel, pixels: Tensor) -> Tensor:
    """Scores [n, classes] of images [n, channels, height, width], differentiable."""
    logits: Tensor = model(pixel_values=pixels).logits
    return logits


def matrix(convolution: Any) -> Tensor:
    """The weight of a 1x1 convolution, [out, in]."""
    # [out, in, 1, 1] -> [out, in]
    weight: Tensor = convolution.weight.detach().flatten(1)
    return weight


def build_narrow_config(config: PretrainedConfig, channels: float) -> tuple[PretrainedConfig, str]:
    """The configuration with an expansion ratio closest to a share of the old one, and a description of the change.

    Raises:
        RecipeError: another family; the share changes nothing.
    """
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise RecipeError(
            f"width: supports the blocks of {', '.join(_FAMILIES)}, and this model is a {config.model_type}; leave "
            "the step out"
        )
    narrowed = copy.deepcopy(config)
    now = getattr(config, family.ratio)
    if isinstance(now, int | float):
        then: float | list[int] = float(now * channels)
    else:  # integers per stage; 1 would remove the expanding convolution of the block
        now = list(now)
        then = [r if r == 1 else max(2, round(r * channels)) for r in now]
    if now == then:
        raise RecipeError(f"width: channels: {channels:g} leaves {family.ratio} at {now}; ask for a smaller share")
    setattr(narrowed, family.ratio, then)
    return narrowed, f"{family.ratio} {now} -> {then}"


def find_readers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The 1x1 convolution that reads the inner channels of each block, by the block's name."""
    family = _FAMILIES[model.config.model_type]
    return {
        name: block.get_submodule(family.reader)
        for name, block in model.named_modules()
        if type(block).__name__ == family.block
    }


def copy_kept_channels(model: PreTrainedModel, pruned: PreTrainedModel, keep: Mapping[str, Tensor]) -> None:
    """Copies the kept values of `model` into `pruned`, a narrower model of the family, in place.

    Args:
        keep: block name -> indices of the inner channels to keep.
    """
    before = model.state_dict()
    # The running statistics of the norms are part of the state and are sliced like weights.
    pruned.load_state_dict(
        {name: _slice_channels(name, before[name], like, keep) for name, like in pruned.state_dict().items()}
    )


def _slice_channels(name: str, value: Tensor, like: Tensor, keep: Mapping[str, Tensor]) -> Tensor:
    """The kept channels of a tensor, with the shape of `like`."""
    # Inner channels are one axis of each tensor: the output of the expansion, the channels of norms and of
    # the depthwise convolution, the input of the projection.
    axes = [n for n, (now, then) in enumerate(zip(value.shape, like.shape, strict=True)) if now != then]
    if not axes:
        return value
    (axis,) = axes
    (block,) = (block for block in keep if name.startswith(f"{block}."))
    return value.index_select(axis, keep[block])
