"""APOLLO: an optimizer that keeps moments of a small random projection of each matrix's gradient.

What: projects the gradient to a few rows with a random matrix and keeps AdamW's moments of those rows. They estimate
how large AdamW's update of each channel would be, and the gradient itself is scaled to that size. Embeddings, head,
norms and biases are updated by AdamW. The first moment acts through the scale only: the direction is that of the
current gradient.
Helps: optimizer state of a matrix falls to 8 bytes times `rank` per parameter (2 at a rank of 0.25), and to almost
nothing with a `rank` of 0 (APOLLO-Mini: one row), without GaLore's singular value decompositions.
Hurts: noisier than AdamW on small batches; updates are smaller by about the square root of `rank`, so it needs a larger
learning rate; each step draws a random matrix and multiplies by it.
Source: Zhu et al. 2024, "APOLLO: SGD-like Memory, AdamW-level Performance" (arXiv:2412.05270).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack

from preheat.core import Build, Change, Numerics, Slot, Stage, Tag, Technique, Trials
from preheat.errors import RecipeError
from preheat.recipe import Bound, Fraction, Positive

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim.optimizer import ParamsT

    from preheat.core.json_types import JsonObject
    from preheat.ops.optim.param_groups import AdamSettings

__all__ = ["Apollo", "apollo_optimizer"]


def apollo_optimizer(groups: ParamsT, *, by_adamw: Iterable[Tensor] = (), **settings: Any) -> torch.optim.Optimizer:
    """Returns the optimizer (`preheat.ops.optim.apollo.Apollo`): APOLLO for matrices, AdamW for the rest.

    Args:
        groups: parameters, or groups of them.
        by_adamw: matrices that AdamW updates: embeddings and the head.
        settings: lr, betas, eps, weight_decay, rank (0: APOLLO-Mini), every, scale, seed, number.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(64, 32)
        >>> optimizer = apollo_optimizer(layer.parameters(), lr=1e-3, rank=0.25)
        >>> optimizer.state[layer.weight]["exp_avg"].shape
        torch.Size([8, 64])
    """
    from preheat.ops.optim.apollo import Apollo
    from preheat.ops.optim.optimizers import split_matrices

    return Apollo(split_matrices(groups, by_adamw, "apollo"), **settings)


@dataclass(frozen=True, kw_only=True)
class Apollo(Technique):
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "exact"  # for the gradients; the updates differ
    trials: ClassVar[Trials] = Trials(settings=({"rank": 0.0},))
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OPTIMIZER})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.PER_MATRIX_STATES})

    rank: Fraction = 0.25
    """Rows of the projection, as a fraction of a matrix's smaller side; 0: APOLLO-Mini, one row and one scale for a
    whole matrix."""
    every: Annotated[int, Bound(1)] = 200
    """Steps after which a new projection is drawn."""
    scale: Literal["auto"] | Positive = "auto"
    """Factor on the updates; auto: the authors' 1, and the square root of 128 for a rank of 0."""

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models.hf import end_weights

        options: JsonObject = {
            "rank": self.rank,
            "every": self.every,
            # The single scale of APOLLO-Mini is too small, which its authors correct by sqrt(128).
            "scale": (1.0 if self.rank else 128**0.5) if self.scale == "auto" else self.scale,
            "seed": build.recipe.seed,
            # Projections are drawn from seed and step, so that none is stored and a resumed run draws the same.
            "number": lambda: build.state.updates,
        }

        def make(groups: ParamsT, **settings: Unpack[AdamSettings]) -> torch.optim.Optimizer:
            # Read when the optimizer is created: pipeline stages have replaced the parts by then.
            others = [weight for trained in build.trained for weight in end_weights(trained)]
            return apollo_optimizer(groups, by_adamw=others, **options, **settings)

        build.claim(Slot.OPTIMIZER, make, self.name())
        others = {id(weight) for weight in end_weights(part)}
        # AdamW updates all others: embedding, head, norms and biases.
        count = sum(p.requires_grad and p.ndim == 2 and id(p) not in others for p in part.parameters())
        if not count:
            raise RecipeError("techniques.apollo: no matrix is trained but embeddings and head; leave it out")
        rows = f"{self.rank:g} of the rows" if self.rank else "one row"
        return Change(f"{count} matrices by APOLLO with moments of {rows}, the rest by AdamW", count)
