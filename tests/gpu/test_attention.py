"""Every attention kernel of a CUDA device against fp64, forward and backward. Not yet run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks._gpu.attention import Case, cases, run
from preheat.core import MaskSpec
from preheat.ops.attention.sdpa import reference_attention
from preheat.techniques.efficient_attention import attend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PACKAGES = {"flash2": "flash_attn", "flash3": "flash_attn_interface"}
DOCUMENTS = ((300,), (150, 20, 130), (1, 299))


@pytest.mark.parametrize("case", cases("cuda"), ids=str)
def test_kernels_agree_with_fp64(case: Case) -> None:
    if case.kernel == "cudnn" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("cuDNN's attention needs an Ampere GPU")
    errors = run(case, "cuda")
    assert max(errors.values()) < case.bound, errors


@pytest.mark.parametrize("mask", [MaskSpec(documents=DOCUMENTS, window=50, global_tokens=4)], ids=str)
@pytest.mark.parametrize("kernel", ["blocks", "flex"])
def test_global_tokens_agree_with_the_plain_form(kernel: str, mask: MaskSpec) -> None:
    _agrees(kernel, mask)


@pytest.mark.parametrize("mask", [MaskSpec(), MaskSpec(window=70), MaskSpec(documents=DOCUMENTS, window=70)], ids=str)
@pytest.mark.parametrize("kernel", ["flash2", "flash3"])
def test_packages_agree_with_the_plain_form(kernel: str, mask: MaskSpec) -> None:
    if find_spec(PACKAGES[kernel]) is None:
        pytest.skip(f"{PACKAGES[kernel]} is not installed")
    if kernel == "flash3" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("flash3 needs a Hopper GPU")
    _agrees(kernel, mask)


def _agrees(kernel: str, mask: MaskSpec) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(3, heads, 300, 64, device="cuda", requires_grad=True) for heads in (4, 2, 2)]
    rounded = [t.detach().bfloat16().requires_grad_() for t in exact]
    outs: list[Any] = [
        reference_attention(*exact, mask, 0.125),
        attend(*rounded, mask=mask, scale=0.125, kernel=kernel),
    ]
    weight = torch.randn_like(outs[0])
    grads = [
        torch.autograd.grad(out, tensors, weight.to(out.dtype))
        for out, tensors in zip(outs, (exact, rounded), strict=True)
    ]
    for ours, truth in zip((outs[1].detach(), *grads[1]), (outs[0].detach(), *grads[0]), strict=True):
        assert float((ours.float() - truth).norm() / truth.norm()) < 0.02
