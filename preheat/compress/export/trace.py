"""Tracing of a model with torch.export for other runtimes: whole sequences in, logits out, dynamic batch and length."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from preheat.errors import RunError
from preheat.torch_compat import export_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["REDUCE_RANGE", "Logits", "explain_export_error", "write_onnx", "export_trace"]

# On x86 without VNNI (AVX2, early AVX512), ONNX Runtime accumulates pairs of 8-bit products in 16 bits, which
# saturates: logits were off by one half. 7-bit weights cannot saturate, and the file may be used on another machine
# than the writer's.
REDUCE_RANGE = True


class Logits(nn.Module):
    """Maps input_ids and attention_mask, [batch, length] int64 each, to logits [batch, length, vocabulary].

    Padding (0 in the mask) must be on the right: positions are counted from the left.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        # Our own attention has operators that other runtimes lack.
        model.set_attn_implementation("sdpa")
        # The cache would be a further output of the graph.
        model.config.use_cache = False
        self.model = model.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def export_trace(module: nn.Module, positions: int) -> torch.export.ExportedProgram:
    """Exports a `Logits` with `torch.export`.

    Args:
        positions: maximum sequence length; 0: unlimited.
    """
    # Two rows, because torch.export specializes a dimension of size 1.
    ids = torch.zeros(2, min(8, positions or 8), dtype=torch.int64)
    # Both inputs share the dimensions, so that the graph may rely on equal shapes.
    batch = torch.export.Dim("batch", min=1)
    length = torch.export.Dim("length", min=1, max=positions or None)
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return torch.export.export(module, (ids, torch.ones_like(ids)), dynamic_shapes=shapes, **export_options())


def write_onnx(
    program: torch.export.ExportedProgram, file: Path, inputs: tuple[str, ...], *, beside: bool = True
) -> None:
    """Writes a traced graph as ONNX.

    Args:
        inputs: names of its inputs; its output is called logits.
        beside: store weights in a separate file, FILE.data; a single file is limited to 2 GiB.

    Raises:
        RunError: ONNX lacks an operator.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")  # raised inside torch
        try:
            onnx_program: Any = torch.onnx.export(
                program, (), dynamo=True, verbose=False, input_names=inputs, output_names=("logits",)
            )
        except torch.onnx.errors.OnnxExporterError as error:
            unsupported = explain_export_error(error, "onnx", "use --to aoti, which has PyTorch's own, or --to gguf")
            if unsupported is None:
                raise
            raise unsupported from None
    for node in onnx_program.model.graph:
        node.metadata_props.clear()  # source lines with paths of this machine
    onnx_program.save(file, external_data=beside)


def explain_export_error(error: BaseException, to: str, alternative: str) -> RunError | None:
    """Returns a RunError for the operator that a format lacks; None if the error names no operator.

    Args:
        error: of the exporter; its causes are searched, too.
        alternative: a hint on what else to use.
    """
    cause: BaseException | None = error
    while cause is not None:
        # "op='aten::x'", "Operator torch._ops.aten.x", or "Missing out variants: {'aten::x'"
        if match := re.search(
            r"(?:op='|Operator |Missing out variants: \{')(?:torch\._ops\.)?(\w+)(?:\.|::)(\w+)", str(cause)
        ):
            name = f"{match[1]}.{match[2]}"
            return RunError(f"--to {to}: the operator {name} is not supported there; {alternative}")
        # The exporters wrap the error several times.
        cause = cause.__cause__ or cause.__context__
    return None
