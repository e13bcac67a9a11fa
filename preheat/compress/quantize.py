"""What methods that quantize share: which maps they take, what stays high, and what was done in words. No torch at import."""

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
    "chosen_maps",
    "group_for",
    "keep_high",
    "quantize",
    "quantize_by_inputs",
    "told",
    "weights_and_bits",
]


@dataclass(frozen=True, kw_only=True)
class High:
    """Settings of a method that quantizes, for what it does not quantize as the rest."""

    keep: str | tuple[str, ...] = "auto"
    """What stays high: auto (embedding, head, and the first and last of more than two layers), or of embedding, head, first, last (layer), last parts of names (down_proj), or regular expressions for whole names."""
    high: Literal["int8", "bf16"] = "int8"
    """What is kept stands in: int8 (a scale for each output, weights alone), which costs next to nothing, or bf16."""

    def check(self, model: ModelFacts) -> list[str]:
        if model.experts:
            return [
                f"method: the {model.experts} experts of a layer stand in one parameter, which is no linear map: most weights would stay as they are"
            ]
        return []


def chosen_maps(model: PreTrainedModel, settings: High, method: str) -> tuple[dict[str, nn.Module], set[str]]:
    """The linear maps that a method quantizes, by name, and the names of maps and embedding that it keeps high.

    Raises:
        RecipeError: `keep` matches nothing, or leaves nothing.
    """
    from torch import nn

    from preheat.models.sensitive_modules import roles
    from preheat.ops.quantization.module_filter import kept_names, linear_maps

    places, maps = roles(model), linear_maps(model)
    embedding = [name for name in places["embedding"] if type(model.get_submodule(name)) is nn.Embedding]
    try:
        kept = kept_names([*maps, *embedding], settings.keep, places)
    except ValueError as error:
        raise RecipeError(f"--method {method}: {error}") from None
    chosen = {name: module for name, module in maps.items() if name not in kept}
    if not chosen:
        raise RecipeError(f"--method {method}: keep: {settings.keep!r} leaves no linear map to quantize; keep less")
    return chosen, kept


def group_for(name: str, module: nn.Module, group: int | str, method: str) -> int:
    """Inputs of a map that share a scale.

    Raises:
        RecipeError: the group does not divide them.
    """
    from preheat.ops.quantization.linear import map_weight
    from preheat.ops.quantization.module_filter import group_of

    try:
        return group_of(name, map_weight(module).shape[1], group)
    except ValueError as error:
        raise RecipeError(f"--method {method}: {error}") from None


def quantize(
    model: PreTrainedModel, settings: High, method: str, make: Callable[[str, nn.Module], nn.Module], words: str
) -> Change:
    """Puts `make(name, map)` in the place of each chosen map and brings what is kept into its form, in place."""
    from preheat.ops.quantization.serialization import put_in

    chosen, kept = chosen_maps(model, settings, method)
    made = {name: make(name, module) for name, module in chosen.items()}  # all of them, before the model is touched
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, module in made.items():
        put_in(model, name, module)
    keep_high(model, kept, settings.high, tied=tied)
    return told(model, list(made), words)


def quantize_by_inputs(
    model: PreTrainedModel,
    settings: High,
    method: str,
    rows: Sequence[Tensor],
    make: Callable[[str, nn.Module, Inputs], nn.Module],
    words: str,
) -> Change:
    """As `quantize`, layer by layer, each map with its inputs over the calibration rows as the layers before, quantized, make them."""
    from preheat.compress.calibration import walk
    from preheat.models.layerwise import plainly
    from preheat.ops.quantization.serialization import put_in

    chosen, kept = chosen_maps(model, settings, method)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    left = dict(chosen)
    for layer in walk(model, rows):
        own = {name: module for name, module in chosen.items() if name.startswith(f"{layer.name}.")}
        found = layer.inputs(own) if own else {}
        for name, module in own.items():
            put_in(model, name, make(name, module, found[name]))
            del left[name]
    if left:
        with plainly(model):
            for name, seen in _inputs_of(model, left, rows).items():
                put_in(model, name, make(name, left[name], seen))
    keep_high(model, kept, settings.high, tied=tied)
    return told(model, list(chosen), f"{words}; {len(rows)} rows of {rows[0].shape[1]} tokens looked at")


def _inputs_of(model: PreTrainedModel, maps: dict[str, nn.Module], rows: Sequence[Tensor]) -> dict[str, Inputs]:
    """The inputs of maps outside the layers: the head's, where it is not kept."""
    from preheat.compress.calibration import Layer

    def run() -> list[Tensor]:
        return [model(input_ids=row.to(model.device), use_cache=False).logits for row in rows]

    return Layer("", model, run).inputs(maps)


def keep_high(model: PreTrainedModel, kept: set[str], high: str, *, tied: bool) -> None:
    """Brings embedding and what is kept into its form, in place; a head that was tied to the embedding holds the same codes.

    The embedding stands in eight bits, too, unless it (or a head that it is tied to) is kept in bf16: it is looked up and not multiplied.
    """
    from torch import nn

    from preheat.models.hf import embedding, head
    from preheat.models.sensitive_modules import roles
    from preheat.ops.quantization.linear import Int8Embedding, Int8Linear
    from preheat.ops.quantization.serialization import put_in

    places = roles(model)
    first, last = places["embedding"], places["head"]
    in_half = kept if high == "bf16" else set()
    for name in sorted(kept - set(first)):
        if high == "int8":
            put_in(model, name, Int8Linear.of(model.get_submodule(name)))
    looked_up: Any = embedding(model)
    if type(looked_up) is nn.Embedding and not in_half & {*first, *(last if tied else ())}:
        put_in(model, first[0], Int8Embedding.of(looked_up))
        ends: Any = (embedding(model), head(model))
        if tied and isinstance(ends[1], Int8Linear) and ends[1].input_scales is None:
            ends[1].codes, ends[1].scales = ends[0].codes, ends[0].scales


def told(model: PreTrainedModel, names: Sequence[str], words: str) -> Change:
    """What was done: bits of a weight over the maps that were quantized, scales included, and what stands otherwise."""
    from preheat.models.hf import embedding
    from preheat.ops.quantization.serialization import form_of, quantized_modules

    weights, held = weights_and_bits(model, names)
    looked_up = embedding(model)
    others = [m for name, m in quantized_modules(model).items() if name not in set(names) and m is not looked_up]
    beside = f"; {len(others)} others kept in int8" if others else ""
    beside += f"; the embedding in {'int8' if form_of(looked_up) else 'bf16'}"
    groups: dict[int, int] = {}
    for name in names:
        form = form_of(model.get_submodule(name)) or {}
        if "group" in form:
            groups[form["group"]] = groups.get(form["group"], 0) + 1
    of = (
        ", groups of " + ", ".join(f"{size} ({count} maps)" for size, count in sorted(groups.items())) if groups else ""
    )
    return Change(f"{len(names)} linear maps in {words}{of}: {held / weights:.2f} bits a weight{beside}", len(names))


def weights_and_bits(model: nn.Module, names: Sequence[str]) -> tuple[int, int]:
    """Weights of some linear maps, and the bits that they take, scales, zeros and factors included, biases not."""
    from preheat.ops.quantization.linear import QuantizedMap
    from preheat.ops.quantization.nf4 import PackedMap

    weights = bits = 0
    for name in names:
        m: Any = model.get_submodule(name)
        if isinstance(m, PackedMap):
            weights += m.nf4_shape[0] * m.nf4_shape[1]
        elif isinstance(m, QuantizedMap):
            weights += m.in_features * m.out_features
        else:
            weights, bits = weights + m.weight.numel(), bits + 16 * m.weight.numel()
            continue
        bits += sum(8 * p.nbytes for key, p in m.named_parameters(recurse=False) if key != "bias")
    return weights, bits
