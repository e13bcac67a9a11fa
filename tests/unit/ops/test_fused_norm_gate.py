"""RMSNorm and the gated activation that save only their inputs, against plain formulas in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import get_decompositions

from preheat.engine.builder import build
from preheat.ops import fused_norm_gate, rowwise_cpu
from preheat.ops.fused_norm_gate import gated_silu, rms_norm

from ...conftest import DEVICE, difference, tiny, uneven


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 50, 24), (7, 24), (2, 5, 3, 24)])
def test_the_norm_and_its_gradients_are_the_formula_s(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_norm_gate, "_CHUNK", 24 * 4)  # several pieces, the last one shorter
    monkeypatch.setattr(
        rowwise_cpu, "find_compiler", lambda: None
    )  # tests/unit/ops/test_rowwise_cpu.py has the C++ kernel
    x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.rand(24).add(0.5).to(dtype)
    found = []
    for function, exact in ((rms_norm, dtype), (plain_norm, torch.float64)):
        a, w = x.detach().to(exact).requires_grad_(), weight.detach().to(exact).requires_grad_()
        out = function(a, w, 1e-5)
        out.backward(grad.to(exact))
        found.append({"out": out.detach().double(), "x": a.grad.double(), "weight": w.grad.double()})  # type: ignore[union-attr]
    assert difference(found[0], found[1]) < (1e-6 if dtype == torch.float32 else 6e-3)


class OnCuda(torch.Tensor):
    """A CPU tensor that takes the path of CUDA."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_on_cuda_the_norm_is_one_kernel_of_torch(
    dtype: torch.dtype, weights: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_shape = (7, 1)  # in fp32
    x, grad = torch.randn(7, 24).to(dtype), torch.randn(7, 24).to(dtype)
    weight = torch.rand(24).add(0.5).to(weights)
    wide, exact = x.double().requires_grad_(), weight.double().requires_grad_()
    truth = plain_norm(wide, exact, 1e-5)
    truth.backward(grad.double())
    here = x.as_subclass(OnCuda)
    called = []
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
        operator = getattr(torch.ops.aten, name).default

        def decomposed(*args: Any, operator: Any = operator) -> Any:
            """As torch decomposes it: a CPU has no such kernel. That of CUDA takes one dtype."""
            called.append(operator.name())
            assert {t.dtype for t in args if torch.is_tensor(t) and t.shape != scale_shape} == {dtype}
            return get_decompositions([operator])[operator](*args)

        monkeypatch.setattr(torch.ops.aten, name, decomposed)
    out, scale = fused_norm_gate._norm._init_fn(here, weight, 1e-5, dtype)
    by_x, by_weight = fused_norm_gate._norm_backward._init_fn(grad, here, scale, weight, True)
    assert called == ["aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"]
    assert (out.dtype, by_x.dtype, by_weight.dtype) == (dtype, dtype, weights)
    assert scale.shape == scale_shape
    ours = {"out": out.double(), "x": by_x.double(), "weight": by_weight.double()}
    theirs = {"out": truth.detach(), "x": wide.grad, "weight": exact.grad}
    assert difference(ours, theirs) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_without_a_compiler_the_gate_is_torch_s_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise_cpu, "find_compiler", lambda: None)
    for dtype in (torch.float32, torch.bfloat16):
        a, b, grad = (torch.randn(4, 33).to(dtype).requires_grad_() for _ in range(3))
        ours, theirs = gated_silu(a, b), torch.nn.functional.silu(a) * b
        assert torch.equal(ours, theirs)
        for one, other in zip(
            torch.autograd.grad(ours, (a, b), grad), torch.autograd.grad(theirs, (a, b), grad), strict=True
        ):
            assert torch.equal(one, other)


def test_torch_may_transform_the_norm() -> None:
    arguments = (torch.randn(2, 5, 8, requires_grad=True), torch.ones(8, requires_grad=True), 1e-5, torch.float32)
    torch.library.opcheck(torch.ops.preheat.rms_norm.default, arguments)


@pytest.mark.parametrize(("precision", "share"), [("fp32", 0.9), ("bf16", 0.8), ("bf16_pure", 0.85)])
def test_less_is_kept_for_the_backward_pass(precision: str, share: float) -> None:
    kept: dict[str, int] = {}
    losses: dict[str, float] = {}
    for more in ("", ", fused_operators: {}"):
        made = build(
            tiny(f"{{efficient_attention: {{}}, mixed_precision: {{mode: {precision}}}{more}}}"),
            vocabulary=96,
            device=DEVICE,
        )
        own = {p.untyped_storage().data_ptr() for _, p in made.parameters()}
        sizes: dict[int, int] = {}

        def pack(t: torch.Tensor, own: set[int] = own, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if t.untyped_storage().data_ptr() not in own:
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        from preheat.engine.step import forward

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            losses[more] = float(forward(made, uneven()).total.detach())
        kept[more] = sum(sizes.values())
    assert kept[", fused_operators: {}"] < share * kept[""]
    assert losses[", fused_operators: {}"] == pytest.approx(losses[""], rel=1e-6 if precision == "fp32" else 1e-2)
