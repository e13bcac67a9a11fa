"""Reference logits of a model, by transformers' own eager attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from preheat.models.moe import experts_of
from preheat.models.vision import set_attention

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["compute_reference_logits"]


def compute_reference_logits(
    model: PreTrainedModel, tokens: Tensor, seen: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Logits [rows, length, vocabulary] by transformers' eager attention, whatever the model is set to; fp32 or fp64.

    An encoder-decoder gets the tokens for its encoder and its decoder.

    Args:
        seen: further arguments of its forward, such as images.
    """
    import torch

    given = {
        "input_ids": tokens.to(model.device),
        **{key: value.to(model.device) for key, value in (seen or {}).items()},
    }
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    # Eager attention is plain matmuls and a softmax, which is what other implementations are compared with.
    set_attention(model, "eager")
    grouped = experts_of(model) and model.config.get_text_config()._experts_implementation == "grouped_mm"
    if grouped:  # torch has no grouped_mm in fp64
        model.set_experts_implementation("eager")
    try:
        with torch.no_grad():
            logits = model(**given, use_cache=False).logits
            # fp64 models are references for rounding, so their logits keep their precision.
            return logits if logits.dtype == torch.float64 else logits.float()
    finally:
        set_attention(model, attention)
        if grouped:
            model.set_experts_implementation("grouped_mm")
        model.train(training)
