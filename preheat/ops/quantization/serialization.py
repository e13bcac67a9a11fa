"""Stores which modules are quantized and how, and restores such models on meta.

`config.json` holds it as `quantization_config`: {quant_method: preheat, version, method, tied, forms: [{kind, ...,
modules: [names]}]}; model.safetensors holds the modules' integers, scales and factors as parameters. Importing this
module does not import torchao.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from preheat.model_folder import STORED
from preheat.ops.quantization.grids import HALF
from preheat.ops.quantization.linear import Fp8Linear, Int4Linear, Int8Embedding, Int8Linear, QuantizedMap, map_weight
from preheat.ops.quantization.nf4 import PackedMap, build_tables, pack_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from preheat.core.json_types import JsonObject
    from preheat.ops.quantization.linear import Form


__all__ = [
    "STORED",
    "find_form",
    "is_compressed",
    "open_on_meta",
    "put_in",
    "find_quantized_modules",
    "quantization_config",
    "register_tables",
    "cast_to_half",
]

_VERSION = 1
_KINDS: dict[str, type[Int8Linear | Int4Linear | Fp8Linear]] = {
    cls.kind: cls for cls in (Int8Linear, Int4Linear, Fp8Linear)
}


def find_form(module: nn.Module) -> Form | None:
    """Returns how a module is quantized, in the stored format; None if it is not."""
    # NF4 layers have no `form`; theirs follows from their tensors.
    if isinstance(module, PackedMap):
        return {"kind": "nf4", "double": module.nf4_ranges is not None}
    return dict(module.form) if isinstance(module, QuantizedMap | Int8Embedding) else None


def find_quantized_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns every quantized module by name."""
    return {name: m for name, m in model.named_modules() if find_form(m) is not None}


def is_compressed(model: PreTrainedModel) -> bool:
    """True if the model comes from `preheat compress`; a 4-bit base under an adapter does not count."""
    config = getattr(model.config, "quantization_config", None)
    return (
        config is not None and (config if isinstance(config, dict) else config.to_dict()).get("quant_method") == STORED
    )


def put_in(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replaces the module `name` by `new`, in place, and copies preheat's attributes (such as a cap on the logits)."""
    parent, _, last = name.rpartition(".")
    old = model.get_submodule(name)
    # Plain attributes only: parameters and submodules are in dicts of their own.
    for key, value in vars(old).items():
        if key.startswith("preheat_"):
            setattr(new, key, value)
    new.train(old.training)
    setattr(model.get_submodule(parent), last, new)


def quantization_config(model: nn.Module, method: str, tied: tuple[str, str]) -> JsonObject:
    """Returns the `quantization_config` of config.json: which modules are quantized and how.

    Args:
        method: name of the quantization method.
        tied: names of the embedding and the head, which may share their codes.
    """
    forms: list[Form] = []
    for name, module in find_quantized_modules(model).items():
        form = find_form(module)
        assert form is not None
        # Layers of equal form share one entry, so that config.json stays short.
        same = next((f for f in forms if {**f, "modules": None} == {**form, "modules": None}), None)
        if same is None:
            forms.append({**form, "modules": [name]})
        else:
            same["modules"].append(name)
    first, last = (getattr(model.get_submodule(name), "codes", None) for name in tied)
    # Compared by identity: a tied head shares the embedding's codes, and safetensors stores them once.
    shared = list(tied) if first is not None and first is last else None
    return {"quant_method": STORED, "version": _VERSION, "method": method, "tied": shared, "forms": forms}


def open_on_meta(model: nn.Module, stored_config: JsonObject) -> list[str]:
    """Replaces modules of a model on meta as `quantization_config` says, in place, without values; others become bf16.

    Returns:
        Names of the NF4 modules, whose lookup tables are not stored (see `register_tables`).

    Raises:
        KeyError, AttributeError, ValueError: written by another version, or for another model.
    """
    if stored_config["version"] != _VERSION:
        raise ValueError(f"version {stored_config['version']}, and this preheat reads {_VERSION}")
    packed = []
    for form in stored_config["forms"]:
        for name in form["modules"]:
            old: Any = model.get_submodule(name)
            if form["kind"] == "nf4":
                pack_([old], double=form["double"])
                packed.append(name)
            elif form["kind"] == Int8Embedding.kind:
                put_in(model, name, Int8Embedding.on_meta(*old.weight.shape))
            else:
                outputs, inputs = map_weight(old).shape
                settings = {key: value for key, value in form.items() if key not in ("kind", "modules")}
                put_in(model, name, _KINDS[form["kind"]].on_meta(inputs, outputs, old.bias is not None, settings))
    if stored_config["tied"] is not None:
        first, last = (model.get_submodule(name) for name in stored_config["tied"])
        # Tied after all replacements, which would otherwise separate the two again.
        last.codes, last.scales = first.codes, first.scales
    cast_to_half(model)
    return packed


def cast_to_half(model: nn.Module) -> None:
    """Casts floating-point parameters to bf16 in place; leaves buffers (rotary tables) unchanged."""
    for p in model.parameters():
        if p.is_floating_point():
            # By `data`, so that tied parameters stay the same objects. Integer codes are no floats and remain.
            p.data = p.data.to(HALF)


def register_tables(module: nn.Module) -> None:
    """Registers the lookup tables, which are not stored, in all NF4 layers of a module."""
    for m in module.modules():
        if isinstance(m, PackedMap):
            for name, value in zip(("nf4_pairs", "nf4_levels"), build_tables(m.nf4_codes.device), strict=True):
                m.register_buffer(name, value, persistent=False)
