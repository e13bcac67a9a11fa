"""Finds the linear layers that a published folder has quantized, and its `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from preheat.model_folder import STORED

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.core.json_types import JsonObject

__all__ = [
    "LAYER_KEYS",
    "LAYER_MARKS",
    "Folder",
    "Format",
    "PackedLayer",
    "choose_layers",
    "find_unknown_layer",
    "packed_method",
    "stored_quantization",
]

LAYER_KEYS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_shape", "weight_scale"),
    *("weight_scale_inv", "weight_zero_point", "weight_g_idx", "SCB", "weight_format"),
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    "weight.quant_state.bitsandbytes__nf4",
    *("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),
)
"""Last parts of the names of a quantized layer's tensors."""
LAYER_MARKS = (
    *(".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight.absmax", ".SCB"),
    *(".gate_up_proj_blocks", ".down_proj_blocks"),
)
"""Ends of the names of tensors that only a quantized layer has."""


class Format(Protocol):
    """The interface of ops.quantization.folder_formats.LayerFormat and Nf4Format: the format of a quantized layer."""

    @property
    def codes_key(self) -> str: ...

    @property
    def scale_keys(self) -> tuple[str, ...]: ...

    @property
    def raw_key(self) -> str: ...

    def with_scales_in(self, dtype: str) -> Format: ...

    def pack_(self, module: Any) -> PackedLayer: ...

    def convert(self, read: Callable[[str], Tensor | None], shape: Any) -> Any: ...

    def dequantize(self, read: Callable[[str], Tensor | None], shape: tuple[int, int]) -> Tensor: ...


class Folder(Protocol):
    """The interface of ops.quantization.folder_formats.QuantizedFolder."""

    @property
    def method(self) -> str: ...

    @property
    def ignored(self) -> str: ...

    @property
    def format_of(self) -> Callable[[str], Format | None]: ...

    @property
    def experts(self) -> Format | None: ...


class PackedLayer(Protocol):
    """A layer that holds its weight in the packed form that `Format.convert` returns."""

    @property
    def full_shape(self) -> Any: ...

    def fill_(self, tensors: Any) -> None: ...

    def count_packed(self) -> tuple[int, int]: ...

    def count_packed_bytes(self) -> int: ...


def stored_quantization(config: PretrainedConfig) -> JsonObject:
    """Returns the `quantization_config` of a configuration, or of its text part; {}: its weights are plain."""
    for part in (config, config.get_text_config()):
        if stored := getattr(part, "quantization_config", None):
            values: JsonObject = stored if isinstance(stored, dict) else stored.to_dict()
            # transformers' own classes hold an enumeration.
            method = values.get("quant_method")
            return {**values, "quant_method": getattr(method, "value", method)}
    return {}


def packed_method(config: PretrainedConfig) -> str:
    """Returns the `quant_method` of a published folder whose weights stay packed; "": none, or it is preheat's own."""
    method = stored_quantization(config).get("quant_method")
    return "" if method in (None, STORED) else str(method)


def choose_layers(model: PreTrainedModel, folder: Folder, has: Callable[[str], bool] | None) -> dict[str, Format]:
    """Returns the format of each linear layer, and of each layer's experts, that a folder has quantized, by its name.

    Args:
        model: on meta.
        has: tells if the files have a tensor, by its name in the model; None without files: config.json decides alone.

    Raises:
        ValueError: the model's experts are quantized, which are matrices of one parameter and no linear layers.
    """
    from torch import nn

    from preheat.models.module_lookup import head
    from preheat.models.moe import experts_of

    last, experts = head(model), {id(module) for module in experts_of(model)}
    layers = {}
    for name, module in model.named_modules():
        if id(module) in experts:
            chosen = folder.experts
        else:
            chosen = folder.format_of(name) if type(module) is nn.Linear else None
        if chosen is None:
            continue
        # The files decide: not every folder names all layers that it leaves out.
        keys = [chosen.codes_key, *chosen.scale_keys]
        if (
            module is not last
            if has is None
            else has(f"{name}.{keys[0]}") and any(has(f"{name}.{key}") for key in keys[1:])
        ):
            layers[name] = chosen
    # FP8 experts are read in full precision, by transformers' own rules.
    for name, module in model.named_modules() if has is None and folder.method != "fp8" else ():
        if id(module) in experts and folder.format_of(f"{name}.0.down_proj") is not None:
            raise ValueError(f"{name} are quantized experts")
    return layers


def find_unknown_layer(model: PreTrainedModel, names: Mapping[str, str], layers: Mapping[str, object]) -> str | None:
    """Returns a quantized tensor of the files that belongs to none of the layers, though the model has its module.

    Its codes would be read as values. Layers that the model leaves out do not count.

    Args:
        names: the name in the model of each tensor of the files.
        layers: the layers that are known to be quantized.
    """
    from preheat.models.moe import experts_of

    modules = dict(model.named_modules())
    experts = {id(module) for module in experts_of(model)}
    stacks = tuple(f"{name}." for name, module in modules.items() if id(module) in experts)
    for key, name in names.items():
        mark = next(filter(name.endswith, LAYER_MARKS), None)
        if mark is None:
            continue
        layer = name.removesuffix(mark)
        if layer not in layers and (layer in modules or (stacks and layer.startswith(stacks))):
            return key
    return None
