"""Lion: an optimizer with one moment and sign updates.

What: moves each weight by the learning rate in the direction of the sign of an interpolation between momentum and
gradient.
Helps: 4 bytes of state per parameter, while AdamW keeps 8.
Hurts: needs a learning rate about 5 times smaller than AdamW's and a weight decay larger by the same factor (`scale`
does both), and is less robust on small batches.
Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from preheat.core import Build, Change, Numerics, Slot, Stage, Technique
from preheat.recipe import Fraction, Positive

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.optimizer import ParamsT

__all__ = ["Lion", "lion_optimizer"]


def lion_optimizer(parameters: ParamsT, **settings: Any) -> torch.optim.Optimizer:
    """Returns the optimizer (`preheat.ops.optim.optimizers.Lion`); settings: lr, betas, weight_decay, scale.

    Example:
        >>> import torch
        >>> optimizer = lion_optimizer(torch.nn.Linear(4, 4).parameters(), lr=1e-4)
    """
    from preheat.ops.optim.optimizers import Lion

    return Lion(parameters, **settings)


@dataclass(frozen=True, kw_only=True)
class Lion(Technique):
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "exact"  # for the gradients; the updates differ
    supports_encoder_decoder: ClassVar[bool] = True
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OPTIMIZER})

    # An update is the sign alone, of size 1 in each element, so the learning rate must be smaller.
    scale: Positive = 0.2
    """Lion's learning rate is `optimizer.lr` times this."""
    momentum: Fraction = 0.99
    """Decay of the momentum; the first of `optimizer.betas` is the interpolation's."""

    def apply(self, build: Build, part: nn.Module) -> Change:
        def make(groups: ParamsT, *, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
            # A GPU wants few large kernels; a CPU chunks that fit its cache.
            chunk = 1 << 24 if build.device.kind == "cuda" and build.storage_device is None else 1 << 20
            # `eps` is unused: nothing is divided by a second moment.
            return lion_optimizer(groups, lr=lr, betas=(betas[0], self.momentum), scale=self.scale, chunk=chunk)

        build.claim(Slot.OPTIMIZER, make, self.name())
        return Change(
            f"Lion at {self.scale:g} of the learning rate: one moment", sum(p.requires_grad for p in part.parameters())
        )
