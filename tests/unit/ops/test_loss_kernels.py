"""Chunked losses at a real size against the plain one: same gradients, an eighth of the memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from preheat import recipe as recipes
from preheat.core import Device
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.ops.losses.cross_entropy import (
    CrossEntropy,
    DynamicCrossEntropy,
    sum_chunked_loss,
    sum_full_loss,
    sum_torch_loss,
)
from preheat.planning.dispatch_recorder import Kernel, Recorder
from preheat.planning.dry_run import observe
from preheat.planning.request import Request

from ...conftest import DEVICE, difference, tiny

ROWS, PIECES, WIDTH = 2048, 32_000, 64


@pytest.fixture(scope="module")
def inputs() -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, PIECES, bias=False)
    torch.nn.init.normal_(head.weight, std=0.3)
    labels = torch.randint(PIECES, (1, ROWS))
    labels[0, ::7] = -100
    return torch.randn(1, ROWS, WIDTH), head, labels


def _run(function: Any, inputs: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Loss and gradients, and bytes at the peak beyond those of the gradients: seen by the recorder over the real computation."""
    hidden, head, labels = inputs
    leaf = hidden.clone().requires_grad_()
    head.weight.grad = None
    recorder = Recorder(rounding=64)
    with recorder:
        loss = function(leaf, head, CrossEntropy(), labels)
        (loss / ROWS).backward()
    alive = peak = 0
    for _, size, _ in recorder.log:
        alive += size
        peak = max(peak, alive)
    grads = {"hidden": leaf.grad, "head": head.weight.grad}
    return grads, peak - sum(g.nbytes for g in grads.values() if g is not None)


def _dynamic_by_hand(hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    """TRL's formula, token by token: the sum over trained tokens of -p log p, p without gradient."""
    terms = []
    for state, label in zip(hidden[0], labels[0].tolist(), strict=True):
        if label != -100:
            log_p = torch.log_softmax(head(state), dim=-1)[label]
            terms.append(-log_p.exp().detach() * log_p)
    return torch.stack(terms).sum()


@pytest.mark.parametrize("sum_loss", [sum_full_loss, functools.partial(sum_chunked_loss, rows=5)])
def test_dynamic_fine_tuning_is_its_formula(sum_loss: Any) -> None:
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 50, bias=False), torch.randn(1, 24, 16)
    labels = torch.randint(50, (1, 24))
    labels[0, ::3] = -100
    results = []
    for run in (_dynamic_by_hand, lambda h, m, n: sum_loss(h, m, DynamicCrossEntropy(), n)):
        leaf = hidden.clone().requires_grad_()
        head.weight.grad = None
        loss = run(leaf, head, labels)
        loss.backward()
        results.append((loss.item(), {"hidden": leaf.grad, "head": head.weight.grad.clone()}))  # type: ignore[union-attr]
    (wanted, wanted_grads), (loss, grads) = results
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert difference(grads, wanted_grads) < 1e-6


def test_chunks_give_the_plain_gradients_in_an_eighth_of_its_memory(inputs: Any) -> None:
    plain, much = _run(sum_full_loss, inputs)
    ours, little = _run(sum_chunked_loss, inputs)
    assert difference(ours, plain) < 1e-6
    assert much >= 2 * ROWS * PIECES * 4, "the plain loss holds the logits and their gradient: the recorder sees it"
    assert little <= much / 8


def test_the_heads_gradient_is_summed_in_fp32_some_rows_at_a_time(inputs: Any) -> None:
    """Bit for bit what sums of whole products give, with no product of all 32,000 pieces: of bf16 and, cast by torch, of fp32 they would take 12 MiB."""
    hidden, head, labels = inputs
    whole = PIECES * WIDTH * 2  # of bf16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, beyond = _run(sum_chunked_loss, inputs)
    assert beyond < ROWS * WIDTH * 2 + 2 * whole + 512 * PIECES * 2 + whole, (
        "hidden states, the weight and its gradient cast, a chunk's logits, and less than a product"
    )
    products: list[torch.Tensor] = []

    class Seen(CrossEntropy):
        def value_and_grad_(self, logits: torch.Tensor, *aligned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = super().value_and_grad_(logits, *aligned)
            products.append(logits.detach().clone())
            return found

    with torch.autocast("cpu", dtype=torch.bfloat16):
        sum_chunked_loss(hidden.clone().requires_grad_(), head, Seen(), labels)
    parts = hidden[0].bfloat16().split(512)
    factor = (labels[0] != -100).bfloat16().split(512)
    total = sum(torch.mm(g.t(), h * f[:, None]).float() for g, h, f in zip(products, parts, factor, strict=True))
    assert torch.equal(ours["head"], total / ROWS)


def test_on_cuda_products_add_to_the_heads_gradient_in_fp32(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product a chunk in a plan; and nearer to fp64 than products that are rounded to bf16 first, by a twin of what runs on CUDA alone."""
    hidden, head, labels = inputs
    loss = functools.partial(sum_chunked_loss, rows=256, cuda=True)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        Recorder(512) as recorder,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        fake = torch.nn.Linear(WIDTH, PIECES, bias=False)
        loss(
            torch.empty(1, ROWS, WIDTH, requires_grad=True),
            fake,
            CrossEntropy(),
            torch.zeros(1, ROWS, dtype=torch.int64),
        )
    (product,) = ((k, count) for k, count in recorder.kernels.items() if k.operator == "addmm")
    assert product == (replace(product[0], dtype="bf16", flops=2 * PIECES * 256 * WIDTH), ROWS // 256)

    def add(total: Any, left: Any, right: Any, *, out_dtype: torch.dtype, beta: float, out: Any) -> None:
        assert out is total
        assert out_dtype == total.dtype == torch.float32
        product = left.float() @ right.float()
        total.copy_(total + product if beta else product)

    monkeypatch.setattr(torch, "addmm", add)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, plain = (_run(f, inputs)[0]["head"] for f in (loss, functools.partial(sum_chunked_loss, rows=256)))
    exact = head.weight.detach().double().requires_grad_()
    logits = functional.linear(hidden[0].bfloat16().double(), exact.bfloat16().double())
    (truth,) = torch.autograd.grad(functional.cross_entropy(logits, labels[0], reduction="sum") / ROWS, exact)
    errors = [float((g.double() - truth).norm() / truth.norm()) for g in (ours, plain)]
    assert errors[0] < errors[1] < 0.01


@pytest.mark.parametrize(
    ("kind", "rows", "summed"),
    [("cuda", 4096, ("addmm", (96, 4096))), ("cpu", 512, ("mm", (96, 512)))],
)
def test_a_plan_has_the_chunks_of_its_device(kind: Any, rows: int, summed: tuple[str, tuple[int, int]]) -> None:
    """Of 8,192 tokens: their logits, the gradient by the hidden states, and that by the head, added up in fp32 on CUDA."""
    techniques = "{chunked_loss: {}, mixed_precision: {mode: bf16}, efficient_attention: {}}"
    recipe = recipes.override(tiny(techniques, rows=64), "batch.seq_len=128")
    device = Device(kind, "a device", 80 << 30, (9, 0) if kind == "cuda" else None)
    kernels = observe(Request(recipe, device, vocabulary=96)).kernels
    # The first operand of addmm is the sum.
    products = {(k.operator, k.shapes[k.operator == "addmm"]): n for k, n in kernels.items() if _is_of_head(k)}
    chunks = 64 * 128 // rows
    assert products == dict.fromkeys([("mm", (rows, 32)), ("mm", (rows, 96)), summed], chunks)


def _is_of_head(kernel: Kernel) -> bool:
    return kernel.operator in ("mm", "addmm") and any(96 in shape for shape in kernel.shapes)


@pytest.mark.usefixtures("torchs_loss")
def test_torchs_own_kernel_agrees(inputs: Any) -> None:
    hidden, head, labels = inputs
    found = []
    for function in (sum_chunked_loss, sum_torch_loss):
        leaf = hidden[:, :256].clone().requires_grad_()
        head.weight.grad = None
        loss = function(leaf, head, CrossEntropy(), labels[:, :256], rows=100)
        loss.backward()
        found.append({"loss": loss.detach(), "hidden": leaf.grad, "head": head.weight.grad})
    assert difference(found[1], found[0]) < 1e-6


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ("{chunked_loss: {kernel: liger}}", "needs a CUDA device"),
        ("{chunked_loss: {kernel: torch}, regularized_loss: {}}", "without the terms of regularized_loss"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused(techniques: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(tiny(techniques), vocabulary=96, device=DEVICE)


def test_auto_says_whom_it_chose() -> None:
    assert build(tiny("{chunked_loss: {}}"), vocabulary=96, device=DEVICE).changes["chunked_loss"][0].kernel == "ours"
