"""Sums of a row loss by the source of each row, beside the loss itself and without another pass over the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.ops.losses.cross_entropy import IGNORED

if TYPE_CHECKING:
    from preheat.core import RowLoss

__all__ = ["SourceSums"]


class SourceSums:
    """Sums losses and labels by source, across chunks of rows and on the device.

    Args:
        count: number of sources.

    Attributes:
        losses: [count] fp32.
        labels: [count] int64, number of labels.

    Example:
        >>> from preheat.ops.losses.cross_entropy import CrossEntropy
        >>> sums = SourceSums(2)
        >>> loss = sums.record(CrossEntropy())
        >>> _ = loss(torch.zeros(3, 4), torch.tensor([1, 2, -100]), torch.tensor([1, 1, 0]))
        >>> sums.losses, sums.labels
        (tensor([0.0000, 2.7726]), tensor([0, 2]))
    """

    losses: Tensor
    labels: Tensor

    def __init__(self, count: int):
        self.count = count
        self._empty = True

    def record(self, loss: RowLoss) -> RowLoss:
        """Returns the same loss with a last input, the source of each row [n], that adds its rows to the sums."""
        return _Recording(loss, self)

    def add(self, losses: Tensor, labels: Tensor, sources: Tensor) -> None:
        """Adds the losses of some rows; all inputs are [n]."""
        numbers = torch.arange(self.count, dtype=sources.dtype, device=sources.device)
        # [n, count]. Not index_add_, whose order of additions on a GPU is random.
        of = (sources[:, None] == numbers) & (labels != IGNORED)[:, None]
        total = torch.where(of, losses.detach()[:, None], 0.0).sum(0, dtype=torch.float32)
        count = of.sum(0)
        self.losses, self.labels = (total, count) if self._empty else (self.losses + total, self.labels + count)
        self._empty = False


class _Recording:
    def __init__(self, loss: RowLoss, sums: SourceSums):
        self.loss, self.sums = loss, sums
        # As in `Softcapped`: the chunked loss differentiates by autograd if it finds None here.
        self.value_and_grad_ = self._in_place if getattr(loss, "value_and_grad_", None) is not None else None

    @property
    def measured(self) -> RowLoss:
        return _Recording(self.loss.measured, self.sums)

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        labels, sources = aligned
        losses = self.loss(logits, labels)
        self.sums.add(losses, labels, sources)
        return losses

    def _in_place(self, logits: Tensor, labels: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
        losses: Tensor
        losses, factor = self.loss.value_and_grad_(logits, labels)  # type: ignore[attr-defined]
        self.sums.add(losses, labels, sources)
        return losses, factor
