"""Gradients of a global batch, summed over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["accumulate"]

Micro = TypeVar("Micro")


def accumulate(
    micro_batches: Iterable[Micro], loss_sum: Callable[[Micro], Tensor], global_weight: float | Tensor
) -> Tensor:
    """Accumulates gradients of `sum of losses / global_weight` over micro-batches into `.grad`.

    Args:
        micro_batches: parts of one global batch.
        loss_sum: the sum (not the mean) of a part's losses, a scalar.
        global_weight: divisor: the trained tokens of the global batch over all ranks; a tensor must be at least 1.

    Returns:
        The sum of the losses over all parts, detached.

    Example:
        >>> import torch
        >>> w = torch.ones(2, requires_grad=True)
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> total = accumulate([rows[:1], rows[1:]], lambda part: (part * w).sum(), global_weight=3)
        >>> w.grad
        tensor([3., 4.])
    """
    total = None
    if isinstance(global_weight, int | float):
        # Without trained tokens all losses are 0, and so are the gradients: 0 / 1 instead of 0 / 0.
        global_weight = max(global_weight, 1)
    for batch in micro_batches:
        loss = loss_sum(batch)
        # Divided by the weight of the full batch, so that micro-batches with more tokens count more, as in one large
        # batch. Backward within the loop frees each graph before the next one is built.
        (loss / global_weight).backward()
        # A tensor, since reading it would wait for the device in each micro-batch.
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "a global batch has at least one micro-batch"
    return total
