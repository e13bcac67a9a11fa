"""Dynamic fine-tuning (DFT): weighs the cross entropy of each token by the token's own probability.

What: the loss of a token is -p log p with p held constant, where p is the probability that the model gives the token:
the gradient of the cross entropy without its factor 1 / p, which is large for tokens that the model finds unlikely.
Evaluation still measures the plain cross entropy.
Helps: fine-tuning on answers that are partly noise, or far from the model's own, changes it less: the paper reports
better generalization on mathematics than plain fine-tuning.
Hurts: what the model finds nearly impossible is hardly learnt: not for pretraining, new facts or a new language. The
training loss is no measure, since -p log p rises until p is 1 / e; the validation loss is.
Source: Wu et al. 2025 (arXiv:2508.05629).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from preheat.core import Build, Change, Numerics, Slot, Stage, Tag, Technique, Trials

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Dft", "dynamic_cross_entropy"]


def dynamic_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the losses [n] of logits [n, vocabulary] against labels [n] (-100: ignored); differentiable.

    Example:
        >>> import torch
        >>> dynamic_cross_entropy(torch.zeros(2, 4), torch.tensor([2, -100]))
        tensor([0.3466, 0.0000])
    """
    from preheat.ops.losses.cross_entropy import DynamicCrossEntropy

    return DynamicCrossEntropy()(logits, labels)


@dataclass(frozen=True, kw_only=True)
class Dft(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "different"
    # -p log p at the start, where each of the trial's 96 tokens has the same probability.
    trials: ClassVar[Trials] = Trials(first_loss={None: math.log(96) / 96})
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.ROW_LOSS})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.CLASSIFICATION_HEAD})  # for answers, not for classes

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.ops.losses.cross_entropy import DynamicCrossEntropy

        # A row loss works with chunked and full logits alike; its `measured` form is the plain loss.
        build.claim(Slot.ROW_LOSS, DynamicCrossEntropy(), self.name())
        return Change("cross entropy weighted by each token's probability", 1)
