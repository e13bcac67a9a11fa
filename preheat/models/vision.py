"""Vision-language models: how a configuration's model reads images, and the forward pass over packed rows.

The parts are transformers' own: the vision tower with its mergers, and the text layers. The code around them there
synchronizes with the device in each pass (boolean masks, `tolist` in every block of the tower); here sizes come with
the batch, on the host.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.core import IMAGE_BUDGETS, ImageLayout, Images, MaskSpec, Vision
from preheat.errors import RecipeError
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.core.json_types import JsonObject

__all__ = [
    "FAMILIES",
    "PROJECTORS",
    "copy_processor",
    "draw_image",
    "embed_images",
    "is_clipped",
    "replace_deepstack",
    "read_processor",
    "vision_arguments",
    "set_attention",
    "find_tower",
    "tower_blocks",
    "find_unread_parts",
    "read_vision",
    "find_vision_modules",
    "exclude_adapters_pattern",
]

_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families whose tower takes the patches of all images as one sequence."""
_SQUARES: dict[str, tuple[ImageLayout, bool]] = {
    "gemma3": ("gemma3", True),
    "gemma4": ("gemma4", False),
    "mistral3": ("pixtral", False),
    "smolvlm": ("smolvlm", True),
}
"""Families whose tower takes pixels: their image processor, and whether it makes squares of one size of an image."""
FAMILIES = (*_GRIDS, *_SQUARES)
"""Families that are trained with images."""
PROJECTORS = ("merger", "deepstack_merger_list")
"""The parts of a tower that project its features to the text's width."""


def read_vision(config: PretrainedConfig) -> Vision | None:
    """How a model of this configuration reads images; None for text models."""
    if config.model_type not in FAMILIES:
        return None
    c = config.vision_config
    if config.model_type not in _SQUARES:
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
    layout, fixed = _SQUARES[config.model_type]
    if c is None:
        raise RecipeError(
            f"model: this {config.model_type} has no vision_config, so it has no vision part; set model.part: text"
        )
    if (layer := getattr(config, "vision_feature_layer", -1)) != -1:
        raise RecipeError(
            f"model: {config.model_type} takes images' features from layers {layer} of its tower, and preheat trains "
            "with those of the last one; set model.part: text"
        )
    tile = c.image_size // c.patch_size if fixed else 0
    merge = getattr(config, "spatial_merge_size", None) or getattr(config, "scale_factor", None)
    merge = merge or getattr(c, "pooling_kernel_size", None)
    if merge is None:  # Gemma 3 states the tokens that are left of a square
        merge = tile // int(config.mm_tokens_per_image**0.5)
    return Vision(
        blocks=c.num_hidden_layers,
        patch=c.patch_size,
        temporal=1,
        channels=getattr(c, "num_channels", 3),
        merge=merge,
        side=0,
        deep=0,
        image=config.image_token_id,
        start=getattr(config, "boi_token_id", None),
        end=getattr(config, "eoi_token_id", None),
        layout=layout,
        tile=tile,
        bidirectional=layout == "gemma3"
        or getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision",
    )


def read_processor(vision: Vision, folder: str | None) -> JsonObject:
    """Settings of the model's image processor: its folder's, completed by those that fit the model.

    Raises:
        RecipeError: the folder's processor makes other patches than the model has, or cannot be read.
    """
    # What the model's own sizes decide; a folder's file must agree.
    square = vision.tile * vision.patch
    decided: dict[str, JsonObject] = {
        "qwen2_vl": {
            "patch_size": vision.patch,
            "temporal_patch_size": vision.temporal,
            "merge_size": vision.merge,
        },
        "gemma3": {"size": {"height": square, "width": square}, "do_pan_and_scan": False},
        "gemma4": {"patch_size": vision.patch, "pooling_kernel_size": vision.merge},
        "smolvlm": {"max_image_size": {"longest_edge": square}},
        "pixtral": {},
    }
    fixed = decided[vision.layout]
    settings: JsonObject = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], **fixed}
    if vision.layout == "qwen2_vl":
        settings["size"] = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
    elif vision.layout == "gemma4":  # its sizes follow from a number of tokens
        settings |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "max_soft_tokens": 280}
    elif vision.layout != "gemma3":
        settings["size"] = {"longest_edge": 4 * square or 1540}
    file = _find_processor_file(folder)
    if file is not None:
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
        known = (
            *settings,
            "do_resize",
            "do_rescale",
            "do_normalize",
            "rescale_factor",
            "resample",
            "do_image_splitting",
        )
        settings |= {key: value for key in known if (value := values.get(key)) is not None}
        if "size" in settings:
            settings["size"] = {**settings["size"], **size}
        if settings.get("do_pan_and_scan"):
            raise RecipeError(
                f"model.path: {file} has do_pan_and_scan true: crops of images are not supported; set it to false"
            )
        for key, wanted in fixed.items():
            if settings[key] != wanted:
                raise RecipeError(
                    f"model.path: {file} has {key} {settings[key]}, but config.json {wanted}; the folder's files do "
                    "not belong together"
                )
    if vision.layout == "gemma4" and settings["max_soft_tokens"] not in IMAGE_BUDGETS:
        raise RecipeError(
            f"model.path: {file} has max_soft_tokens {quote_value(settings['max_soft_tokens'])}; its processor takes "
            f"{', '.join(map(str, IMAGE_BUDGETS))}"
        )
    if vision.layout == "pixtral":  # its processor sets that of the image processor too
        settings["patch_size"] = {"height": vision.patch * vision.merge, "width": vision.patch * vision.merge}
    return settings


def vision_arguments(config: PretrainedConfig, folder: str | None) -> JsonObject:
    """The vision arguments of `data.prepare`; {} for text models."""
    vision = read_vision(config)
    return {"vision": vision, "processor": read_processor(vision, folder)} if vision else {}


def _find_processor_file(folder: str | None) -> Path | None:
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


def draw_image(vision: Vision) -> dict[str, Tensor]:
    """A row with a random image, as arguments of transformers' forward."""
    import torch

    rows, columns = (vision.tile, vision.tile) if vision.tile else (2 * vision.merge, 3 * vision.merge)
    pieces = [vision.image] * (rows * columns // vision.merge**2)
    around = [[] if token is None else [token] for token in (vision.start, vision.end)]
    tokens = torch.tensor([[1, *around[0], *pieces, *around[1], *range(2, 12)]])
    generator = torch.Generator().manual_seed(0)
    if vision.mrope:
        return {
            "input_ids": tokens,
            "mm_token_type_ids": (tokens == vision.image).int(),
            "pixel_values": torch.randn(rows * columns, vision.values, generator=generator),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }
    if vision.layout == "gemma4":
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)  # column, row
        return {
            "input_ids": tokens,
            "mm_token_type_ids": (tokens == vision.image).int(),
            "pixel_values": torch.rand(1, rows * columns, vision.values, generator=generator),
            "image_position_ids": positions[None],
        }
    high, wide = rows * vision.patch, columns * vision.patch
    pixels = torch.randn(1, vision.channels, high, wide, generator=generator)
    row = {"input_ids": tokens, "pixel_values": pixels[None] if vision.layout == "smolvlm" else pixels}
    if vision.bidirectional:
        row["token_type_ids"] = (tokens == vision.image).int()
    if vision.layout == "pixtral":
        row["image_sizes"] = torch.tensor([[high, wide]])
    return row


def find_tower(model: PreTrainedModel) -> PreTrainedModel | None:
    """The vision tower; None for text models."""
    return model.get_encoder("image") if model.config.model_type in FAMILIES else None


def find_vision_modules(model: PreTrainedModel) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """The modules that turn images into the text's width, by name, and which of the names are projectors.

    A projector is a merger within the tower, or a module beside it; in the second case the tower is one module. Empty
    for text models.
    """
    seeing = find_tower(model)
    if seeing is None:
        return {}, ()
    inner = {name: child for name, child in seeing.named_children() if name in PROJECTORS}
    if inner:
        return dict(seeing.named_children()), tuple(inner)
    others = (seeing, model.get_decoder(), *find_unread_parts(model))
    projectors = {n: m for n, m in model.base_model.named_children() if not any(m is other for other in others)}
    return {"tower": seeing, **projectors}, tuple(projectors)


def find_unread_parts(model: PreTrainedModel) -> list[nn.Module]:
    """The parts of a model with images that read sound, which no row has: they stay as they are."""
    if model.config.model_type not in FAMILIES:
        return []
    return [module for name, module in model.base_model.named_children() if "audio" in name]


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Sets transformers' attention of a model in place; parts that read sound keep their own, which has one form."""
    if find_unread_parts(model):
        model.set_attn_implementation({"": name, "text_config": name, "vision_config": name})
    else:
        model.set_attn_implementation(name)


def tower_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of the vision tower, in order; [] without one."""
    from torch import nn

    module, vision = find_tower(model), read_vision(model.config)
    if module is None or vision is None:
        return []
    return next(list(m) for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == vision.blocks)


def exclude_adapters_pattern(model: PreTrainedModel, *, tower: bool) -> str | None:
    """A regular expression for the names of the modules that get no adapters; None: there are none.

    Args:
        tower: those that only images go through are among them.
    """
    parts = {
        id(part) for part in (*find_unread_parts(model), *(find_vision_modules(model)[0].values() if tower else ()))
    }
    named = [re.escape(name) + r"(\..*)?" for name, module in model.named_modules() if id(module) in parts]
    # Around a linear layer, which has the adapter in its place.
    named += [re.escape(name) for name, module in model.named_modules() if is_clipped(module)]
    return "|".join(named) or None


def is_clipped(module: nn.Module) -> bool:
    """True for a module around a linear layer of which it bounds inputs and outputs (Gemma 4's tower)."""
    from torch import nn

    return [name for name, _ in module.named_children()] == ["linear"] and isinstance(module.linear, nn.Linear)


def replace_deepstack(model: PreTrainedModel) -> None:
    """Makes the text's first layers add the tower's inner features at known indices, in place."""
    text: Any = getattr(model.base_model, "language_model", None)
    if find_tower(model) is not None and hasattr(text, "_deepstack_process"):
        text._deepstack_process = types.MethodType(_add_at, text)


def _add_at(text: nn.Module, hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Adds features [n, width] to hidden [rows, length, width] at indices [n] of the flattened rows, or at a mask."""
    import torch

    # transformers' own forward hands over a mask, ours indices, which need no synchronization.
    if places.dtype == torch.bool:
        places = places.flatten().nonzero().flatten()
    return hidden.flatten(0, 1).index_add(0, places, features.to(hidden.dtype)).view_as(hidden)


def embed_images(
    model: PreTrainedModel, tokens: Tensor, images: Images, attention: Callable[..., Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Token embeddings with the images' features [rows, length, width], and further arguments for the text layers."""
    vision = read_vision(model.config)
    assert vision is not None, "images of a model without a vision tower"
    deep: Sequence[Tensor] = ()
    if vision.mrope:
        features, deep = _encode_grids(model, images, attention)
    else:
        features = _FEATURES[vision.layout](model, vision, images, attention)
    count = len(
        images.positions
    )  # features of a blank image come after these and are dropped: their gradients are zeros
    more: dict[str, Any] = {}
    text: PreTrainedModel = model.get_decoder()
    if vision.layout == "gemma4":
        tokens = _replace_placeholders(model.config, tokens)
    if getattr(text.config, "hidden_size_per_layer_input", 0):  # looked up here, where the tokens are known
        more["per_layer_inputs"] = text.get_per_layer_inputs(tokens)
    embeddings = model.get_input_embeddings()(tokens)
    features = features[:count].to(embeddings.dtype)
    merged = embeddings.flatten(0, 1).index_copy(0, images.positions, features).view_as(embeddings)
    deep = [each[:count] for each in deep]
    if deep:
        more |= {"visual_pos_masks": images.positions, "deepstack_visual_embeds": deep}
    return merged, more


def _replace_placeholders(config: PretrainedConfig, tokens: Tensor) -> Tensor:
    """The tokens with padding in place of images, videos and sounds, as Gemma 4 looks up its embeddings."""
    import torch

    for token in (config.image_token_id, config.video_token_id, config.audio_token_id):
        tokens = torch.where(tokens == token, config.get_text_config().pad_token_id, tokens)
    return tokens


def _encode_grids(
    model: PreTrainedModel, images: Images, attention: Callable[..., Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """The features of images of any size, all in one sequence of patches (Qwen-VL), and those of inner layers.

    The tower uses `attention` too, bidirectional within each image.
    """
    import numpy as np

    # On the host, because transformers splits queries, keys and values by these cumulative lengths in each block.
    ends = np.cumsum((0, *images.sizes))
    seeing: Any = find_tower(model)
    output = seeing(
        images.patches,
        grid_thw=None,
        **images.inputs,
        cu_seqlens=ends,
        **({"cu_window_seqlens": np.cumsum((0, *images.windows))} if images.windows else {}),
        preheat_attention=attention,
        preheat_mask=MaskSpec(causal=False),
    )
    return output.pooler_output, getattr(output, "deepstack_features", ())


def _encode_gemma3(model: PreTrainedModel, vision: Vision, images: Images, attention: Callable[..., Tensor]) -> Tensor:
    base: PreTrainedModel = model.base_model
    hidden = base.vision_tower(pixel_values=_read_squares(base.vision_tower, vision, images)).last_hidden_state
    return base.multi_modal_projector(hidden).flatten(0, 1)  # type: ignore[no-any-return]


def _encode_smolvlm(model: PreTrainedModel, vision: Vision, images: Images, attention: Callable[..., Tensor]) -> Tensor:
    # Without the masks of padding, whose sizes transformers reads back from the device: squares are never padded.
    import torch

    base: PreTrainedModel = model.base_model
    seeing = base.vision_model
    squares = _read_squares(seeing, vision, images)
    full = torch.ones(len(squares), vision.tile, vision.tile, dtype=torch.bool, device=squares.device)
    hidden = seeing.embeddings(pixel_values=squares, patch_attention_mask=full)
    hidden = seeing.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
    return base.connector(seeing.post_layernorm(hidden)).flatten(0, 1)  # type: ignore[no-any-return]


def _read_squares(seeing: nn.Module, vision: Vision, images: Images) -> Tensor:
    """The pixels of all squares, [squares, channels, height, width]."""
    side = vision.tile * vision.patch
    return images.patches.view(-1, vision.channels, side, side).to(next(seeing.parameters()).dtype)


def _encode_pixtral(model: PreTrainedModel, vision: Vision, images: Images, attention: Callable[..., Tensor]) -> Tensor:
    """One sequence of the patches of all images, each of which attends to itself.

    transformers' forward makes a dense mask of it, and reads sizes back. One call for each image would not do: devices
    that shard the weights have different numbers of them.
    """
    import torch

    base: PreTrainedModel = model.base_model
    seeing, size = base.vision_tower, vision.patch
    pieces = [
        pixels.view(vision.channels, rows, size, columns, size).permute(1, 3, 0, 2, 4).flatten(0, 1)
        for (rows, columns), pixels in zip(images.grids, images.patches.split(images.sizes), strict=True)
    ]
    patches = torch.cat(pieces).to(next(seeing.parameters()).dtype)
    hidden = seeing.ln_pre(seeing.patch_conv(patches).flatten(1)[None])
    hidden = seeing.transformer(
        hidden,
        attention_mask=None,
        position_embeddings=seeing.patch_positional_embedding(hidden, images.inputs["position_ids"]),
        preheat_attention=_separate_images(images, attention),
        preheat_mask=MaskSpec(causal=False),
    ).last_hidden_state
    pixels = [(rows * size, columns * size) for rows, columns in images.grids]
    return base.multi_modal_projector(hidden.squeeze(0), pixels)  # type: ignore[no-any-return]


def _encode_gemma4(model: PreTrainedModel, vision: Vision, images: Images, attention: Callable[..., Tensor]) -> Tensor:
    """One sequence of the patches of all images; those of a token are neighbours, so that they are pooled by a mean.

    transformers' forward pads images to one size and pools by a matrix of patches and tokens.
    """
    base: PreTrainedModel = model.base_model
    seeing = base.vision_tower
    positions = images.inputs["position_ids"].flip(-1)[None]  # column, row
    hidden = seeing.patch_embedder(images.patches[None], positions, positions.new_zeros(positions.shape[:2]).bool())
    dtype = hidden.dtype
    hidden = seeing.encoder(
        inputs_embeds=hidden,
        attention_mask=None,
        pixel_position_ids=positions,
        preheat_attention=_separate_images(images, attention),
        preheat_mask=MaskSpec(causal=False),
    ).last_hidden_state
    # In fp32 as there: scaled features exceed fp16.
    pooled = hidden[0].unflatten(0, (-1, vision.merge**2)).float().mean(1).to(dtype).float()
    pooled = pooled * seeing.pooler.root_hidden_size
    if seeing.config.standardize:
        pooled = (pooled - seeing.std_bias.float()) * seeing.std_scale.float()
    return base.embed_vision(inputs_embeds=pooled.to(dtype))  # type: ignore[no-any-return]


def _separate_images(images: Images, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The attention of one sequence of patches in which each image attends to itself."""
    import torch

    def attend_separately(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
        each = zip(*(t.split(images.sizes, dim=2) for t in (q, k, v)), strict=True)
        return torch.cat([attention(*image, mask, scale) for image in each], dim=2)

    return attend_separately


_FEATURES: dict[str, Callable[..., Tensor]] = {
    "gemma3": _encode_gemma3,
    "gemma4": _encode_gemma4,
    "smolvlm": _encode_smolvlm,
    "pixtral": _encode_pixtral,
}
"""How the tower and the projector of a layout of images are called."""
