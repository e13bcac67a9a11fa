"""Optimizers with little state against slow references of their published updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from preheat.ops.optim.apollo import Apollo
from preheat.ops.optim.low_bit_adamw import LowBitAdamW, _Tables, code_book, dequantize, quantize

from .test_optimizers import near, run


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_code_book_is_what_the_papers_define(bits: Any, signed: bool) -> None:
    book = code_book(bits, signed=signed)
    assert len(set(book)) == 2**bits
    assert max(book) == 1
    if bits == 4 and not signed:
        assert 0 not in book
        return
    assert 0 in book
    decade = [v for v in book if 0.1 < v < 1]
    assert len(decade) == 2 ** (bits - 1 - signed)  # what is left after the sign and the bit that ends the exponent
    assert len([v for v in book if 0.01 < v < 0.1]) == len(decade) / 2
    assert decade[1] - decade[0] == pytest.approx(0.9 / len(decade))
    assert (sum(v < 0 for v in book) == sum(v > 0 for v in book) - 1) == signed


@pytest.mark.parametrize("count", [1000, 896])
@pytest.mark.parametrize(("bits", "signed"), [(8, True), (8, False), (4, True), (4, False)])
def test_codes_are_the_nearest_and_blocks_are_scaled_by_their_largest(bits: Any, signed: bool, count: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(count) * torch.logspace(0, -6, count)
    x = x if signed else x.abs()
    x[128:256] = 0
    tables = _Tables(bits, signed=signed, device="cpu")
    codes, scales = quantize(x, tables, 128)
    assert (codes.dtype, codes.numel()) == (torch.uint8, count * bits // 8)
    got = dequantize(codes, scales, tables, 128)
    book = torch.tensor(code_book(bits, signed=signed), dtype=torch.float64)
    for begin in range(0, count, 128):
        block = x[begin : begin + 128].double()
        largest = block.abs().max()
        assert float(scales[begin // 128]) == float(largest)
        best = (block[:, None] - book * largest).abs().min(dim=1).values
        error = (got[begin : begin + 128].double() - block).abs()
        assert bool((error <= best + block.abs() * 2**-10 + largest * 2**-24).all()), (
            "the nearest, up to fp16's rounding"
        )


def _reference(w: Tensor, grads: list[Tensor], bits: Any, block: int, **s: Any) -> Tensor:
    """Algorithm 1 of both papers: dequantize, AdamW, quantize; element by element in fp64."""
    w = w.double().flatten()
    (b1, b2), books = s["betas"], [torch.tensor(code_book(bits, signed=k), dtype=torch.float64) for k in (True, False)]
    moments = [torch.zeros_like(w), torch.zeros_like(w)]
    for t, g in enumerate((g.double().flatten() for g in grads), start=1):
        moments = [b1 * moments[0] + (1 - b1) * g, b2 * moments[1] + (1 - b2) * g * g]
        m, v = moments[0] / (1 - b1**t), moments[1] / (1 - b2**t)
        w = w * (1 - s["lr"] * s["weight_decay"]) - s["lr"] * m / (v.sqrt() + s["eps"])
        for i, book in enumerate(books):
            for begin in range(0, w.numel(), block):
                part = moments[i][begin : begin + block]
                scale = part.abs().max()
                part.copy_(book[(part[:, None] / scale - book).abs().argmin(dim=1)] * scale)
    return w


@pytest.mark.parametrize(("bits", "bound", "rounding"), [(8, 0.003, 0.005), (4, 0.02, 0.1)])
def test_low_bit_adamw_is_that_of_its_papers(bits: Any, bound: float, rounding: float) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    shape = (24, 21)  # 504 elements: the last block of 64 is not whole, the last chunk of 128 neither
    make = lambda p: LowBitAdamW(p, bits=bits, block=64, chunk=128, least=0, **settings)  # noqa: E731
    got, grads, begin = run(make, shape=shape, steps=3)
    wanted = _reference(begin, grads, bits, 64, **settings).view(shape)
    fp32, *_ = run(lambda p: torch.optim.AdamW(p, **settings), shape=shape, steps=3)
    # Few codes differ, where fp16 rounds to the other side of the middle; fp32 moments end further off than that.
    assert near(got - begin, wanted - begin, bound)
    assert not near(fp32 - begin, wanted - begin, rounding)


def test_bytes_a_parameter() -> None:
    p = torch.nn.Parameter(torch.zeros(512, 256))
    for bits, block, wanted in ((8, 256, 2 * (1 + 4 / 256)), (4, 128, 2 * (0.5 + 4 / 128))):
        state = LowBitAdamW([p], bits=bits, block=block, lr=0.1).state[p]
        assert sum(t.nbytes for t in state.values()) == pytest.approx(wanted * p.numel() + 4)
    small = torch.nn.Parameter(torch.zeros(63, 65))
    assert LowBitAdamW([small], lr=0.1).state[small]["exp_avg"].dtype == torch.float32


def _loss(make: Any, dtype: torch.dtype = torch.float32) -> float:
    """Of a small model after 60 steps, where a third of the labels is noise; the mean of the last ten steps."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 32), torch.nn.Linear(32, 96), torch.nn.GELU(), torch.nn.Linear(96, 64)
    )
    model.to(dtype)
    optimizer, table, losses = make(model.parameters()), torch.randint(64, (64,), generator=g), []
    for _ in range(60):
        x = torch.randint(64, (64,), generator=g)
        noise = torch.rand(64, generator=g) < 1 / 3
        y = torch.where(noise, torch.randint(64, (64,), generator=g), table[x])
        loss = torch.nn.functional.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


def test_it_trains_as_well_as_fp32() -> None:
    settings: dict[str, Any] = {"lr": 0.005, "betas": (0.9, 0.95), "weight_decay": 0.0}
    fp32 = _loss(lambda p: torch.optim.AdamW(p, fused=True, **settings))
    assert fp32 < 2.5, "it learns: 4.2 is chance"
    for bits, dtype, bound in ((8, torch.float32, 0.005), (8, torch.bfloat16, 0.01), (4, torch.float32, 0.02)):
        low = _loss(lambda p, bits=bits: LowBitAdamW(p, bits=bits, block=128, least=0, **settings), dtype)
        assert low == pytest.approx(fp32, rel=bound), (bits, dtype)


def test_a_state_dict_keeps_codes() -> None:
    settings: dict[str, Any] = {"lr": 0.01, "least": 0, "block": 64}
    make = lambda p: LowBitAdamW(p, **settings)  # noqa: E731
    grads = [torch.randn(16, 16) for _ in range(4)]
    p = torch.nn.Parameter(torch.ones(16, 16))
    one = make([p])
    for step, grad in enumerate(grads):
        if step == 2:
            q = torch.nn.Parameter(p.detach().clone())
            two = make([q])
            two.load_state_dict(one.state_dict())
        p.grad = grad
        one.step()
        if step >= 2:
            q.grad = grad
            two.step()
    assert two.state[q]["exp_avg"].dtype == torch.uint8
    assert torch.equal(p, q)


def _apollo(p: Any, **more: Any) -> Apollo:
    return Apollo([{"params": p, "apollo": True}], lr=0.02, weight_decay=0.1, seed=3, **more)


@pytest.mark.parametrize("rank", [0.25, 0.0])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_apollo_is_algorithm_1_of_its_paper(shape: tuple[int, ...], rank: float) -> None:
    made: list[Apollo] = []

    def make(p: Any) -> Apollo:
        made.append(_apollo(p, rank=rank, every=2, scale=1.5))
        return made[0]

    got, grads, w = run(make, shape=shape, steps=5)
    grads[3] = grads[3]
    (group,), w = made[0].param_groups, w.double()
    across = 0 if rank else (0, 1)
    m = v = torch.zeros((), dtype=torch.float64)
    previous = None
    for t, g in enumerate((g.double() for g in grads), start=1):
        wide = g if shape[0] <= shape[1] else g.T
        r = made[0].projection(group["params"][0], group, t - 1).double() @ wide
        m, v = 0.9 * m + 0.1 * r, 0.95 * v + 0.05 * r * r
        adam = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        update = 1.5 * wide * adam.norm(dim=across, keepdim=True) / r.norm(dim=across, keepdim=True)
        if previous is not None and update.norm() > 1.01 * previous:
            update = update / update.norm() * 1.01 * previous
        previous = update.norm()
        w = w - 0.02 * 0.1 * w - 0.02 * (update if shape[0] <= shape[1] else update.T)
    assert near(got, w, 1e-6)


def test_projections_are_functions_of_seed_and_step_and_keep_norms() -> None:
    p, other = (torch.nn.Parameter(torch.zeros(256, 300)) for _ in range(2))
    optimizer = _apollo([p, other], every=10)
    group = optimizer.param_groups[0]
    first = optimizer.projection(p, group, 3)
    assert first.shape == (64, 256)
    assert torch.equal(first, optimizer.projection(p, group, 9))
    assert not torch.equal(first, optimizer.projection(p, group, 10))
    assert not torch.equal(first, optimizer.projection(other, group, 3))
    x = torch.randn(256)
    assert float((first @ x).norm() / x.norm()) == pytest.approx(1, abs=0.3)


def test_apollos_update_is_as_large_as_adamws_of_the_rank() -> None:
    """Each column of AdamW's first update has a norm of sqrt(rank) lr, and that is what the gradient's column is scaled to."""
    got, (grad,), begin = run(
        lambda p: Apollo([{"params": p, "apollo": True}], lr=0.01, rank=0.25), steps=1, shape=(16, 24)
    )
    norms = (got - begin).norm(dim=0) / grad.norm(dim=0)
    assert torch.nn.functional.cosine_similarity(begin - got, grad, dim=0).min() > 0.999
    assert float((begin - got).norm(dim=0).mean()) == pytest.approx(0.01 * 4**0.5, rel=0.35)
    assert float(norms.std()) > 0, "a scale for each channel"
