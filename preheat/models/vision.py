"""Models that read images (Qwen3-VL and its mixture of experts): what their configurations say of it, and their forward pass over packed rows.

The parts are transformers' own: the vision tower with its mergers, the layers of the text. What stands around them there reads sizes back from the
device in each pass (boolean masks, `tolist` in every block of the tower); here they come with the batch, on the host.
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

__all__ = [
    "FAMILIES",
    "PROJECTORS",
    "copy_processor",
    "drawn_image",
    "embedded",
    "own_deepstack",
    "processor_of",
    "reading",
    "tower",
    "tower_blocks",
    "tower_modules",
    "vision_of",
]

FAMILIES = ("qwen3_vl", "qwen3_vl_moe")
PROJECTORS = ("merger", "deepstack_merger_list")
"""The parts of a tower that bring its features to the text's width."""


def vision_of(config: PretrainedConfig) -> Vision | None:
    """How a model of this configuration reads images; None: it reads text alone."""
    if config.model_type not in FAMILIES:
        return None
    c = config.vision_config
    return Vision(
        blocks=c.depth,
        patch=c.patch_size,
        temporal=c.temporal_patch_size,
        channels=c.in_channels,
        merge=c.spatial_merge_size,
        side=int(c.num_position_embeddings**0.5),
        deep=len(c.deepstack_visual_indexes),
        image=config.image_token_id,
        start=config.vision_start_token_id,
        end=config.vision_end_token_id,
    )


def processor_of(vision: Vision, folder: str | None) -> dict[str, Any]:
    """Settings of the model's image processor: its folder's, and where that says nothing those of the published Qwen3-VL.

    Raises:
        RecipeError: the folder's processor cuts other patches than the model reads, or cannot be read.
    """
    settings: dict[str, Any] = {
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
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {file}: cannot be read ({error}); put back the model's own") from None
    stated = stated.get("image_processor", stated)
    size = {
        key: stated[old]
        for key, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))
        if old in stated
    }
    known = (*settings, "do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample")
    settings |= {key: value for key in known if (value := stated.get(key)) is not None}
    settings["size"] = {**settings["size"], **size}
    for key, wanted in (
        ("patch_size", vision.patch),
        ("temporal_patch_size", vision.temporal),
        ("merge_size", vision.merge),
    ):
        if settings[key] != wanted:
            raise RecipeError(
                f"model.path: {file} has {key} {settings[key]}, but config.json {wanted}; the folder's files do not belong together"
            )
    return settings


def reading(config: PretrainedConfig, folder: str | None) -> dict[str, Any]:
    """How the model reads images, as arguments of `data.prepare`: {} where it reads text alone."""
    found = vision_of(config)
    return {"vision": found, "processor": processor_of(found, folder)} if found else {}


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
            f"model.path: {folder}: its {names[0]} cannot be had from the hub ({str(error).splitlines()[0][:160]}); download the model and name the folder"
        ) from None


_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")


def copy_processor(source: Path, folder: Path) -> None:
    """Copies the files that say how images are read into another folder of the model."""
    for name in _FILES:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def drawn_image(vision: Vision) -> dict[str, Tensor]:
    """A row with a drawn image in it, as arguments of transformers' forward."""
    import torch

    rows, columns = 2 * vision.merge, 3 * vision.merge
    tokens = torch.tensor([[1, vision.start, *[vision.image] * 6, vision.end, *range(2, 12)]])
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == vision.image).int(),
        "pixel_values": torch.randn(rows * columns, vision.values, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


def tower(model: PreTrainedModel) -> nn.Module | None:
    """The vision tower with its mergers; None: the model reads text alone."""
    return model.base_model.visual if model.config.model_type in FAMILIES else None  # type: ignore[no-any-return]


def tower_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of the vision tower, in order; [] where there is none."""
    found: Any = tower(model)
    return [] if found is None else list(found.blocks)


def tower_modules(model: PreTrainedModel) -> str | None:
    """A regular expression for the names of the modules in the vision tower; None where there is none."""
    found = tower(model)
    if found is None:
        return None
    return "|".join(re.escape(name) + r"\..*" for name, module in model.named_modules() if module is found)


def own_deepstack(model: PreTrainedModel) -> None:
    """Has the tower's inner features added to the text's first layers at places that are known by number, in place."""
    if tower(model) is not None:
        text: Any = model.base_model.language_model
        text._deepstack_process = types.MethodType(_add_at, text)


def _add_at(text: Any, hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """hidden [rows, length, width] with features [n, width] added at places of the rows laid end to end: [n], or a mask as transformers' own forward has it."""
    import torch

    if places.dtype == torch.bool:
        places = places.flatten().nonzero().flatten()
    return hidden.flatten(0, 1).index_add(0, places, features.to(hidden.dtype)).view_as(hidden)


def embedded(
    model: PreTrainedModel, tokens: Tensor, images: Images, attention: Callable[..., Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Embeddings of the tokens with the images' features in their places [rows, length, width], and what the text's layers take besides.

    Attention in the tower is of each image by itself and not causal, by `attention` too.
    """
    import numpy as np

    # An array of the host for transformers' cumulative lengths: it cuts queries, keys and values by them in each block.
    ends = np.cumsum((0, *images.sizes))
    found: Any = tower(model)
    seen = found(
        images.patches,
        grid_thw=None,
        interp_indices=images.taps,
        interp_weights=images.shares,
        position_ids=images.grid,
        cu_seqlens=ends,
        preheat_attention=attention,
        preheat_mask=MaskSpec(causal=False),
    )
    count = len(images.places)  # a blank image's features, behind them, go nowhere: their gradients are zeros
    words = model.get_input_embeddings()(tokens)
    features = seen.pooler_output[:count].to(words.dtype)
    whole = words.flatten(0, 1).index_copy(0, images.places, features).view_as(words)
    deep = [each[:count] for each in seen.deepstack_features]
    return whole, {"visual_pos_masks": images.places, "deepstack_visual_embeds": deep}
