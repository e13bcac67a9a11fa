"""Export to AOTInductor: a .pt2 package compiled ahead of time, which PyTorch runs without the Python interpreter.

The package contains machine code for the kind of processor that compiled it. Input: whole sequences with dynamic batch
and length; output: logits. Compiling takes minutes and a C++ compiler. The package is loaded again and its logits
compared.
Source: torch.export and torch._inductor.aoti_compile_and_package (PyTorch's page "AOTInductor").
"""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat import remote_code
from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import verify
from preheat.compress.export.merged_model import write_plain_model
from preheat.compress.export.trace import Logits, export_trace
from preheat.errors import RunError
from preheat.models.hf import read_facts

if TYPE_CHECKING:
    from preheat.core.export import ExportResult

__all__ = ["compile_package", "replay", "write"]

_LOAD = """\
import torch, transformers
model = torch._inductor.aoti_load_package("model.pt2")"""
_STEP = """\
row = torch.tensor([ids + answer])
logits = model(row, torch.ones_like(row))"""


def write(
    run: str | Path, out: str | Path, *, dtype: str = "float32", tolerance: float | None = None, base: str | None = None
) -> ExportResult:
    """Writes `out`/model.pt2, tokenizer, configuration and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: float32 or bfloat16, of weights and activations.
        tolerance: maximum logit difference relative to the largest logit; None: `verify.BOUNDS`.
        base: as in `load_model`.

    Raises:
        RunError: no C++ compiler; the difference exceeds the bound.
    """
    from transformers import AutoModelForCausalLM

    out = Path(out)
    require_new(out, run)
    # Checked first, because the merge and the trace take minutes.
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise RunError("--to aoti: needs a C++ compiler and found none on the PATH: apt install g++, or use --to onnx")
    bound = verify.choose_bound("aoti", dtype, tolerance)
    with NewFolder(out) as folder:
        with write_plain_model(run, folder, base=base) as model:
            file = folder / "model.pt2"
            positions = read_facts(model.model.config).positions
            # Loaded again in that dtype: `model.to(dtype)` would also cast the rotary frequencies.
            cast = AutoModelForCausalLM.from_pretrained(
                model.folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=remote_code.is_allowed(),
            )
            # `Logits` drops the cache, which a compiled graph would have to return.
            compile_package(Logits(cast), file, positions)
            reader = model_card.find_version("torch")
            summary = model.finish(out, file, dtype, partial(replay, file), bound, reader=reader)
            use = model.use(_LOAD, _STEP)
        model_card.write_export(folder, run, summary, title=f"AOTInductor package, {dtype}", use=use, library="pytorch")
    return summary


def compile_package(module: torch.nn.Module, file: Path, positions: int) -> None:
    """Compiles a module for this machine's processor and writes the package.

    Args:
        module: has the inputs and output of `Logits`.
        file: where to write the package (.pt2).
        positions: maximum sequence length in tokens; 0: unlimited.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.")  # raised by the compiler itself
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
        torch._inductor.aoti_compile_and_package(export_trace(module, positions), package_path=str(file))


def replay(file: Path, rows: list[Tensor]) -> list[Tensor]:
    """Returns the logits [1, length, vocabulary] of rows of tokens from the loaded package, in fp32."""
    model = torch._inductor.aoti_load_package(str(file))
    with torch.no_grad():
        # bfloat16 packages return bfloat16 logits.
        return [model(row, torch.ones_like(row)).float() for row in rows]
