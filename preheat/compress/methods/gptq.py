"""GPTQ: four bits; columns not yet rounded compensate the rounding error of the others.

What: each map is rounded column by column to the int4 grid; the change of the map's outputs over calibration sequences
is compensated, as far as possible, by the columns that are not rounded yet. Layers are processed in order, each with
its inputs after quantization of the preceding ones. Helps: usually the least loss at four bits without training. Hurts:
needs calibration sequences similar to the text of later use; takes the time of a factorization for each map.
Source: Frantar et al. 2022 (arXiv:2210.17323).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.compress.quantize import High, choose_group_size, quantize_by_inputs
from preheat.compress.registry import Method
from preheat.core import Change
from preheat.recipe import Positive

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from preheat.compress.calibration import Inputs

__all__ = ["Gptq", "quantize_to_gptq"]


def quantize_to_gptq(model: PreTrainedModel, rows: Sequence[Tensor], settings: Gptq | None = None) -> Change:
    """Quantizes the linear maps of a transformers model to four bits by GPTQ, in place; the rest to eight.

    Args:
        rows: calibration sequences, [1, length] tokens each.

    Raises:
        RecipeError: a group size that does not divide a map's inputs.
        DataError: too few rows, or all alike.

    Example:
        >>> quantize_to_gptq(model, rows, Gptq(group=64))  # doctest: +SKIP
    """
    from preheat.ops.quantization.awq_gptq import quantize_gptq
    from preheat.ops.quantization.linear import Int4Linear, map_weight

    chosen = settings or Gptq()

    def make(name: str, module: nn.Module, inputs: Inputs) -> nn.Module:
        group = choose_group_size(name, module, chosen.group, "gptq")
        # (out, in); the Gram matrix of the inputs is (in, in).
        weight = map_weight(module)
        return Int4Linear.of(
            module, quantize_gptq(weight, inputs.gram, group, symmetric=chosen.symmetric, damping=chosen.damping)
        )

    return quantize_by_inputs(
        model, chosen, "gptq", rows, make, f"int4, {'symmetric' if chosen.symmetric else 'with zeros'}, by GPTQ"
    )


@dataclass(frozen=True, kw_only=True)
class Gptq(High, Method):
    reads_rows: ClassVar[bool] = True

    group: int | Literal["auto"] = "auto"
    """Number of inputs that share a scale; auto: for each map the divisor nearest to 32."""
    symmetric: bool = True
    """Scale only; if false, each group also has a zero point (as many bits as the scale)."""
    damping: Positive = 0.01
    """Added to the diagonal of the inputs' Gram matrix, as a share of its mean."""

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_to_gptq(model, rows, self)
