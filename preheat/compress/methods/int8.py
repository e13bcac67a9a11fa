"""Eight bits for weights: a scale for each output, inputs as they come.

What: every linear map's weight, the head's and the embedding's become whole numbers from -127 to 127 with a scale for each output (row of
the embedding); a tied head holds the embedding's codes. Helps: half of bf16's size and, since decoding waits for weights to arrive from
memory, up to twice its speed at a few rows, for a perplexity that is hardly told from the original's. Nothing needs calibration, so
nothing is kept high by default. Hurts: nothing much; prompts are multiplied in the inputs' precision, no faster than before.
Source: Dettmers et al. 2022 (arXiv:2208.07339), section 2.1, for a scale a row; Krishnamoorthi 2018 (arXiv:1806.08342), section 3.
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

__all__ = ["Int8", "to_int8"]


def to_int8(model: PreTrainedModel, settings: High | None = None) -> Change:
    """Puts the linear maps and the embedding of a transformers model into eight bits, in place.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=16)
        >>> to_int8(LlamaForCausalLM(config)).count
        8
    """
    from preheat.ops.quantization.linear import Int8Linear

    return quantize(
        model, settings or Int8(), "int8", lambda name, module: Int8Linear.of(module), "int8, a scale for each output"
    )


@dataclass(frozen=True, kw_only=True)
class Int8(High, Method):
    keep: str | tuple[str, ...] = ()
    """What stays in `high`: embedding, head, first and last (layer), last parts of names, or regular expressions for whole names."""

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return to_int8(model, self)
