"""A model as an ExecuTorch program (.pte) on XNNPACK with a static cache of keys and values; run again by its Python runtime and compared.

For phones and small boards. `forward(input_ids [1, n], cache_position [n])` gives logits [1, n, vocabulary] and keeps keys and values
in the program: a prompt goes in at once, then a token at a time. 8da4w: weights of the layers' matrices in 4 bits by groups of 32,
activations in 8 bits by token as they come; embedding and head stay in fp32.
Source: transformers' integrations/executorch.py (the module that is exported); torchao's quantize_; ExecuTorch's XNNPACK backend.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import model_card, verify
from preheat.compress.export.merged_model import plain, require
from preheat.compress.export.trace import refused
from preheat.errors import RecipeError
from preheat.models.hf import facts, head

__all__ = ["lower", "quantize", "replay", "write"]

GROUP = 32
_LENGTH = 2048
_LOAD = """\
import torch, transformers
from executorch.runtime import Runtime
forward, read = Runtime.get().load_program("model.pte").load_method("forward"), 0"""
_STEP = """\
new = (ids + answer)[read:]  # what the cache has not: the prompt, then a token at a time
logits, = forward.execute((torch.tensor([new]), torch.arange(read, read + len(new))))
read += len(new)"""


def write(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str = "float32",
    tolerance: float | None = None,
    base: str | None = None,
    length: int | None = None,
) -> dict[str, Any]:
    """Writes `out`/model.pte, tokenizer, configuration and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: float32 or 8da4w. A matrix whose rows are no whole groups of 32 stays in fp32.
        tolerance: largest difference of a logit, as a share of the largest logit; `verify.BOUNDS` when None.
        base: as in `open_model`.
        length: positions of the cache; the model's, up to 2,048, when None.

    Returns:
        {path, bytes, dtype, length, merged, read_by, note} and `verify.figures`

    Raises:
        RunError: executorch is not installed; an operator has no form there; beyond the bound.
        RecipeError: a length beyond the model's positions.
    """
    out = Path(out)
    require_new(out, run)
    require("executorch", "executorch", "torchao")
    bound = verify.bound_of("executorch", dtype, tolerance)
    with NewFolder(out) as folder:
        with plain(run, folder, base=base) as model:
            positions = facts(model.model.config).positions
            length = length or min(positions or _LENGTH, _LENGTH)
            if positions and length > positions:
                raise RecipeError(f"--length: {length:,} is more than the model's {positions:,} positions")
            notes = list(model.notes)
            if dtype == "8da4w" and (left := quantize(model.model)):
                notes.append(
                    f"{len(left)} matrices stay in fp32: their rows are no whole groups of {GROUP} ({left[0]})"
                )
            file = folder / "model.pte"
            lower(model.model, file, length, quantized=dtype == "8da4w")
            rows = [row[:, : length - 1] for row in model.rows]
            wanted = [row[:, : length - 1] for row in model.wanted]
            found = verify.compare(wanted, replay(file, rows), rows)
            verify.refuse_beyond(found, bound, str(out), "use --dtype float32, or raise --tolerance")
            model.copy_settings(folder)
            made = {"path": str(out), "bytes": verify.size(folder, file.name), "dtype": dtype, "length": length}
            made |= {
                "merged": model.merged,
                "read_by": model_card.version_of("executorch"),
                **verify.figures(found, bound),
            }
            made |= {**model.held.told(found, partial(replay, file), longest=length - 1), "note": "; ".join(notes)}
            use = model.use(_LOAD, _STEP, positions=length)
        model_card.write(folder, run, made, title=f"ExecuTorch program, {dtype}", use=use, library="executorch")
    return made


def quantize(model: Any) -> list[str]:
    """Quantizes the linear maps but the head to 4 bits by groups, activations to 8 bits by token, in place.

    Returns:
        Names of the maps whose rows are no whole groups, which stay as they are.
    """
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.utils import unwrap_tensor_subclass

    left = []
    top = head(model)

    def chosen(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or module is top:
            return False
        if module.in_features % GROUP:
            left.append(name)
            return False
        return True

    four: Any = torch.int4  # type: ignore[attr-defined]
    quantize_(
        model, Int8DynamicActivationIntxWeightConfig(weight_dtype=four, weight_granularity=PerGroup(GROUP)), chosen
    )
    unwrap_tensor_subclass(model)
    return left


def lower(model: Any, file: Path, length: int, *, quantized: bool = False) -> None:
    """Exports a model with a static cache of `length` positions and lowers it to XNNPACK.

    Raises:
        RunError: an operator has no form there.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )
    from executorch.exir import to_edge_transform_and_lower
    from torch._export.verifier import SpecViolationError
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model.set_attn_implementation("sdpa")
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    module: Any = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=length)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    tokens = torch.export.Dim("tokens", min=1, max=length - 1)
    partitioners = (
        [XnnpackDynamicallyQuantizedPartitioner(), XnnpackPartitioner()] if quantized else [XnnpackPartitioner()]
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")  # torch's own
        warnings.filterwarnings(
            "ignore", message="While compiling, we found certain side effects"
        )  # transformers' hooks, unused
        program = module.export(
            input_ids=ids,
            cache_position=torch.arange(3),
            dynamic_shapes={"input_ids": {1: tokens}, "cache_position": {0: tokens}},
            strict=True,  # else the cache is in the graph twice
        )
        try:
            lowered = to_edge_transform_and_lower(program, partitioner=partitioners).to_executorch()
        except (RuntimeError, SpecViolationError) as error:
            known = refused(error, "executorch", "use --to gguf for llama.cpp on a device, or --to onnx")
            if known is None:
                raise
            raise known from None
    with file.open("wb") as written:
        lowered.write_to_file(written)


def replay(file: Path, rows: list[Tensor]) -> list[Tensor]:
    """Logits [1, length, vocabulary] of rows of tokens: their first half at once, the others one by one, so that the cache is used."""
    from executorch.runtime import Runtime

    forward = Runtime.get().load_program(file).load_method("forward")
    found = []
    for row in rows:
        half = (row.shape[1] + 1) // 2
        steps = [(0, half), *((n, n + 1) for n in range(half, row.shape[1]))]
        parts = [forward.execute((row[:, a:b].contiguous(), torch.arange(a, b)))[0].clone() for a, b in steps]
        found.append(torch.cat(parts, dim=1))
    return found
