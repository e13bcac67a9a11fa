"""NF4: four bits, with levels at the quantiles of a normal distribution.

What: blocks of 64 weights with one scale, each weight rounded to the nearest of 16 levels at the quantiles of a normal
distribution, the scales in eight bits themselves: 4.13 bits per weight. Helps: smaller than int4 in groups of 32, and
about as good, without calibration; the format of QLoRA. Hurts: no CPU kernel multiplies it directly, so every use
dequantizes the weight: decoding is slower than with int4.
Source: QLoRA, Dettmers et al. 2023 (arXiv:2305.14314).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.compress.quantize import High, choose_maps, describe_precision, keep_high
from preheat.compress.registry import Method
from preheat.core import Change

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Nf4", "quantize_to_nf4"]


def quantize_to_nf4(model: PreTrainedModel, settings: Nf4 | None = None) -> Change:
    """Quantizes the linear maps of a transformers model to NF4, in place; the rest to eight bits.

    Example:
        >>> quantize_to_nf4(model, Nf4(double_quantization=False))  # doctest: +SKIP
    """
    from preheat.ops.quantization.nf4 import pack_

    settings = settings or Nf4()
    chosen, excluded = choose_maps(model, settings, "nf4")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    # Replaces the weights inside the modules, which keep their names.
    pack_(list(chosen.values()), double=settings.double_quantization)
    keep_high(model, excluded, settings.high, tied=tied)
    return describe_precision(model, list(chosen), "NF4, blocks of 64")


@dataclass(frozen=True, kw_only=True)
class Nf4(High, Method):
    double_quantization: bool = True
    """Quantize the scales too: 4.13 bits a weight instead of 4.5."""

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_to_nf4(model, self)
