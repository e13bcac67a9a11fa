"""Gradient accumulation of chunked losses: for the head's weight and for an adapter on the head."""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.ops.dry_run_loops import fold_identical
from preheat.torch_compat import add_product_

__all__ = ["LogitAdapter", "sum_product"]

_SOME_ROWS = 4096
"""Rows of the head per matmul: on two cores 4 times as fast as all 32,000 rows of 512 numbers at once, and no slower
for smaller heads; large enough to fill a GPU.
"""


def sum_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool, at_once: bool = False) -> None:
    """Computes total (+)= left.T @ right for a `total` of another dtype; `first` ignores its old contents.

    Works on a block of rows at a time: the full product would be half as large as `total`, and a CPU casts all of it
    before it adds.

    Args:
        at_once: on CUDA, uses one matmul that accumulates into `total` in fp32 without intermediate rounding.
    """
    if at_once:
        add_product_(total, left.t(), right, beta=float(not first))
        return
    for start in fold_identical(range(0, total.shape[0], _SOME_ROWS)):
        rows = slice(start, start + _SOME_ROWS)
        # [block, n] x [n, width], in the dtype of the operands; only this block is cast to the dtype of `total`.
        product = torch.mm(left[:, rows].t(), right)
        if first:
            total[rows].copy_(product)
        else:
            total[rows].add_(product)


class LogitAdapter:
    """An adapter's addition to the logits, per chunk: low [n, rank] times up [rank, vocabulary]."""

    def __init__(self, low: Tensor, up: Tensor, dtype: torch.dtype, differentiate: bool):
        self.low, self.up = low.detach().to(dtype), up.detach().to(dtype)
        # By `low` each chunk writes its own rows; by `up` all chunks add to the same numbers, so it starts at zero.
        grads = (torch.empty_like(low), torch.zeros_like(up)) if differentiate else (None, None)
        self.grads: tuple[Tensor | None, Tensor | None] = grads

    def add_(self, logits: Tensor, start: int) -> None:
        logits.addmm_(self.low[start : start + logits.shape[0]], self.up)  # [chunk, rank] x [rank, vocabulary]

    def differentiate(self, grad: Tensor, factor: Tensor, start: int) -> None:
        """Accumulates gradients from those of a chunk's logits, up to a factor per row."""
        grad_low, grad_up = self.grads
        if grad_low is None or grad_up is None:
            return
        rows = slice(start, start + grad.shape[0])
        # `grad` is [chunk, vocabulary]; the factor scales the small side of both products.
        grad_low[rows] = torch.mm(grad, self.up.t()) * factor
        grad_up += torch.mm((self.low[rows] * factor).t(), grad)
