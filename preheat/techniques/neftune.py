"""NEFTune: adds uniform noise to the token embeddings during instruction fine-tuning.

What: adds noise drawn from [-1, 1] times alpha / sqrt(tokens in a sequence x hidden size) to the embeddings in training
mode. A sequence is counted with its padding, as in transformers. Evaluation and generation use none, and the trained
model contains none.
Helps: fine-tuning on a few thousand instructions: answers become longer and less similar to the data's wording.
Hurts: pretraining and long runs on much data, which need no such regularization; the training loss is higher.
Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (arXiv:2310.05914), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from preheat.core import Build, Change, Numerics, Stage, Tag, Technique, Trials
from preheat.recipe import Positive

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["Neftune", "add_embedding_noise"]


def add_embedding_noise(embedding: nn.Module, alpha: float = 5.0) -> RemovableHandle:
    """Adds noise to the output of an embedding in training mode, in place; the handle's `remove()` undoes it.

    Args:
        embedding: returns [rows, length, hidden size].
        alpha: scale of the noise; its elements lie within alpha / sqrt(length x hidden size).

    Example:
        >>> import torch
        >>> embedding = torch.nn.Embedding(10, 4)
        >>> handle = add_embedding_noise(embedding, alpha=2.0)
        >>> tokens = torch.zeros(1, 16, dtype=torch.long)
        >>> bool((embedding(tokens) - embedding.weight[0]).abs().max() <= 2.0 / 64**0.5)
        True
        >>> bool((embedding.eval()(tokens) == embedding.weight[0]).all())
        True
    """

    def add_noise(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
        import torch

        # Evaluation and generation read the plain embeddings.
        if not module.training:
            return output
        # Uniform in +- alpha / sqrt(length x width): the norm of a row's noise does not depend on its size.
        scale = alpha / (output.shape[-2] * output.shape[-1]) ** 0.5
        return output + torch.empty_like(output).uniform_(-scale, scale)

    return embedding.register_forward_hook(add_noise)


@dataclass(frozen=True, kw_only=True)
class Neftune(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "different"
    training_only: ClassVar[bool] = True
    unsupported_for_images: ClassVar[str] = (
        "adds noise to the embeddings of text, and is not tested with images; leave it out"
    )
    # Ranks that process the same tokens would draw different noise.
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.TENSOR_PARALLEL, Tag.PIPELINE_STAGES})
    trials: ClassVar[Trials] = Trials(settings=({"alpha": 15.0},))

    alpha: Positive = 5.0
    """Scale of the noise (`neftune_noise_alpha` elsewhere): 5 to 15 in the paper."""

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models import hf

        add_embedding_noise(hf.embedding(part), self.alpha)
        return Change(f"noise of alpha {self.alpha:g} on the token embeddings while training", 1)
