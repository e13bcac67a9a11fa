"""Reads a GGUF file back for verification.

Of families that transformers reads, it reads model and tokenizer, with the configuration from the file's metadata. Of
others, the tensors are dequantized and laid out as the model's parameters; llama.cpp alone reads their metadata.
"""

from __future__ import annotations

import contextlib
import copy
import io
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from preheat.compress.export import gguf_families, verify
from preheat.compress.export.gguf_layout import join_tensors
from preheat.compress.export.gguf_tokenizer import build_pre_tokenizer
from preheat.compress.export.merged_model import Plain
from preheat.errors import RunError
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from preheat.core.json_types import JsonObject

__all__ = ["compare", "load", "load_tensors", "load_tokenizer", "count_types"]


def compare(plain: Plain, file: Path) -> tuple[verify.Difference, PreTrainedModel]:
    """Compares logits and tokenization of the file with the model's; also returns the loaded model.

    Raises:
        RunError: the file's tokenizer differs.
    """
    if gguf_families.find_family(plain.model.config).read_by_transformers:
        model, tokenizer = load(file)
    else:
        model, tokenizer = load_tensors(plain.model, file), load_tokenizer(file)
    _complete_splitting(tokenizer, file)
    # First, because it takes no forward pass and names the token.
    _require_same_tokens(plain.tokenizer, tokenizer, file)
    return verify.compare(plain.reference_logits, verify.compute_logits(model, plain.rows), plain.rows), model


def load(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Loads transformers' model in fp32 and its tokenizer from the file alone.

    Raises:
        RunError: it is no complete GGUF file of a supported family.
    """
    from transformers import AutoModelForCausalLM
    from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict, read_gguf_metadata

    try:
        metadata, names = read_gguf_metadata(str(file))
        config = _build_config(metadata, set(names))
    except (ValueError, LookupError, TypeError, OSError, struct.error) as error:
        raise RunError(
            f"{file}: is not a complete GGUF file of a model that can be read ({shorten(str(error), 160)})"
        ) from None
    options = {"gguf_file": file.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar without an option to turn it off
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            file.parent, config=config, dtype=torch.float32, **options
        )
    # transformers does not read the divisors of llama3's scaling.
    if "rope_freqs.weight" in names:
        factors = load_gguf_state_dict(GgufHeader.from_file(str(file)))["rope_freqs.weight"][...]
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.div_(factors)
    return model, load_tokenizer(file)


def load_tensors(model: PreTrainedModel, file: Path) -> PreTrainedModel:
    """Returns a model of the same class with the values of the file's tensors."""
    from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict
    from transformers.integrations.gguf.dequant import dequantize

    header = GgufHeader.from_file(str(file))
    stored = load_gguf_state_dict(header)
    tensors = {}
    for entry in header.tensors:
        value = stored[entry.name][...]
        if value.dtype == torch.uint8:  # blocks
            value = dequantize(value.reshape(-1), entry.ggml_type)
        tensors[entry.name] = value.float().reshape(entry.shape)
    family = gguf_families.find_family(model.config)
    parameters = join_tensors(model, family.architecture(model.config), family.rules(model.config), tensors)
    loaded = copy.deepcopy(model)
    # A tied head is not in the file.
    loaded.load_state_dict(parameters, strict=False)
    return loaded


def load_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Loads transformers' tokenizer from the file's metadata."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)


def _complete_splitting(loaded: PreTrainedTokenizerFast, file: Path) -> None:
    """Sets the splitting into words that the file names, in place, if transformers does not know the name."""
    from transformers.integrations.gguf import read_gguf_metadata
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = read_gguf_metadata(str(file))[0].get("tokenizer.ggml.pre", "default")
    if name not in (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", "default"):
        # Not the model's own, with which a wrong name would not be noticed.
        loaded.backend_tokenizer.pre_tokenizer = build_pre_tokenizer(name)


def _build_config(metadata: JsonObject, tensors: set[str]) -> PretrainedConfig:
    """Builds the configuration from a file's metadata: transformers' table of keys, and some that it lacks.

    These are qwen3's head size, rope scaling, soft caps and biases. `AutoConfig` is not used, because it also parses
    the vocabulary token by token in Python, which takes half a minute for a large one.
    """
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_MAPPING

    architecture = metadata["general.architecture"]
    # None: read below, because transformers has one dictionary for all rotary settings.
    table = GGUF_CONFIG_MAPPING[architecture] | {
        "attention.key_length": "head_dim",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.dimension_count": None,
        "rope.freq_base": None,
    }
    settings = {
        name: metadata[f"{architecture}.{key}"]
        for key, name in table.items()
        if name and f"{architecture}.{key}" in metadata
    }
    # "llama.rope.scaling.factor" -> "scaling.factor"
    rope = {key.removeprefix(f"{architecture}.rope."): value for key, value in metadata.items() if ".rope." in key}
    settings["rope_parameters"] = {"rope_type": rope.get("scaling.type", "default"), "rope_theta": rope["freq_base"]}
    if "scaling.type" in rope:
        settings["rope_parameters"]["factor"] = rope["scaling.factor"]
    if rope.get("scaling.type") == "yarn":
        settings["rope_parameters"] |= {
            "original_max_position_embeddings": rope["scaling.original_context_length"],
            "beta_fast": rope["scaling.yarn_beta_fast"],
            "beta_slow": rope["scaling.yarn_beta_slow"],
        }
    # The metadata has no flag for biases; the tensors show it.
    if architecture == "llama":
        settings |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if architecture == "gemma2":
        settings["query_pre_attn_scalar"] = settings["head_dim"]  # llama.cpp's assumption
    ids = {f"{mark}_token_id": metadata.get(f"tokenizer.ggml.{mark}_token_id") for mark in ("bos", "eos")}
    # A file without a head uses the embedding.
    return AutoConfig.for_model(architecture, tie_word_embeddings="output.weight" not in tensors, **settings, **ids)


def count_types(file: Path) -> dict[str, int]:
    """Returns the number of a file's tensors per type."""
    import gguf
    from transformers.integrations.gguf import GgufHeader

    # From the header alone, without reading any weights.
    kinds = [gguf.GGMLQuantizationType(kind).name for kind in GgufHeader.from_file(str(file)).ggml_types.values()]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _require_same_tokens(wanted: PreTrainedTokenizerFast, loaded: PreTrainedTokenizerFast, file: Path) -> None:
    for name in ("bos_token_id", "eos_token_id", "chat_template"):
        if getattr(wanted, name) != getattr(loaded, name):
            raise RunError(
                f"{file.name}: {name} is {getattr(loaded, name)!r} in the file, and {getattr(wanted, name)!r} "
                "in the model; nothing was written"
            )
    for text in verify.TEXTS:
        if (ids := loaded.encode(text)) != (expected_ids := wanted.encode(text)):
            # The first different token, or the end of the shorter list.
            at = next(
                (n for n, (a, b) in enumerate(zip(ids, expected_ids, strict=False)) if a != b),
                min(len(ids), len(expected_ids)),
            )
            raise RunError(
                f"{file.name}: from token {at} the file's tokenizer splits {text[:24]!r}… differently "
                f"({loaded.convert_ids_to_tokens(ids[at : at + 3])}, the model's "
                f"{wanted.convert_ids_to_tokens(expected_ids[at : at + 3])}); nothing was written; use --to hf and "
                "llama.cpp's converter"
            )
