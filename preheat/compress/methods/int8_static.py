"""Eight bits for weights and inputs, with static scales: SmoothQuant.

What: as int8_dynamic, but a map's inputs have one scale, from the largest magnitude over calibration sequences.
Outliers, which occur in a few inputs of every token, are first moved into the weight: inputs are divided, and the
weight's columns multiplied, by max|x|^strength / max|w|^(1 - strength); the division is fused with the scale into one
multiplication.
Helps: prompts and large batches, without a search for each token's largest value. Hurts: values larger than any in
calibration are clipped; text that differs from the calibration sequences loses more.
Source: Xiao et al. 2022 (arXiv:2211.10438).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from preheat.compress.quantize import High, quantize_by_inputs
from preheat.compress.registry import Method
from preheat.core import Change
from preheat.recipe import Fraction

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from preheat.compress.calibration import Inputs

__all__ = ["Int8Static", "quantize_to_int8_static"]


def quantize_to_int8_static(
    model: PreTrainedModel, rows: Sequence[Tensor], settings: Int8Static | None = None
) -> Change:
    """Makes the linear maps of a transformers model multiply in eight-bit integers with static scales, in place.

    Args:
        rows: calibration sequences, [1, length] tokens each.

    Example:
        >>> quantize_to_int8_static(model, rows, Int8Static(strength=0.5))  # doctest: +SKIP
    """
    from preheat.ops.quantization.awq_gptq import smooth
    from preheat.ops.quantization.linear import Int8Linear, map_weight

    chosen = settings or Int8Static()

    def make(name: str, module: nn.Module, inputs: Inputs) -> nn.Module:
        # (in): factors that the inputs are multiplied by.
        factors = smooth(map_weight(module), inputs.largest, chosen.strength)
        # One scale for all inputs: the largest smoothed value becomes 127. Never 0, because inputs are divided by it.
        scale = (inputs.largest * factors.float()).max() / 127
        return Int8Linear.of(module, inputs="static", input_scales=factors, input_scale=scale.clamp(min=1e-12))

    description = f"int8, inputs too, with known scales (SmoothQuant, strength {chosen.strength:g})"
    return quantize_by_inputs(model, chosen, "int8_static", rows, make, description)


@dataclass(frozen=True, kw_only=True)
class Int8Static(High, Method):
    reads_rows: ClassVar[bool] = True

    strength: Fraction = 0.5
    """How much of the outliers moves into the weight: 0: nothing, 1: all."""

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_to_int8_static(model, rows, self)
