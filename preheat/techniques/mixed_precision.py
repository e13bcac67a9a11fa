"""Mixed precision: compute in bf16, with fp32 weights (autocast) or with bf16 weights rounded stochastically.

What: `bf16` keeps weights, gradients and optimizer in fp32 and casts to bf16 around matrix products. `bf16_weights` keeps
weights and gradients in bf16, moments in fp32, and rounds each new weight up or down at random so that its mean is exact:
an update smaller than bf16's step (0.4 %) is not lost. Adapters on a frozen base stay in fp32. `fp32` says so plainly.
Helps: bf16 products run several times faster than fp32; `bf16_weights` also saves 4 bytes a parameter and all casts.
Hurts: results differ by bf16's rounding (8 bits of mantissa).
Source: Micikevicius et al. 2018 (arXiv:1710.03740); Kalamkar et al. 2019 (arXiv:1905.12322); stochastic rounding of
weights: Rae et al. 2021 (arXiv:2112.11446), appendix C.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.technique import Build, Change, Context, Slot, Stage, Tag, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["MixedPrecision", "autocast", "stochastic_adamw", "to_bf16"]


def autocast(device: str = "cpu") -> torch.autocast:
    """torch's autocast to bf16 on a device, for a forward pass."""
    import torch

    return torch.autocast(device, dtype=torch.bfloat16)


def to_bf16(model: nn.Module) -> int:
    """Casts parameters to bf16, in place: all of them, or, where some are frozen, the frozen ones. Buffers stay.

    Returns:
        How many elements were cast.

    Example:
        >>> import torch
        >>> to_bf16(torch.nn.Linear(4, 4))
        20
    """
    import torch

    frozen = [p for p in model.parameters() if not p.requires_grad]
    chosen = [p for p in (frozen or model.parameters()) if p.dtype == torch.float32]
    for p in chosen:
        p.data = p.data.to(torch.bfloat16)
    return sum(p.numel() for p in chosen)


def stochastic_adamw(parameters: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
    """AdamW for bf16 weights with stochastic rounding (`preheat.ops.optimizers.StochasticAdamW`).

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> _ = to_bf16(layer)
        >>> optimizer = stochastic_adamw(layer.parameters(), lr=1e-3)
    """
    from preheat.ops.optimizers import StochasticAdamW

    return StochasticAdamW(parameters, **settings)


@dataclass(frozen=True, kw_only=True)
class MixedPrecision(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Any] = "rounding"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OPTIMIZER})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag("bf16-compute")})

    mode: Literal["fp32", "bf16", "bf16_weights"] = "bf16"
    """fp32: no mixing; bf16: fp32 weights under autocast; bf16_weights: weights in bf16 with stochastic rounding."""

    def owned(self) -> frozenset[Slot]:
        return self.owns if self.mode == "bf16_weights" else frozenset()

    def provided(self) -> frozenset[Tag]:
        return self.provides if self.mode != "fp32" else frozenset()

    def apply(self, build: Build, part: Any) -> Change:
        if self.mode == "fp32":
            return Change("weights, products and optimizer in fp32", sum(p.numel() for p in part.parameters()))
        if self.mode == "bf16":
            build.around_forward.append(functools.partial(autocast, build.device.kind))
            return Change("matrix products in bf16 under autocast, weights in fp32", sum(p.numel() for p in part.parameters()))
        count = to_bf16(part)
        if all(p.requires_grad for p in part.parameters()):

            def optimizer(groups: Any, **settings: Any) -> Any:
                return stochastic_adamw(groups, seed=build.recipe.seed, number=lambda: build.step, **settings)

            build.own(Slot.OPTIMIZER, optimizer, self.name())
            return Change("weights and gradients in bf16, rounded stochastically; moments in fp32", count)
        build.around_forward.append(functools.partial(autocast, build.device.kind))
        return Change("frozen weights in bf16; trained ones in fp32 under autocast", count)

    def options(self, context: Context) -> Iterable[Technique]:
        return [MixedPrecision(mode=mode) for mode in ("fp32", "bf16", "bf16_weights")]  # type: ignore[arg-type]
