"""A GGUF file read back: the weights by transformers, the tokenizer by transformers, the settings from the file itself."""

from __future__ import annotations

import contextlib
import io
import struct
from pathlib import Path
from typing import Any

import torch

from preheat.compress.export import verify
from preheat.compress.export.merged_model import Plain
from preheat.errors import RunError
from preheat.sanitize import shorten

__all__ = ["compare", "load", "tokenizer_of", "types_of"]


def compare(plain: Plain, file: Path) -> tuple[verify.Difference, Any]:
    """Reads the file and compares its logits, and how it cuts text into tokens, with the model's; the model that was read, too.

    Raises:
        RunError: the tokenizer that stands in the file is another one.
    """
    model, tokenizer = load(file)
    _same_tokens(plain.tokenizer, tokenizer, file)
    return verify.compare(plain.wanted, verify.logits(model, plain.rows), plain.rows), model


def load(file: Path) -> tuple[Any, Any]:
    """transformers' model in fp32 and its tokenizer, from nothing but the file.

    Raises:
        RunError: it is no whole GGUF file of a family that is written here.
    """
    from transformers import AutoModelForCausalLM
    from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict, read_gguf_metadata

    try:
        told, names = read_gguf_metadata(str(file))
        config = _config(told, set(names))
    except (ValueError, LookupError, TypeError, OSError, struct.error) as error:
        raise RunError(
            f"{file}: is no whole GGUF file of a model that can be read ({shorten(str(error), 160)})"
        ) from None
    where = {"gguf_file": file.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that nothing turns off
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, config=config, dtype=torch.float32, **where)
    if "rope_freqs.weight" in names:
        factors = load_gguf_state_dict(GgufHeader.from_file(str(file)))["rope_freqs.weight"][...]
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.div_(factors)
    return model, tokenizer_of(file)


def tokenizer_of(file: Path) -> Any:
    """transformers' tokenizer from the file's fields."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)


def _config(told: dict[str, Any], tensors: set[str]) -> Any:
    """The configuration that a file tells: by transformers' table of keys, and some that this leaves out.

    These are the size of a head in qwen3, rotary scaling, soft caps, biases. `AutoConfig` reads a file's vocabulary piece by piece in
    Python to leave it, which takes half a minute for a large one.
    """
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_MAPPING

    architecture = told["general.architecture"]
    table = GGUF_CONFIG_MAPPING[architecture] | {
        "attention.key_length": "head_dim",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.dimension_count": None,
        "rope.freq_base": None,
    }
    made = {
        name: told[f"{architecture}.{key}"] for key, name in table.items() if name and f"{architecture}.{key}" in told
    }
    rope = {key.removeprefix(f"{architecture}.rope."): value for key, value in told.items() if ".rope." in key}
    made["rope_parameters"] = {"rope_type": rope.get("scaling.type", "default"), "rope_theta": rope["freq_base"]}
    if "scaling.type" in rope:
        made["rope_parameters"]["factor"] = rope["scaling.factor"]
    if rope.get("scaling.type") == "yarn":
        made["rope_parameters"] |= {
            "original_max_position_embeddings": rope["scaling.original_context_length"],
            "beta_fast": rope["scaling.yarn_beta_fast"],
            "beta_slow": rope["scaling.yarn_beta_slow"],
        }
    if architecture == "llama":
        made |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if architecture == "gemma2":
        made["query_pre_attn_scalar"] = made["head_dim"]  # as llama.cpp has it
    ids = {f"{mark}_token_id": told.get(f"tokenizer.ggml.{mark}_token_id") for mark in ("bos", "eos")}
    return AutoConfig.for_model(architecture, tie_word_embeddings="output.weight" not in tensors, **made, **ids)


def types_of(file: Path) -> dict[str, int]:
    """How many tensors of a file have which type."""
    import gguf
    from transformers.integrations.gguf import GgufHeader

    kinds = [gguf.GGMLQuantizationType(kind).name for kind in GgufHeader.from_file(str(file)).ggml_types.values()]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _same_tokens(wanted: Any, found: Any, file: Path) -> None:
    for name in ("bos_token_id", "eos_token_id", "chat_template"):
        if getattr(wanted, name) != getattr(found, name):
            raise RunError(
                f"{file.name}: {name} is {getattr(found, name)!r} in the file, and {getattr(wanted, name)!r} in the model; nothing was written"
            )
    for text in verify.TEXTS:
        if (ids := found.encode(text)) != (own := wanted.encode(text)):
            at = next((n for n, (a, b) in enumerate(zip(ids, own, strict=False)) if a != b), min(len(ids), len(own)))
            raise RunError(
                f"{file.name}: from token {at} the file's tokenizer cuts {text[:24]!r}… otherwise ({found.convert_ids_to_tokens(ids[at : at + 3])}, "
                f"the model's {wanted.convert_ids_to_tokens(own[at : at + 3])}); nothing was written; use --to hf and llama.cpp's converter"
            )
