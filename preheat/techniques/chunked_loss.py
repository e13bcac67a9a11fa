"""Chunked loss: head and cross entropy by rows, so that the logits are never whole in memory.

What: for a few hundred rows at a time, logits, loss and their gradient are made and consumed in the forward pass, in place.
Helps: logits are tokens x vocabulary, often the largest tensor of a step, held two or three times by the plain loss;
here one chunk is held once. Faster too where memory is slow. Hurts: little; very few rows a chunk slow the products.
Source: Wijmans et al. 2024, "Cut Your Losses" (arXiv:2411.09009); Hsu et al. 2024, Liger Kernel (arXiv:2410.10989).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from preheat.recipe import Bound
from preheat.technique import Build, Change, Context, Slot, Stage, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ChunkedLoss", "chunked_cross_entropy"]


def chunked_cross_entropy(hidden: Tensor, head: nn.Module, labels: Tensor, *, rows: int = 512) -> Tensor:
    """The sum of the cross entropies of `head(hidden)` against `labels` (-100: not trained), `rows` rows at a time.

    Args:
        hidden: [..., width]; head: a module with `weight` [vocabulary, width] and no bias; labels: [...].

    Example:
        >>> import torch
        >>> head = torch.nn.Linear(8, 50, bias=False)
        >>> loss = chunked_cross_entropy(torch.randn(2, 5, 8), head, torch.randint(50, (2, 5))) / 10
        >>> loss.backward()
    """
    from preheat.ops.losses import CrossEntropy, chunked_logits

    return chunked_logits(hidden, head, CrossEntropy(), labels, rows=rows)


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Any] = "exact"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OVER_LOGITS})

    rows: Annotated[int, Bound(1)] = 512
    """Rows of logits in memory at a time."""

    def apply(self, build: Build, part: Any) -> Change:
        from preheat.ops.losses import chunked_logits

        build.own(Slot.OVER_LOGITS, functools.partial(chunked_logits, rows=self.rows), self.name())
        return Change(f"head and loss {self.rows} rows at a time, gradients made in the forward pass", 1)

    def options(self, context: Context) -> Iterable[Technique]:
        return [ChunkedLoss(rows=n) for n in (1024, 512, 256, 128)]

    def rungs(self, context: Context) -> Iterable[Technique]:
        return [ChunkedLoss(rows=n) for n in (512, 256, 128, 64) if n < self.rows]
