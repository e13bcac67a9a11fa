"""Evaluation: the mean loss on held-out rows through the slots that training uses, and scores of single tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.core import DATA, Axis, Batch, Build, LossSum, Slot
from preheat.engine.step import add_up, flatten_result, forward, transform, unflatten_result
from preheat.models import hf

__all__ = [
    "Measured",
    "evaluate",
    "find_likeliest",
    "measure",
    "iterate_losses",
    "set_eval_mode",
    "sum_metrics",
    "sum_parts",
    "score_tokens",
]

LOGITS = 2**24
"""Logits computed at once when single tokens are scored (64 MiB in fp32): keeps evaluations within planned memory."""


@contextmanager
def set_eval_mode(build: Build) -> Iterator[None]:
    """Puts the build's parts into eval mode without gradients; restores their modes afterwards."""
    modes = [part.training for part in build.trained]
    for part in build.trained:
        part.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in zip(build.trained, modes, strict=True):
            part.train(mode)


def iterate_losses(build: Build, batches: Iterable[Batch]) -> Iterator[LossSum]:
    """The loss of each batch by the build's own objective, on the CPU: the terms that `evaluate` sums.

    Data-parallel ranks take the batches in turns and exchange the results: every rank yields the losses of all batches.
    """
    # Devices of the other axes (tensor, context, pipeline) work together on the same batch.
    many, mine = build.mesh.size(*DATA), build.mesh.index(*DATA)
    for group in _iterate_groups(batches, many):
        # In the last group some ranks repeat a batch: all must take part in the collective.
        batch = group[min(mine, len(group) - 1)]
        with set_eval_mode(build):
            loss = forward(build, transform(build, batch))
        results = flatten_result(loss.total, loss.metrics)
        if build.mesh.world > 1:
            # Each rank fills its row and the sum completes the table: an all-gather and, over context-parallel ranks,
            # the sum of their parts of a row, in one collective.
            table = results.new_zeros(many, len(results))
            table[mine] = results
            results = build.mesh.add(table, *DATA, Axis.CONTEXT)
        # Not strict: in the last group the table has more rows than there are batches.
        for batch, row in zip(group, results.view(many, -1).cpu(), strict=False):
            total, metrics = unflatten_result(row, loss.metrics)
            yield LossSum(total, batch.weight, metrics)


def _iterate_groups(batches: Iterable[Batch], many: int) -> Iterator[list[Batch]]:
    left = iter(batches)
    while group := list(itertools.islice(left, many)):
        yield group


class Measured(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: the mean in nats per trained token, or per pair, answer or document if the objective scores those; NaN
            over nothing.
        weight: number of tokens (or pairs, answers, documents) in the mean.
        scores: further metrics of the objective by name, such as accuracy.
    """

    loss: float
    weight: int
    scores: dict[str, float]


def sum_parts(build: Build, losses: Iterable[LossSum]) -> Measured:
    """Combines the partial sums of an evaluation."""
    parts = list(losses)
    # In Python's fp64, in the order of batches, which does not depend on the number of ranks.
    total, weight = 0.0, 0
    for part in parts:
        total += float(part.total)
        weight += int(part.weight)
    return (
        Measured(total / weight, weight, build.loss.scores(sum_metrics(parts), weight))
        if weight
        else Measured(float("nan"), 0, {})
    )


def sum_metrics(losses: Iterable[LossSum]) -> dict[str, Tensor]:
    """Returns the sums of the metrics of some losses."""
    metrics = dict[str, Tensor]()
    for part in losses:
        add_up(metrics, part.metrics)
    return metrics


def measure(build: Build, batches: Iterable[Batch]) -> Measured:
    """Loss and scores over batches."""
    return sum_parts(build, iterate_losses(build, batches))


def evaluate(build: Build, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss per trained token in nats, and the number of tokens in the mean."""
    return measure(build, batches)[:2]


def score_tokens(build: Build, batch: Batch, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-likelihoods of given next tokens at given positions of a batch, whatever the build's objective.

    Args:
        places: [n] int64, row * length + position of the last token that is read; may repeat.
        targets: [n] int64, the next token.

    Returns:
        Log-likelihoods [n] in nats, float32, and whether the target is the argmax [n]; both on the CPU.
    """

    def judge(numbers: Tensor, logits: Tensor) -> Tensor:
        # `numbers` select the positions of this chunk: logits are [some, vocabulary].
        wanted = targets[numbers].to(logits.device)
        # log softmax at one column, without a second tensor of the vocabulary's width.
        scores = logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(dim=1)
        return torch.stack([scores, logits.argmax(dim=1) == wanted], dim=1)

    scores, best = _judge_logits(build, batch, places, judge, columns=2).unbind(1)
    return scores.float(), best > 0


def find_likeliest(build: Build, batch: Batch, places: Tensor) -> Tensor:
    """The argmax of the head (a token, or a class for a classification head) at each position, [n] on the CPU."""
    return _judge_logits(build, batch, places, lambda _, logits: logits.argmax(dim=1)[:, None], columns=1)[:, 0].long()


def _judge_logits(
    build: Build, batch: Batch, places: Tensor, judge: Callable[[Tensor, Tensor], Tensor], *, columns: int
) -> Tensor:
    """Applies `judge` to the fp32 logits at each position, [n, columns] in fp64 on the CPU; the same on every rank.

    Args:
        judge: (indices of some positions [some], logits [some, rows of the head]) -> [some, columns].
    """
    part = build.trained[0]
    rows, length = batch.tokens.shape
    # Context parallelism splits labels along with their tokens: positions in their place tell each rank which it has.
    with set_eval_mode(build):
        mine = transform(build, replace(batch, labels=torch.arange(rows * length).view(rows, length)))
    # Index on this rank of each position of the full batch, -1 on all other ranks. Padding has the label -100.
    own = mine.labels.flatten().cpu()
    at = torch.full((rows * length,), -1)
    at[own[own >= 0]] = torch.arange(len(own))[own >= 0]
    numbers = (at[places] >= 0).nonzero()[:, 0]

    def run() -> Tensor:
        with ExitStack() as stack:
            for context in build.hooks.around_forward:
                stack.enter_context(context())
            hidden = build.slot(Slot.HIDDEN)(part, mine).flatten(0, 1)
            # Zeros for positions of other context-parallel ranks: the sum below fills them in.
            table = torch.zeros(len(places), columns, dtype=torch.float64, device=hidden.device)
            hidden = hidden.index_select(0, at[places[numbers]].to(hidden.device))
            # As the training loss does (engine/step.py), so that scores and losses agree.
            if build.loss.head_dtype is not None:
                stack.enter_context(torch.autocast(build.device.kind, enabled=False))
                hidden = hidden.to(build.loss.head_dtype)
            size = max(1, LOGITS // build.model.vocabulary)
            # In chunks, because [positions, vocabulary] in fp32 may exceed the step's own peak.
            for some, states in zip(numbers.split(size), hidden.split(size), strict=True):
                if len(some):
                    table[some.to(table.device)] = judge(some, hf.compute_logits(part, states)).double()
            return table

    with set_eval_mode(build):
        table: Tensor = build.slot(Slot.UNSHARD_SCOPE)(part, run)
    if build.mesh.size(Axis.CONTEXT) > 1:
        table = build.mesh.add(table, Axis.CONTEXT)
    return table.cpu()
