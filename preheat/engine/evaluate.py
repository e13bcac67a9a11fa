"""The mean loss of a build on held-out rows, through the very slots that training uses; and scores of single tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.engine.step import add_up, forward, transform
from preheat.models import adapter
from preheat.technique import Batch, Build, LossSum, Slot

__all__ = ["Measured", "evaluate", "likeliest", "measure", "parts", "reading", "summed", "token_scores"]

LOGITS = 2**24
"""Logits made at once where single tokens are scored (64 MiB in fp32): what a dry run saw of an evaluation is not exceeded."""


@contextmanager
def reading(build: Build) -> Iterator[None]:
    """The build's parts as they are when they only read: no dropout, no gradients."""
    modes = [part.training for part in build.trained]
    for part in build.trained:
        part.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in zip(build.trained, modes, strict=True):
            part.train(mode)


def parts(build: Build, batches: Iterable[Batch]) -> Iterator[LossSum]:
    """The loss of each batch by the build's own objective, on the CPU: what `evaluate` adds up."""
    for batch in batches:
        with reading(build):
            loss = forward(build, transform(build, batch))
        yield LossSum(
            loss.total.double().cpu(), batch.weight, {name: value.double().cpu() for name, value in loss.metrics.items()}
        )


class Measured(NamedTuple):
    """What an evaluation found.

    Attributes:
        loss: the mean, in nats a trained token, or a pair, answer or document where the objective judges those; NaN over nothing.
        weight: over how many.
        scores: of the objective, by name: accuracy for one.
    """

    loss: float
    weight: int
    scores: dict[str, float]


def summed(build: Build, found: Iterable[LossSum]) -> Measured:
    """The parts of an evaluation together."""
    total, weight, metrics = 0.0, 0, dict[str, Tensor]()
    for part in found:
        total += float(part.total)
        weight += int(part.weight)
        add_up(metrics, part.metrics)
    return Measured(total / weight, weight, build.scores(metrics, weight)) if weight else Measured(float("nan"), 0, {})


def measure(build: Build, batches: Iterable[Batch]) -> Measured:
    """Loss and scores over batches."""
    return summed(build, parts(build, batches))


def evaluate(build: Build, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss a trained token in nats, and the number of tokens it was taken over."""
    return measure(build, batches)[:2]


def token_scores(build: Build, batch: Batch, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """How likely a token is to come after each of some places of a batch, whatever the build's objective.

    Args:
        places: [n] int64, row * length + place, of the token that is read last; one may stand several times.
        targets: [n] int64, the token that is to come.

    Returns:
        Log-likelihoods [n] in nats, float32, and whether the target is the likeliest token [n]; both on the CPU.
    """
    scores, best = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]
    first = 0
    for logits in _logits(build, batch, places):
        wanted = targets[first : first + len(logits)].to(logits.device)
        first += len(logits)
        scores.append((logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(dim=1)).cpu())
        best.append((logits.argmax(dim=1) == wanted).cpu())
    return torch.cat(scores), torch.cat(best)


def likeliest(build: Build, batch: Batch, places: Tensor) -> Tensor:
    """The row of the head (a token, or a class where the head is over classes) that scores highest after each place, [n] on the CPU."""
    return torch.cat(
        [torch.zeros(0, dtype=torch.int64), *(logits.argmax(dim=1).cpu() for logits in _logits(build, batch, places))]
    )


def _logits(build: Build, batch: Batch, places: Tensor) -> Iterator[Tensor]:
    """Logits [some, rows of the head] in fp32 at the places, some at a time."""
    part = build.trained[0]
    with reading(build), ExitStack() as stack:
        for context in build.around_forward:
            stack.enter_context(context())
        hidden = build.slot(Slot.HIDDEN)(part, transform(build, batch)).flatten(0, 1)
        hidden = hidden.index_select(0, places.to(hidden.device))
        if build.head_dtype is not None:
            stack.enter_context(torch.autocast(build.device.kind, enabled=False))
            hidden = hidden.to(build.head_dtype)
        made = (adapter.logits(part, some) for some in hidden.split(max(1, LOGITS // build.model.vocabulary)))
        yield from made
