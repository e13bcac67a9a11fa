"""A head with a bias: losses, their gradients and the rest that reads a head's tensors, against the plain formula."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from preheat.models.weights import resize_rows
from preheat.ops.losses.cross_entropy import (
    CrossEntropy,
    Recorded,
    RegularizedCrossEntropy,
    Softcapped,
    WeightedCrossEntropy,
    sum_chunked_loss,
    sum_full_loss,
    sum_torch_loss,
)
from preheat.ops.losses.distillation import Distilled, TeacherHead
from preheat.techniques.distillation import _find_teacher_head

ROWS, WIDTH, TOKENS = 30, 12, 41
Formula = Callable[[Tensor, Tensor], Tensor]


def head_of(tokens: int = TOKENS, width: int = WIDTH, seed: int = 1) -> torch.nn.Linear:
    head = torch.nn.Linear(width, tokens, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype))
    return head


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    return functional.cross_entropy(
        logits, labels, ignore_index=-100, reduction="none", label_smoothing=smoothing
    ).double()


def regularized(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, 0.1) + 0.01 * logits.logsumexp(-1).square() * (labels != -100)


WEIGHTS = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
STATES = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
TEACHER = head_of(TOKENS + 3, 5, seed=4)


def distilled(logits: Tensor, labels: Tensor) -> Tensor:
    theirs = TEACHER(STATES)[:, :TOKENS].detach() / 2
    apart = functional.kl_div((logits / 2).log_softmax(-1), theirs.softmax(-1), reduction="none").sum(-1)
    return 0.4 * cross_entropy(logits, labels) + 0.6 * 4 * apart * (labels != -100)


def teacher() -> Distilled:
    return Distilled(TeacherHead(TEACHER.weight, TOKENS, bias=TEACHER.bias), temperature=2.0, mixture=0.6)


# Row loss, its formula, aligned tensors besides the labels, and the bound: some compute in fp32 from the logits on.
LOSSES: dict[str, tuple[Callable[[], Any], Formula, list[Tensor], float]] = {
    "cross entropy": (CrossEntropy, cross_entropy, [], 1e-10),
    "weighted, as of preferences": (
        WeightedCrossEntropy,
        lambda logits, labels: cross_entropy(logits, labels) * WEIGHTS,
        [WEIGHTS],
        1e-10,
    ),
    "capped": (
        lambda: Softcapped(CrossEntropy(), 3.0),
        lambda logits, labels: cross_entropy(3 * torch.tanh(logits / 3), labels),
        [],
        1e-10,
    ),
    "smoothing and z": (lambda: RegularizedCrossEntropy(0.1, 0.01), regularized, [], 1e-6),
    "distilled": (teacher, distilled, [STATES], 1e-6),
    "by autograd": (lambda: regularized, regularized, [], 1e-10),
}


@pytest.fixture
def inputs() -> tuple[Tensor, torch.nn.Linear, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(TOKENS, (ROWS,), generator=g)
    labels[::4] = -100
    return hidden, head_of(), labels


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("by", ["chunks", "plain"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_formula(name: str, by: str, inputs: Any) -> None:
    hidden, head, labels = inputs
    row_loss, formula, aligned, bound = LOSSES[name]
    parts = [hidden, head.weight, head.bias]
    # A scale behind the loss, as of a mean over tokens; of 8, which fp32 holds exactly.
    reference = formula(hidden @ head.weight.t() + head.bias, labels).sum() / 8
    wanted = torch.autograd.grad(reference, parts)
    if by == "chunks":
        total = sum_chunked_loss(hidden, head, row_loss(), labels, *aligned, rows=7) / 8
    else:
        total = sum_full_loss(hidden[None], head, row_loss(), labels[None], *(a[None] for a in aligned)) / 8
        bound = max(bound, 1e-6)  # these compute in fp32
    assert float(total.detach()) == pytest.approx(float(reference.detach()), rel=2e-6)
    grads = torch.autograd.grad(total, parts)
    assert max(map(relative, grads, wanted)) < bound


@pytest.mark.usefixtures("torchs_loss")
def test_the_kernel_of_torch_agrees(inputs: Any) -> None:
    hidden, head, labels = inputs
    parts = [hidden, head.weight, head.bias]
    wanted = torch.autograd.grad(cross_entropy(head(hidden), labels).sum(), parts)
    total = sum_torch_loss(hidden, head, CrossEntropy(), labels, rows=7)
    assert max(map(relative, torch.autograd.grad(total, parts), wanted)) < 1e-10


@pytest.mark.parametrize("frozen", ["bias", "weight"])
def test_a_frozen_part_of_the_head_gets_no_gradient(frozen: str, inputs: Any) -> None:
    hidden, head, labels = inputs
    cross_entropy(head(hidden), labels).sum().backward()
    wanted = {name: p.grad for name, p in head.named_parameters()}
    head.zero_grad()
    getattr(head, frozen).requires_grad_(False)
    sum_chunked_loss(hidden, head, CrossEntropy(), labels, rows=7).backward()
    assert getattr(head, frozen).grad is None
    (other,) = wanted.keys() - {frozen}
    assert relative(getattr(head, other).grad, wanted[other]) < 1e-10  # type: ignore[arg-type]


def test_scores_of_an_evaluation_contain_it(inputs: Any) -> None:
    hidden, head, labels = inputs
    recorded = Recorded()
    with torch.no_grad():
        sum_chunked_loss(hidden, head, recorded, labels, rows=7)
    assert torch.allclose(recorded.found().double(), cross_entropy(head(hidden), labels), rtol=1e-6)


def test_in_bf16_its_gradient_is_as_near_as_the_plain_one(inputs: Any) -> None:
    """A sum over all rows, in which errors add up if bf16 holds it."""
    g = torch.Generator().manual_seed(2)
    hidden, labels = torch.randn(4096, WIDTH, generator=g), torch.randint(TOKENS, (4096,), generator=g)
    head = head_of().float()
    (exact,) = torch.autograd.grad(cross_entropy(head(hidden), labels).sum(), [head.bias])
    errors = []
    for by in (functools.partial(sum_chunked_loss, rows=512), sum_full_loss):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = by(hidden[None], head, CrossEntropy(), labels[None])
        errors.append(relative(torch.autograd.grad(total, [head.bias])[0], exact))
    assert errors[0] < max(1.2 * errors[1], 2e-3), errors


def test_a_teacher_adds_its_bias() -> None:
    of: Any = SimpleNamespace(
        model=SimpleNamespace(get_output_embeddings=lambda: TEACHER),
        build=SimpleNamespace(model=SimpleNamespace(vocabulary=TOKENS)),
    )
    for same, rows in ((True, TOKENS), (False, TOKENS + 3)):
        logits = _find_teacher_head(of, torch.float64, same=same)(STATES)
        assert torch.allclose(logits, TEACHER(STATES)[:, :rows], rtol=1e-12)


def test_added_tokens_start_with_the_mean_of_the_others() -> None:
    grown = resize_rows(torch.tensor([1.0, 2.0, 6.0, 50.0]), 6, 3, 6)
    assert grown.tolist() == [1, 2, 6, 3, 3, 3]
