"""The C++ kernel of causal attention against the plain form in fp64, and what a dry run sees of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from preheat.core import MaskSpec
from preheat.hardware import cpp_build
from preheat.ops.attention import causal_cpu
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.sdpa import reference_attention
from preheat.planning.dispatch_recorder import Recorder

pytestmark = pytest.mark.skipif(cpp_build.find_compiler() is None, reason="no C++ compiler")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def inputs(
    rows: int, heads: int, shared: int, length: int, width: int, dtype: torch.dtype, *, stored_by_heads: bool = False
) -> list[Tensor]:
    """q, k, v and a gradient, as views of [rows, length, heads, width] unless they are stored by heads."""
    torch.manual_seed(0)
    shapes = [(rows, length, n, width) for n in (heads, shared, shared, heads)]
    views = [torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes]
    return [t.contiguous() for t in views] if stored_by_heads else views


def results(kernel: Any, tensors: list[Tensor], mask: MaskSpec) -> list[Tensor]:
    *leaves, grad = (t.detach().requires_grad_() for t in tensors)
    out = kernel(*leaves, mask, 0.3)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]


def largest_error(tensors: list[Tensor], mask: MaskSpec) -> float:
    exact = results(reference_attention, [t.double() for t in tensors], mask)
    pairs = zip(results(attend_blockwise, tensors, mask), exact, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape",  # rows, heads, shared heads, length, width; a block has 48 queries
    [
        (2, 4, 4, 48, 48),
        (1, 4, 2, 131, 64),
        (2, 3, 1, 97, 16),
        (1, 2, 2, 47, 32),
        (1, 2, 1, 200, 80),
        (1, 1, 1, 2, 128),
    ],
    ids=str,
)
def test_the_kernel_agrees_with_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for by_heads in (False, True):
        tensors = inputs(*shape, dtype, stored_by_heads=by_heads)
        assert causal_cpu.is_supported(*tensors[:3])
        assert largest_error(tensors, MaskSpec()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_documents_agree_with_fp64(dtype: torch.dtype) -> None:
    mask = MaskSpec(documents=((150, 20, 130), (1, 299)))
    assert largest_error(inputs(2, 4, 2, 300, 16, dtype), mask) < TOLERANCE[dtype]


def test_extreme_scores_and_expanded_gradients() -> None:
    q, k, v, _ = inputs(1, 2, 2, 100, 16, torch.float32)
    expanded = torch.ones(()).expand(q.shape)
    assert largest_error([q * 300, k, v, expanded], MaskSpec()) < 1e-4
    q[0, 0, 50] = float("nan")
    out = attend_blockwise(q, k, v, MaskSpec(), 0.3)
    assert out[0, 0, 50].isnan().all()
    assert out[0, 0, :50].isfinite().all()
    assert out[0, 1].isfinite().all()


def test_results_do_not_depend_on_the_number_of_threads(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    tensors, both = inputs(2, 4, 2, 100, 16, torch.bfloat16), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        both.append(results(attend_blockwise, tensors, MaskSpec()))
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 8, 24), torch.float32),
        ((1, 1, 1, 8, 16), torch.float64),
        ((1, 1, 1, 8, 272), torch.float32),
        ((1, 1, 1, causal_cpu.UP_TO + 1, 16), torch.float32),
    ],
    ids=str,
)
def test_other_tensors_are_not_served(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert not causal_cpu.is_supported(*inputs(*shape, dtype)[:3])


def test_without_a_compiler_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(1, 4, 2, 131, 16, torch.float32)
    native = results(attend_blockwise, tensors, MaskSpec())
    monkeypatch.setattr(causal_cpu, "find_compiler", lambda: None)
    slow = results(attend_blockwise, tensors, MaskSpec())
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(native, slow, strict=True)) < 1e-6


def test_a_dry_run_counts_products_and_scratch() -> None:
    recorder = Recorder(rounding=1)
    with FakeTensorMode(), recorder:
        q, k, v = (torch.randn(2, n, 300, 16, requires_grad=True) for n in (4, 2, 2))
        attend_blockwise(q, k, v, MaskSpec(), 0.3).sum().backward()
    forward, backward = sorted((k for k in recorder.kernels if k.flops), key=lambda kernel: kernel.flops)
    assert forward.operator == "preheat::causal_attention"
    assert forward.flops == 4 * 2 * 4 * 300**2 * 16
    assert backward.operator == "preheat::causal_attention_backward"
    assert backward.flops * 2 == forward.flops * 5
