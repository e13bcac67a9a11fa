"""Answers judged as a whole: log-probabilities of sequences out of those of tokens, and the losses that compare them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from preheat.core import Batch
from preheat.hardware.transfers import to_device
from preheat.ops.losses.cross_entropy import IGNORED

__all__ = ["AnswerIndex", "liked_losses", "pair_losses"]


@dataclass
class AnswerIndex:
    """Which places of a batch belong to which answer. Made from lengths on the host, so nothing is read back.

    Attributes:
        index: [answers, longest], the places of each in the flattened batch; beyond its end one past the last.
        owner: [rows * length], the answer that a place belongs to; the number of answers: none.
        lengths: [answers] fp32, how many labels each has.
    """

    index: Tensor
    owner: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, batch: Batch) -> AnswerIndex:
        """Of a batch whose rows hold answers, and padding after them."""
        documents, device = batch.mask.documents, batch.tokens.device
        assert documents is not None, "answers have their lengths beside them"
        answers = (
            [len(row) for row in batch.liked]
            if batch.liked
            else [len(row) // batch.group * batch.group for row in documents]
        )
        count = sum(answers)
        sizes = [size for row in documents for size in row]
        numbers, n = [], 0
        for row, real in zip(documents, answers, strict=True):
            numbers += [n + i if i < real else count for i in range(len(row))]
            n += real
        ends = to_device(sizes, device).cumsum(0)
        total = batch.tokens.numel()
        owner = to_device(numbers, device)[torch.bucketize(torch.arange(total, device=device), ends, right=True)]
        real_sizes = [size for size, number in zip(sizes, numbers, strict=True) if number < count]
        begins = itertools.accumulate(sizes, initial=0)
        starts = [start for start, number in zip(begins, numbers, strict=False) if number < count]
        within = torch.arange(max(real_sizes), device=device)
        index = to_device(starts, device)[:, None] + within
        index = torch.where(within < to_device(real_sizes, device)[:, None], index, total)
        answer_index = cls(index, owner, ends)
        answer_index.lengths = answer_index.sums((batch.labels != IGNORED).float()).clamp(min=1)
        return answer_index

    def sums(self, values: Tensor) -> Tensor:
        """[answers], the sum of each over its places. By gathering: the order of sums is the same at any time, on a GPU too."""
        return functional.pad(values.flatten(), (0, 1))[self.index].sum(dim=1)

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        """A value an answer at each of its places, 0 elsewhere, in the shape of `like`."""
        return functional.pad(values, (0, 1))[self.owner].view_as(like)


def _log_odds(logp: Tensor) -> Tensor:
    """log p / (1 - p). p below 1 by at least fp32's resolution: at 1 odds are infinite, and so would their slope be."""
    logp = logp.clamp(max=-torch.finfo(torch.float32).eps)
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
    """The loss of each pair of answers.

    With d = (chosen - rejected) - (reference_chosen - reference_rejected), s(x) = -log sigmoid(x), e the smoothing:
    `dpo`, `cpo`: (1 - e) s(beta d) + e s(-beta d); `simpo`: that of beta d - gamma; `hinge`: max(0, 1 - beta d);
    `ipo`: (d - 1 / (2 beta)) ** 2; `orpo`: beta s(log odds(chosen) - log odds(rejected)).

    Args:
        chosen, rejected: [pairs] log-probabilities, of the answers or a token's mean; `orpo` needs the mean.
        reference_chosen, reference_rejected: those of the reference model; 0 without one.

    Returns:
        [pairs].

    Raises:
        ValueError: no such loss.

    Example:
        >>> pair_losses(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.6931])
    """
    if loss == "orpo":
        return -beta * functional.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    difference = (chosen - rejected) - (reference_chosen - reference_rejected)
    if loss == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if loss == "hinge":
        return torch.relu(1 - beta * difference)
    if loss not in ("dpo", "cpo", "simpo"):
        raise ValueError(f"loss: {loss} is none of dpo, ipo, hinge, simpo, cpo, orpo")
    scaled = beta * difference - (gamma if loss == "simpo" else 0.0)
    return -(1 - label_smoothing) * functional.logsigmoid(scaled) - label_smoothing * functional.logsigmoid(-scaled)


def liked_losses(answer: Tensor, reference: Tensor, liked: Tensor, *, beta: float = 0.1) -> Tensor:
    """The loss of each answer that is judged by itself: 1 - sigmoid(r) where it was liked, sigmoid(r) where not; r = beta (answer - reference).

    Args:
        answer, reference: [n] log-probabilities; liked: [n], 1 or 0.

    Example:
        >>> liked_losses(torch.zeros(2), torch.zeros(2), torch.tensor([1, 0]))
        tensor([0.5000, 0.5000])
    """
    sign: Any = 1 - 2 * liked.float()
    return torch.sigmoid(sign * beta * (answer - reference))
