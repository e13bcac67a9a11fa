"""Four bits for weights in groups, rounded to the nearest code.

What: `group` inputs of an output share a scale (and, if not symmetric, a zero), and each weight becomes the nearest of
16 steps. With `inputs: int8` the inputs are rounded to eight bits per token, too, as in ExecuTorch's 8da4w. Helps:
about a quarter of bf16's size and, for small batches, up to three times its decoding speed; no calibration. Hurts:
raises perplexity, most for small models; awq and gptq lose less with the same grid, training with `quantization_aware`
least.
Source: round-to-nearest in groups as in llama.cpp's Q4_0 (whose grid the symmetric one is); compared in Frantar et al.
2022 (arXiv:2210.17323), table 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from preheat.compress.quantize import High, choose_group_size, quantize
from preheat.compress.registry import Method
from preheat.core import Change

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = ["Int4", "quantize_to_int4"]


def quantize_to_int4(model: PreTrainedModel, settings: Int4 | None = None) -> Change:
    """Quantizes the linear maps of a transformers model to four bits, in place; the rest to eight.

    Raises:
        RecipeError: a group size that does not divide a map's inputs.

    Example:
        >>> quantize_to_int4(model, Int4(group=64, symmetric=False))  # doctest: +SKIP
    """
    from preheat.ops.quantization.linear import Int4Linear

    chosen = settings or Int4()

    def make(name: str, module: nn.Module) -> nn.Module:
        group = choose_group_size(name, module, chosen.group, "int4")
        # Dynamic: each token's scale is computed at run time.
        inputs = "dynamic" if chosen.inputs == "int8" else None
        return Int4Linear.of(module, group=group, symmetric=chosen.symmetric, inputs=inputs)

    suffix = ", inputs in int8 with a scale for each token" if chosen.inputs == "int8" else ""
    return quantize(
        model,
        chosen,
        "int4",
        make,
        f"int4, {'symmetric' if chosen.symmetric else 'with zeros'}, to the nearest{suffix}",
    )


@dataclass(frozen=True, kw_only=True)
class Int4(High, Method):
    group: int | Literal["auto"] = "auto"
    """Number of inputs that share a scale; auto: for each map the divisor nearest to 32."""
    symmetric: bool = True
    """Scale only; if false, each group also has a zero point (as many bits as the scale)."""
    inputs: Literal["full", "int8"] = "full"
    """int8: inputs are rounded to eight bits, with a scale for each token."""

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_to_int4(model, self)
