"""Adafactor: an optimizer with factored second moments (one row and one column per matrix).

What: keeps the row and column means of the squared gradients and reconstructs the second moment as their outer product;
no momentum; each update is clipped to a root mean square of `clip_threshold`.
Helps: almost no optimizer state: n + m numbers for an n x m matrix, while AdamW keeps 2 n m.
Hurts: noisier than AdamW, whose learning rates are somewhat high for it.
Source: Shazeer and Stern 2018 (arXiv:1804.04235), algorithm 4, with an external learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from preheat.core import Build, Change, Numerics, Slot, Stage, Tag, Technique
from preheat.recipe import Positive

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.optimizer import ParamsT

__all__ = ["Adafactor", "adafactor_optimizer"]


def adafactor_optimizer(parameters: ParamsT, **settings: Any) -> torch.optim.Optimizer:
    """Returns the optimizer (`preheat.ops.optim.optimizers.Adafactor`); settings: lr, weight_decay, decay, clip.

    Example:
        >>> import torch
        >>> optimizer = adafactor_optimizer(torch.nn.Linear(4, 4).parameters(), lr=1e-3)
    """
    from preheat.ops.optim.optimizers import Adafactor

    return Adafactor(parameters, **settings)


@dataclass(frozen=True, kw_only=True)
class Adafactor(Technique):
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "exact"  # for the gradients; the updates differ
    supports_encoder_decoder: ClassVar[bool] = True
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OPTIMIZER})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.PER_MATRIX_STATES})

    decay: Positive = 0.8
    """Decay of the second moments at step t is 1 - t ** -decay."""
    clip_threshold: Positive = 1.0
    """Root mean square to which an update is clipped."""

    def apply(self, build: Build, part: nn.Module) -> Change:
        # It has neither momentum nor AdamW's eps: `betas` and `eps` of the recipe are unused.
        def make(groups: ParamsT, *, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
            return adafactor_optimizer(groups, lr=lr, decay=self.decay, clip=self.clip_threshold)

        build.claim(Slot.OPTIMIZER, make, self.name())
        return Change("Adafactor: second moments by rows and columns", sum(p.requires_grad for p in part.parameters()))
