"""A GGUF file read back: the weights by transformers, the tokenizer by transformers, the settings from the file itself."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch

from preheat.compress.export import shared
from preheat.compress.export.plain import Plain
from preheat.errors import RunError

__all__ = ["compare", "load", "types_of"]


def compare(plain: Plain, file: Path) -> shared.Difference:
    """Reads the file and compares its logits, and how it cuts text into tokens, with the model's.

    Raises:
        RunError: the tokenizer that stands in the file is another one.
    """
    model, tokenizer = load(file)
    _same_tokens(plain.tokenizer, tokenizer, file)
    return shared.compare(plain.wanted, shared.logits(model, plain.rows), plain.rows)


def load(file: Path) -> tuple[Any, Any]:
    """transformers' model in fp32 and its tokenizer, from nothing but the file.

    transformers leaves out some settings of a GGUF file (the size of a head in qwen3, rotary scaling, soft caps), so these are read here.
    """
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": file.name, "local_files_only": True}
    reader = gguf.GGUFReader(file)
    config = AutoConfig.from_pretrained(file.parent, **where)
    factors = _complete(config, reader)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that nothing turns off
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, config=config, dtype=torch.float32, **where)
    if factors is not None:
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.div_(factors)
    return model, AutoTokenizer.from_pretrained(file.parent, **where)


def _complete(config: Any, reader: Any) -> torch.Tensor | None:
    """Puts settings of the file into a configuration, in place; returns what divides the rotary frequencies, [head_dim / 2]."""
    architecture = reader.get_field("general.architecture").contents()

    def told(key: str) -> Any:
        field = reader.get_field(f"{architecture}.{key}")
        return None if field is None else field.contents()

    for key, name in {
        "attention.key_length": "head_dim",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }.items():
        if (value := told(key)) is not None:
            setattr(config, name, value)
    if architecture == "gemma2":
        config.query_pre_attn_scalar = config.head_dim  # as llama.cpp has it
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": told("rope.freq_base")}
    if (kind := told("rope.scaling.type")) is not None:
        rope |= {"rope_type": kind, "factor": told("rope.scaling.factor")}
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": told("rope.scaling.original_context_length"),
            "beta_fast": told("rope.scaling.yarn_beta_fast"),
            "beta_slow": told("rope.scaling.yarn_beta_slow"),
        }
    config.rope_parameters = rope
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if architecture == "llama":
        config.attention_bias = "blk.0.attn_q.bias" in tensors
        config.mlp_bias = "blk.0.ffn_gate.bias" in tensors
    factors = tensors.get("rope_freqs.weight")
    return None if factors is None else torch.tensor(factors.data.copy())


def types_of(file: Path) -> dict[str, int]:
    """How many tensors of a file have which type."""
    import gguf

    found: dict[str, int] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        found[tensor.tensor_type.name] = found.get(tensor.tensor_type.name, 0) + 1
    return found


def _same_tokens(wanted: Any, found: Any, file: Path) -> None:
    for name in ("bos_token_id", "eos_token_id", "chat_template"):
        if getattr(wanted, name) != getattr(found, name):
            raise RunError(
                f"{file.name}: {name} is {getattr(found, name)!r} in the file, and {getattr(wanted, name)!r} in the model; nothing was written"
            )
    for text in shared.TEXTS:
        if (ids := found.encode(text)) != (own := wanted.encode(text)):
            at = next((n for n, (a, b) in enumerate(zip(ids, own, strict=False)) if a != b), min(len(ids), len(own)))
            raise RunError(
                f"{file.name}: from token {at} the file's tokenizer cuts {text[:24]!r}… otherwise ({found.convert_ids_to_tokens(ids[at : at + 3])}, "
                f"the model's {wanted.convert_ids_to_tokens(own[at : at + 3])}); nothing was written; use --to hf and llama.cpp's converter"
            )
