"""A model as ONNX with open batch and length, for ONNX Runtime and what reads ONNX; run again by ONNX Runtime and compared.

Whole sequences go in and logits come out, without a cache of keys and values: for scoring, classification by likelihood and short
texts; to write long ones, GGUF and ExecuTorch have caches. int8: weights by row, activations by tensor as they come (ONNX Runtime's
dynamic quantization).
Source: torch.onnx.export(dynamo=True); onnxruntime.quantization.quantize_dynamic.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import model_card, verify
from preheat.compress.export.merged_model import plain, require
from preheat.compress.export.trace import REDUCE_RANGE, Logits, to_onnx, trace
from preheat.models.hf import facts

__all__ = ["quantize", "replay", "write"]

_LOAD = """\
import onnxruntime, numpy, transformers
session = onnxruntime.InferenceSession("model.onnx")"""
_STEP = """\
row = numpy.array([ids + answer])
logits, = session.run(None, {"input_ids": row, "attention_mask": numpy.ones_like(row)})"""


def write(
    run: str | Path, out: str | Path, *, dtype: str = "float32", tolerance: float | None = None, base: str | None = None
) -> dict[str, Any]:
    """Writes `out`/model.onnx (weights beside it in model.onnx.data), tokenizer, configuration and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: float32 or int8.
        tolerance: largest difference of a logit, as a share of the largest logit; `verify.BOUNDS` when None.
        base: as in `open_model`.

    Returns:
        {path, bytes, dtype, merged, read_by, note} and `verify.figures`

    Raises:
        RunError: onnx, onnxscript or onnxruntime is not installed; an operator has no form in ONNX; beyond the bound.
    """
    out = Path(out)
    require_new(out, run)
    require("onnx", "onnx", "onnxscript", "onnxruntime")
    bound = verify.bound_of("onnx", dtype, tolerance)
    with NewFolder(out) as folder:
        with plain(run, folder, base=base) as model:
            file = folder / "model.onnx"
            program = trace(Logits(model.model), facts(model.model.config).positions)
            to_onnx(program, file, ("input_ids", "attention_mask"))
            if dtype == "int8":
                quantize(file)
            found = verify.compare(model.wanted, replay(file, model.rows), model.rows)
            verify.refuse_beyond(found, bound, str(out), "use --dtype float32, or raise --tolerance")
            model.copy_settings(folder)
            made = {"path": str(out), "bytes": verify.size(folder, file.name), "dtype": dtype, "merged": model.merged}
            made |= {"read_by": model_card.version_of("onnxruntime"), **verify.figures(found, bound)}
            made |= {**model.held.told(found, partial(replay, file)), "note": "; ".join(model.notes)}
            use = model.use(_LOAD, _STEP)
        model_card.write(folder, run, made, title=f"ONNX, {dtype}", use=use, library="onnx")
    return made


def quantize(file: Path) -> None:
    """Quantizes the weights of a file's matrix products to 8 bits by row, in place; activations as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = file.with_name("float.onnx")
    data = file.with_name(file.name + ".data")
    import onnx

    onnx.save_model(onnx.load(file), whole)
    data.unlink(missing_ok=True)
    file.unlink()
    log = logging.getLogger()  # onnxruntime warns through the root logger, of what nobody here can change
    level = log.level
    log.setLevel(max(logging.ERROR, level))
    try:
        quantize_dynamic(whole, file, weight_type=QuantType.QInt8, per_channel=True, reduce_range=REDUCE_RANGE)
    finally:
        log.setLevel(level)
    whole.unlink()


def replay(file: Path, rows: list[Tensor]) -> list[Tensor]:
    """Logits [1, length, vocabulary] of rows of tokens by ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    fed = [{"input_ids": row.numpy(), "attention_mask": torch.ones_like(row).numpy()} for row in rows]
    return [torch.from_numpy(session.run(None, inputs)[0]) for inputs in fed]
