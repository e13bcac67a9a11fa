"""Export of transformers' image classifiers (MobileNetV2, EfficientNet, MobileViT …) to ONNX and ExecuTorch.

Both support fp32 and int8. int8 is static: activation ranges are calibrated on a few hundred images and fixed in the
file, weights are quantized per channel. Each file is run again by its own runtime over the images, and checked against
`verify.BOUNDS["vision"]`.
Source: onnxruntime.quantization.quantize_static; torchao's pt2e quantization with ExecuTorch's XNNPACKQuantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from preheat.compress.export import trace, verify
from preheat.compress.export.merged_model import require
from preheat.models.torchao_import import silence_torchao

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

__all__ = [
    "Scorer",
    "open_executorch",
    "open_onnx",
    "replay_executorch",
    "replay_onnx",
    "write_executorch",
    "write_onnx",
]

Scorer = Callable[[Tensor], Tensor]


class _Scores(nn.Module):
    """Maps pixel_values [batch, channels, height, width] to logits [batch, classes]."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        # Eval mode: batch norm must use its running statistics, not those of a batch.
        self.model = model.eval()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


def write_onnx(
    model: PreTrainedModel, file: str | Path, images: Tensor, *, int8: bool = False, tolerance: float | None = None
) -> verify.Difference:
    """Writes `file` (.onnx) with a dynamic batch size: input pixel_values, output logits.

    Args:
        model: a transformers model for image classification, in fp32 on the CPU; it is set to eval mode.
        images: [n, channels, height, width] fp32 from its image processor, for calibration and comparison.
        tolerance: replaces the bounds.

    Returns:
        Difference of the file's and the model's logits over the images.

    Raises:
        RunError: onnx, onnxscript or onnxruntime is not installed; an operator is not supported; the difference
            exceeds the bound (no file is left).

    Example:
        >>> write_onnx(model, "digits.onnx", images, int8=True).agreement  # doctest: +SKIP
        0.994
    """
    require("onnx", "onnx", "onnxscript", "onnxruntime")
    file, module = Path(file), _Scores(model)
    # int8 is computed from the fp32 file.
    unquantized = file.with_name(file.name + ".float") if int8 else file
    with torch.no_grad():
        # Two images, because torch.export specializes a dimension of size 1.
        program = torch.export.export(module, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    trace.write_onnx(program, unquantized, ("pixel_values",), beside=False)
    if int8:
        _calibrate_model(unquantized, file, images)
        unquantized.unlink()
    return _check_bound(module, replay_onnx(file, images), file, images, int8=int8, tolerance=tolerance)


def _calibrate_model(unquantized: Path, file: Path, images: Tensor) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(images.split(8))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.left, None)
            return None if batch is None else {"pixel_values": batch.numpy()}

    # Fuses and folds nodes first, so that fused ones share a quantization.
    preprocessed = unquantized.with_name(unquantized.name + ".ready")
    quant_pre_process(unquantized, preprocessed, skip_symbolic_shape=True)
    # Products of activations (squeeze-and-excite, swish) stay in fp32: int8 ruins EfficientNet's logits.
    products = [node.name for node in onnx.load(preprocessed).graph.node if node.op_type == "Mul"]
    quantize_static(
        preprocessed,
        file,
        Images(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=trace.REDUCE_RANGE,
        nodes_to_exclude=products,
    )
    preprocessed.unlink()


def open_onnx(file: str | Path) -> Scorer:
    """Opens a file in ONNX Runtime on the CPU: pixels [n, channels, height, width] to logits [n, classes]."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # As many threads as torch has, so that times can be compared.
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(None, {"pixel_values": pixels.numpy()})[0])


def replay_onnx(file: str | Path, images: Tensor) -> Tensor:
    """Returns the logits [n, classes] of images by ONNX Runtime on the CPU."""
    run = open_onnx(file)
    return torch.cat([run(part) for part in images.split(8)])


def write_executorch(
    model: PreTrainedModel, file: str | Path, images: Tensor, *, int8: bool = False, tolerance: float | None = None
) -> verify.Difference:
    """Writes `file` (.pte) on XNNPACK for one image at a time; arguments, result and errors as in `write_onnx`."""
    require("executorch", "executorch", "torchao")
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from torch._export.verifier import SpecViolationError

    file, module = Path(file), _Scores(model)
    with torch.no_grad():
        program = torch.export.export(module, (images[:1],))
        if int8:
            # Quantization returns a module, which is exported again.
            program = torch.export.export(_quantize_graph(program, images), (images[:1],))
        try:
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
        except (RuntimeError, SpecViolationError) as error:
            if (unsupported := trace.explain_export_error(error, "executorch", "use ONNX")) is None:
                raise
            raise unsupported from None
    with file.open("wb") as stream:
        lowered.write_to_file(stream)
    return _check_bound(module, replay_executorch(file, images), file, images, int8=int8, tolerance=tolerance)


def _quantize_graph(program: torch.export.ExportedProgram, images: Tensor) -> nn.Module:
    """Quantizes the graph's weights, and its activations with ranges calibrated on the images."""
    with silence_torchao():
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(program.module(), quantizer)
    # The exported graph has a batch size of one.
    for image in images.split(1):
        prepared(image)
    return convert_pt2e(prepared)


def open_executorch(file: str | Path) -> Scorer:
    """Opens a program in ExecuTorch's runtime: pixels [1, channels, height, width] to logits [1, classes]."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(Path(file))
    forward = program.load_method("forward")
    return lambda pixels: forward.execute((pixels.contiguous(),))[0].clone()


def replay_executorch(file: str | Path, images: Tensor) -> Tensor:
    """Returns the logits [n, classes] of images by ExecuTorch's runtime."""
    run = open_executorch(file)
    return torch.cat([run(image) for image in images.split(1)])


def _check_bound(
    module: nn.Module, logits: Tensor, file: Path, images: Tensor, *, int8: bool, tolerance: float | None
) -> verify.Difference:
    with torch.no_grad():
        expected = torch.cat([module(part) for part in images.split(8)])
    # (n, 1, classes): each image is a row of one position.
    difference = verify.compare([expected[:, None]], [logits[:, None]])
    bound = verify.choose_bound("vision", "int8" if int8 else "float32", tolerance)
    if difference.beyond(bound):
        # No file remains that a user might take for a checked one.
        file.unlink()
    verify.refuse_beyond(
        difference, bound, str(file), "calibrate on more images like those to come, or raise the tolerance"
    )
    return difference
