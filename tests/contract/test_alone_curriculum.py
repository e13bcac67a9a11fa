"""Curricula and the dynamic micro-batch, in a loop written by hand."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from preheat.core import Batch, MaskSpec

from ..conftest import difference
from .by_hand import by_hand, plain_backward


def test_alone_length_curriculum() -> None:
    from preheat.techniques.length_curriculum import length_at, shape_at

    model, tokens = by_hand()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, lengths = [], []
    for step in range(16):
        length = length_at(step / 16, start=4, full=16, until=0.5, schedule="steps")
        shape = shape_at(length, rows=4, micro=4, full=16)
        pieces = tokens.reshape(shape.rows, shape.length)
        losses.append(float(plain_backward(model, pieces)))
        optimizer.step()
        optimizer.zero_grad()
        lengths.append(length)
    assert list(dict.fromkeys(lengths)) == [4, 8, 16]
    assert losses[-1] < losses[0] - 0.15


def test_alone_difficulty_curriculum() -> None:
    from preheat.techniques.difficulty_curriculum import order_by_difficulty

    model, _ = by_hand()
    data = torch.randint(96, (12, 16))
    data[:6] = torch.arange(16) % 3  # easy: they repeat themselves
    order = order_by_difficulty(np.repeat([0.0, 1.0], 6), total=24, seed=0, start=0.5, until=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    read, losses = [], []
    for _ in range(6):
        rows = list(itertools.islice(order, 4))
        read += rows
        losses.append(float(plain_backward(model, data[rows])))
        optimizer.step()
        optimizer.zero_grad()
    assert read[0] < 6
    assert set(read) == set(range(12))
    assert losses[1] < losses[0]


def test_alone_dynamic_batch() -> None:
    from preheat.techniques.dynamic_batch import MicroBatch, regroup_batches

    model, tokens = by_hand()
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    whole = Batch(tokens, labels, torch.arange(16).expand(4, 16), MaskSpec(), 60, (0, 1, 2, 3))
    state = MicroBatch(1, 4, limit=10, alarm=12, floor=1)
    found = []
    for peak in (2, 3, 5):
        for batch in regroup_batches([whole], state.rows):
            logits = model(batch.tokens, use_cache=False).logits.flatten(0, 1)
            (torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / 60).backward()
        found.append((state.rows, {n: p.grad.clone() for n, p in model.named_parameters()}))
        model.zero_grad()
        state.decide(peak)
    assert [rows for rows, _ in found] == [1, 2, 4]
    assert all(difference(grads, found[0][1]) < 1e-6 for _, grads in found)
