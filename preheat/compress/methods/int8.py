"""Eight bits for weights: one scale per output, inputs unchanged.

What: the weights of every linear map, the head and the embedding become integers from -127 to 127 with one scale per
output (row of the embedding); a tied head shares the embedding's codes. Helps: half of bf16's size and, since decoding
is bound by memory bandwidth, up to twice its speed for small batches, at almost the original's perplexity. It needs no
calibration, and keeps nothing in higher precision by default. Hurts: hardly anything; prompts are multiplied in the
inputs' precision, no faster than before.
Source: Dettmers et al. 2022 (arXiv:2208.07339), section 2.1, for a scale a row; Krishnamoorthi 2018 (arXiv:1806.08342),
section 3.
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

__all__ = ["Int8", "quantize_to_int8"]


def quantize_to_int8(model: PreTrainedModel, settings: High | None = None) -> Change:
    """Quantizes the linear maps and the embedding of a transformers model to eight bits, in place.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 16}
        >>> quantize_to_int8(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))).count
        8
    """
    from preheat.ops.quantization.linear import Int8Linear

    return quantize(
        model, settings or Int8(), "int8", lambda name, module: Int8Linear.of(module), "int8, a scale for each output"
    )


@dataclass(frozen=True, kw_only=True)
class Int8(High, Method):
    keep: str | tuple[str, ...] = ()
    """Modules kept in `high`: embedding, head, first and last (layer), last parts of names, or regular expressions for
    whole names."""

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return quantize_to_int8(model, self)
