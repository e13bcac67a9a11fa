"""Image classifiers as files for devices: run again by the format's own runtime, also calibrated in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from preheat.compress.export import image_classifier

from .test_export_formats import largest_code
from .test_image_classifiers import small


def quadrants(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images of which one quarter is bright, and which."""
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 32, 32, generator=g) * 0.3
    which = torch.randint(4, (count,), generator=g)
    for image, quarter in zip(images, which.tolist(), strict=True):
        row, column = 16 * (quarter // 2), 16 * (quarter % 2)
        image[:, row : row + 16, column : column + 16] += 1.5
    return images, which


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.MobileNetV2Config(
        depth_multiplier=0.25, min_depth=8, image_size=32, num_labels=4, classifier_dropout_prob=0.0
    )
    made = transformers.MobileNetV2ForImageClassification(config)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    for step in range(30):
        images, which = quadrants(32, step)
        loss = made(pixel_values=images, labels=which).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return made.eval()


@pytest.mark.slow
def test_mobilenet_as_onnx_in_fp32_and_calibrated_in_8_bits(model: Any, tmp_path: Path) -> None:
    images, _ = quadrants(32, 100)
    whole = image_classifier.write_onnx(model, tmp_path / "whole.onnx", images)
    assert whole.share() < 1e-4
    small = image_classifier.write_onnx(model, tmp_path / "small.onnx", images, int8=True)
    assert small.agreement >= 0.8
    assert 1e-4 < small.share() < 0.15  # 0.109 where onnxruntime multiplies with AVX512 and AMX
    assert 32 < largest_code(tmp_path / "small.onnx") <= 64
    assert (tmp_path / "small.onnx").stat().st_size < 0.6 * (tmp_path / "whole.onnx").stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small.onnx", "whole.onnx"]


@pytest.mark.filterwarnings("ignore")  # ExecuTorch's own, of many kinds
@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_mobilenet_as_an_executorch_program(model: Any, tmp_path: Path, int8: bool) -> None:
    pytest.importorskip("executorch", reason="ExecuTorch is not installed here (pip install 'preheat[executorch]')")
    images, _ = quadrants(16, 100)
    found = image_classifier.write_executorch(model, tmp_path / "model.pte", images, int8=int8)
    assert found.share() < (0.5 if int8 else 1e-4)


@pytest.mark.slow
def test_an_efficientnet_in_8_bits_keeps_its_scores(tmp_path: Path) -> None:
    model, (images, _) = small("efficientnet"), quadrants(32, 100)
    found = image_classifier.write_onnx(model, tmp_path / "small.onnx", images, int8=True)
    assert found.share() < 0.3
    assert (tmp_path / "small.onnx").stat().st_size < 0.6 * sum(p.nbytes for p in model.parameters())
