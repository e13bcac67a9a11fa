"""Export to ONNX with dynamic batch and length, for ONNX Runtime and other readers of ONNX.

Input: whole sequences; output: logits, without a KV cache. Suited to scoring, classification by likelihood and short
texts; for long generations, GGUF and ExecuTorch have caches. int8: weights per row, activations dynamically per tensor
(ONNX Runtime's dynamic quantization). The file is run again by ONNX Runtime and its logits compared.
Source: torch.onnx.export(dynamo=True); onnxruntime.quantization.quantize_dynamic.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import verify
from preheat.compress.export.merged_model import require, write_plain_model
from preheat.compress.export.trace import REDUCE_RANGE, Logits, export_trace, write_onnx
from preheat.models.hf import read_facts

if TYPE_CHECKING:
    from preheat.core.export import ExportResult

__all__ = ["quantize", "replay", "write"]

_LOAD = """\
import onnxruntime, numpy, transformers
session = onnxruntime.InferenceSession("model.onnx")"""
_STEP = """\
row = numpy.array([ids + answer])
logits, = session.run(None, {"input_ids": row, "attention_mask": numpy.ones_like(row)})"""

_LARGEST = 1 << 31
"""Maximum bytes of a protobuf file; a larger model keeps its weights in a file of their own."""


def write(
    run: str | Path, out: str | Path, *, dtype: str = "float32", tolerance: float | None = None, base: str | None = None
) -> ExportResult:
    """Writes `out`/model.onnx (weights in model.onnx.data), tokenizer, configuration and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: float32 or int8.
        tolerance: maximum logit difference relative to the largest logit; None: `verify.BOUNDS`.
        base: as in `load_model`.

    Raises:
        RunError: onnx, onnxscript or onnxruntime is not installed; ONNX lacks an operator; the difference exceeds the
            bound.
    """
    out = Path(out)
    require_new(out, run)
    require("onnx", "onnx", "onnxscript", "onnxruntime")
    bound = verify.choose_bound("onnx", dtype, tolerance)
    with NewFolder(out) as folder:
        with write_plain_model(run, folder, base=base) as model:
            file = folder / "model.onnx"
            program = export_trace(Logits(model.model), read_facts(model.model.config).positions)
            write_onnx(program, file, ("input_ids", "attention_mask"))
            if dtype == "int8":
                quantize(file)
            reader = model_card.find_version("onnxruntime")
            summary = model.finish(out, file, dtype, partial(replay, file), bound, reader=reader)
            use = model.use(_LOAD, _STEP)
        model_card.write_export(folder, run, summary, title=f"ONNX, {dtype}", use=use, library="onnx")
    return summary


def quantize(file: Path) -> None:
    """Quantizes the weights of a file's matmuls to 8 bits per row, in place; activations are quantized dynamically.

    The result is one file without model.onnx.data, unless it could exceed the size limit of protobuf.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    unquantized = file.with_name("float.onnx")
    # The fp32 weights, which the quantized file does not need.
    data = file.with_name(file.name + ".data")
    import onnx

    large = data.is_file() and data.stat().st_size > _LARGEST
    # Under another name, because the quantizer writes to the original name.
    values = file.with_name("float.onnx.data")
    onnx.save_model(onnx.load(file), unquantized, save_as_external_data=True, location=values.name)
    data.unlink(missing_ok=True)
    file.unlink()
    log = logging.getLogger()  # onnxruntime warns through the root logger about its own pre-processing
    level = log.level
    log.setLevel(max(logging.ERROR, level))
    try:
        quantize_dynamic(
            unquantized,
            file,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=REDUCE_RANGE,
            use_external_data_format=large,
        )
    finally:
        log.setLevel(level)
    unquantized.unlink()
    values.unlink(missing_ok=True)


def replay(file: Path, rows: list[Tensor]) -> list[Tensor]:
    """Returns the logits [1, length, vocabulary] of rows of tokens by ONNX Runtime on the CPU."""
    import onnxruntime

    # The threads that torch uses, not all cores of the machine.
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    feeds = [{"input_ids": row.numpy(), "attention_mask": torch.ones_like(row).numpy()} for row in rows]
    return [torch.from_numpy(session.run(None, inputs)[0]) for inputs in feeds]
