"""Operators that are one kernel on CUDA, against fp64 or the plain form on the CPU; which of them fails is in the error, and how to switch it off."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from preheat.ops import rowwise_cuda
from preheat.ops.distributed.dtensor_utils import Runs
from preheat.ops.losses.cross_entropy import CrossEntropy, sum_chunked_loss
from preheat.ops.optim.half_adamw import half_adamw_
from preheat.ops.optim.half_precision import MasterAdamW
from preheat.ops.optim.optimizers import StochasticAdamW
from preheat.ops.quantization import nf4
from preheat.ops.quantization.linear import Int4Linear, Int8Linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(4096, 1024), (5, 7), (300, 60)])
def test_nf4_is_dequantized_as_on_a_cpu(double: bool, shape: tuple[int, int]) -> None:
    packed = nf4.quantize(draw(*shape) * 0.02, double=double)
    there = [None if t is None else t.cuda() for t in (*packed, *nf4.build_tables())]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain = nf4.dequantize(packed, shape, dtype, nf4.build_tables())
        out = nf4.dequantize_by_triton(*there, dtype)[: plain.numel()].view(shape).cpu()  # type: ignore[arg-type]
        assert torch.equal(out, plain), "products and sums are rounded apart, as on a CPU"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated_silu_is_that_of_fp64(dtype: torch.dtype) -> None:
    a, b, grad = (draw(3, 5001, seed=n).mul(4).to(dtype) for n in range(3))
    wide = [t.double().requires_grad_() for t in (a, b)]
    truth = functional.silu(wide[0]) * wide[1]
    slopes = torch.autograd.grad(truth, wide, grad.double())
    close = 1e-6 if dtype == torch.float32 else 4e-3
    there = [t.cuda().requires_grad_() for t in (a, b)]
    out = rowwise_cuda.gated_silu(*there)
    assert relative(out, truth) < close
    for one, other in zip(torch.autograd.grad(out, there, grad.cuda()), slopes, strict=True):
        assert relative(one, other) < close
    given = grad.cuda()
    for one, other in zip(rowwise_cuda.gated_silu_backward_(given, *(t.detach() for t in there)), slopes, strict=True):
        assert relative(one, other) < close
    assert relative(given, truth) < close


@pytest.mark.parametrize("angles", [torch.bfloat16, torch.float32])
def test_rotary_embedding_is_that_of_fp64(angles: torch.dtype) -> None:
    q, k = (draw(2, 33, n, 128, seed=n).bfloat16().transpose(1, 2) for n in (8, 2))
    turn = draw(1, 33, 64, seed=9).repeat(1, 1, 2)
    cos, sin = turn.cos().to(angles), turn.sin().to(angles)
    wide = [t.double().requires_grad_() for t in (q, k)]
    truth = rowwise_cuda.rotary(*wide, cos.double(), sin.double())
    slopes = torch.autograd.grad(truth, wide, [t.detach() for t in truth])
    there = [t.cuda().requires_grad_() for t in (q, k)]
    ours = rowwise_cuda.rotary(*there, cos.cuda(), sin.cuda())
    back = torch.autograd.grad(ours, there, [t.detach().bfloat16().cuda() for t in truth])
    assert max(relative(one, other) for one, other in zip(ours + back, truth + slopes, strict=True)) < 4e-3


@pytest.mark.parametrize("four_bits", [False, True])
def test_adapters_together_are_as_close_to_fp32_as_each_alone(four_bits: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from preheat.ops.adapters.peft_layers import prevent_fp32_cast
    from preheat.techniques.fused_operators import fuse_operators
    from preheat.techniques.lora import add_lora
    from preheat.techniques.nf4 import quantize_to_nf4

    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512,
        vocab_size=500, attn_implementation="sdpa",
    )  # fmt: skip
    tokens = torch.arange(256).view(2, 128).cuda() % 499
    results = []
    for kind in ("fp32", "alone", "together"):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        if four_bits:
            quantize_to_nf4(model)
        add_lora(model, rank=8)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.05)
            elif kind != "fp32" and not p.requires_grad and p.dtype == torch.float32:
                p.data = p.data.bfloat16()
        model.cuda()
        if kind != "fp32":
            prevent_fp32_cast(model)
        if kind == "together":
            fuse_operators(model, rotary=True, adapters=True, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=kind != "fp32"):
            model(input_ids=tokens, labels=tokens).loss.backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    truth, alone, together = results
    assert relative(together, truth) < 1.1 * relative(alone, truth) + 1e-3


@pytest.mark.parametrize("kind", [StochasticAdamW, MasterAdamW])
def test_half_adamw_is_adamw_in_fp64(kind: Any) -> None:
    start, settings = draw(300, 700), {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    half = torch.nn.Parameter(start.bfloat16().cuda())
    exact = torch.nn.Parameter(half.detach().double())
    ours, theirs = kind([half], fused=True, **settings), torch.optim.AdamW([exact], **settings)
    for step in range(5):
        grad = draw(300, 700, seed=step + 1).bfloat16().cuda()
        ours.found_inf = torch.tensor(float(step == 2), device="cuda")
        half.grad, exact.grad = grad, grad.double()
        if step == 2:
            half.grad[3, 5] = float("inf")
            before = half.detach().clone()
            ours.step()
            assert torch.equal(half, before)
        else:
            ours.step()
            theirs.step()
    state = ours.state[half]
    assert float(state["step"]) == 4
    for name in ("exp_avg", "exp_avg_sq"):
        assert relative(state[name], theirs.state[exact][name]) < 1e-6
    assert relative(half, exact) < 0.01, "rounded four times"
    if kind is MasterAdamW:
        assert relative(state["master"], exact) < 1e-6
        assert torch.equal(half, state["master"].bfloat16())


def test_half_adamw_rounds_right_on_average_and_alike_again() -> None:
    count, results = 1 << 22, []
    for _ in range(2):
        p = torch.nn.Parameter(torch.ones(count, dtype=torch.bfloat16, device="cuda"))
        p.grad = torch.ones_like(p)
        StochasticAdamW([p], lr=1e-4, weight_decay=0.0, fused=True, seed=7, number=lambda: 3).step()
        results.append(p.detach())
    assert torch.equal(*results)
    assert float(1 - results[0].double().mean()) == pytest.approx(1e-4, rel=0.01)  # 3 standard deviations


def test_half_adamw_rounds_ranges_of_a_stack_as_the_whole() -> None:
    """Experts whose rows are sharded: one range of the full parameter for each, in one launch."""
    experts, rows, columns = 5, 8, 1111
    weight, grad = (draw(experts, rows, columns, seed=n).bfloat16().cuda() for n in (0, 1))
    group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}

    def updated(p: Tensor, slope: Tensor, runs: Runs | None) -> Tensor:
        state = {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] = torch.zeros((), device="cuda")
        half_adamw_(p, slope, state, group, None, seed=7, runs=runs)  # type: ignore[arg-type]
        return p

    whole = updated(weight.clone(), grad, None)
    assert not torch.equal(whole, weight)
    for first in range(0, rows, 2):
        share, slope = (t[:, first : first + 2].contiguous() for t in (weight, grad))
        runs = Runs(first * columns, experts, rows * columns, 2 * columns)
        assert torch.equal(updated(share, slope, runs), whole[:, first : first + 2])


@pytest.mark.parametrize("rows", [1, 5, 64, 65])
@pytest.mark.parametrize(("inputs", "group"), [(1024, 32), (1088, 64), (352, 32), (1000, 8)])
def test_four_bits_multiply_as_the_values_they_stand_for(rows: int, inputs: int, group: int) -> None:
    made = Int4Linear.of(torch.nn.Linear(inputs, 96), group=group, symmetric=False).cuda()
    x = draw(rows, inputs).bfloat16().cuda()
    with torch.no_grad():
        out = made(x)
    assert relative(out, functional.linear(x.double(), made.weight.double(), made.bias.double())) < 8e-3  # type: ignore[union-attr]
    assert (made._ready is not None) == (rows <= 64 and group != 8), (
        "aten's kernel takes few rows of groups that it knows"
    )


@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 96), (1000, 50), (20, 33)])
@pytest.mark.parametrize("rounded", [None, "dynamic"])
def test_eight_bits_multiply_as_the_values_they_stand_for(
    rows: int, inputs: int, outputs: int, rounded: str | None
) -> None:
    cpu = Int8Linear.of(torch.nn.Linear(inputs, outputs, bias=False), inputs=rounded)
    x = draw(rows, inputs).bfloat16()
    with torch.no_grad():
        plain = functional.linear(x.double(), cpu.weight.double()) if rounded is None else cpu(x)
        out = cpu.cuda()(x.cuda())
    assert relative(out, plain) < 8e-3


def test_the_heads_gradient_is_summed_in_fp32() -> None:
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(256, 4000, bias=False).cuda(), torch.randn(3000, 256, device="cuda")
    labels, errors = torch.randint(4000, (3000,), device="cuda"), []
    exact = head.weight.detach().double().requires_grad_()
    logits = functional.linear(hidden.bfloat16().double(), exact.bfloat16().double())
    (truth,) = torch.autograd.grad(functional.cross_entropy(logits, labels, reduction="sum"), exact)
    for cuda in (True, False):
        loss = functools.partial(sum_chunked_loss, rows=500, cuda=cuda)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            total = loss(hidden, head, CrossEntropy(), labels)
        (grad,) = torch.autograd.grad(total, head.weight)
        errors.append(relative(grad, truth))
    assert errors[0] < 0.01
    assert errors[0] <= errors[1] * 1.01


@pytest.mark.parametrize("bias", [False, True])
def test_loras_small_side_is_added_as_in_fp64(bias: bool) -> None:
    from preheat.ops.adapters.peft_layers import add_product

    base, x = torch.nn.Linear(256, 384, bias=bias).cuda(), draw(4, 100, 256).cuda()
    down, up = draw(16, 256, seed=1).cuda() / 16, draw(384, 16, seed=2).cuda().requires_grad_()
    exact = up.detach().double().requires_grad_()
    truth = functional.linear(x.double(), base.weight.double(), base.bias.double() if bias else None)
    truth = truth + 2 * functional.linear(functional.linear(x.double(), down.double()), exact)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.01)):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype != torch.float32):
            out = add_product(base(x), functional.linear(x, down) * 2, up)
        assert out.dtype == dtype
        (grad,) = torch.autograd.grad(out.float().square().sum(), up)
        (wanted,) = torch.autograd.grad(truth.square().sum(), exact, retain_graph=True)
        assert max(relative(out, truth), relative(grad, wanted)) < bound


def test_the_norm_and_its_gradients_are_those_of_fp64() -> None:
    from preheat.ops.fused_norm_gate import rms_norm

    x, weight, grad = draw(64, 300, seed=1), draw(300, seed=2), draw(64, 300, seed=3)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    truth = functional.rms_norm(exact[0], (300,), exact[1], 1e-5)
    wanted = torch.autograd.grad(truth, exact, grad.double())
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.01)):
        given = [t.to("cuda", dtype).requires_grad_() for t in (x, weight)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = rms_norm(*given, 1e-5)
        assert torch.cuda.memory_allocated() - before <= out.nbytes + 64 * 4 + 1024, (
            "kept: one number a row beside the result"
        )
        ours = torch.autograd.grad(out, given, grad.to("cuda", dtype))
        assert max(relative(a, b) for a, b in zip((out, *ours), (truth, *wanted), strict=True)) < bound
