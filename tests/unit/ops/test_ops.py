"""Operators against slow references."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from preheat.core import MaskSpec
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.sdpa import build_dense_mask, reference_attention, sdpa_attention
from preheat.ops.losses.cross_entropy import CrossEntropy, sum_chunked_loss, sum_full_loss
from preheat.ops.optim.optimizers import StochasticAdamW
from preheat.ops.optim.stochastic_rounding import stochastic_round_


def norm_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("count", "width", "vocabulary", "rows"), [(1, 8, 5, 512), (33, 16, 97, 8), (64, 24, 1000, 64), (50, 8, 33, 7)]
)
@pytest.mark.parametrize("generic", [False, True])
def test_chunked_loss_has_the_gradients_of_autograd(
    count: int, width: int, vocabulary: int, rows: int, generic: bool
) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(count, width, requires_grad=True), torch.nn.Linear(width, vocabulary, bias=False)
    labels = torch.randint(vocabulary, (count,))
    labels[1::3] = -100
    loss_of: object = CrossEntropy()
    if generic:  # a row loss without gradients of its own goes through autograd, chunk by chunk

        def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return CrossEntropy()(logits, labels) + 1e-3 * logits.logsumexp(-1) ** 2

    reference = sum_full_loss(hidden[None], head, loss_of, labels[None]) / 7  # type: ignore[arg-type]
    wanted = torch.autograd.grad(reference, [hidden, head.weight])
    total = sum_chunked_loss(hidden, head, loss_of, labels, rows=rows) / 7  # type: ignore[arg-type]
    got = torch.autograd.grad(total, [hidden, head.weight])
    assert torch.isclose(total, reference, rtol=1e-5)
    assert max(norm_difference(a, b) for a, b in zip(got, wanted, strict=True)) < 2e-6


def test_in_bf16_the_loss_made_in_place_is_as_near_as_its_logits_are() -> None:
    torch.manual_seed(0)
    exact, labels = torch.randn(512, 300) * 4, torch.randint(300, (512,))
    labels[::5] = -100
    truth, rounded = CrossEntropy()(exact, labels), CrossEntropy()(exact.bfloat16(), labels)
    logits = exact.bfloat16()
    got, factor = CrossEntropy().value_and_grad_(logits, labels)
    assert norm_difference(got, truth) < 1.1 * norm_difference(rounded, truth)
    exact.requires_grad_()
    (wanted,) = torch.autograd.grad(CrossEntropy()(exact, labels).sum(), exact)
    assert norm_difference(logits.float() * factor[:, None], wanted) < 0.02


def test_gradients_of_the_head_never_hold_what_lay_in_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first chunk is written, not added: empty memory may hold NaN."""
    like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: like(*args, **kwargs).fill_(float("nan")))
    for dtype in (torch.float32, torch.bfloat16):
        head, hidden = torch.nn.Linear(8, 50, bias=False).to(dtype), torch.randn(20, 8, dtype=dtype, requires_grad=True)
        sum_chunked_loss(hidden, head, CrossEntropy(), torch.randint(50, (20,)), rows=7).backward()
        assert head.weight.grad is not None
        assert bool(head.weight.grad.isfinite().all())
        assert hidden.grad is not None
        assert bool(hidden.grad.isfinite().all())


def test_a_confident_wrong_row_has_a_finite_loss() -> None:
    logits, labels = torch.zeros(2, 6), torch.tensor([3, 0])
    logits[:, 0] = 300.0
    wanted = CrossEntropy()(logits, labels)
    got, _ = CrossEntropy().value_and_grad_(logits.clone(), labels)
    assert got.tolist() == pytest.approx(wanted.tolist()) == [300.0, 0.0]


@pytest.mark.parametrize(
    "mask",
    [
        MaskSpec(),
        MaskSpec(causal=False),
        MaskSpec(documents=((24,), (24,), (24,))),
        MaskSpec(documents=((10, 14), (10, 14), (1, 1, 22))),
        MaskSpec(documents=((24,), (3, 4, 17), (24,))),
        MaskSpec(documents=((24,), (1, 23), (12, 12))),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("attention", [sdpa_attention, attend_blockwise])
def test_fused_attention_agrees_forward_and_backward(attention: Any, mask: MaskSpec, kv_heads: int) -> None:
    torch.manual_seed(0)
    _agrees(attention, [torch.randn(3, heads, 24, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads)], mask)


def _agrees(attention: Any, tensors: list[torch.Tensor], mask: MaskSpec, tolerance: float = 2e-6) -> None:
    a, b = attention(*tensors, mask, 0.3), reference_attention(*tensors, mask, 0.3)
    assert norm_difference(a, b) < tolerance
    weight = torch.randn_like(a)
    for x, y in zip(
        torch.autograd.grad((a * weight).sum(), tensors), torch.autograd.grad((b * weight).sum(), tensors), strict=True
    ):
        assert norm_difference(x, y) < tolerance


@pytest.mark.parametrize("length", [2, 127, 128, 300])
@pytest.mark.parametrize("causal", [True, False])
def test_blocked_attention_agrees_over_several_tiles(
    monkeypatch: pytest.MonkeyPatch, length: int, causal: bool
) -> None:
    """Some heads at a time (3 rows x 5 heads: 8, 4, 2, 1), and blocks of queries that end unevenly."""
    import preheat.ops.attention.blockwise as module

    monkeypatch.setattr(module, "_SCRATCH", 8 * 2 * 128 * length)
    torch.manual_seed(0)
    tensors = [torch.randn(3, heads, length, 8, requires_grad=True) for heads in (10, 5, 5)]
    _agrees(attend_blockwise, tensors, MaskSpec(causal=causal))


def test_blocked_attention_in_bf16_is_as_near_to_fp32_as_eager_is() -> None:
    torch.manual_seed(0)
    exact = [torch.randn(2, 4, 256, 16) for _ in range(3)]
    truth = reference_attention(*exact, MaskSpec(), 0.25)
    rounded = [t.bfloat16() for t in exact]
    eager, ours = (f(*rounded, MaskSpec(), 0.25).float() for f in (reference_attention, attend_blockwise))
    assert norm_difference(ours, truth) < 1.1 * norm_difference(eager, truth)


def test_the_mask_says_what_its_definition_says() -> None:
    mask = MaskSpec(window=3, documents=((4, 4),))
    may = build_dense_mask(mask, 1, 8, torch.device("cpu"))[0, 0]
    for i, j in itertools.product(range(8), range(8)):
        assert bool(may[i, j]) == (j <= i and i - j < 3 and i // 4 == j // 4)


def test_long_documents_are_padded_to_blocks_and_agree() -> None:
    torch.manual_seed(0)
    mask = MaskSpec(documents=((200,), (65, 7, 128), (63, 64, 73)))
    tensors = [torch.randn(3, heads, 200, 8, requires_grad=True) for heads in (4, 2, 2)]
    for attention in (sdpa_attention, attend_blockwise):
        _agrees(attention, tensors, mask)


def test_what_has_no_kernel_is_refused_not_ignored() -> None:
    q = torch.randn(1, 1, 8, 4)
    for attention in (sdpa_attention, attend_blockwise):
        with pytest.raises(ValueError, match="causal"):
            attention(q, q, q, MaskSpec(causal=False, documents=((4, 4),)), 1.0)
    with pytest.raises(ValueError, match="window"):
        sdpa_attention(q, q, q, MaskSpec(window=4), 1.0)
    with pytest.raises(ValueError, match="global tokens"):
        attend_blockwise(q, q, q, MaskSpec(causal=False, window=4, global_tokens=1), 1.0)


def test_stochastic_rounding_is_right_on_average_and_picks_only_neighbours() -> None:
    g = torch.Generator().manual_seed(1)
    exact = torch.tensor([1.0, 1 + 2**-9, -1 - 3 * 2**-10, 3e-39, 1e30 * 1.001])
    value = exact[:, None].expand(-1, 40_000).contiguous()
    out = torch.empty_like(value, dtype=torch.bfloat16)
    stochastic_round_(out, value.clone(), g)
    for i, x in enumerate(exact):
        seen = out[i].float().unique()
        assert len(seen) <= 2
        assert float(seen.min()) <= float(x) <= float(seen.max())
        step = float(seen.max() - seen.min())
        assert abs(float(out[i].double().mean()) - float(x)) <= 0.02 * step + 1e-12 * abs(float(x))
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    kept = stochastic_round_(torch.empty(3, dtype=torch.bfloat16), special.clone(), g)
    assert kept[:2].tolist() == [float("inf"), -float("inf")]
    assert bool(kept[2].isnan())


def _reference_adamw(
    p: torch.Tensor, grads: list[torch.Tensor], lr: float, betas: tuple[float, float], eps: float, decay: float
) -> torch.Tensor:
    """Loshchilov and Hutter 2019, algorithm 2, in float64."""
    p, m, v = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    for t, g in enumerate(grads, 1):
        g = g.double()
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr * decay * p - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return p


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_stochastic_adamw_in_fp32_is_adamw(chunk: int) -> None:
    torch.manual_seed(0)
    p, grads = torch.nn.Parameter(torch.randn(5, 9)), [torch.randn(5, 9) for _ in range(6)]
    wanted = _reference_adamw(p.detach().clone(), grads, 0.1, (0.9, 0.95), 1e-8, 0.2)
    optimizer = StochasticAdamW([p], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2, chunk=chunk)
    for g in grads:
        p.grad = g
        optimizer.step()
    assert norm_difference(p.detach(), wanted) < 1e-6


def test_small_updates_are_not_lost_in_bf16() -> None:
    """An update a hundredth of bf16's step: plain rounding loses all of it, stochastic rounding none on average."""
    start, lr, steps = 1.0, 2**-7 / 100, 200
    stochastic, plain = (torch.nn.Parameter(torch.full((20_000,), start, dtype=torch.bfloat16)) for _ in range(2))
    ours = StochasticAdamW([stochastic], lr=lr, weight_decay=0.0)
    theirs = torch.optim.AdamW([plain], lr=lr, weight_decay=0.0, fused=True)
    for _ in range(steps):
        stochastic.grad, plain.grad = torch.ones_like(stochastic), torch.ones_like(plain)
        ours.step()
        theirs.step()
    assert float(plain.detach().float().mean()) == start
    assert float(stochastic.detach().double().mean()) == pytest.approx(start - lr * steps, abs=0.02 * lr * steps)


def test_found_inf_leaves_weights_alone() -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([p], lr=0.1)
    p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert p.tolist() == [1.0] * 4
