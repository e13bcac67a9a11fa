"""Shared code of quantization methods: module selection, group sizes, and the summary. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from preheat.core import Change, ModelFacts
from preheat.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from preheat.compress.calibration import Inputs

__all__ = [
    "High",
    "choose_maps",
    "choose_group_size",
    "keep_high",
    "quantize",
    "quantize_by_inputs",
    "describe_precision",
    "count_weights_and_bits",
]


@dataclass(frozen=True, kw_only=True)
class High:
    """Settings of quantization methods for the modules that stay in higher precision."""

    keep: str | tuple[str, ...] = "auto"
    """Modules kept in higher precision: auto (embedding, head, and the first and last of more than two layers), or any
    of embedding, head, first, last (layer), last parts of names (down_proj), or regular expressions for whole names."""
    high: Literal["int8", "bf16"] = "int8"
    """Precision of the modules in `keep`: int8 (weight-only, one scale per output), nearly lossless, or bf16."""

    def check(self, model: ModelFacts) -> list[str]:
        # transformers stores the experts of a layer as one 3D parameter.
        if model.experts:
            return [
                f"method: the {model.experts} experts of a layer share one parameter, which is not a linear map: most "
                "weights would stay unquantized"
            ]
        return []

    def require(self, model: PreTrainedModel) -> None:
        method = type(self).__module__.rpartition(".")[2]
        chosen, _ = choose_maps(model, self, method)
        # Not every method has groups, and with 8 bits there are none.
        if getattr(self, "bits", 4) == 4:
            for name, module in chosen.items():
                choose_group_size(name, module, getattr(self, "group", "auto"), method)


def choose_maps(model: PreTrainedModel, settings: High, method: str) -> tuple[dict[str, nn.Module], set[str]]:
    """Selects the linear maps that a method quantizes.

    Returns:
        The linear maps by name, and the names of the maps and the embedding kept in higher precision.

    Raises:
        RecipeError: `keep` matches nothing, or leaves nothing to quantize.
    """
    from torch import nn

    from preheat.models.sensitive_modules import roles
    from preheat.ops.quantization.module_filter import find_linear_maps, select_kept

    places, maps = roles(model), find_linear_maps(model)
    # Subclasses may scale their output, which Int8Embedding would lose.
    embedding = [name for name in places["embedding"] if type(model.get_submodule(name)) is nn.Embedding]
    try:
        excluded = select_kept([*maps, *embedding], settings.keep, places)
    except ValueError as error:
        raise RecipeError(f"--method {method}: {error}") from None
    chosen = {name: module for name, module in maps.items() if name not in excluded}
    if not chosen:
        raise RecipeError(f"--method {method}: keep: {settings.keep!r} leaves no linear map to quantize; keep less")
    return chosen, excluded


def choose_group_size(name: str, module: nn.Module, group: int | str, method: str) -> int:
    """Returns the group size of a map: the number of inputs that share a scale.

    Raises:
        RecipeError: the group size does not divide the number of inputs.
    """
    from preheat.ops.quantization.linear import map_weight
    from preheat.ops.quantization.module_filter import group_of

    try:
        return group_of(name, map_weight(module).shape[1], group)
    except ValueError as error:
        raise RecipeError(f"--method {method}: {error}") from None


def quantize(
    model: PreTrainedModel, settings: High, method: str, make: Callable[[str, nn.Module], nn.Module], description: str
) -> Change:
    """Replaces each chosen map by `make(name, map)`, and converts the modules in `keep`, in place."""
    from preheat.ops.quantization.serialization import put_in

    chosen, excluded = choose_maps(model, settings, method)
    # all first, so that an error leaves the model unchanged
    quantized = {name: make(name, module) for name, module in chosen.items()}
    # Read before the maps are replaced, when both are still plain modules.
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, module in quantized.items():
        put_in(model, name, module)
    keep_high(model, excluded, settings.high, tied=tied)
    return describe_precision(model, list(quantized), description)


def quantize_by_inputs(
    model: PreTrainedModel,
    settings: High,
    method: str,
    rows: Sequence[Tensor],
    make: Callable[[str, nn.Module, Inputs], nn.Module],
    description: str,
) -> Change:
    """As `quantize`, layer by layer, with each map's input statistics after quantization of the preceding layers."""
    from preheat.compress.calibration import describe, walk
    from preheat.models.layerwise import plain_forward
    from preheat.ops.quantization.serialization import put_in

    chosen, excluded = choose_maps(model, settings, method)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    remaining = dict(chosen)
    # Later maps are calibrated on the outputs of the quantized maps before them, so that they can compensate.
    for layer in walk(model, rows):
        layer_maps = {name: module for name, module in chosen.items() if name.startswith(f"{layer.name}.")}
        inputs = layer.inputs(layer_maps) if layer_maps else {}
        for name, module in layer_maps.items():
            put_in(model, name, make(name, module, inputs[name]))
            del remaining[name]
    # Maps outside the layers, such as the head, are calibrated when all layers are quantized.
    if remaining:
        with plain_forward(model):
            for name, statistics in _collect_inputs(model, remaining, rows).items():
                put_in(model, name, make(name, remaining[name], statistics))
    keep_high(model, excluded, settings.high, tied=tied)
    return describe_precision(model, list(chosen), f"{description}; calibrated on {describe(rows)}")


def _collect_inputs(model: PreTrainedModel, maps: dict[str, nn.Module], rows: Sequence[Tensor]) -> dict[str, Inputs]:
    """Collects the inputs of maps outside the layers, such as the head if it is quantized."""
    from preheat.compress.calibration import Layer

    def run() -> list[Tensor]:
        return [model(input_ids=row.to(model.device), use_cache=False).logits for row in rows]

    return Layer("", model, run).inputs(maps)


def keep_high(model: PreTrainedModel, excluded: set[str], high: str, *, tied: bool) -> None:
    """Converts the embedding and the modules in `keep`, in place; a tied head shares the embedding's codes.

    The embedding is stored in int8, too, unless it (or a head tied to it) is kept in bf16: its rows are only looked
    up, never multiplied.
    """
    from torch import nn

    from preheat.models.hf import embedding, head
    from preheat.models.sensitive_modules import roles
    from preheat.ops.quantization.linear import Int8Embedding, Int8Linear
    from preheat.ops.quantization.serialization import put_in

    names = roles(model)
    first, last = names["embedding"], names["head"]
    in_half = excluded if high == "bf16" else set()
    for name in sorted(excluded - set(first)):
        if high == "int8":
            put_in(model, name, Int8Linear.of(model.get_submodule(name)))
    looked_up = embedding(model)
    # With a tied head in bf16, embedding codes of its own would store the matrix twice.
    if type(looked_up) is nn.Embedding and not in_half & {*first, *(last if tied else ())}:
        put_in(model, first[0], Int8Embedding.of(looked_up))
        ends: Any = (embedding(model), head(model))
        if tied and isinstance(ends[1], Int8Linear) and ends[1].input_scales is None:
            # As in the model, the head shares the embedding's tensors, so that they are stored once.
            ends[1].codes, ends[1].scales = ends[0].codes, ends[0].scales


def describe_precision(model: PreTrainedModel, names: Sequence[str], description: str) -> Change:
    """Returns a summary: average bits per weight of the quantized maps with scales, and the precision of the rest."""
    from preheat.models.hf import embedding
    from preheat.ops.quantization.serialization import find_form, find_quantized_modules

    weights, bits = count_weights_and_bits(model, names)
    looked_up = embedding(model)
    # Quantized modules that the method did not choose: those of `keep`.
    others = [m for name, m in find_quantized_modules(model).items() if name not in set(names) and m is not looked_up]
    rest = f"; {len(others)} others kept in int8" if others else ""
    rest += f"; the embedding in {'int8' if find_form(looked_up) else 'bf16'}"
    groups: dict[int, int] = {}
    for name in names:
        form = find_form(model.get_submodule(name)) or {}
        if "group" in form:
            groups[form["group"]] = groups.get(form["group"], 0) + 1
    group_sizes = (
        ", groups of " + ", ".join(f"{size} ({count} maps)" for size, count in sorted(groups.items())) if groups else ""
    )
    return Change(
        f"{len(names)} linear maps in {description}{group_sizes}: {bits / weights:.2f} bits a weight{rest}", len(names)
    )


def count_weights_and_bits(model: nn.Module, names: Sequence[str]) -> tuple[int, int]:
    """Returns the number of weights of linear maps, and their bits with scales, zeros and factors, without biases."""
    from preheat.ops.quantization.linear import QuantizedMap
    from preheat.ops.quantization.nf4 import PackedMap

    weights = bits = 0
    for name in names:
        m: Any = model.get_submodule(name)
        # NF4 packs two weights a byte, so the shape of its parameter says nothing.
        if isinstance(m, PackedMap):
            weights += m.nf4_shape[0] * m.nf4_shape[1]
        elif isinstance(m, QuantizedMap):
            weights += m.in_features * m.out_features
        # A map that stayed in bf16 counts 16 bits a weight.
        else:
            weights, bits = weights + m.weight.numel(), bits + 16 * m.weight.numel()
            continue
        bits += sum(8 * p.nbytes for key, p in m.named_parameters(recurse=False) if key != "bias")
    return weights, bits
