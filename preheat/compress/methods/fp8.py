"""FP8: weights and inputs in eight-bit floats (e4m3), with fp8 matmuls. GPUs only.

What: one scale per output of the weight and per token of the inputs, and matmuls in eight-bit floats. Helps: half of
bf16's size and up to twice its rate, without calibration, and less sensitive to outliers than int8. Hurts: needs a GPU
with fp8 matmuls (Ada, Hopper, Blackwell); three bits of mantissa lose more than int8 if there are no outliers.
Source: Micikevicius et al. 2022 (arXiv:2209.05433); scales by row as in torchao's float8 inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.compress.quantize import High, quantize
from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Fp8", "quantize_to_fp8"]

_FIRST = (8, 9)  # lowest compute capability with fp8 matmuls (Ada)


def quantize_to_fp8(model: PreTrainedModel, settings: High | None = None) -> Change:
    """Quantizes the linear maps of a transformers model to eight-bit floats, in place.

    Example:
        >>> quantize_to_fp8(model.cuda())  # doctest: +SKIP
    """
    from preheat.ops.quantization.linear import Fp8Linear

    description = "fp8, inputs too, with a scale for each token"
    return quantize(model, settings or Fp8(), "fp8", lambda name, module: Fp8Linear.of(module), description)


@dataclass(frozen=True, kw_only=True)
class Fp8(High, Method):
    def check(self, model: ModelFacts) -> list[str]:
        import torch

        from preheat.hardware.cuda_driver import has_cuda

        problems = super().check(model)
        # Checked here, because without fp8 matmuls the quantized map fails at its first call.
        if not has_cuda():
            problems.append(
                "needs a CUDA device of compute capability 8.9 or more: a CPU has no fp8 matmuls; use int8 or "
                "int8_dynamic here"
            )
        elif torch.cuda.get_device_capability() < _FIRST:
            name = torch.cuda.get_device_name()
            problems.append(f"needs compute capability 8.9 or more, and {name} has less; use int8 or int8_dynamic here")
        return problems

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_to_fp8(model, self)
