"""The C++ kernels of cross entropy, RMSNorm, gated SiLU and rotary embedding against plain formulas in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients
from preheat.hardware import cpp_build
from preheat.ops import rowwise_cpu
from preheat.ops.fused_norm_gate import gated_silu, rms_norm
from preheat.ops.losses.cross_entropy import CrossEntropy
from preheat.planning.dispatch_recorder import Recorder

from ...conftest import DEVICE, tiny, uneven

pytestmark = pytest.mark.skipif(cpp_build.find_compiler() is None, reason="no C++ compiler")

ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 4e-3}


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def agree(kernel: Callable[..., Tensor], plain: Callable[..., Tensor], tensors: Sequence[Tensor], trained: int) -> None:
    """Compares results and gradients by the first `trained` tensors, with those of `plain` in fp64."""
    results = []
    for function, dtype in ((kernel, tensors[0].dtype), (plain, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_(n < trained) for n, t in enumerate(tensors)]
        out = function(*leaves)
        torch.manual_seed(1)
        grad = torch.randn(out.shape).to(tensors[0].dtype).to(dtype)
        results.append([out.detach(), *torch.autograd.grad(out, leaves[:trained], grad)])
    assert max(map(error, *results)) < ROUNDING[tensors[0].dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("pieces", [1, 17, 3000])
def test_cross_entropy_and_its_gradient(pieces: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, labels = (torch.randn(9, pieces) * 8).to(dtype), torch.randint(pieces, (9,))
    labels[3] = -100
    exact = logits.double().requires_grad_()
    losses = functional.cross_entropy(exact, labels, reduction="none")
    losses.sum().backward()
    values, factor = CrossEntropy().value_and_grad_(logits, labels)
    assert (values - losses).abs().max() < 1e-4
    assert factor.tolist() == (labels != -100).tolist()
    assert (logits.double() - exact.grad).norm() <= ROUNDING[dtype] * max(float(exact.grad.norm()), 1e-9)  # type: ignore[union-attr, operator]
    assert not logits[3].any()


def test_extreme_logits_and_wrong_labels() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [float("nan"), 0, 0], [-1e4, 1e4, 0]])
    losses, _ = CrossEntropy().value_and_grad_(logits, torch.tensor([0, 1, 0]))
    assert losses[0] == 0
    assert losses[1].isnan()
    assert losses[2] == 2e4
    for wrong in (3, -1):
        with pytest.raises(IndexError, match=f"label {wrong} is no column of 3 logits"):
            CrossEntropy().value_and_grad_(torch.zeros(2, 3), torch.tensor([-100, wrong]))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_norm_and_gate(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 200, 24).to(dtype), torch.rand(24).add(0.5).to(dtype)  # more rows than a part has
    agree(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w,
        (x, weight),
        2,
    )
    a, b = (torch.randn(3, 5, 999).mul(6).to(dtype) for _ in range(2))
    agree(gated_silu, lambda a, b: functional.silu(a) * b, (a, b), 2)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 2])
def test_rotary_embedding(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 7, n, 10).to(dtype).transpose(1, 2) for n in (4, 2))
    angles = torch.randn(rows, 7, 5).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)

    for which, x in enumerate((q, k)):
        agree(lambda x, c, s, n=which: rowwise_cpu.rotary(*((x, k) if n == 0 else (q, x)), c, s)[n], plain, (x, cos, sin), 1)  # type: ignore[misc] # fmt: skip


@pytest.mark.parametrize("mode", ["fp32", "bf16_weights"])
def test_a_step_uses_the_kernels_and_keeps_less(mode: str) -> None:
    peaks, losses = [], []
    for more in (", fused_operators: {}", ""):
        made = build(
            tiny(f"{{mixed_precision: {{mode: {mode}}}, chunked_loss: {{rows: 7}}{more}}}"),
            vocabulary=96,
            device=DEVICE,
        )
        recorder = Recorder(rounding=64)
        with recorder:
            losses.append(float(accumulate_gradients(made, [uneven()]).total))
        if more:
            names = {kernel.operator for kernel in recorder.kernels}
            assert {"preheat::cross_entropy_", "preheat::rotary", "preheat::gated_silu"} <= names
        alive = peak = 0
        for _, size, _ in recorder.log:
            alive += size
            peak = max(peak, alive)
        peaks.append(peak)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if mode == "fp32" else 1e-2)
    assert peaks[0] < peaks[1]


def test_operators_have_fake_forms() -> None:
    with FakeTensorMode():
        a = torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        gated_silu(a, a).sum().backward()
        assert a.grad is not None
    torch.library.opcheck(torch.ops.preheat.rotary.default, (torch.randn(1, 2, 3, 4), *torch.randn(2, 1, 3, 4), True))
    torch.library.opcheck(torch.ops.preheat.cross_entropy_.default, (torch.randn(2, 3), torch.tensor([0, 2])))
