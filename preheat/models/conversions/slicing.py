"""Smaller models out of larger ones: which layers, heads, feed-forward channels and stream dimensions stay; the rest is cut away.

What comes out is an ordinary model of its family: transformers builds it from the smaller configuration, and its parameters are slices of
the larger model's. `AutoModelForCausalLM.from_pretrained` loads what `save_pretrained` writes of it.
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
from preheat.models.conversions.architecture import beyond_transformers
from preheat.models.conversions.modules import DynamicRotary, LongRotary, own_rotary
from preheat.models.hf import PATTERN, SOFTCAP, anatomy, facts

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "FAMILIES",
    "Indices",
    "Kept",
    "Sizes",
    "become",
    "counter",
    "misfit",
    "norms_over_stream",
    "origin",
    "readers",
    "sizes_of",
    "smaller",
    "width_step",
]

_GATED = (  # what each dimension of a parameter is: of the stream, query heads, key-value heads, channels; "": it stays as it is
    (r"embed_tokens\.weight|lm_head\.weight", ("", "hidden")),
    (r"(input_layernorm|post_attention_layernorm|norm)\.weight", ("hidden",)),
    (r"[qk]_norm\.weight", ("",)),
    (r"q_proj\.(weight|bias)", ("heads", "hidden")),
    (r"[kv]_proj\.(weight|bias)", ("kv_heads", "hidden")),
    (r"o_proj\.(weight|bias)", ("hidden", "heads")),
    (r"(gate|up)_proj\.(weight|bias)", ("channels", "hidden")),
    (r"down_proj\.(weight|bias)", ("hidden", "channels")),
)
_GPT2 = (  # its maps are stored [in, out]
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
"""Families that can be made narrower; layers can be taken out of any."""


@dataclass(frozen=True)
class Sizes:
    """How large a model is; `head_dim` never changes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    head_dim: int


@dataclass(frozen=True)
class Kept:
    """What stays, by number, ascending; None: everything. `heads`, `kv_heads` and `channels` have an entry for each layer of the larger model."""

    layers: Tensor | None = None
    hidden: Tensor | None = None
    heads: Sequence[Tensor] | None = None
    kv_heads: Sequence[Tensor] | None = None
    channels: Sequence[Tensor] | None = None


def _table(config: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if config.model_type not in FAMILIES:
        why = (
            "has experts, whose channels and stream preheat does not slice"
            if facts(config).experts
            else "is a family whose heads, channels and stream preheat does not slice"
        )
        raise RecipeError(
            f"model: {config.model_type} {why} (it does those of {', '.join(FAMILIES)}); take out whole layers by the method depth"
        )
    return FAMILIES[config.model_type]


def _axes(config: Any, name: str, dimensions: int) -> tuple[str, ...]:
    """What each dimension of a parameter is."""
    for pattern, axes in _table(config):
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return axes[:dimensions]  # a bias has the first of its weight's
    raise RecipeError(
        f"model: {name} is no parameter that preheat knows of a {config.model_type}, so it cannot be sliced; take out whole layers by the method depth"
    )


def sizes_of(config: PretrainedConfig) -> Sizes:
    """The sizes that a model of one of `FAMILIES` has.

    Raises:
        RecipeError: another family.
    """
    _table(config)
    known = facts(config)
    channels = config.n_inner or 4 * config.n_embd if config.model_type == "gpt2" else config.intermediate_size
    return Sizes(known.layers, known.width, known.heads, known.kv_heads, channels, known.head_dim)


def counter(model: PreTrainedModel) -> Callable[[Sizes], int]:
    """Counts the parameters that the model would have at other sizes; a shared one once. Nothing is built."""
    layers = f"{_name_of(model, anatomy(model).layers)}."
    ends: Counter[tuple[Any, ...]] = Counter()
    inside: Counter[tuple[Any, ...]] = Counter()
    for name, p in model.named_parameters():
        axes = _axes(model.config, name, p.ndim)
        sides = tuple(axis or size for axis, size in zip(axes, p.shape, strict=True))
        (inside if name.startswith(layers) else ends)[sides] += 1
    count = sizes_of(model.config).layers

    def at(sizes: Sizes) -> int:
        width = {
            "hidden": sizes.hidden,
            "heads": sizes.heads * sizes.head_dim,
            "kv_heads": sizes.kv_heads * sizes.head_dim,
            "qkv": 3 * sizes.heads * sizes.head_dim,
            "channels": sizes.channels,
        }

        def total(parts: Counter[tuple[Any, ...]]) -> int:
            return sum(times * math.prod(width.get(side, side) for side in sides) for sides, times in parts.items())

        return total(ends) + total(inside) * sizes.layers // count

    return at


def misfit(config: Any, sizes: Sizes) -> str:
    """Why transformers has no such model of the family; "" where it has one."""
    if config.model_type == "gpt2" and sizes.hidden != sizes.heads * sizes.head_dim:
        return (
            f"a gpt2 has heads of width / heads, so {sizes.heads} heads of {sizes.head_dim} need a width of "
            f"{sizes.heads * sizes.head_dim} and not {sizes.hidden}: give heads and hidden the same share"
        )
    if config.model_type == "llama" and sizes.hidden % sizes.heads:
        down = sizes.hidden // sizes.heads * sizes.heads
        return (
            f"transformers takes a llama only if its width is a multiple of its heads, and {sizes.hidden} is none of {sizes.heads}: "
            f"with {sizes.heads} heads use a width of {down}, or keep another number of heads"
        )
    return ""


def width_step(config: Any, heads: int, head_dim: int, multiple: int) -> int:
    """What the width must be a multiple of with so many heads; of `multiple` where the family leaves it open."""
    if config.model_type == "gpt2":
        return heads * head_dim
    return math.lcm(multiple, heads) if config.model_type == "llama" else multiple


def readers(model: PreTrainedModel, what: str) -> list[tuple[int, str, nn.Module]]:
    """The maps that read `heads` or `channels` and write to the stream: (layer, name, module) in order."""
    from transformers.pytorch_utils import Conv1D

    layers = _name_of(model, anatomy(model).layers)
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2:
            continue
        axes = _axes(model.config, f"{name}.weight", 2)
        if axes[0 if isinstance(module, Conv1D) else 1] == what:
            found.append((int(name.removeprefix(f"{layers}.").partition(".")[0]), name, module))
    return found


def norms_over_stream(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The norms over the stream, by name; not those over a head."""
    norms = anatomy(model).norms
    return {name: m for name, m in norms.items() if _axes(model.config, f"{name}.weight", 1) == ("hidden",)}


def origin(model: PreTrainedModel, kept: Kept) -> Callable[[str], tuple[int, str]]:
    """Tells of a name in the smaller model where it was in `model`: the layer there, -1 outside of layers, and the name there."""
    layers = anatomy(model).layers
    prefix = f"{_name_of(model, layers)}."
    order = list(range(len(layers))) if kept.layers is None else kept.layers.tolist()

    def before(name: str) -> tuple[int, str]:
        if not name.startswith(prefix):
            return -1, name
        number, dot, rest = name.removeprefix(prefix).partition(".")
        return order[int(number)], f"{prefix}{order[int(number)]}{dot}{rest}"

    return before


def smaller(model: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """A new model of what stays, with its own configuration and copies of the values; `model` stays as it is.

    Raises:
        RecipeError: a family that cannot be sliced so, or a model that is not as transformers builds it.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=96)
        >>> smaller(LlamaForCausalLM(config), Kept(layers=torch.tensor([0, 2]))).config.num_hidden_layers
        2
    """
    import torch

    if beyond := beyond_transformers(model):
        raise RecipeError(
            f"model: has {' and '.join(beyond)}, which no configuration of transformers describes a smaller form of"
        )
    config = _configuration(model.config, kept)
    with torch.device("meta"):
        made: Any = type(model)(config)
    if any(isinstance(m, DynamicRotary | LongRotary) for m in model.modules()):
        own_rotary(made)
    before = origin(model, kept)
    indices = Indices(model, kept)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, module in made.named_modules():
            layer, old_name = before(name)
            old: Any = modules.get(old_name)
            if type(old) is not type(module):
                raise RecipeError(
                    f"model: {old_name or 'the model'} is a {type(old).__name__}, where transformers builds a {type(module).__name__} "
                    "for a smaller model of this configuration; the model cannot be cut"
                )
            for key, value in list(module.named_parameters(recurse=False)):
                source = old._parameters[key]
                sliced = indices.slice(f"{old_name}.{key}", layer, source.detach())
                assert sliced.shape == value.shape, f"{old_name}.{key}: {tuple(sliced.shape)} for {tuple(value.shape)}"
                module._parameters[key] = torch.nn.Parameter(sliced, requires_grad=source.requires_grad)
            for key, _ in list(module.named_buffers(recurse=False)):
                module._buffers[key] = old._buffers[key].clone()
            for attribute in (SOFTCAP, PATTERN):  # what preheat hung onto a module goes on with it
                if hasattr(old, attribute):
                    setattr(module, attribute, getattr(old, attribute))
    made.tie_weights()
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.train(model.training)  # type: ignore[no-any-return]


def become(model: PreTrainedModel, made: PreTrainedModel) -> None:
    """Lets `model` be what `smaller` made of it, in place: its modules and configuration are those of `made` from now on."""
    for name, child in made.named_children():
        setattr(model, name, child)
    model.config = made.config


class Indices:
    """Which elements of each dimension of each parameter stay."""

    def __init__(self, model: PreTrainedModel, kept: Kept):
        self.kept, self.config = kept, model.config
        self.narrow = any(part is not None for part in (kept.hidden, kept.heads, kept.kv_heads, kept.channels))
        self.sizes = sizes_of(model.config) if self.narrow else None

    def slice(self, name: str, layer: int, value: Tensor) -> Tensor:
        """A copy of what stays of a parameter of layer `layer`, or of none (-1)."""
        import torch

        if not self.narrow:
            return value.clone()
        found = value
        for dimension, axis in enumerate(_axes(self.config, name, value.ndim)):
            index = self.of(axis, layer)
            if index is not None:
                found = torch.index_select(found, dimension, index.to(found.device))
        return found.contiguous() if found is not value else value.clone()

    def of(self, axis: str, layer: int) -> Tensor | None:
        """The elements that stay along `hidden`, `channels`, `heads` ... of a layer; None: all."""
        import torch

        kept, sizes = self.kept, self.sizes
        assert sizes is not None
        if axis == "hidden":
            return kept.hidden
        if axis == "channels":
            return None if kept.channels is None else kept.channels[layer]
        heads = kept.kv_heads if axis == "kv_heads" else kept.heads
        if axis == "" or heads is None:
            return None
        whole = (heads[layer][:, None] * sizes.head_dim + torch.arange(sizes.head_dim)).flatten()
        if axis == "qkv":
            return torch.cat([whole + part * sizes.heads * sizes.head_dim for part in range(3)])
        return whole


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if m is module)


def _configuration(config: Any, kept: Kept) -> Any:
    """The configuration of what stays."""
    made = copy.deepcopy(config)
    if kept.layers is not None:
        order = kept.layers.tolist()
        for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):  # lists with an entry for each layer
            if entries := getattr(config, key, None):
                setattr(made, key, [entries[n] for n in order])
        made.num_hidden_layers = len(order)
    if kept.heads is not None:
        if config.model_type != "gpt2":
            made.head_dim = facts(config).head_dim  # else it would be taken for width / heads
        made.num_attention_heads = len(kept.heads[0])
    if kept.kv_heads is not None and config.model_type != "gpt2":
        made.num_key_value_heads = len(kept.kv_heads[0])
    if kept.hidden is not None:
        if config.model_type != "gpt2":
            made.head_dim = facts(config).head_dim
        made.hidden_size = len(kept.hidden)
    if kept.channels is not None:
        setattr(made, "n_inner" if config.model_type == "gpt2" else "intermediate_size", len(kept.channels[0]))
    elif kept.hidden is not None and config.model_type == "gpt2":
        made.n_inner = config.n_inner or 4 * config.n_embd  # else it would be taken for 4 * width
    return made
