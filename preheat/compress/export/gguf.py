"""Export to a single GGUF file, for llama.cpp and tools built on it.

The file contains: weights under llama.cpp's names (rows of q and k permuted to its order for llama), in a float format
or in blocks of 32 by gguf's own quantizers; sizes, rotary embedding and its scaling; the tokenizer with special tokens
and chat template. Norms and biases stay in fp32. K-quants are made by llama.cpp's `llama-quantize`, if it is on the
PATH. The file is read back by transformers and its logits compared; with llama.cpp's wheel installed (xllamacpp, the
extra llama-cpp), llama.cpp runs the file, too.
Source: the GGUF specification (ggml's docs/gguf.md); names of tensors and keys: the `gguf` package.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import gguf_reader, llama_cpp, verify
from preheat.compress.export.gguf_tokenizer import add_vocabulary, assign_end_tokens
from preheat.compress.export.merged_model import Plain, build_configuration, require, write_plain_model
from preheat.core.export import ExportResult, LlamaCppComparison
from preheat.errors import RunError
from preheat.hardware.child_processes import tie_to_parent

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    from gguf import GGUFValueType, GGUFWriter
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel


__all__ = ["require_supported", "write"]

# Mistral's layers compute the same as llama's; its window is noted in `_collect_notes`.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2"}
_ACTIVATIONS = {"gemma2": "gelu_pytorch_tanh"}  # all others: silu
_TOOL = "llama-quantize"
_BLOCK = 32  # weights per block of q8_0 and q4_0
_K_BLOCK = 256  # weights per block of K-quants
_HINT = "use --dtype q8_0 or f16, or raise --tolerance"


def write(
    run: str | Path, out: str | Path, *, dtype: str = "f16", tolerance: float | None = None, base: str | None = None
) -> ExportResult:
    """Writes `out`/NAME-DTYPE.gguf and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: f32, f16, bf16, q8_0, q4_0; q4_k_m, q5_k_m, q6_k with llama.cpp's `llama-quantize` on the PATH. A matrix
            whose rows are not divisible by 32 stays in f16 (`note` counts them); with q4_0, embedding and head are
            q8_0.
        tolerance: maximum logit difference relative to the largest logit; None: `verify.BOUNDS`.
        base: as in `load_model`.

    Raises:
        RunError: a model, tokenizer or rope scaling that llama.cpp does not support; no `gguf` package or tool; no
            matrix of the layers can have the dtype; the difference exceeds the bound.

    Example:
        >>> write("runs/demo", "demo-gguf", dtype="q8_0").top1_agreement         # doctest: +SKIP
        0.997
    """
    out = Path(out)
    require_new(out, run)
    if (config := build_configuration(run, base)) is not None:
        require_supported(config)
    require("gguf", "gguf")
    bound = verify.choose_bound("gguf", dtype, tolerance)
    tool = _find_tool(dtype) if "_k" in dtype else None
    with NewFolder(out) as folder:
        with write_plain_model(run, folder, base=base) as model:
            _require_blocks(model.model, dtype)
            name = Path(run).resolve().name
            file = folder / f"{name}-{dtype}.gguf"
            if tool is None:
                types = _write(model, file, dtype, name)
            else:
                # K-quants: llama-quantize reads an f32 file, so nothing is rounded twice.
                unquantized = folder / f"{name}-f32.gguf"
                _write(model, unquantized, "f32", name)
                _quantize(tool, unquantized, file, dtype)
                unquantized.unlink()
                types = gguf_reader.count_types(file)
            # transformers dequantizes the file, which checks names, layout and rounding.
            difference, reloaded = gguf_reader.compare(model, file)
            verify.refuse_beyond(difference, bound, str(out), _HINT)
            llama_cpp_figures = _compare_with_llama_cpp(model, file, dtype, tolerance)
            notes = [*model.notes, *_collect_notes(model, types, dtype)]
            if llama_cpp_figures is None:
                notes.append(
                    f"compared by {model_card.find_version('transformers')} alone: llama.cpp did not run the "
                    "file, since its wheel is not installed "
                    "here (pip install 'preheat[llama-cpp]')"
                )
            summary = ExportResult(
                path=str(out),
                file=file.name,
                bytes=file.stat().st_size,
                dtype=dtype,
                types=types,
                merged=model.merged,
                read_by=model_card.find_version("transformers"),
                llama_cpp=llama_cpp_figures,
                **vars(verify.build_comparison(difference, bound)),
                **vars(model.held_out_text.by(reloaded, difference)),
                note="; ".join(notes),
            )
        use = f"llama-cli -m {summary.file} -p 'Once upon a time'"
        model_card.write_export(folder, run, summary, title=f"GGUF, {dtype}", use=use, library="gguf")
    return summary


def _compare_with_llama_cpp(model: Plain, file: Path, dtype: str, tolerance: float | None) -> LlamaCppComparison | None:
    """Compares logprobs with llama.cpp's; None if it is not installed."""
    if not llama_cpp.is_installed():
        return None
    difference = llama_cpp.compare(file, model.tokenizer, model.rows, model.reference_logits)
    bound = verify.BOUNDS["llama.cpp"][dtype]
    # llama.cpp computes in its own precision, so a user's tolerance can only widen this bound.
    if tolerance is not None:
        bound = verify.Bound(max(tolerance, bound.largest))
    verify.refuse_beyond(difference, bound, f"{file.name}, run by llama.cpp", _HINT)
    return LlamaCppComparison(
        version=model_card.find_version("xllamacpp"),
        max_logprob_difference=difference.largest,
        mean_logprob_difference=difference.mean,
        top1_agreement=difference.agreement,
        places=difference.tokens,
    )


def _find_block_size(dtype: str) -> int:
    """Returns the number of neighbouring weights that a dtype quantizes together; 1: none."""
    return 1 if not dtype.startswith("q") else _K_BLOCK if "_k" in dtype else _BLOCK


def _require_blocks(model: PreTrainedModel, dtype: str) -> None:
    """Raises RunError if no matrix of the layers can have the dtype that the file would be named for."""
    block = _find_block_size(dtype)
    # Some dtypes do not apply to the embedding and the head, which have other types then.
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    widths = {w.shape[-1] for w in model.parameters() if w.ndim == 2 and id(w) not in ends}
    if all(width % block for width in widths):
        raise RunError(
            f"--dtype {dtype}: no matrix of the layers has rows of whole blocks of {block} weights (they have "
            f"{', '.join(map(str, sorted(widths)))}); use --dtype {'q8_0, q4_0 or ' if block > _BLOCK else ''}f16"
        )


def _find_tool(dtype: str) -> str:
    executable = shutil.which(_TOOL)
    if executable is None:
        raise RunError(
            f"--dtype {dtype}: K-quants are made by llama.cpp's {_TOOL}, which is not on the PATH; build "
            "llama.cpp, or use --dtype q4_0 or q8_0"
        )
    return executable


def _quantize(tool: str, source: Path, file: Path, dtype: str) -> None:
    process = subprocess.run(
        tie_to_parent([tool, str(source), str(file), dtype.upper()]), capture_output=True, text=True
    )
    if process.returncode or not file.is_file():
        # The tool logs its progress first; the reason is in the last line.
        message = ((process.stderr or process.stdout).strip().splitlines() or ["no output"])[-1]
        raise RunError(f"--dtype {dtype}: {tool} failed ({process.returncode}): {message}")


def _write(plain: Plain, file: Path, dtype: str, name: str) -> dict[str, int]:
    """Writes the file; returns the number of tensors per type."""
    import gguf

    config = plain.model.config
    require_supported(config)
    architecture = _ARCHITECTURES[config.model_type]
    writer = _build_writer(file, architecture)
    writer.add_name(name)
    _add_sizes(writer, config, gguf)
    types: dict[str, int] = {}
    factors = _add_rope(writer, plain.model, gguf)
    for title, data in _iterate_tensors(plain.model, architecture, gguf, factors):
        kind = _choose_type(title, data, dtype)
        encoded = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
        # Larger values became infinite; bf16 has fp32's range.
        if kind == "F16" and not _is_finite(encoded):
            raise RunError(f"--dtype {dtype}: {title} has values beyond f16's 65,504; use --dtype bf16 or f32")
        writer.add_tensor(title, encoded, raw_dtype=gguf.GGMLQuantizationType[kind])
        types[kind] = types.get(kind, 0) + 1
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"])
    if dtype.startswith("q"):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    # All metadata before the first write, because the header counts the keys.
    add_vocabulary(writer, plain.tokenizer, config.vocab_size, plain.end_tokens, plain.end_of_turn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return types


def _build_writer(file: Path, architecture: str) -> GGUFWriter:
    """Returns a gguf writer that also writes empty lists: llama.cpp requires merges even of a tokenizer without any."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def _pack_val(
            self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
        ) -> bytes:
            if vtype != gguf.GGUFValueType.ARRAY or len(val):
                return super()._pack_val(val, vtype, add_vtype, sub_type)
            # Type of the value, type of its elements, and their number: 0.
            return self._pack("I", vtype) * add_vtype + self._pack("I", sub_type) + self._pack("Q", 0)

    return Writer(file, architecture)


def _is_finite(data: np.ndarray) -> bool:
    import numpy as np

    return bool(np.isfinite(data).all())


def require_supported(config: PretrainedConfig) -> None:
    """Raises RunError for a model that cannot be written, from its configuration alone: before any work."""
    family = config.model_type
    if family not in _ARCHITECTURES:
        raise RunError(
            f"--to gguf: writes {', '.join(_ARCHITECTURES)}, and this is a {family}; use --to hf and, where llama.cpp "
            "has the architecture, its convert_hf_to_gguf.py"
        )
    # gemma2's config uses the second name.
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation != _ACTIVATIONS.get(family, "silu"):
        raise RunError(
            f"--to gguf: llama.cpp's {family} has {_ACTIVATIONS.get(family, 'silu')}, and this model "
            f"{activation}; use --to hf"
        )
    if family == "gemma2" and config.query_pre_attn_scalar != config.head_dim:
        raise RunError(
            f"--to gguf: llama.cpp scales gemma2's scores by its head size {config.head_dim}, and this model "
            f"by {config.query_pre_attn_scalar}; use --to hf"
        )
    # transformers' Qwen models may mix full and windowed layers.
    if family != "gemma2" and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise RunError(f"--to gguf: some layers attend in a window, which llama.cpp's {family} does not; use --to hf")
    rope = config.rope_parameters
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise RunError(
            "--to gguf: a part of each head is rotated, which llama.cpp's model of the family does not; use --to hf"
        )
    kind = rope.get("rope_type", "default")
    own_factor = any(rope.get(key) is not None for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if kind not in ("default", "linear", "llama3", "yarn") or (kind == "yarn" and own_factor):
        name = "yarn with an attention factor of its own" if kind == "yarn" else kind
        raise RunError(
            f"--to gguf: rotary scaling {name} is not supported there; linear, yarn and llama3 are; use --to hf"
        )


def _find_head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_sizes(writer: GGUFWriter, config: PretrainedConfig, gguf: ModuleType) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    # Explicit, because some families have heads that are not hidden_size / heads wide.
    writer.add_key_length(_find_head_dim(config))
    writer.add_value_length(_find_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_rope(writer: GGUFWriter, model: PreTrainedModel, gguf: ModuleType) -> np.ndarray | None:
    """Adds the rotary embedding; returns the divisors of its frequencies, [head_dim / 2], if the scaling needs them."""
    config = model.config
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    writer.add_rope_dimension_count(_find_head_dim(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
        return None
    if kind == "llama3":
        # llama3's scaling is a divisor per frequency: theta^(-2 i / d) over the scaled frequencies of the model.
        base = rope["rope_theta"] ** -(_build_arange(_find_head_dim(config)))
        return (base / model.model.rotary_emb.inv_freq.double()).float().numpy()
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    return None


def _build_arange(size: int) -> Tensor:
    import torch

    return torch.arange(0, size, 2, dtype=torch.float64) / size


def _iterate_tensors(
    model: PreTrainedModel, architecture: str, gguf: ModuleType, factors: np.ndarray | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor of the file in fp32, with llama.cpp's names and layout."""
    config = model.config
    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue  # llama.cpp uses the embedding if there is no head
        stem, _, last = name.rpartition(".")
        # gguf maps module names, so the parameter's last component is split off.
        title = names.get_name(stem)
        if title is None:
            raise RunError(f"--to gguf: llama.cpp's {architecture} has no field for {name}; use --to hf")
        data = value.detach().float()
        # llama.cpp rotates neighbouring dimensions in llama, transformers the two halves of a head.
        if architecture == "llama" and title.endswith(("attn_q", "attn_k")):
            heads = config.num_attention_heads if title.endswith("attn_q") else config.num_key_value_heads
            data = _interleave_rows(data, heads)
        if architecture == "gemma2" and title.endswith("norm"):
            data = data + 1  # transformers' gemma computes (1 + weight) at run time
        yield f"{title}.{last}", data.contiguous().numpy()
    if factors is not None:
        yield "rope_freqs.weight", factors


def _interleave_rows(rows: Tensor, heads: int) -> Tensor:
    """Permutes rows of q or k, [heads * head_dim, ...]: rotary pairs (i, i + head_dim / 2) become (2 i, 2 i + 1)."""
    # (heads, 2, head_dim / 2, ...) -> (heads, head_dim / 2, 2, ...)
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _choose_type(title: str, data: np.ndarray, dtype: str) -> str:
    """Returns the type of one tensor."""
    # Norms and biases are small, and llama.cpp expects them in fp32.
    if data.ndim == 1:
        return "F32"
    if data.shape[-1] % _find_block_size(dtype):
        return "F16"
    if dtype == "q4_0" and title in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    return dtype.upper()


def _collect_notes(plain: Plain, types: dict[str, int], dtype: str) -> list[str]:
    notes = []
    # Fields for end of text, of turn and of message; further end tokens have no field.
    if unnamed := assign_end_tokens(plain.tokenizer.eos_token_id, plain.end_tokens, plain.end_of_turn)[2]:
        tokens = ", ".join(map(repr, plain.tokenizer.convert_ids_to_tokens(unnamed)))
        notes.append(f"a GGUF file names three tokens that end a text, so {tokens} ends none there")
    matrices = {kind: count for kind, count in types.items() if kind != "F32"}
    # llama-quantize gives matrices without whole blocks a type of smaller blocks.
    others = {k: n for k, n in matrices.items() if (not k.endswith("_K") if "_k" in dtype else k == "F16")}
    if (block := _find_block_size(dtype)) > 1 and others:
        listed = " and ".join(f"{count} in {kind.lower()}" for kind, count in sorted(others.items()))
        notes.append(f"{listed}, of {sum(matrices.values())} matrices: their rows are not whole blocks of {block}")
    if plain.model.config.model_type == "mistral" and (window := plain.model.config.sliding_window):
        notes.append(f"llama.cpp attends in full where the model has a window of {window:,} positions")
    return notes
