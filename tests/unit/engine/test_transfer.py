"""Micro-batches copied ahead: by a link that delivers as late as a stream may, the same loss and gradients as without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from preheat.core import Batch, Build, Order, Slot
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.engine.transfer import Transfer
from preheat.hardware.transfers import to_device
from preheat.ops.memory.host_transfer import Copy, HostCopy

from ...conftest import DEVICE, difference, split, tiny, uneven


class LateLink(HostCopy):
    """A target holds what no embedding has until its copy is waited for."""

    def __init__(self, log: list[str]):
        self.log = log

    def back(self, sent: Tensor, into: Tensor) -> Copy:
        copy = Copy(into.fill_(-1000), sent)
        copy.event = _Late(copy, self.log)
        self.log.append("begun")
        return copy


class _Late:
    def __init__(self, copy: Copy, log: list[str]):
        self.copy, self.log = copy, log

    def wait(self) -> None:
        assert self.copy.source is not None, "the source was let go before the copy ended"
        self.copy.value.copy_(self.copy.source)
        self.log.append("waited")


def made(log: list[str] | None, techniques: str = "{gradient_accumulation: {steps: 4}}") -> Build:
    """A tiny build; with a log its micro-batches come by a late link."""
    b = build(tiny(techniques), vocabulary=96, device=DEVICE)
    if log is not None:
        b.hooks.transfer = Transfer(torch.device("cpu"), LateLink(log))
        b.hooks.transforms.append((Order.MOVE, b.hooks.transfer))
        plain = b.slot(Slot.MODEL_LOSS)

        def forward(b: Build, batch: Batch) -> Any:
            log.append("forward")
            return plain(b, batch)

        b.claim(Slot.MODEL_LOSS, forward, "plain")
    return b


def steps(b: Build, count: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps whose first micro-batch is begun beside the update before it, and the last gradients."""
    batches = [split(uneven(seed=n, padded=True), [1] * 4) for n in range(count)]
    losses, grads = [], dict[str, Tensor]()
    for n, batch in enumerate(batches):
        losses.append(float(accumulate_gradients(b, batch, 0.01).total))
        grads = {name: p.grad.clone() for name, p in b.parameters() if p.grad is not None}
        if n + 1 < count:
            b.begin(batches[n + 1][0])
        update(b, 0.01)
    return losses, grads


def test_the_next_micro_batch_is_on_its_way_while_one_computes_and_nothing_changes() -> None:
    log: list[str] = []
    losses, grads = steps(made(log))
    expected, expected_grads = steps(made(None))
    assert losses == expected
    assert difference(grads, expected_grads) == 0
    begun, waited = ["begun"] * 4, ["waited"] * 4  # tokens, labels, positions, padding
    first = [*begun, "forward", *waited, *begun, "forward", *waited, *begun, "forward", *waited, "forward"]
    assert log == [*first, *begun, *waited, *first]  # the second step's first was begun beside the update


@pytest.mark.parametrize(
    "techniques",
    ["{dynamic_batch: {start: 1}}", "{expert_balancing: {method: loss}, gradient_accumulation: {steps: 2}}"],
)
def test_what_takes_batches_otherwise_gets_the_same(techniques: str) -> None:
    family = "qwen3_moe" if "expert" in techniques else "llama"
    log: list[str] = []
    found = []
    for late in (log, None):
        b = build(tiny(techniques, family=family), vocabulary=96, device=DEVICE)
        if late is not None:
            b.hooks.transfer = Transfer(torch.device("cpu"), LateLink(late))
            b.hooks.transforms.append((Order.MOVE, b.hooks.transfer))
        found.append(steps(b))
    assert found[0][0] == found[1][0]
    assert difference(found[0][1], found[1][1]) == 0
    assert log.count("begun") == log.count("waited") > 0


def test_what_changes_rows_on_the_host_comes_before_the_copy() -> None:
    b, log = made(None, "{}"), list[str]()
    b.hooks.transfer = Transfer(torch.device("cpu"), LateLink(log))

    def packed(batch: Batch) -> Batch:
        log.append("packed")
        return replace(batch, aligned=(batch.tokens * 2,))

    def written(batch: Batch) -> Batch:
        log.append("written")
        return batch

    b.hooks.transforms += [(Order.MOVE, b.hooks.transfer), (Order.MOVE, written), (Order.PACK, packed)]
    batch, other = uneven(padded=True), uneven(seed=1, padded=True)
    b.begin(batch)
    moved = b.transform_batch(batch)
    assert torch.equal(moved.aligned[0], batch.tokens * 2)
    assert log == ["packed", *["begun"] * 5, *["waited"] * 5, "written"]
    b.begin(batch)
    assert torch.equal(b.transform_batch(other).tokens, other.tokens)  # begun, and another one is asked for
    assert log.count("begun") == log.count("waited") == 10


def test_numbers_of_the_host_are_int64() -> None:
    assert to_device([3, 1], torch.device("cpu")).dtype == torch.int64
