"""Liger's kernels, compiled layers and the kernels of the chunked loss on a CUDA device, against the plain step there."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients

from ..conftest import difference, tiny, uneven
from .conftest import copy_weights

LIGER = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    "techniques",
    [
        "{compile: {}}",
        "{compile: {}, activation_checkpointing: {}, mixed_precision: {}, efficient_attention: {}}",
        "{chunked_loss: {kernel: torch}}",
        pytest.param("{chunked_loss: {kernel: liger}}", marks=LIGER),
        pytest.param("{liger: {loss: true}}", marks=LIGER),
        pytest.param("{liger: {}, mixed_precision: {mode: bf16_weights}, efficient_attention: {}}", marks=LIGER),
    ],
)
def test_a_step_agrees_with_the_plain_one(techniques: str) -> None:
    from preheat.hardware.probe import probe

    other, plain = (build(tiny(t), vocabulary=96, device=probe("cuda")) for t in (techniques, "{}"))
    copy_weights(plain, other)
    for b in (other, plain):
        accumulate_gradients(b, [uneven()])
    bound = 0.05 if "mixed_precision" in techniques else 1e-3
    assert difference({n: p.grad for n, p in other.parameters()}, {n: p.grad for n, p in plain.parameters()}) < bound
