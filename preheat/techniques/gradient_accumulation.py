"""Gradient accumulation: the global batch in several micro-batches, their gradients summed before one update.

What: each micro-batch runs forward and backward by itself; the loss is divided by the trained tokens of the whole global
batch, so the gradients equal those of the big batch even where sequences and masks are uneven. (Averaging the
micro-batches' means, as is often done, weighs tokens of short sequences more.)
Helps: activations shrink with the micro-batch; the optimizer sees the same batch. Hurts: very small micro-batches leave
the device idle and repeat the cost of each layer's launch.
Source: Ott et al. 2018, "Scaling Neural Machine Translation" (arXiv:1806.00187), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from preheat.recipe import Bound
from preheat.technique import Build, Change, Context, Stage, Tag, Technique

if TYPE_CHECKING:
    from torch import Tensor

Micro = TypeVar("Micro")


def accumulate(micro_batches: Iterable[Micro], loss_sum: Callable[[Micro], Tensor], global_weight: float) -> Tensor:
    """Adds up the gradients of `sum of losses / global_weight` over micro-batches, into `.grad`.

    Args:
        micro_batches: parts of one global batch.
        loss_sum: the sum (not the mean) of a part's losses, a scalar.
        global_weight: what to divide by: the trained tokens of the whole global batch.

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
    for batch in micro_batches:
        loss = loss_sum(batch)
        (loss / max(global_weight, 1)).backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "a global batch has at least one micro-batch"
    return total


@dataclass(frozen=True, kw_only=True)
class GradientAccumulation(Technique):
    stage: ClassVar[Stage] = Stage.LOADER
    numerics: ClassVar[Any] = "exact"
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag("micro-batch-size")})

    steps: Annotated[int, Bound(2)] = 4
    """Micro-batches that make one global batch of `batch.size` rows."""

    def check(self, context: Context) -> list[str]:
        rows = context.recipe.batch.size
        if self.steps > rows:
            return [f"steps: {self.steps} micro-batches cannot be cut from batch.size {rows}; use at most {rows}"]
        return []

    def apply(self, build: Build, part: Any) -> Change:
        build.accumulation = self.steps
        micro = -(-build.recipe.batch.size // self.steps)
        return Change(
            f"{build.recipe.batch.size} rows a step in {-(-build.recipe.batch.size // micro)} micro-batches of {micro}",
            self.steps,
        )

    def options(self, context: Context) -> Iterable[Technique]:
        rows = context.recipe.batch.size
        return [GradientAccumulation(steps=n) for n in range(2, rows + 1) if rows % n == 0]

    def rungs(self, context: Context) -> Iterable[Technique]:
        return [t for t in self.options(context) if isinstance(t, GradientAccumulation) and t.steps > self.steps]
