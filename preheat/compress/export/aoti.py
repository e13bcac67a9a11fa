"""A model compiled ahead of time into one .pt2 package (AOTInductor), for PyTorch without Python's interpreter; loaded again and compared.

The package has machine code for the kind of processor that it was compiled on. Whole sequences go in and logits come out, batch and
length open. Compiling takes minutes and a C++ compiler.
Source: torch.export and torch._inductor.aoti_compile_and_package (PyTorch's page "AOTInductor").
"""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat import remote_code
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import model_card, verify
from preheat.compress.export.merged_model import plain
from preheat.compress.export.trace import Logits, trace
from preheat.errors import RunError
from preheat.models.hf import facts

__all__ = ["compile_package", "replay", "write"]

_LOAD = """\
import torch, transformers
model = torch._inductor.aoti_load_package("model.pt2")"""
_STEP = """\
row = torch.tensor([ids + answer])
logits = model(row, torch.ones_like(row))"""


def write(
    run: str | Path, out: str | Path, *, dtype: str = "float32", tolerance: float | None = None, base: str | None = None
) -> dict[str, Any]:
    """Writes `out`/model.pt2, tokenizer, configuration and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: float32 or bfloat16, of weights and activations.
        tolerance: largest difference of a logit, as a share of the largest logit; `verify.BOUNDS` when None.
        base: as in `open_model`.

    Returns:
        {path, bytes, dtype, merged, read_by, note} and `verify.figures`

    Raises:
        RunError: no C++ compiler; beyond the bound.
    """
    from transformers import AutoModelForCausalLM

    out = Path(out)
    require_new(out, run)
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise RunError("--to aoti: needs a C++ compiler and found none on the PATH: apt install g++, or use --to onnx")
    bound = verify.bound_of("aoti", dtype, tolerance)
    with NewFolder(out) as folder:
        with plain(run, folder, base=base) as model:
            file = folder / "model.pt2"
            positions = facts(model.model.config).positions
            # Read anew: casting a model casts the frequencies of its rotary positions, too.
            cast = AutoModelForCausalLM.from_pretrained(
                model.folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=remote_code.allowed(),
            )
            compile_package(Logits(cast), file, positions)
            found = verify.compare(model.wanted, replay(file, model.rows), model.rows)
            verify.refuse_beyond(found, bound, str(out), "use --dtype float32, or raise --tolerance")
            model.copy_settings(folder)
            made = {"path": str(out), "bytes": verify.size(folder, file.name), "dtype": dtype, "merged": model.merged}
            made |= {"read_by": model_card.version_of("torch"), **verify.figures(found, bound)}
            made |= {**model.held.told(found, partial(replay, file)), "note": "; ".join(model.notes)}
            use = model.use(_LOAD, _STEP)
        model_card.write(folder, run, made, title=f"AOTInductor package, {dtype}", use=use, library="pytorch")
    return made


def compile_package(module: torch.nn.Module, file: Path, positions: int) -> None:
    """Compiles a module of `Logits`' inputs and output for this machine's processor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.")  # which the compiler itself uses
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
        torch._inductor.aoti_compile_and_package(trace(module, positions), package_path=str(file))


def replay(file: Path, rows: list[Tensor]) -> list[Tensor]:
    """Logits [1, length, vocabulary] of rows of tokens, in fp32, by the loaded package."""
    model = torch._inductor.aoti_load_package(str(file))
    with torch.no_grad():
        return [model(row, torch.ones_like(row)).float() for row in rows]
