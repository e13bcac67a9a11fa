"""Export to a single GGUF file, for llama.cpp and tools built on it.

The file contains: weights under llama.cpp's names and in its layout, in a float format or quantized in blocks by gguf's
own quantizers or, for K-quants, by llama.cpp's; the metadata of the family; the tokenizer with special tokens and chat
template. Norms, biases, routers and kernels of convolutions stay in fp32. The file is read back and its logits
compared; with llama.cpp's wheel installed (xllamacpp, the extra llama-cpp), llama.cpp runs the file, too.
Source: the GGUF specification (ggml's docs/gguf.md); names of tensors and keys: the `gguf` package.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import gguf_families, gguf_kquants, gguf_reader, llama_cpp, verify
from preheat.compress.export.gguf_families import Keys
from preheat.compress.export.gguf_layout import iterate_tensors
from preheat.compress.export.gguf_tokenizer import add_vocabulary, assign_end_tokens
from preheat.compress.export.merged_model import Plain, build_configuration, require, write_plain_model
from preheat.core.export import ExportResult, LlamaCppComparison
from preheat.errors import RunError
from preheat.hardware.child_processes import tie_to_parent
from preheat.model_folder import beginning_tokens

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFValueType, GGUFWriter
    from transformers import PreTrainedModel


__all__ = ["write"]

_TOOL = "llama-quantize"
_BLOCK = 32  # weights per block of q8_0 and q4_0
_K_BLOCK = 256  # weights per block of K-quants
_ENDS = ("token_embd.weight", "output.weight")
_IN_FP32 = ("_norm.weight", "ffn_gate_inp", "conv1d", "shortconv.conv")
_CLOSER = {"f32": None, "f16": "f32", "bf16": "f16 or f32", "q8_0": "f16"}
"""Types that are closer to the model, by type; of those below 8 bits: q8_0 or f16."""


def write(
    run: str | Path, out: str | Path, *, dtype: str = "f16", tolerance: float | None = None, base: str | None = None
) -> ExportResult:
    """Writes `out`/NAME-DTYPE.gguf and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: f32, f16, bf16, q8_0, q4_0; q4_k_m, q5_k_m, q6_k by the quantizer of xllamacpp or `llama-quantize` on the
            PATH. A matrix whose rows are not whole blocks stays in f16 or, with K-quants, q8_0 (`note` counts them);
            with q4_0, embedding and head are q8_0.
        tolerance: maximum logit difference relative to the largest logit; None: `verify.BOUNDS`.
        base: as in `load_model`.

    Raises:
        RunError: a model, tokenizer or rope scaling that llama.cpp does not support; no `gguf` package or quantizer; no
            matrix of the layers can have the dtype; the difference exceeds the bound.

    Example:
        >>> write("runs/demo", "demo-gguf", dtype="q8_0").top1_agreement         # doctest: +SKIP
        0.997
    """
    out = Path(out)
    require_new(out, run)
    if (config := build_configuration(run, base)) is not None:
        gguf_families.require_supported(config)
    require("gguf", "gguf")
    bound = verify.choose_bound("gguf", dtype, tolerance)
    tool = _find_tool(dtype) if "_k" in dtype else None
    with NewFolder(out) as folder:
        with write_plain_model(run, folder, base=base) as model:
            family = gguf_families.find_family(model.model.config)
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
                types = _count_types(file, dtype)
            # Reading dequantizes the file, which checks names, layout and rounding.
            difference, reloaded = gguf_reader.compare(model, file)
            verify.refuse_beyond(difference, bound, str(out), _suggest_closer(dtype))
            llama_cpp_figures = _compare_with_llama_cpp(model, file, dtype, tolerance)
            notes = [*model.notes, *_collect_notes(model, types, dtype)]
            reader = model_card.find_version("transformers" if family.read_by_transformers else "gguf")
            if llama_cpp_figures is None:
                keys = "" if family.read_by_transformers else ", and its keys were not checked"
                notes.append(
                    f"compared by {reader} alone: llama.cpp did not run the file{keys}, since its wheel is not "
                    "installed here (pip install 'preheat[llama-cpp]')"
                )
            summary = ExportResult(
                path=str(out),
                file=file.name,
                bytes=file.stat().st_size,
                dtype=dtype,
                types=types,
                merged=model.merged,
                read_by=reader,
                llama_cpp=llama_cpp_figures,
                **vars(verify.build_comparison(difference, bound)),
                **vars(model.held_out_text.by(reloaded, difference)),
                note="; ".join(notes),
            )
        use = f"llama-cli -m {summary.file} -p 'Once upon a time'"
        model_card.write_export(folder, run, summary, title=f"GGUF, {dtype}", use=use, library="gguf")
    return summary


def _suggest_closer(dtype: str) -> str:
    closer = _CLOSER.get(dtype, "q8_0 or f16")
    return f"use --dtype {closer}, or raise --tolerance" if closer else "raise --tolerance"


def _compare_with_llama_cpp(model: Plain, file: Path, dtype: str, tolerance: float | None) -> LlamaCppComparison | None:
    """Compares logprobs with llama.cpp's; None if it is not installed."""
    if not llama_cpp.is_installed():
        return None
    begins = gguf_families.find_family(model.model.config).begins
    difference = llama_cpp.compare(file, model.tokenizer, model.rows, model.reference_logits, begins=begins)
    bound = verify.BOUNDS["llama.cpp"][dtype]
    # llama.cpp computes in its own precision, so a user's tolerance can only widen this bound.
    if tolerance is not None:
        bound = verify.Bound(max(tolerance, bound.largest))
    verify.refuse_beyond(difference, bound, f"{file.name}, run by llama.cpp", _suggest_closer(dtype))
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
    widths = {
        shape[-1]
        for title, shape in _iterate_shapes(model)
        if len(shape) > 1 and not _is_small(title) and title not in _ENDS
    }
    if all(width % block for width in widths):
        raise RunError(
            f"--dtype {dtype}: no matrix of the layers has rows of whole blocks of {block} weights (they have "
            f"{', '.join(map(str, sorted(widths)))}); use --dtype {'q8_0, q4_0 or ' if block > _BLOCK else ''}f16"
        )


def _iterate_shapes(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of the file's tensors."""
    family = gguf_families.find_family(model.config)
    for title, tensor in iterate_tensors(
        model, family.architecture(model.config), family.rules(model.config), shapes=True
    ):
        yield title, tuple(tensor.shape)


def _find_tool(dtype: str) -> str | None:
    """Returns llama.cpp's tool that makes K-quants, or None if the package xllamacpp makes them.

    Raises:
        RunError: neither is installed.
    """
    if gguf_kquants.load_quantizer() is not None:
        return None
    executable = shutil.which(_TOOL)
    if executable is None:
        raise RunError(
            f"--dtype {dtype}: K-quants are made by llama.cpp's quantizer, not installed: pip install "
            f"'preheat[llama-cpp]', put llama.cpp's {_TOOL} on the PATH, or use --dtype q4_0 or q8_0"
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


def _count_types(file: Path, dtype: str) -> dict[str, int]:
    try:
        return gguf_reader.count_types(file)
    except ValueError:
        raise RunError(
            f"--dtype {dtype}: {_TOOL} gave rows that are not whole blocks of {_K_BLOCK} a type that cannot be read "
            "back; pip install 'preheat[llama-cpp]', whose quantizer is preferred, or use --dtype q8_0"
        ) from None


def _write(plain: Plain, file: Path, dtype: str, name: str) -> dict[str, int]:
    """Writes the file; returns the number of tensors per type."""
    import gguf

    config = plain.model.config
    family = gguf_families.find_family(config)
    architecture = family.architecture(config)
    writer = _build_writer(file, architecture)
    writer.add_name(name)
    _add_keys(writer, architecture, gguf_families.build_keys(config))
    types: dict[str, int] = {}
    factors = gguf_families.build_factors(plain.model)
    tensors = iterate_tensors(plain.model, architecture, family.rules(config))
    choose = _build_choice(plain.model, dtype)
    for title, tensor in itertools.chain(tensors, factors.items()):
        kind = "F32" if tensor.ndim == 1 or _is_small(title) else choose(title, tensor.shape[-1])
        encoded = _encode(tensor.numpy(), kind, dtype)
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


def _add_keys(writer: GGUFWriter, architecture: str, keys: Keys) -> None:
    for key, value in keys.items():
        # bool first, because it is a subclass of int.
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add: Callable[[str, Any], None] = kinds.get(type(value), writer.add_array)
        add(f"{architecture}.{key}", value)


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


def _is_small(title: str) -> bool:
    """Returns True for tensors that llama.cpp reads in fp32: norms, biases, routers, and kernels of convolutions."""
    return not title.endswith(".weight") or any(part in title for part in _IN_FP32)


def _build_choice(model: PreTrainedModel, dtype: str) -> Callable[[str, int], str]:
    """Returns a function that chooses a matrix's type, from its name and the weights per row."""
    if "_k" in dtype:
        return gguf_kquants.TypeChoice(
            dtype, [title for title, _ in _iterate_shapes(model)], **gguf_families.count_parts(model.config)
        )
    block = _find_block_size(dtype)

    def choose(title: str, width: int) -> str:
        if width % block:
            return "F16"
        return "Q8_0" if dtype == "q4_0" and title in _ENDS else dtype.upper()

    return choose


def _encode(values: np.ndarray, kind: str, dtype: str) -> np.ndarray:
    import gguf

    # The gguf package reads K-quants, and ggml makes them.
    if "_k" in dtype and kind.startswith("Q"):
        return gguf_kquants.encode(values, kind)
    encoded: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return encoded


def _collect_notes(plain: Plain, types: dict[str, int], dtype: str) -> list[str]:
    notes = []
    # Fields for end of text, of turn and of message; further end tokens have no field.
    if unnamed := assign_end_tokens(plain.tokenizer.eos_token_id, plain.end_tokens, plain.end_of_turn)[2]:
        tokens = ", ".join(map(repr, plain.tokenizer.convert_ids_to_tokens(unnamed)))
        notes.append(f"a GGUF file names three tokens that end a text, so {tokens} ends none there")
    matrices = {kind: count for kind, count in types.items() if kind != "F32"}
    # Matrices without whole blocks of K-quants have a type of smaller blocks.
    others = {k: n for k, n in matrices.items() if (not k.endswith("_K") if "_k" in dtype else k == "F16")}
    if (block := _find_block_size(dtype)) > 1 and others:
        listed = " and ".join(f"{count} in {kind.lower()}" for kind, count in sorted(others.items()))
        notes.append(f"{listed}, of {sum(matrices.values())} matrices: their rows are not whole blocks of {block}")
    notes += gguf_families.collect_notes(plain.model.config)
    if gguf_families.find_family(plain.model.config).begins and not beginning_tokens(plain.tokenizer):
        notes.append("llama.cpp puts the BOS token before a text, which the tokenizer leaves to the chat template")
    return notes
