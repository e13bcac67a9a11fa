"""A compressed model as a folder: weights, what says how they stand, tokenizer and generation settings; opened again and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from preheat.inference.load import LoadedModel

__all__ = ["finish", "write_model"]

WEIGHTS = "model.safetensors"


def finish(model: Any) -> bool:
    """Brings what is not quantized into bf16, in place, where anything is; returns whether."""
    from preheat.ops.quantization.serialization import quantized_modules, to_half

    found = bool(quantized_modules(model))
    if found:
        to_half(model)
    return found


def write_model(model: Any, opened: LoadedModel, folder: Path, *, method: str, dtype: torch.dtype) -> list[str]:
    """Writes a model into a folder that `open_model` opens, and leaves it as the folder gives it, in place.

    With quantized weights the rest is in bf16. Without any it is a plain folder of transformers', which may be trained further.

    Args:
        opened: what it was made of, whose tokenizer and generation settings it goes on with.
        method: the name of what compressed it.
        dtype: of the weights, where none is quantized.

    Returns:
        What there is to say of how its texts end.
    """
    from safetensors.torch import save_file

    from preheat.compress.special_tokens import name_ends
    from preheat.data.tokenizer import rebuilt_by_transformers
    from preheat.models.sensitive_modules import roles
    from preheat.ops.quantization.serialization import stored

    quantized = finish(model)
    attention, kept = model.config._attn_implementation, model.config.use_cache
    model.set_attn_implementation("eager")  # the folder must not name our own attention
    model.config.use_cache = True
    ends = name_ends(model, opened)
    if quantized:
        places = roles(model)
        told = stored(model, method, (places["embedding"][0], places["head"][0]))
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures, config.dtype, config.quantization_config = [type(model).__name__], torch.bfloat16, told
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        # Parameters that two modules share are told once; `named_parameters` gives the first of their names, as reading does.
        weights = {name: p.detach().contiguous().cpu() for name, p in model.named_parameters()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    else:
        for p in model.parameters():
            p.data = p.data.to(dtype)
        model.save_pretrained(folder)
    ends.tokenizer.save_pretrained(folder)
    words = rebuilt_by_transformers(folder)
    model.set_attn_implementation(attention)
    model.config.use_cache = kept
    return [*ends.notes, *([words] if words else [])]
