"""Muon: an optimizer that orthogonalizes the update of each matrix.

What: replaces the momentum of a matrix by approximately the nearest orthogonal matrix (five Newton-Schulz iterations in
bf16; in fp32 on CPUs below AVX512), so that all directions move equally. Embeddings, head, norms and biases are updated
by AdamW.
Helps: fewer steps to the same loss (about half the FLOPs of AdamW in its authors' runs), and 4 bytes of state per
matrix parameter instead of 8.
Hurts: the iterations multiply each matrix with itself in every step, which is noticeable on small batches; weights that
were trained with AdamW gain less when fine-tuned with Muon.
Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); scale and weight decay: Liu et al. 2025
(arXiv:2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Unpack

from preheat.core import Build, Change, Numerics, Slot, Stage, Technique
from preheat.errors import RecipeError
from preheat.recipe import Bound, Fraction

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim.optimizer import ParamsT

    from preheat.ops.optim.param_groups import AdamSettings

__all__ = ["Muon", "muon_optimizer"]


def muon_optimizer(groups: ParamsT, *, by_adamw: Iterable[Tensor] = (), **settings: Any) -> torch.optim.Optimizer:
    """Returns the optimizer (`preheat.ops.optim.optimizers.Muon`): Muon for matrices, AdamW for the rest.

    Args:
        groups: parameters, or groups of them.
        by_adamw: matrices that AdamW updates: embeddings and the head.
        settings: lr, betas, eps, weight_decay, momentum, steps.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4))
        >>> optimizer = muon_optimizer(model.parameters(), by_adamw=model[0].parameters(), lr=1e-3)
        >>> [(len(g["params"]), g["muon"]) for g in optimizer.param_groups]
        [(1, True), (2, False)]
    """
    from preheat.ops.optim.optimizers import Muon, split_matrices

    return Muon(split_matrices(groups, by_adamw, "muon"), **settings)


@dataclass(frozen=True, kw_only=True)
class Muon(Technique):
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "exact"  # for the gradients; the updates differ
    supports_encoder_decoder: ClassVar[bool] = True
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OPTIMIZER})

    momentum: Fraction = 0.95
    """Decay of the momentum (Nesterov's)."""
    ns_steps: Annotated[int, Bound(1)] = 5
    """Newton-Schulz iterations."""

    def apply(self, build: Build, part: nn.Module) -> Change:
        import torch

        from preheat.hardware.probe import fastest_half_dtype
        from preheat.models.hf import end_weights

        # The iteration tolerates bf16; a CPU without fast bf16 iterates in fp32.
        dtype = fastest_half_dtype() if build.device.kind == "cpu" else torch.bfloat16

        def make(groups: ParamsT, **settings: Unpack[AdamSettings]) -> torch.optim.Optimizer:
            # Read when the optimizer is created: pipeline stages have replaced the parts by then.
            others = [weight for trained in build.trained for weight in end_weights(trained)]
            return muon_optimizer(
                groups, by_adamw=others, momentum=self.momentum, steps=self.ns_steps, dtype=dtype, **settings
            )

        build.claim(Slot.OPTIMIZER, make, self.name())
        others = {id(weight) for weight in end_weights(part)}
        # AdamW updates all others: embedding, head, norms and biases.
        count = sum(p.requires_grad and p.ndim == 2 and id(p) not in others for p in part.parameters())
        if not count:
            raise RecipeError("techniques.muon: no matrix is trained but embeddings and head; leave it out")
        full = ", which iterates in fp32 on this CPU" if dtype == torch.float32 else ""
        return Change(f"{count} matrices by Muon{full}, the rest by AdamW", count)
