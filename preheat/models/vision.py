"""Vision-language models: how a configuration's model reads images, and the forward pass over packed rows.

The parts are transformers' own: the vision tower with its mergers, and the text layers. The code around them there
synchronizes with the device in each pass (boolean masks, `tolist` in every block of the tower); here sizes come with
the batch, on the host.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.core import Images, MaskSpec, Vision
from preheat.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.core.json_types import JsonObject

__all__ = [
    "FAMILIES",
    "PROJECTORS",
    "copy_processor",
    "drawn_image",
    "embedded",
    "replace_deepstack",
    "processor_of",
    "reading",
    "tower",
    "tower_blocks",
    "tower_modules",
    "vision_of",
]

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families that are trained with images."""
PROJECTORS = ("merger", "deepstack_merger_list")
"""The parts of a tower that project its features to the text's width."""


def vision_of(config: PretrainedConfig) -> Vision | None:
    """How a model of this configuration reads images; None for text models."""
    if config.model_type not in FAMILIES:
        return None
    c = config.vision_config
    return Vision(
        blocks=c.depth,
        patch=c.patch_size,
        temporal=c.temporal_patch_size,
        channels=c.in_channels,
        merge=c.spatial_merge_size,
        side=int(getattr(c, "num_position_embeddings", 0) ** 0.5),
        deep=len(getattr(c, "deepstack_visual_indexes", ())),
        image=config.image_token_id,
        start=config.vision_start_token_id,
        end=config.vision_end_token_id,
        window=getattr(c, "window_size", 0) // (c.patch_size * c.spatial_merge_size),
    )


def processor_of(vision: Vision, folder: str | None) -> JsonObject:
    """Settings of the model's image processor: its folder's, completed by those of the published Qwen3-VL.

    Raises:
        RecipeError: the folder's processor uses other patches than the model, or cannot be read.
    """
    settings: JsonObject = {
        "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": vision.patch,
        "temporal_patch_size": vision.temporal,
        "merge_size": vision.merge,
    }
    file = _processor_file(folder)
    if file is None:
        return settings
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {file}: cannot be read ({error}); restore the model's own") from None
    values = values.get("image_processor", values)
    size = {
        key: values[old]
        for key, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))
        if old in values
    }
    known = (*settings, "do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample")
    settings |= {key: value for key in known if (value := values.get(key)) is not None}
    settings["size"] = {**settings["size"], **size}
    for key, wanted in (
        ("patch_size", vision.patch),
        ("temporal_patch_size", vision.temporal),
        ("merge_size", vision.merge),
    ):
        if settings[key] != wanted:
            raise RecipeError(
                f"model.path: {file} has {key} {settings[key]}, but config.json {wanted}; the folder's files do not "
                "belong together"
            )
    return settings


def reading(config: PretrainedConfig, folder: str | None) -> JsonObject:
    """The vision arguments of `data.prepare`; {} for text models."""
    vision = vision_of(config)
    return {"vision": vision, "processor": processor_of(vision, folder)} if vision else {}


def _processor_file(folder: str | None) -> Path | None:
    names = ("preprocessor_config.json", "processor_config.json")
    if folder is None:
        return None
    if Path(folder).is_dir():
        return next((file for name in names if (file := Path(folder) / name).is_file()), None)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(folder, names[0]))
    except (EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RecipeError(
            f"model.path: {folder}: its {names[0]} cannot be loaded from the hub "
            f"({str(error).splitlines()[0][:160]}); download the model and name the folder"
        ) from None


_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")


def copy_processor(source: Path, folder: Path) -> None:
    """Copies the image processor's files into another folder of the model."""
    for name in _FILES:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def drawn_image(vision: Vision) -> dict[str, Tensor]:
    """A row with a random image, as arguments of transformers' forward."""
    import torch

    rows, columns = 2 * vision.merge, 3 * vision.merge
    tokens = torch.tensor([[1, vision.start, *[vision.image] * 6, vision.end, *range(2, 12)]])
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == vision.image).int(),
        "pixel_values": torch.randn(rows * columns, vision.values, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


def tower(model: PreTrainedModel) -> PreTrainedModel | None:
    """The vision tower with its mergers; None for text models."""
    return model.base_model.visual if model.config.model_type in FAMILIES else None  # type: ignore[no-any-return]


def tower_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of the vision tower, in order; [] without one."""
    module = tower(model)
    return [] if module is None else list(module.blocks)


def tower_modules(model: PreTrainedModel) -> str | None:
    """A regular expression for the names of the modules in the vision tower; None without one."""
    vision_tower = tower(model)
    if vision_tower is None:
        return None
    return "|".join(re.escape(name) + r"\..*" for name, module in model.named_modules() if module is vision_tower)


def replace_deepstack(model: PreTrainedModel) -> None:
    """Makes the text's first layers add the tower's inner features at known indices, in place."""
    text = getattr(model.base_model, "language_model", None)
    if tower(model) is not None and hasattr(text, "_deepstack_process"):
        text._deepstack_process = types.MethodType(_add_at, text)


def _add_at(text: nn.Module, hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Adds features [n, width] to hidden [rows, length, width] at indices [n] of the flattened rows, or at a mask."""
    import torch

    if places.dtype == torch.bool:
        places = places.flatten().nonzero().flatten()
    return hidden.flatten(0, 1).index_add(0, places, features.to(hidden.dtype)).view_as(hidden)


def embedded(
    model: PreTrainedModel, tokens: Tensor, images: Images, attention: Callable[..., Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Token embeddings with the images' features [rows, length, width], and further arguments for the text layers.

    The tower uses `attention` too, bidirectional within each image.
    """
    import numpy as np

    # On the host, because transformers splits queries, keys and values by these cumulative lengths in each block.
    ends = np.cumsum((0, *images.sizes))
    vision_tower = tower(model)
    assert vision_tower is not None, "images of a model without a vision tower"
    output = vision_tower(
        images.patches,
        grid_thw=None,
        **images.inputs,
        cu_seqlens=ends,
        **({"cu_window_seqlens": np.cumsum((0, *images.windows))} if images.windows else {}),
        preheat_attention=attention,
        preheat_mask=MaskSpec(causal=False),
    )
    count = len(
        images.positions
    )  # features of a blank image come after these and are dropped: their gradients are zeros
    embeddings = model.get_input_embeddings()(tokens)
    features = output.pooler_output[:count].to(embeddings.dtype)
    merged = embeddings.flatten(0, 1).index_copy(0, images.positions, features).view_as(embeddings)
    deep = [each[:count] for each in getattr(output, "deepstack_features", ())]
    return merged, {"visual_pos_masks": images.positions, "deepstack_visual_embeds": deep} if deep else {}
