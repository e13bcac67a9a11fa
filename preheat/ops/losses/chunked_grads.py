"""What chunked losses sum chunk by chunk: the gradient of the head, and what adapters of the head have beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.ops.dry_run_loops import fold_identical

__all__ = ["Beside", "sum_product"]

_SOME_ROWS = 4096
"""Of the head at a time: on two cores 4 times as quick as all 32,000 of 512 numbers at once, as quick or quicker for smaller heads; on a GPU large enough to fill it."""


def sum_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool, at_once: bool = False) -> None:
    """total (+)= left.T @ right, where it has another dtype than the factors; `first`: what stands in it is not read.

    Some rows of it at a time: the product would be as large as half of it, and a CPU casts all of that before it adds.

    Args:
        at_once: on CUDA, by one product that adds to `total` in fp32 and rounds nothing on the way.
    """
    if at_once:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, beta=float(not first), out=total)
        return
    for start in fold_identical(range(0, total.shape[0], _SOME_ROWS)):
        rows = slice(start, start + _SOME_ROWS)
        product = torch.mm(left[:, rows].t(), right)
        if first:
            total[rows].copy_(product)
        else:
            total[rows].add_(product)


class Beside:
    """What logits have beside the head's own: low [n, rank] times up [rank, vocabulary], chunk by chunk."""

    def __init__(self, low: Tensor, up: Tensor, dtype: torch.dtype, differentiate: bool):
        self.low, self.up = low.detach().to(dtype), up.detach().to(dtype)
        grads = (torch.empty_like(low), torch.zeros_like(up)) if differentiate else (None, None)
        self.grads: tuple[Tensor | None, Tensor | None] = grads

    def add_(self, logits: Tensor, start: int) -> None:
        logits.addmm_(self.low[start : start + logits.shape[0]], self.up)

    def differentiate(self, grad: Tensor, factor: Tensor, start: int) -> None:
        """From the gradient of a chunk's logits, up to a factor a row."""
        grad_low, grad_up = self.grads
        if grad_low is None or grad_up is None:
            return
        rows = slice(start, start + grad.shape[0])
        grad_low[rows] = torch.mm(grad, self.up.t()) * factor
        grad_up += torch.mm((self.low[rows] * factor).t(), grad)
