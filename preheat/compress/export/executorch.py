"""Export to ExecuTorch: a .pte program on XNNPACK with a static KV cache, for phones and small boards.

`forward(input_ids [1, n], cache_position [n])` returns logits [1, n, vocabulary] and updates the KV cache inside the
program: first the whole prompt, then one token at a time. 8da4w: weights of the layers' matrices in 4 bits in groups
of 32, activations dynamically quantized to 8 bits per token; embedding and head stay in fp32. The program is run again
by ExecuTorch's Python runtime and its logits compared.
Source: transformers' integrations/executorch.py (the exported module); torchao's quantize_; ExecuTorch's XNNPACK
backend.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import verify
from preheat.compress.export.merged_model import require, write_plain_model
from preheat.compress.export.trace import explain_export_error
from preheat.core.export import ExportResult
from preheat.errors import RecipeError, RunError
from preheat.models.hf import head, read_facts
from preheat.models.torchao_import import silence_torchao

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["lower", "quantize", "replay", "write"]

GROUP = 32  # weights that share a scale, as 8da4w defines it
_LENGTH = 2048  # default limit of the cache, in positions
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
) -> ExportResult:
    """Writes `out`/model.pte, tokenizer, configuration and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: float32 or 8da4w. A matrix whose rows are not divisible by 32 stays in fp32.
        tolerance: maximum logit difference relative to the largest logit; None: `verify.BOUNDS`.
        base: as in `load_model`.
        length: size of the cache in positions; None: the model's, up to 2,048.

    Raises:
        RunError: executorch is not installed; an operator is not supported; the difference exceeds the bound.
        RecipeError: `length` exceeds the model's positions.
    """
    out = Path(out)
    require_new(out, run)
    require("executorch", "executorch", "torchao")
    bound = verify.choose_bound("executorch", dtype, tolerance)
    with NewFolder(out) as folder:
        with write_plain_model(run, folder, base=base) as model:
            positions = read_facts(model.model.config).positions
            length = length or min(positions or _LENGTH, _LENGTH)
            if positions and length > positions:
                raise RecipeError(f"--length: {length:,} is more than the model's {positions:,} positions")
            notes = list(model.notes)
            if dtype == "8da4w":
                total, skipped = quantize(model.model)
                if skipped:
                    notes.append(
                        f"{len(skipped)} of {total} matrices stay in fp32: their rows are not whole groups of {GROUP} "
                        f"({skipped[0]})"
                    )
            file = folder / "model.pte"
            lower(model.model, file, length, quantized=dtype == "8da4w")
            # The program accepts at most length - 1 tokens in a call.
            rows = [row[:, : length - 1] for row in model.rows]
            wanted = [row[:, : length - 1] for row in model.reference_logits]
            difference = verify.compare(wanted, replay(file, rows), rows)
            verify.refuse_beyond(difference, bound, str(out), "use --dtype float32, or raise --tolerance")
            model.copy_settings(folder)
            perplexity = model.held_out_text.perplexities(difference, partial(replay, file), longest=length - 1)
            summary = ExportResult(
                path=str(out),
                bytes=verify.count_bytes(folder, file.name),
                dtype=dtype,
                length=length,
                merged=model.merged,
                read_by=model_card.find_version("executorch"),
                **vars(verify.build_comparison(difference, bound)),
                **vars(perplexity),
                note="; ".join(notes),
            )
            use = model.use(_LOAD, _STEP, positions=length)
        model_card.write_export(
            folder, run, summary, title=f"ExecuTorch program, {dtype}", use=use, library="executorch"
        )
    return summary


def quantize(model: PreTrainedModel) -> tuple[int, list[str]]:
    """Quantizes all linear maps except the head to 4-bit groups with 8-bit activations per token, in place.

    Returns:
        The number of these maps, and names of those whose inputs are not divisible by the group size, which are
        unchanged.

    Raises:
        RunError: that is all of them.
    """
    with silence_torchao():
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import PerGroup
        from torchao.utils import unwrap_tensor_subclass

    output_head = head(model)
    maps = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output_head
    }
    skipped = [name for name, module in maps.items() if module.in_features % GROUP]
    if len(skipped) == len(maps):
        raise RunError(f"--dtype 8da4w: no matrix has rows of whole groups of {GROUP}; use --dtype float32")
    chosen = maps.keys() - skipped
    int4: torch.dtype = torch.int4  # type: ignore[attr-defined]
    quantize_(
        model,
        Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=PerGroup(GROUP)),
        lambda module, name: name in chosen,
    )
    # torch.export traces plain tensors, not torchao's subclasses.
    unwrap_tensor_subclass(model)
    return len(maps), skipped


def lower(model: PreTrainedModel, file: Path, length: int, *, quantized: bool = False) -> None:
    """Exports a model with a static cache of `length` positions and lowers it to XNNPACK.

    Raises:
        RunError: an operator is not supported.
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
    # Registers the cache's tensors as buffers of the program, which its calls update.
    module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=length)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    # One call takes any number of tokens: a prompt, or a single token.
    tokens = torch.export.Dim("tokens", min=1, max=length - 1)
    # The dynamic partitioner first: it claims the quantized maps, and the other takes the rest.
    partitioners = (
        [XnnpackDynamicallyQuantizedPartitioner(), XnnpackPartitioner()] if quantized else [XnnpackPartitioner()]
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")  # raised inside torch
        # Side effects of transformers' hooks, which are not used here.
        warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
        program = module.export(
            input_ids=ids,
            cache_position=torch.arange(3),
            dynamic_shapes={"input_ids": {1: tokens}, "cache_position": {0: tokens}},
            strict=True,  # non-strict export puts the cache into the graph twice
        )
        try:
            lowered = to_edge_transform_and_lower(program, partitioner=partitioners).to_executorch()
        except (RuntimeError, SpecViolationError) as error:
            unsupported = explain_export_error(
                error, "executorch", "use --to gguf for llama.cpp on a device, or --to onnx"
            )
            if unsupported is None:
                raise
            raise unsupported from None
    with file.open("wb") as stream:
        lowered.write_to_file(stream)


def replay(file: Path, rows: list[Tensor]) -> list[Tensor]:
    """Returns the logits [1, length, vocabulary] of rows; the second half runs token by token, to test the cache."""
    from executorch.runtime import Runtime

    forward = Runtime.get().load_program(file).load_method("forward")
    logits = []
    for row in rows:
        half = (row.shape[1] + 1) // 2
        # The first half in one call, as a prompt.
        steps = [(0, half), *((n, n + 1) for n in range(half, row.shape[1]))]
        # Cloned, because the runtime reuses its output buffer.
        parts = [forward.execute((row[:, a:b].contiguous(), torch.arange(a, b)))[0].clone() for a, b in steps]
        logits.append(torch.cat(parts, dim=1))
    return logits
