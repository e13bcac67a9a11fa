"""The mean loss of a build on held-out rows, and what its objective counts, through the very slots that training uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.engine.step import add_up, forward, transform
from preheat.technique import Batch, Build

__all__ = ["Measured", "evaluate", "measure"]


class Measured(NamedTuple):
    """What an evaluation found.

    Attributes:
        loss: the mean, in nats a trained token, or a pair, answer or document where the objective judges those.
        weight: over how many.
        scores: of the objective, by name: accuracy for one.
    """

    loss: float
    weight: int
    scores: dict[str, float]


def measure(build: Build, batches: Iterable[Batch]) -> Measured:
    """Loss and scores over batches; the model's mode is put back."""
    modes = [part.training for part in build.trained]
    for part in build.trained:
        part.eval()
    total, weight, metrics = torch.zeros((), dtype=torch.float64), 0, dict[str, Tensor]()
    try:
        with torch.no_grad():
            for batch in batches:
                loss = forward(build, transform(build, batch))
                total += loss.total.double().cpu()
                add_up(metrics, {name: value.double().cpu() for name, value in loss.metrics.items()})
                weight += batch.weight
    finally:
        for part, mode in zip(build.trained, modes, strict=True):
            part.train(mode)
    if not weight:
        return Measured(float("nan"), 0, {})
    return Measured(float(total) / weight, weight, build.scores(metrics, weight))


def evaluate(build: Build, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss a trained token in nats, and the number of tokens it was taken over."""
    return measure(build, batches)[:2]
