"""Structured pruning: builds a smaller model from the layers, heads, channels and stream dimensions to keep.

The result is an ordinary model of its family: transformers builds it from the smaller configuration, and its parameters
are slices of the larger model's. `AutoModelForCausalLM.from_pretrained` loads what `save_pretrained` writes of it.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.models.conversions.architecture import describe_unsupported_modules
from preheat.models.conversions.modules import DynamicRotary, LongRotary, replace_rotary
from preheat.models.hf import PATTERN, SOFTCAP, find_anatomy, read_facts
from preheat.models.sinks import CHUNK

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "FAMILIES",
    "Indices",
    "KeptIndices",
    "Sizes",
    "replace_in_place",
    "build_parameter_counter",
    "describe_misfit",
    "find_stream_norms",
    "build_name_map",
    "find_readers",
    "sizes_of",
    "build_smaller",
    "width_step",
]

# The axis of each dimension of a parameter: stream, query heads, key-value heads, channels; "": not sliced.
_GATED = (
    (r"embed_tokens\.weight|lm_head\.weight", ("", "hidden")),
    (r"(input_layernorm|post_attention_layernorm|norm)\.weight", ("hidden",)),
    (r"[qk]_norm\.weight", ("",)),
    (r"q_proj\.(weight|bias)", ("heads", "hidden")),
    (r"[kv]_proj\.(weight|bias)", ("kv_heads", "hidden")),
    (r"o_proj\.(weight|bias)", ("hidden", "heads")),
    (r"(gate|up)_proj\.(weight|bias)", ("channels", "hidden")),
    (r"down_proj\.(weight|bias)", ("hidden", "channels")),
)
_GPT2 = (  # Conv1D stores weights as [in, out]
    (r"(wte|wpe|lm_head)\.weight", ("", "hidden")),
    (r"ln_\w+\.(weight|bias)", ("hidden",)),
    (r"c_attn\.weight", ("hidden", "qkv")),
    (r"c_attn\.bias", ("qkv",)),
    (r"attn\.c_proj\.weight", ("heads", "hidden")),
    (r"c_fc\.weight", ("hidden", "channels")),
    (r"c_fc\.bias", ("channels",)),
    (r"mlp\.c_proj\.weight", ("channels", "hidden")),
    (r"c_proj\.bias", ("hidden",)),
)
FAMILIES = {"llama": _GATED, "mistral": _GATED, "qwen2": _GATED, "qwen3": _GATED, "gpt2": _GPT2}
"""Families that can be made narrower; layers can be removed from any."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model. `channels` is the inner width of a feed-forward block; `head_dim` never changes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    head_dim: int


@dataclass(frozen=True)
class KeptIndices:
    """Indices to keep, ascending; None: all. `heads`, `kv_heads` and `channels` have one entry per original layer."""

    layers: Tensor | None = None
    hidden: Tensor | None = None
    heads: Sequence[Tensor] | None = None
    kv_heads: Sequence[Tensor] | None = None
    channels: Sequence[Tensor] | None = None


def _build_table(config: PretrainedConfig) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if config.model_type not in FAMILIES:
        why = (
            "has experts, whose channels and stream preheat does not slice"
            if read_facts(config).experts
            else "is a family whose heads, channels and stream preheat does not slice"
        )
        raise RecipeError(
            f"model: {config.model_type} {why} (it does those of {', '.join(FAMILIES)}); remove whole layers by the "
            "method depth"
        )
    return FAMILIES[config.model_type]


def _find_axes(config: PretrainedConfig, name: str, dimensions: int) -> tuple[str, ...]:
    """The axis of each dimension of a parameter."""
    for pattern, axes in _build_table(config):
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return axes[:dimensions]  # a bias has the first axis of its weight
    raise RecipeError(
        f"model: {name} is not a known parameter of a {config.model_type}, so it cannot be sliced; remove whole "
        "layers by the method depth"
    )


def sizes_of(config: PretrainedConfig) -> Sizes:
    """The sizes of a model of one of `FAMILIES`.

    Raises:
        RecipeError: another family.
    """
    _build_table(config)
    known = read_facts(config)
    channels = config.n_inner or 4 * config.n_embd if config.model_type == "gpt2" else config.intermediate_size
    return Sizes(known.layers, known.width, known.heads, known.kv_heads, channels, known.head_dim)


def build_parameter_counter(model: PreTrainedModel) -> Callable[[Sizes], int]:
    """Returns a function that counts the model's parameters at other sizes, shared ones once, without building it."""
    layers = f"{_rename_layer(model, find_anatomy(model).layers)}."
    # How often each shape occurs, with axes by name: the count at other sizes is a sum over a few shapes.
    ends: Counter[tuple[Any, ...]] = Counter()
    inside: Counter[tuple[Any, ...]] = Counter()
    for name, p in model.named_parameters():
        # `named_parameters` yields a tied head once, so it is counted once.
        axes = _find_axes(model.config, name, p.ndim)
        sides = tuple(axis or size for axis, size in zip(axes, p.shape, strict=True))
        (inside if name.startswith(layers) else ends)[sides] += 1
    count = sizes_of(model.config).layers

    def size_at(sizes: Sizes) -> int:
        width = {
            "hidden": sizes.hidden,
            "heads": sizes.heads * sizes.head_dim,
            "kv_heads": sizes.kv_heads * sizes.head_dim,
            "qkv": 3 * sizes.heads * sizes.head_dim,
            "channels": sizes.channels,
        }

        def count_total(parts: Counter[tuple[Any, ...]]) -> int:
            return sum(times * math.prod(width.get(side, side) for side in sides) for sides, times in parts.items())

        # All layers have the same shapes, so their total scales with their number.
        return count_total(ends) + count_total(inside) * sizes.layers // count

    return size_at


def describe_misfit(config: PretrainedConfig, sizes: Sizes) -> str:
    """Why transformers has no model of the family with these sizes; "" if it has one."""
    if config.model_type == "gpt2" and sizes.hidden != sizes.heads * sizes.head_dim:
        return (
            f"a gpt2 has heads of width / heads, so {sizes.heads} heads of {sizes.head_dim} need a width of "
            f"{sizes.heads * sizes.head_dim} and not {sizes.hidden}: give heads and hidden the same share"
        )
    if config.model_type == "llama" and sizes.hidden % sizes.heads:
        down = sizes.hidden // sizes.heads * sizes.heads
        return (
            f"transformers takes a llama only if its width is a multiple of its heads, and {sizes.hidden} is not one "
            f"of {sizes.heads}: with {sizes.heads} heads use a width of {down}, or keep another number of heads"
        )
    return ""


def width_step(config: PretrainedConfig, heads: int, head_dim: int, multiple: int) -> int:
    """The step in which the width may change with that many heads; `multiple` if the family allows any."""
    if config.model_type == "gpt2":
        return heads * head_dim
    return math.lcm(multiple, heads) if config.model_type == "llama" else multiple


def find_readers(model: PreTrainedModel, what: str) -> list[tuple[int, str, nn.Module]]:
    """The linear maps from `heads` or `channels` to the stream: (layer, name, module) in order."""
    from transformers.pytorch_utils import Conv1D

    layers = _rename_layer(model, find_anatomy(model).layers)
    maps = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2:
            continue
        axes = _find_axes(model.config, f"{name}.weight", 2)
        # The input axis: Conv1D stores [in, out], Linear [out, in].
        if axes[0 if isinstance(module, Conv1D) else 1] == what:
            maps.append((int(name.removeprefix(f"{layers}.").partition(".")[0]), name, module))
    return maps


def find_stream_norms(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The norms over the stream by name, without those over a head."""
    norms = find_anatomy(model).norms
    return {name: m for name, m in norms.items() if _find_axes(model.config, f"{name}.weight", 1) == ("hidden",)}


def build_name_map(model: PreTrainedModel, keep: KeptIndices) -> Callable[[str], tuple[int, str]]:
    """Returns a function from names in the smaller model to (layer in `model`, or -1; name in `model`)."""
    layers = find_anatomy(model).layers
    prefix = f"{_rename_layer(model, layers)}."
    # New layer number -> layer number in the larger model.
    order = list(range(len(layers))) if keep.layers is None else keep.layers.tolist()

    def count_before(name: str) -> tuple[int, str]:
        if not name.startswith(prefix):
            return -1, name
        number, dot, rest = name.removeprefix(prefix).partition(".")
        return order[int(number)], f"{prefix}{order[int(number)]}{dot}{rest}"

    return count_before


def build_smaller(model: PreTrainedModel, keep: KeptIndices) -> PreTrainedModel:
    """Builds a smaller model with its own configuration and copies of the kept values; `model` is not changed.

    Raises:
        RecipeError: a family that cannot be sliced like this, or a model that differs from what transformers builds.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 96}
        >>> config = LlamaConfig(num_hidden_layers=3, **sizes)
        >>> build_smaller(LlamaForCausalLM(config), KeptIndices(layers=torch.tensor([0, 2]))).config.num_hidden_layers
        2
    """
    import torch

    if beyond := describe_unsupported_modules(model):
        raise RecipeError(
            f"model: has {' and '.join(beyond)}, which no configuration of transformers describes a smaller form of"
        )
    config = _build_config(model.config, keep)
    # On meta, because every parameter is replaced by a slice: transformers would draw values for nothing.
    with torch.device("meta"):
        pruned: PreTrainedModel = type(model)(config)
    # transformers builds its own rotary modules again; the comparison of types below needs ours.
    if any(isinstance(m, DynamicRotary | LongRotary) for m in model.modules()):
        replace_rotary(pruned)
    before = build_name_map(model, keep)
    indices = Indices(model, keep)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, module in pruned.named_modules():
            layer, old_name = before(name)
            old: Any = modules.get(old_name)
            if type(old) is not type(module):
                raise RecipeError(
                    f"model: {old_name or 'the model'} is a {type(old).__name__}, where transformers builds a "
                    f"{type(module).__name__} for a smaller model of this configuration; the model cannot be cut"
                )
            for key, value in list(module.named_parameters(recurse=False)):
                source = old._parameters[key]
                sliced = indices.slice(f"{old_name}.{key}", layer, source.detach())
                assert sliced.shape == value.shape, f"{old_name}.{key}: {tuple(sliced.shape)} for {tuple(value.shape)}"
                module._parameters[key] = torch.nn.Parameter(sliced, requires_grad=source.requires_grad)
            # Buffers such as rotary frequencies depend on the head dimension only, which does not change.
            for key, _ in list(module.named_buffers(recurse=False)):
                module._buffers[key] = old._buffers[key].clone()
            for attribute in (SOFTCAP, PATTERN, CHUNK):  # preheat's own attributes of modules
                if hasattr(old, attribute):
                    setattr(module, attribute, getattr(old, attribute))
    # A tied head was sliced as a parameter of its own; from here it shares the embedding's again.
    pruned.tie_weights()
    pruned.generation_config = copy.deepcopy(model.generation_config)
    return pruned.train(model.training)  # type: ignore[no-any-return]


def replace_in_place(model: PreTrainedModel, pruned: PreTrainedModel) -> None:
    """Turns `model` into the smaller `pruned`, in place: takes over its modules and configuration."""
    # The caller's reference to `model` stays valid, and so does its class.
    for name, child in pruned.named_children():
        setattr(model, name, child)
    model.config = pruned.config


class Indices:
    """Indices to keep of each dimension of each parameter."""

    def __init__(self, model: PreTrainedModel, keep: KeptIndices):
        self.kept, self.config = keep, model.config
        self.narrow = any(part is not None for part in (keep.hidden, keep.heads, keep.kv_heads, keep.channels))
        self.sizes = sizes_of(model.config) if self.narrow else None

    def slice(self, name: str, layer: int, value: Tensor) -> Tensor:
        """A copy of the kept part of a parameter of layer `layer`, or of none (-1)."""
        import torch

        # Whole layers are removed from any family, without a table of its axes.
        if not self.narrow:
            return value.clone()
        sliced = value
        for dimension, axis in enumerate(_find_axes(self.config, name, value.ndim)):
            index = self.of(axis, layer)
            if index is not None:
                sliced = torch.index_select(sliced, dimension, index.to(sliced.device))
        return sliced.contiguous() if sliced is not value else value.clone()

    def of(self, axis: str, layer: int) -> Tensor | None:
        """The indices to keep along `hidden`, `channels`, `heads` ... of a layer; None: all."""
        import torch

        keep, sizes = self.kept, self.sizes
        assert sizes is not None
        if axis == "hidden":
            return keep.hidden
        if axis == "channels":
            return None if keep.channels is None else keep.channels[layer]
        heads = keep.kv_heads if axis == "kv_heads" else keep.heads
        if axis == "" or heads is None:
            return None
        # [heads kept, head_dim] -> indices of the projection's rows.
        elements = (heads[layer][:, None] * sizes.head_dim + torch.arange(sizes.head_dim)).flatten()
        if axis == "qkv":
            # GPT-2 has queries, keys and values one after the other in a single matrix.
            return torch.cat([elements + part * sizes.heads * sizes.head_dim for part in range(3)])
        return elements


def _rename_layer(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if m is module)


def _build_config(config: PretrainedConfig, keep: KeptIndices) -> PretrainedConfig:
    """The configuration of the smaller model."""
    smaller_config = copy.deepcopy(config)
    if keep.layers is not None:
        order = keep.layers.tolist()
        for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):  # lists with an entry per layer
            if entries := getattr(config, key, None):
                setattr(smaller_config, key, [entries[n] for n in order])
        smaller_config.num_hidden_layers = len(order)
    # Every layer keeps the same number of heads and channels, as one configuration describes all.
    if keep.heads is not None:
        if config.model_type != "gpt2":
            smaller_config.head_dim = read_facts(
                config
            ).head_dim  # otherwise transformers derives it from width / heads
        smaller_config.num_attention_heads = len(keep.heads[0])
    if keep.kv_heads is not None and config.model_type != "gpt2":
        smaller_config.num_key_value_heads = len(keep.kv_heads[0])
    if keep.hidden is not None:
        if config.model_type != "gpt2":
            smaller_config.head_dim = read_facts(config).head_dim
        smaller_config.hidden_size = len(keep.hidden)
    if keep.channels is not None:
        setattr(
            smaller_config, "n_inner" if config.model_type == "gpt2" else "intermediate_size", len(keep.channels[0])
        )
    elif keep.hidden is not None and config.model_type == "gpt2":
        smaller_config.n_inner = config.n_inner or 4 * config.n_embd  # otherwise transformers derives it from the width
    return smaller_config
