"""Saves a compressed model: weights, quantization config, tokenizer and generation settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from preheat.inference.load import LoadedModel

__all__ = ["finish", "count_weight_bytes", "write_model"]

WEIGHTS = "model.safetensors"


def finish(model: PreTrainedModel) -> bool:
    """Casts everything that is not quantized to bf16, in place, if anything is quantized; returns True if so."""
    from preheat.ops.quantization.serialization import cast_to_half, find_quantized_modules

    quantized = bool(find_quantized_modules(model))
    if quantized:
        cast_to_half(model)
    return quantized


def write_model(
    model: PreTrainedModel, opened: LoadedModel, folder: Path, *, method: str, dtype: torch.dtype
) -> list[str]:
    """Writes a model to a folder that `load_model` can open; the model is left with the saved weights, in place.

    A quantized model has its other weights in bf16. Without quantized weights, the folder is an ordinary transformers
    model, which may be trained further.

    Args:
        opened: the original model, whose tokenizer and generation settings are reused.
        method: name of the compression method.
        dtype: of the weights, if none is quantized.

    Returns:
        Notes on its end-of-text tokens and its tokenizer.
    """
    from safetensors.torch import save_file

    from preheat.compress.special_tokens import set_end_tokens
    from preheat.data.tokenizer import describe_rebuild
    from preheat.models.sensitive_modules import roles
    from preheat.ops.quantization.serialization import quantization_config

    quantized = finish(model)
    attention, use_cache = model.config._attn_implementation, model.config.use_cache
    model.set_attn_implementation("eager")  # the folder must not name our own attention
    model.config.use_cache = True
    # Sets the model's config and generation settings, which are saved below.
    ends = set_end_tokens(model, opened)
    if quantized:
        names = roles(model)
        quantization = quantization_config(model, method, (names["embedding"][0], names["head"][0]))
        # A copy: the model in memory is not quantized by transformers and must not say so.
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures, config.dtype, config.quantization_config = (
            [type(model).__name__],
            torch.bfloat16,
            quantization,
        )
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        # Shared parameters are stored once; `named_parameters` yields the first of their names, as loading expects.
        weights = {name: p.detach().contiguous().cpu() for name, p in model.named_parameters()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    else:
        # `p.data` keeps the parameters, so that tied weights stay tied.
        for p in model.parameters():
            p.data = p.data.to(dtype)
        model.save_pretrained(folder)
    ends.tokenizer.save_pretrained(folder)
    note = describe_rebuild(folder)
    # The model is used further: its logits are compared with the folder's.
    model.set_attn_implementation(attention)
    model.config.use_cache = use_cache
    return [*ends.notes, *([note] if note else [])]


def count_weight_bytes(folder: Path) -> int:
    """Returns the bytes of a folder's weight files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
