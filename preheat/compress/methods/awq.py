"""AWQ: four bits, with finer steps for inputs of large magnitude.

What: each map's inputs are divided by factors, its weight's columns multiplied by them, and the weight rounded to the
int4 grid. The factors are a power of the inputs' magnitude over calibration sequences; the exponent with the least
output error is chosen, then the range of each group in the same way. The factors stay in the map (a multiplication of
its inputs), so every architecture is supported. Helps: less loss than int4 at the same size and speed; overfits less to
the calibration text than gptq. Hurts: needs calibration sequences; gptq is often better.
Source: Lin et al. 2023 (arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.compress.quantize import High, choose_group_size, quantize_by_inputs
from preheat.compress.registry import Method
from preheat.core import Change

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from preheat.compress.calibration import Inputs

__all__ = ["Awq", "quantize_to_awq"]


def quantize_to_awq(model: PreTrainedModel, rows: Sequence[Tensor], settings: Awq | None = None) -> Change:
    """Quantizes the linear maps of a transformers model to four bits by AWQ, in place; the rest to eight.

    Args:
        rows: calibration sequences, [1, length] tokens each.

    Raises:
        RecipeError: a group size that does not divide a map's inputs.
        DataError: too few rows, or all alike.

    Example:
        >>> quantize_to_awq(model, rows, Awq(group=64))  # doctest: +SKIP
    """
    from preheat.ops.quantization.awq_gptq import quantize_awq
    from preheat.ops.quantization.linear import Int4Linear, map_weight

    chosen = settings or Awq()

    def make(name: str, module: nn.Module, inputs: Inputs) -> nn.Module:
        group = choose_group_size(name, module, chosen.group, "awq")
        # factors: (in)
        groups, factors = quantize_awq(map_weight(module), inputs.gram, group, symmetric=chosen.symmetric)
        return Int4Linear.of(module, groups, input_scales=factors)

    return quantize_by_inputs(
        model, chosen, "awq", rows, make, f"int4, {'symmetric' if chosen.symmetric else 'with zeros'}, by AWQ"
    )


@dataclass(frozen=True, kw_only=True)
class Awq(High, Method):
    reads_rows: ClassVar[bool] = True

    group: int | Literal["auto"] = "auto"
    """Number of inputs that share a scale; auto: for each map the divisor nearest to 32."""
    symmetric: bool = True
    """Scale only; if false, each group also has a zero point (as many bits as the scale)."""

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_to_awq(model, rows, self)
