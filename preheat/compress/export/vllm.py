"""A model as a Hugging Face folder in the layout of compressed-tensors, which vLLM reads; read again by that package and compared.

int4: weights of the layers' matrices by groups of 32, eight to a word; int8: by row, four to a word. Both are rounded to the nearest and
symmetric; the head and the embedding stay in bfloat16. A folder in bfloat16 (`--to hf`)
is read by vLLM as well.
Source: the compressed-tensors package (format pack-quantized), as vLLM loads them.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import model_card, verify
from preheat.compress.export.merged_model import plain, require
from preheat.errors import RunError
from preheat.models.hf import head

__all__ = ["pack", "write"]

GROUP = 32


def write(
    run: str | Path, out: str | Path, *, dtype: str = "int8", tolerance: float | None = None, base: str | None = None
) -> dict[str, Any]:
    """Writes `out` with the weights, configuration, tokenizer and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: int8 or int4, of the layers' matrices. A matrix whose rows are no whole groups of 32 stays in bfloat16 with int4.
        tolerance: largest difference of a logit, as a share of the largest logit; `verify.BOUNDS` when None.
        base: as in `open_model`.

    Returns:
        {path, bytes, dtype, merged, read_by, note} and `verify.figures`

    Raises:
        RunError: compressed-tensors is not installed; beyond the bound.
    """
    out = Path(out)
    require_new(out, run)
    require("vllm", "compressed_tensors", extra="compressed-tensors")
    bound = verify.bound_of("vllm", dtype, tolerance)
    with NewFolder(out) as folder:
        with plain(run, folder, base=base) as model:
            left = pack(model.model.to(torch.bfloat16), 4 if dtype == "int4" else 8, folder)
            for file in model.folder.iterdir():
                if (
                    file.name != "config.json"
                    and file.suffix in (".json", ".jinja")
                    and not (folder / file.name).exists()
                ):
                    (folder / file.name).write_bytes(file.read_bytes())
            again = _load(folder)
            found = verify.compare(model.wanted, verify.logits(again, model.rows), model.rows)
            verify.refuse_beyond(found, bound, str(out), "use --dtype int8, --to hf, or raise --tolerance")
            told = model.held.by(again, found)
            notes = list(model.notes)
            if left:
                notes.append(
                    f"{len(left)} matrices stay in bfloat16: their rows are no whole groups of {GROUP} ({left[0]})"
                )
        made = {"path": str(out), "bytes": verify.size(folder), "dtype": dtype, "merged": model.merged}
        made |= {
            "read_by": model_card.version_of("compressed-tensors"),
            **verify.figures(found, bound),
            **told,
            "note": "; ".join(notes),
        }
        model_card.write(
            folder, run, made, title=f"compressed-tensors, {dtype}", use="vllm serve .", library="transformers"
        )
    return made


def pack(model: Any, bits: int, folder: Path) -> list[str]:
    """Quantizes the linear maps but the head in place and writes weights and configuration.

    Returns:
        Names of the maps whose rows are no whole groups, which stay as they are.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    maps: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    top = next(name for name, module in maps.items() if module is head(model))
    grouped = {"strategy": "group", "group_size": GROUP} if bits == 4 else {"strategy": "channel"}
    left = [name for name, module in maps.items() if bits == 4 and module.in_features % GROUP and name != top]
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, **grouped)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    if len(left) + 1 == len(maps):
        raise RunError(f"--dtype int4: no matrix has rows of whole groups of {GROUP}; use --dtype int8")
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=[top, *left]), show_progress=False
    )
    with torch.no_grad():
        for name, module in maps.items():
            if name == top or name in left:
                continue
            blocks = module.weight.unflatten(1, (-1, GROUP if bits == 4 else module.in_features))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights)
            module.weight_scale.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that nothing turns off
        compressor.compress_model(model)
        model.save_pretrained(folder)
    compressor.update_config(folder)
    return left


def _load(folder: Path) -> Any:
    """transformers' model with its weights made full by compressed-tensors."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="You passed `quantization_config`"
        )  # to be given full weights is asked for so
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            quantization_config=CompressedTensorsConfig(dequantize=True),
        )
