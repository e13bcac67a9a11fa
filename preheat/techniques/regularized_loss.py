"""Regularized loss: adds label smoothing and z-loss to the cross entropy.

What: `label_smoothing` distributes a fraction of each label's weight over all tokens equally; `z` adds the squared
logarithm of the softmax's normalizer. Evaluation still measures the plain cross entropy.
Helps: z-loss keeps logits near zero, where bf16 is precise enough, and long runs stable; smoothing keeps small or noisy
data sets from being memorized.
Hurts: the training loss is no longer in nats per token; smoothing costs some of the best likelihood that a large data
set would allow.
Source: label smoothing: Szegedy et al. 2016 (arXiv:1512.00567); z-loss: Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from preheat.core import Build, Change, Context, Numerics, Slot, Stage, Technique, Trials
from preheat.recipe import Bound, Fraction

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["RegularizedLoss", "regularized_cross_entropy"]


def regularized_cross_entropy(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, z: float = 0.0
) -> Tensor:
    """Returns the losses [n] of logits [n, vocabulary] against labels [n] (-100: ignored).

    Example:
        >>> import torch
        >>> regularized_cross_entropy(torch.zeros(1, 4), torch.tensor([2]), label_smoothing=0.1)
        tensor([1.3863])
    """
    from preheat.ops.losses.cross_entropy import RegularizedCrossEntropy

    return RegularizedCrossEntropy(label_smoothing, z)(logits, labels)


@dataclass(frozen=True, kw_only=True)
class RegularizedLoss(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"label_smoothing": 0.1, "z": 0.0},))
    supports_encoder_decoder: ClassVar[bool] = True
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.ROW_LOSS})

    label_smoothing: Fraction = 0.0
    """Fraction of each label's weight that is distributed over all tokens equally."""
    z: Annotated[float, Bound(0)] = 1e-4
    """Weight of the squared logsumexp of the logits."""

    def check(self, context: Context) -> list[str]:
        if not self.label_smoothing and not self.z:
            return ["label_smoothing and z are both 0, which changes nothing; set one, or leave the technique out"]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.ops.losses.cross_entropy import RegularizedCrossEntropy

        # A row loss works with chunked and full logits alike; its `measured` form is the plain loss.
        build.claim(Slot.ROW_LOSS, RegularizedCrossEntropy(self.label_smoothing, self.z), self.name())
        terms = [f"label smoothing {self.label_smoothing:g}"] * bool(self.label_smoothing) + [
            f"z-loss {self.z:g}"
        ] * bool(self.z)
        return Change(f"cross entropy with {' and '.join(terms)}", 1)
