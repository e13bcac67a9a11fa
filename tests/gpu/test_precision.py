"""Half precision and fp8 on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from preheat import recipe as recipes
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update

from ..conftest import DEVICE, difference, tiny, uneven
from .conftest import copy_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    ("techniques", "bound"),
    [
        ("{mixed_precision: {mode: fp32, tf32: true}}", 0.01),
        ("{mixed_precision: {mode: fp16}}", 0.01),
        ("{mixed_precision: {mode: fp16_master}}", 0.02),
        ("{mixed_precision: {mode: bf16_master}}", 0.05),
        ("{mixed_precision: {mode: bf16, keep_fp32: [norm, lm_head]}}", 0.05),
        ("{mixed_precision: {mode: bf16}, fp8: {recipe: tensorwise}}", 0.2),
        ("{mixed_precision: {mode: bf16}, fp8: {recipe: rowwise}}", 0.2),
    ],
)
def test_a_step_agrees_with_fp32_on_the_cpu(techniques: str, bound: float) -> None:
    from preheat.hardware.probe import probe

    if "fp8" in techniques and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no fp8 matmuls")
    if "tf32" in techniques and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this device has no TF32")
    recipe = tiny(techniques)
    cuda = build(recipe, vocabulary=96, device=probe("cuda"))
    cpu = build(recipes.override(recipe, "techniques={}"), vocabulary=96, device=DEVICE)
    copy_weights(cpu, cuda)
    for b in (cuda, cpu):
        accumulate_gradients(b, [uneven()])
    assert difference({n: p.grad.cpu() for n, p in cuda.parameters()}, {n: p.grad for n, p in cpu.parameters()}) < bound
    assert update(cuda, 0.01).tolist()[1] == 1
