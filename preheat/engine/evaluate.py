"""The mean loss of a build on held-out rows, through the very slots that training uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from preheat.engine.step import forward, transform
from preheat.technique import Batch, Build

__all__ = ["evaluate"]


def evaluate(build: Build, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss a trained token in nats, and the number of tokens it was taken over."""
    modes = [part.training for part in build.trained]
    for part in build.trained:
        part.eval()
    total, weight = torch.zeros((), dtype=torch.float64), 0
    try:
        with torch.no_grad():
            for batch in batches:
                total += forward(build, transform(build, batch)).total.double().cpu()
                weight += batch.weight
    finally:
        for part, mode in zip(build.trained, modes, strict=True):
            part.train(mode)
    return (float(total) / weight if weight else float("nan")), weight
