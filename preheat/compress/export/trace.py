"""A model as a graph of operators, for runtimes that take one: whole sequences in, logits out, batch and length left open."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from preheat.errors import RunError

__all__ = ["REDUCE_RANGE", "Logits", "refused", "to_onnx", "trace"]

# ONNX Runtime on x86 without VNNI (AVX2, early AVX512) adds two products of eight bits in sixteen, where they saturate: logits were
# off by a half. Weights of seven bits cannot, and a file is carried to machines that its writer does not know.
REDUCE_RANGE = True


class Logits(nn.Module):
    """input_ids and attention_mask, [batch, length] int64 each, to logits [batch, length, vocabulary].

    Padding (0 in the mask) stands on the right: positions are counted from the left.
    """

    def __init__(self, model: Any):
        super().__init__()
        model.set_attn_implementation("sdpa")
        model.config.use_cache = False
        self.model = model.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def trace(module: nn.Module, positions: int) -> torch.export.ExportedProgram:
    """Exports a `Logits` with `torch.export`.

    Args:
        positions: the longest sequence; 0: not limited.
    """
    ids = torch.zeros(2, min(8, positions or 8), dtype=torch.int64)
    batch = torch.export.Dim("batch", min=1)
    length = torch.export.Dim("length", min=1, max=positions or None)
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return torch.export.export(module, (ids, torch.ones_like(ids)), dynamic_shapes=shapes)


def to_onnx(program: torch.export.ExportedProgram, file: Path, inputs: tuple[str, ...], *, beside: bool = True) -> None:
    """Writes a traced graph as ONNX.

    Args:
        inputs: names of its inputs; its output is called logits.
        beside: weights in a file of their own, FILE.data: one that holds all may have 2 GiB.

    Raises:
        RunError: an operator has no form in ONNX.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")  # torch's exporter, of torch
        try:
            made: Any = torch.onnx.export(
                program, (), dynamo=True, verbose=False, input_names=inputs, output_names=("logits",)
            )
        except torch.onnx.errors.OnnxExporterError as error:
            known = refused(error, "onnx", "use --to aoti, which has PyTorch's own, or --to gguf")
            if known is None:
                raise
            raise known from None
    for node in made.model.graph:
        node.metadata_props.clear()  # each has the lines of source that it came from, with this machine's paths
    made.save(file, external_data=beside)


def refused(error: BaseException, to: str, alternative: str) -> RunError | None:
    """The line for an operator that a format has no form of; None where the error names none.

    Args:
        error: of the exporter; what caused it is looked at, too.
        alternative: what else serves, in words.
    """
    seen: BaseException | None = error
    while seen is not None:
        if found := re.search(
            r"(?:op='|Operator |Missing out variants: \{')(?:torch\._ops\.)?(\w+)(?:\.|::)(\w+)", str(seen)
        ):
            name = f"{found[1]}.{found[2]}"
            return RunError(f"--to {to}: the operator {name} has no form there; {alternative}")
        seen = seen.__cause__ or seen.__context__
    return None
