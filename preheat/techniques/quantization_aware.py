"""Quantization-aware training: rounds weights to 4 bits in the forward pass, so that training compensates for it.

What: rounds the layers' linear weights to the grid of `preheat compress --method int4` in each forward pass, those of
the first and last layer to int8's; gradients use the straight-through estimator, and the trained weights stay in full
precision. With `inputs: int8` each token's inputs are rounded to eight bits too (ExecuTorch's 8da4w). With LoRA the sum
W + s B A is rounded, which is what merging gives. `preheat compress RUN` then converts with the same settings, and no
weight of these layers differs from the ones trained with. Embedding and head are not rounded here.
Helps: less loss than rounding the layers after training; best as the last part of training, from a trained model with a
low learning rate. GPTQ was better if embedding and head are 4-bit too. If 4 bits cost tenths of a percent, train
towards the model itself: `distillation` with its own folder as teacher and mixture 1.0, at about 3e-5.
Hurts: Adam moves every weight by about the learning rate whatever the gradient, so a higher rate loses more than
rounding did; nothing to gain if 4 bits cost hundredths (an undertrained model); each forward pass rounds every weight
(about one more pass over the weights), and keeps the rounded one until its backward pass.
Source: Jacob et al. 2018 (arXiv:1712.05877); for language models, Liu et al. 2023 (arXiv:2305.17888).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Stage, Tag, Technique
from preheat.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from preheat.ops.quantization.fake_quant import Grid

__all__ = ["QuantizationAware", "choose_grids", "round_weights"]


def choose_grids(model: PreTrainedModel, settings: QuantizationAware) -> dict[str, Grid]:
    """Returns the rounding grid of each linear layer of a model's blocks, by name.

    Raises:
        ValueError: `keep` matches nothing, or a group does not divide a layer's inputs.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from preheat.models.sensitive_modules import layer_names, roles
    from preheat.ops.quantization.fake_quant import Grid
    from preheat.ops.quantization.linear import map_weight
    from preheat.ops.quantization.module_filter import group_of, select_kept

    # Of the blocks only: embedding and head are not rounded in training.
    layers = tuple(f"{name}." for name in layer_names(model))
    # Under an adapter the layer itself is its `base_layer`, next to the adapter's own matrices.
    bases = {name.removesuffix(".base_layer"): m for name, m in model.named_modules() if name.endswith(".base_layer")}
    inside_adapters = tuple(f"{name}." for name in bases)
    maps = {
        name: m
        for name, m in model.named_modules()
        # Exact types: a subclass computes something else.
        if type(m) in (nn.Linear, Conv1D) and not name.startswith(inside_adapters)
    } | bases
    # The same rule as in `preheat compress`, so that it converts exactly these layers.
    excluded = select_kept(maps, settings.keep, roles(model))
    grids = {}
    for name, module in maps.items():
        if not name.startswith(layers):
            continue
        if name not in excluded:
            group = group_of(name, map_weight(module).shape[1], settings.group_size)
            grids[name] = Grid(4, group, settings.symmetric, settings.inputs == "int8")
        # high: bf16 leaves these layers as they are, without a grid.
        elif settings.high == "int8":
            grids[name] = Grid(8)
    return grids


def round_weights(model: PreTrainedModel, settings: QuantizationAware | None = None) -> tuple[int, int]:
    """Makes the linear layers of a transformers model use rounded weights, in place; works on meta too.

    Returns:
        The numbers of layers in four bits and in eight bits.

    Raises:
        ValueError: see `choose_grids`; an adapter that is not a plain LoRA, or has dropout.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=16
        ... )
        >>> round_weights(LlamaForCausalLM(config))
        (7, 14)
    """
    from preheat.ops.quantization.fake_quant import add_fake_quantization

    grids = choose_grids(model, settings or QuantizationAware())
    add_fake_quantization(model, grids)
    four = sum(grid.bits == 4 for grid in grids.values())
    return four, len(grids) - four


@dataclass(frozen=True, kw_only=True)
class QuantizationAware(Technique):
    stage: ClassVar[Stage] = Stage.FAKE_QUANTIZE
    numerics: ClassVar[Numerics] = "different"
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.FAKE_QUANTIZED_WEIGHTS})
    # Only a LoRA is rounded with its base.
    conflicts: ClassVar[frozenset[Tag]] = frozenset(
        {
            Tag.QUANTIZED_BASE,
            Tag.FP8_COMPUTE,
            Tag.FAKE_QUANTIZED_WEIGHTS,
            Tag.NON_LORA_ADAPTER,
            Tag.EXPERTS,
        }
    )

    group_size: int | Literal["auto"] = "auto"
    """Inputs that share a scale; auto: for each linear layer the divisor nearest to 32."""
    symmetric: bool = True
    """A scale only; false adds a zero point."""
    inputs: Literal["full", "int8"] = "full"
    """int8: inputs are rounded to eight bits, with a scale for each token."""
    keep: str | tuple[str, ...] = "auto"
    """What keeps a higher precision: auto (embedding, head, and the first and last of more than two layers), or names
    out of embedding, head, first, last (layer), last parts of names, or regular expressions for whole names."""
    high: Literal["int8", "bf16"] = "int8"
    """What is kept in the layers is rounded to int8, or not at all; embedding and head are never rounded in
    training."""

    def check(self, context: Context) -> list[str]:
        if context.model.experts:
            return [
                f"the {context.model.experts} experts of a layer share one parameter, which is not a linear map; "
                "leave it out"
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        try:
            four, eight = round_weights(part, self)
        except ValueError as error:
            raise RecipeError(f"techniques.quantization_aware.{error}") from None
        # Without a layer in four bits, the recipe would train as if without this technique.
        if not four:
            raise RecipeError(
                f"techniques.quantization_aware.keep: {self.keep!r} leaves no linear map for four bits; keep less"
            )
        inputs = ", their inputs to eight for each token" if self.inputs == "int8" else ""
        summary = f"{four} linear maps compute with weights rounded to four bits{inputs}" + (
            f", {eight} to eight" if eight else ""
        )
        return Change(summary, four + eight)
