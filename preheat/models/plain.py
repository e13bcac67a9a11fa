"""A model's logits as transformers itself gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["plain_logits"]


def plain_logits(model: PreTrainedModel, tokens: Tensor, seen: Mapping[str, Tensor] | None = None) -> Tensor:
    """Logits [rows, length, vocabulary] by transformers' own eager attention, whatever the model is set to; in fp32, or its fp64."""
    import torch

    images = {key: value.to(model.device) for key, value in (seen or {}).items()}

    training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens.to(model.device), use_cache=False, **images).logits
            return logits if logits.dtype == torch.float64 else logits.float()
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
