"""Export to a Hugging Face folder in the layout of compressed-tensors, which vLLM reads.

int4: the layers' matrices in groups of 32, eight weights per word; int8: per row, four per word. Both are rounded to
the nearest and symmetric; head and embedding stay in bfloat16. The folder is reloaded by compressed-tensors and its
logits compared. vLLM also reads a bfloat16 folder (`--to hf`).
Source: the compressed-tensors package (format pack-quantized), as vLLM loads them.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import verify
from preheat.compress.export.merged_model import require, write_plain_model
from preheat.core.export import ExportResult
from preheat.errors import RunError
from preheat.models.hf import head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["pack", "write"]

GROUP = 32  # weights that share a scale


def write(
    run: str | Path, out: str | Path, *, dtype: str = "int8", tolerance: float | None = None, base: str | None = None
) -> ExportResult:
    """Writes `out` with the weights, configuration, tokenizer and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: int8 or int4, of the layers' matrices. With int4, a matrix whose rows are not divisible by 32 stays in
            bfloat16.
        tolerance: maximum logit difference relative to the largest logit; None: `verify.BOUNDS`.
        base: as in `load_model`.

    Raises:
        RunError: compressed-tensors is not installed; the difference exceeds the bound.
    """
    out = Path(out)
    require_new(out, run)
    require("vllm", "compressed_tensors", extra="compressed-tensors")
    bound = verify.choose_bound("vllm", dtype, tolerance)
    with NewFolder(out) as folder:
        with write_plain_model(run, folder, base=base) as model:
            # The reference logits are those of the fp32 weights, so the comparison includes the rounding to bfloat16.
            total, skipped = pack(model.model.to(torch.bfloat16), 4 if dtype == "int4" else 8, folder)
            for file in model.folder.iterdir():
                if (
                    file.name != "config.json"
                    and file.suffix in (".json", ".jinja")
                    and not (folder / file.name).exists()
                ):
                    (folder / file.name).write_bytes(file.read_bytes())
            # Through compressed-tensors' own decompression, which checks scales and packing.
            reloaded = _load(folder)
            difference = verify.compare(model.reference_logits, verify.compute_logits(reloaded, model.rows), model.rows)
            verify.refuse_beyond(difference, bound, str(out), "use --dtype int8, --to hf, or raise --tolerance")
            perplexity = model.held_out_text.by(reloaded, difference)
            notes = list(model.notes)
            if skipped:
                notes.append(
                    f"{len(skipped)} of {total} matrices stay in bfloat16: their rows are not whole groups of {GROUP} "
                    f"({skipped[0]})"
                )
        summary = ExportResult(
            path=str(out),
            bytes=verify.count_bytes(folder),
            dtype=dtype,
            merged=model.merged,
            read_by=model_card.find_version("compressed-tensors"),
            **vars(verify.build_comparison(difference, bound)),
            **vars(perplexity),
            note="; ".join(notes),
        )
        model_card.write_export(
            folder, run, summary, title=f"compressed-tensors, {dtype}", use="vllm serve .", library="transformers"
        )
    return summary


def pack(model: PreTrainedModel, bits: int, folder: Path) -> tuple[int, list[str]]:
    """Quantizes all linear maps except the head in place, and writes weights and configuration.

    Returns:
        The number of these maps, and names of those whose inputs are not divisible by the group size, which are
        unchanged.

    Raises:
        RunError: that is all of them.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    maps: dict[str, nn.Linear] = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    head_name = next(name for name, module in maps.items() if module is head(model))
    granularity = {"strategy": "group", "group_size": GROUP} if bits == 4 else {"strategy": "channel"}
    skipped = [name for name, module in maps.items() if bits == 4 and module.in_features % GROUP and name != head_name]
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, **granularity)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    # Every matrix but the head was skipped.
    if len(skipped) + 1 == len(maps):
        raise RunError(f"--dtype int4: no matrix has rows of whole groups of {GROUP}; use --dtype int8")
    # Adds the scales as parameters, which are set below.
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=[head_name, *skipped]), show_progress=False
    )
    with torch.no_grad():
        for name, module in maps.items():
            if name == head_name or name in skipped:
                continue
            # (out, groups, inputs of a group) -> scales (out, groups)
            blocks = module.weight.unflatten(1, (-1, GROUP if bits == 4 else module.in_features))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights)
            module.weight_scale.copy_(scale)  # type: ignore[operator]  # added by `apply_quantization_config`
    # Packs the codes into int32 words and replaces the weights by them.
    compressor = ModelCompressor.from_pretrained_model(model)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar without an option to turn it off
        compressor.compress_model(model)
        model.save_pretrained(folder)
    # After save_pretrained, whose config.json does not have the quantization.
    compressor.update_config(folder)
    return len(maps) - 1, skipped


def _load(folder: Path) -> PreTrainedModel:
    """Loads transformers' model with weights dequantized by compressed-tensors."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        # The override is intended: it requests dequantized weights.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            quantization_config=CompressedTensorsConfig(dequantize=True),
        )
