"""The loss by source of a mixture: that of the tokens of each source, from the same passes and with the same loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from preheat.core import Batch, Build, Order
from preheat.engine.builder import build
from preheat.engine.evaluate import measure
from preheat.engine.step import accumulate_gradients, record_sources, split_sources
from preheat.engine.transfer import Transfer

from ...conftest import DEVICE, difference, split, tiny, uneven

NAMES = ("a", "b", "never", "c")


def micro_batches() -> list[Batch]:
    torch.manual_seed(0)
    sources = torch.randint(3, (4, 32)).to(torch.int16)
    sources[sources == 2] = 3
    parts = split(uneven(padded=True), [1, 2, 1])
    return [replace(p, sources=s) for p, s in zip(parts, sources.split([1, 2, 1]), strict=True)]


def gradients(b: Build) -> tuple[float, dict[str, Tensor]]:
    total = float(accumulate_gradients(b, micro_batches(), 0.01).total)
    return total, {name: p.grad for name, p in b.parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "techniques",
    ["{}", "{chunked_loss: {rows: 7}}", "{dynamic_batch: {start: 1}}", "{regularized_loss: {z: 0.01}}"],
)
def test_it_is_the_loss_of_the_tokens_of_each_source(techniques: str) -> None:
    plain, b = (build(tiny(techniques), vocabulary=96, device=DEVICE) for _ in range(2))
    assert record_sources(b, NAMES) == ""
    b.hooks.transfer = Transfer(torch.device("cpu"))
    b.hooks.transforms.append((Order.MOVE, b.hooks.transfer))
    assert gradients(b)[0] == gradients(plain)[0]
    assert difference(gradients(b)[1], gradients(plain)[1]) == 0
    assert split_sources(plain, plain.loss.metrics) is None

    def of_source(number: int) -> list[Batch]:
        masked = [torch.where(p.sources == number, p.labels, -100) for p in micro_batches()]
        parts = zip(micro_batches(), masked, strict=True)
        return [replace(p, labels=labels, weight=int((labels != -100).sum())) for p, labels in parts]

    losses = split_sources(b, b.loss.metrics)
    assert losses is not None
    assert [*losses] == ["a", "b", "c"]
    for number, name in enumerate(NAMES):
        if name in losses:
            batches = of_source(number)
            total = float(accumulate_gradients(plain, batches, 0.01).total)
            assert losses[name] == pytest.approx(total / sum(p.weight for p in batches), rel=1e-6)
            # Rows of an evaluation without sources: another text, say.
            assert measure(b, [replace(p, sources=None) for p in batches]).loss > 0


@pytest.mark.parametrize(
    ("techniques", "why"),
    [
        ("{preference: {}}", "preference trains on another objective"),
        ("{chunked_loss: {kernel: torch}}", "the kernel of chunked_loss only gives the sum"),
    ],
)
def test_losses_that_are_sums_alone_say_why(techniques: str, why: str) -> None:
    b = build(tiny(techniques), vocabulary=96, device=DEVICE)
    assert why in record_sources(b, NAMES)
    assert not b.loss.sources
