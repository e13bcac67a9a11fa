"""Image classifiers of transformers (MobileNetV2, EfficientNet, MobileViT …) for devices: ONNX and ExecuTorch, also in 8 bits calibrated.

Calibrated 8 bits: a few hundred images go through the model, and the ranges that activations were seen to take are fixed in the file;
weights are quantized by channel. Each file is run again by its own runtime over the images, and held to `verify.BOUNDS["vision"]`.
Source: onnxruntime.quantization.quantize_static; torchao's pt2e quantization with ExecuTorch's XNNPACKQuantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from preheat.compress.export import trace, verify
from preheat.compress.export.merged_model import require

__all__ = ["Scorer", "open_executorch", "open_onnx", "replay_executorch", "replay_onnx", "to_executorch", "to_onnx"]

Scorer = Callable[[Tensor], Tensor]


class _Scores(nn.Module):
    """pixel_values [batch, channels, height, width] to scores [batch, classes]."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model.eval()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


def to_onnx(
    model: Any, file: str | Path, images: Tensor, *, int8: bool = False, tolerance: float | None = None
) -> verify.Difference:
    """Writes `file` (.onnx) with an open batch: input pixel_values, output logits.

    Args:
        model: a transformers model for image classification, in fp32 on the CPU; it is set to evaluation.
        images: [n, channels, height, width] fp32, as its image processor makes them: what is calibrated on and compared over.
        tolerance: in place of the bounds.

    Returns:
        How far the file's scores are from the model's over the images.

    Raises:
        RunError: onnx, onnxscript or onnxruntime is not installed; an operator has no form; beyond the bound (no file is left).

    Example:
        >>> to_onnx(model, "digits.onnx", images, int8=True).agreement           # doctest: +SKIP
        0.994
    """
    require("onnx", "onnx", "onnxscript", "onnxruntime")
    file, module = Path(file), _Scores(model)
    whole = file.with_name(file.name + ".float") if int8 else file
    with torch.no_grad():
        program = torch.export.export(module, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    trace.to_onnx(program, whole, ("pixel_values",), beside=False)
    if int8:
        _calibrated(whole, file, images)
        whole.unlink()
    return _held(module, replay_onnx(file, images), file, images, int8=int8, tolerance=tolerance)


def _calibrated(whole: Path, file: Path, images: Tensor) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(images.split(8))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.left, None)
            return None if batch is None else {"pixel_values": batch.numpy()}

    ready = whole.with_name(whole.name + ".ready")
    quant_pre_process(whole, ready, skip_symbolic_shape=True)
    # Products of activations (squeeze and excite, swish) stay in fp32: in 8 bits ONNX Runtime's make EfficientNet's scores noise.
    products = [node.name for node in onnx.load(ready).graph.node if node.op_type == "Mul"]
    quantize_static(
        ready,
        file,
        Images(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=trace.REDUCE_RANGE,
        nodes_to_exclude=products,
    )
    ready.unlink()


def open_onnx(file: str | Path) -> Scorer:
    """A file in ONNX Runtime on the CPU: pixels [n, channels, height, width] to scores [n, classes]."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(None, {"pixel_values": pixels.numpy()})[0])


def replay_onnx(file: str | Path, images: Tensor) -> Tensor:
    """Scores [n, classes] of images by ONNX Runtime on the CPU."""
    run = open_onnx(file)
    return torch.cat([run(part) for part in images.split(8)])


def to_executorch(
    model: Any, file: str | Path, images: Tensor, *, int8: bool = False, tolerance: float | None = None
) -> verify.Difference:
    """Writes `file` (.pte) on XNNPACK for one image at a time; arguments, result and errors as of `to_onnx`."""
    require("executorch", "executorch", "torchao")
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from torch._export.verifier import SpecViolationError

    file, module = Path(file), _Scores(model)
    with torch.no_grad():
        program = torch.export.export(module, (images[:1],))
        if int8:
            program = torch.export.export(_observed(program, images), (images[:1],))
        try:
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
        except (RuntimeError, SpecViolationError) as error:
            if (known := trace.refused(error, "executorch", "use ONNX")) is None:
                raise
            raise known from None
    with file.open("wb") as written:
        lowered.write_to_file(written)
    return _held(module, replay_executorch(file, images), file, images, int8=int8, tolerance=tolerance)


def _observed(program: torch.export.ExportedProgram, images: Tensor) -> nn.Module:
    """The graph with its weights quantized and its activations' ranges fixed by what the images made of them."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(program.module(), quantizer)
    for image in images.split(1):
        prepared(image)
    return convert_pt2e(prepared)


def open_executorch(file: str | Path) -> Scorer:
    """A program in ExecuTorch's runtime: pixels [1, channels, height, width] to scores [1, classes]."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(Path(file))
    forward = program.load_method("forward")
    return lambda pixels: forward.execute((pixels.contiguous(),))[0].clone()


def replay_executorch(file: str | Path, images: Tensor) -> Tensor:
    """Scores [n, classes] of images by ExecuTorch's runtime."""
    run = open_executorch(file)
    return torch.cat([run(image) for image in images.split(1)])


def _held(
    module: nn.Module, found: Tensor, file: Path, images: Tensor, *, int8: bool, tolerance: float | None
) -> verify.Difference:
    with torch.no_grad():
        wanted = torch.cat([module(part) for part in images.split(8)])
    difference = verify.compare([wanted[:, None]], [found[:, None]])
    bound = verify.bound_of("vision", "int8" if int8 else "float32", tolerance)
    if difference.beyond(bound):
        file.unlink()
    verify.refuse_beyond(
        difference, bound, str(file), "calibrate on more images like those to come, or raise the tolerance"
    )
    return difference
