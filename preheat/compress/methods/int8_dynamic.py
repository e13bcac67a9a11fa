"""Eight bits for weights and inputs: integer matmuls, with each token's scale computed at run time.

What: as int8, and each token's inputs are divided by their largest magnitude and rounded to integers from -127 to 127;
the matmul multiplies eight-bit integers with 32-bit accumulation. Helps: prompts and large batches, as integer matmuls
have up to twice bf16's rate; no calibration. Hurts: an input with outliers leaves few steps for the rest (int8_static
moves them into the weight), and rounding the inputs costs time for small batches.
Source: Dettmers et al. 2022 (arXiv:2208.07339), section 2.1; Yao et al. 2022 (arXiv:2206.01861), section 4.1, for a
scale per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.compress.quantize import High, quantize
from preheat.compress.registry import Method
from preheat.core import Change

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Int8Dynamic", "quantize_to_int8_dynamic"]


def quantize_to_int8_dynamic(model: PreTrainedModel, settings: High | None = None) -> Change:
    """Makes the linear maps of a transformers model multiply in eight-bit integers, in place.

    Example:
        >>> quantize_to_int8_dynamic(model, Int8Dynamic(keep=("head",)))  # doctest: +SKIP
    """
    from preheat.ops.quantization.linear import Int8Linear

    description = "int8, inputs too, with a scale for each token"
    return quantize(
        model,
        settings or Int8Dynamic(),
        "int8_dynamic",
        lambda name, module: Int8Linear.of(module, inputs="dynamic"),
        description,
    )


@dataclass(frozen=True, kw_only=True)
class Int8Dynamic(High, Method):
    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_to_int8_dynamic(model, self)
