"""Preference losses (DPO and relatives, KTO-style), and sequence log-probabilities from those of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from preheat.core import Batch
from preheat.hardware.transfers import to_device
from preheat.ops.losses.cross_entropy import IGNORED

__all__ = ["AnswerIndex", "exchange_answers", "kto_losses", "mean_by_row", "pair_losses", "unpaired_losses"]


@dataclass
class AnswerIndex:
    """Maps positions of a batch to answers. Built from lengths on the host, without a device sync.

    Attributes:
        index: [answers, longest], positions of each answer in the flattened batch; padded with one past the last.
        owner: [rows * length], answer of each position; the number of answers means none.
        lengths: [answers] fp32, number of labels of each.
    """

    index: Tensor
    owner: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, batch: Batch) -> AnswerIndex:
        """Builds the index of a batch whose rows hold answers followed by padding."""
        documents, device = batch.mask.documents, batch.tokens.device
        assert documents is not None, "answers have their lengths beside them"
        # Real answers per row; what follows them in `documents` is padding. In pairs (a group of 2), an odd last
        # document is padding.
        answers = (
            [len(row) for row in batch.desirable]
            if batch.desirable
            else [len(row) // batch.group * batch.group for row in documents]
        )
        count = sum(answers)
        sizes = [size for row in documents for size in row]
        # The answer of each document, in order over all rows; padding gets `count`, one past the last answer.
        numbers, n = [], 0
        for row, real in zip(documents, answers, strict=True):
            numbers += [n + i if i < real else count for i in range(len(row))]
            n += real
        ends = to_device(sizes, device).cumsum(0)  # [documents], in the flattened batch
        total = batch.tokens.numel()
        # right=True: the position at which a document ends belongs to the next one.
        owner = to_device(numbers, device)[torch.bucketize(torch.arange(total, device=device), ends, right=True)]
        real_sizes = [size for size, number in zip(sizes, numbers, strict=True) if number < count]
        begins = itertools.accumulate(sizes, initial=0)
        # accumulate yields one number more than there are documents, hence strict=False.
        starts = [start for start, number in zip(begins, numbers, strict=False) if number < count]
        within = torch.arange(max(real_sizes), device=device)
        index = to_device(starts, device)[:, None] + within  # [answers, longest]
        # `total` is one past the last position: `sums` pads the values by a 0 there.
        index = torch.where(within < to_device(real_sizes, device)[:, None], index, total)
        # `ends` fills the field until the labels are counted, for which the index is needed.
        answer_index = cls(index, owner, ends)
        # At least 1, because losses divide by it.
        answer_index.lengths = answer_index.sums((batch.labels != IGNORED).float()).clamp(min=1)
        return answer_index

    def sums(self, values: Tensor) -> Tensor:
        """Sums values per answer: [answers]. Gathers, so that the summation order is deterministic on a GPU too."""
        return functional.pad(values.flatten(), (0, 1))[self.index].sum(dim=1)

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """Spreads one value per answer over its positions, 0 elsewhere, in the shape of `like`."""
        # The 0 at the end is for padding, whose owner is one past the last answer.
        return functional.pad(values, (0, 1))[self.owner].view_as(like)


def _log_odds(logp: Tensor) -> Tensor:
    """Returns log p / (1 - p). Clamps p below 1 by fp32's resolution, since odds and gradient are infinite at 1."""
    logp = logp.clamp(max=-torch.finfo(torch.float32).eps)
    # expm1, since 1 - exp(logp) loses all digits for p near 1.
    return logp - torch.log(-torch.expm1(logp))


def pair_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | float = 0.0,
    reference_rejected: Tensor | float = 0.0,
    *,
    loss: str = "dpo",
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Computes the loss of each pair of answers.

    With d = (chosen - rejected) - (reference_chosen - reference_rejected), s(x) = -log sigmoid(x), e the smoothing:
    `dpo`, `cpo`: (1 - e) s(beta d) + e s(-beta d); `simpo`: that of beta d - gamma; `hinge`: max(0, 1 - beta d);
    `ipo`: (d - 1 / (2 beta)) ** 2; `orpo`: beta s(log odds(chosen) - log odds(rejected)).

    Args:
        chosen, rejected: [pairs] log-probabilities, summed or averaged over tokens; `orpo` needs averages.
        reference_chosen, reference_rejected: the same of the reference model; 0 without one.

    Returns:
        [pairs].

    Raises:
        ValueError: unknown loss.

    Example:
        >>> pair_losses(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.6931])
    """
    if loss == "orpo":
        # Only the odds-ratio term of arXiv:2403.07691; the caller adds the likelihood of the preferred answer.
        return -beta * functional.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    difference = (chosen - rejected) - (reference_chosen - reference_rejected)  # [pairs]
    if loss == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if loss == "hinge":
        return torch.relu(1 - beta * difference)
    if loss not in ("dpo", "cpo", "simpo"):
        raise ValueError(f"loss: {loss} is none of dpo, ipo, hinge, simpo, cpo, orpo")
    scaled = beta * difference - (gamma if loss == "simpo" else 0.0)
    # logsigmoid, because log(sigmoid(x)) is -inf for large negative x. Smoothing assumes that a part of the pairs is
    # swapped; a swapped pair has the opposite sign.
    return -(1 - label_smoothing) * functional.logsigmoid(scaled) - label_smoothing * functional.logsigmoid(-scaled)


def unpaired_losses(answer: Tensor, reference: Tensor, desirable: Tensor, *, beta: float = 0.1) -> Tensor:
    """Computes the loss of answers that are judged individually, with r = beta (answer - reference).

    It is 1 - sigmoid(r) for liked answers and sigmoid(r) for the others.

    Args:
        answer, reference: [n] log-probabilities; desirable: [n], 1 or 0.

    Example:
        >>> unpaired_losses(torch.zeros(2), torch.zeros(2), torch.tensor([1, 0]))
        tensor([0.5000, 0.5000])
    """
    # 1 - sigmoid(r) = sigmoid(-r), so one sigmoid serves both kinds.
    sign = 1 - 2 * desirable.float()
    return torch.sigmoid(sign * beta * (answer - reference))


def kto_losses(
    answer: Tensor,
    reference: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Computes KTO's loss of answers that are judged individually (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8).

    With d = answer - reference and z the baseline: w (1 - sigmoid(beta (d - z))) for liked answers and
    w (1 - sigmoid(beta (z - d))) for the others, w being the weight of their kind.

    Args:
        answer, reference: [n] log-probabilities; desirable: [n], 1 or 0.
        baseline: [n], the estimated divergence of the model from the reference, at least 0.

    Example:
        >>> zero = torch.zeros(2)
        >>> kto_losses(zero, zero, torch.tensor([1, 0]), torch.ones(2), beta=1.0)
        tensor([0.7311, 0.2689])
    """
    liked = desirable > 0
    weight = torch.where(liked, desirable_weight, undesirable_weight)
    return weight * unpaired_losses(answer - baseline, reference, desirable, beta=beta)


def mean_by_row(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns for each answer the mean over all answers of its row, clamped to at least 0; 0 for an answer alone.

    Args:
        values: [answers], in the order of rows.
        counts: answers of each row.

    Example:
        >>> mean_by_row(torch.tensor([1.0, 2.0, 5.0, -4.0, 2.0]), [2, 1, 2])
        tensor([1.5000, 1.5000, 0.0000, 0.0000, 0.0000])
    """
    # [answers, answers], made on the host: a sum by index would not be deterministic on a GPU.
    means: numpy.ndarray = numpy.zeros((sum(counts), sum(counts)), numpy.float32)
    start = 0
    for count in counts:
        if count > 1:
            means[start : start + count, start : start + count] = 1 / count
        start += count
    return (to_device(means, values.device) @ values.float()).clamp(min=0)


def exchange_answers(batch: Batch) -> Batch:
    """Returns the prompts of a batch on the host, each with the answer of the one before it in its row.

    The answers of a row change places, so that the row stays as long. KTO estimates the divergence of the model from
    the reference with such unrelated answers. A row with a single answer stays as it is.
    """
    assert batch.mask.documents is not None, "answers have their lengths beside them"
    if all(len(row) < 2 for row in batch.desirable):
        return replace(batch)
    tokens, labels = batch.tokens.clone(), batch.labels.clone()
    positions, documents = batch.positions.clone(), []
    for row, (sizes, liked) in enumerate(zip(batch.mask.documents, batch.desirable, strict=True)):
        ends = list(itertools.accumulate(sizes[: len(liked)]))
        spans = [slice(end - size, end) for size, end in zip(sizes, ends, strict=False)]
        prompts = [_count_prompt(batch.labels[row, span]) for span in spans]
        at, exchanged = 0, []
        for n, (span, prompt) in enumerate(zip(spans, prompts, strict=True)):
            # The answer of the document before; for the first one, that of the last.
            answer = slice(spans[n - 1].start + prompts[n - 1], spans[n - 1].stop)
            begin, size = at + prompt, prompt + answer.stop - answer.start
            tokens[row, at:begin] = batch.tokens[row, span.start : span.start + prompt]
            tokens[row, begin : at + size] = batch.tokens[row, answer]
            # The last position of the prompt has the first token of the answer as its label.
            labels[row, at : begin - 1] = IGNORED
            labels[row, begin - 1 : at + size] = batch.labels[row, answer.start - 1 : answer.stop]
            positions[row, at : at + size] = torch.arange(size)
            exchanged.append(size)
            at += size
        documents.append((*exchanged, *sizes[len(liked) :]))
    mask = replace(batch.mask, documents=tuple(documents))
    return replace(batch, tokens=tokens, labels=labels, positions=positions, mask=mask)


def _count_prompt(labels: Tensor) -> int:
    """Returns the number of tokens of a document before its answer, whose first token is the first label."""
    trained = (labels != IGNORED).numpy()
    return int(trained.argmax()) + 1 if trained.any() else len(trained)
