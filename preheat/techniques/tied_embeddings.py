"""Tied embeddings: embedding and head share one matrix.

What: a new model is built with one matrix for both. For pretrained weights, `keep` selects which of the two remains:
the embedding, the head, or their mean; in any case the model must be trained further.
Helps: saves vocabulary times width parameters, with their gradients and optimizer state: a third of a small model. Rare
tokens learn from both ends.
Hurts: large models lose a little, because reading and predicting need different vectors; a pretrained model's loss
jumps at first.
Source: Press and Wolf 2017 (arXiv:1608.05859); Inan et al. 2017 (arXiv:1611.01462); T5: Raffel et al. 2020
(arXiv:1910.10683).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Build, Change, Numerics, Stage, Tag, Technique, Trials

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.recipe import Recipe

__all__ = ["TiedEmbeddings", "tie_embeddings"]


def tie_embeddings(model: nn.Module, keep: str = "embedding") -> int:
    """Ties a transformers model's head to its embedding (in T5's family, to both stacks' embeddings), in place.

    Args:
        keep: embedding, head or mean: the values of the shared matrix. A T5 that keeps the embedding also scales the
            decoder's output by width ** -0.5, as tied T5 models do.

    Returns:
        The number of removed elements.

    Raises:
        ValueError: they are tied already, or have different shapes.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=96
        ... )
        >>> tie_embeddings(LlamaForCausalLM(config))
        3072
    """
    from preheat.models.conversions import architecture

    return architecture.tie_embeddings(model, keep)


@dataclass(frozen=True, kw_only=True)
class TiedEmbeddings(Technique):
    stage: ClassVar[Stage] = Stage.STRUCTURE
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(family="llama")
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.CLASSIFICATION_HEAD})  # it has no row per token

    keep: Literal["embedding", "head", "mean"] = "embedding"
    """For pretrained weights: which matrix remains. A new model initializes one, like an embedding."""

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> None:
        if config.tie_word_embeddings:
            raise ValueError(
                f"embedding and head of the {config.model_type} are one matrix already; leave the technique out"
            )
        if recipe.model.tie_embeddings is False:
            raise ValueError("contradicts model.tie_embeddings: false; remove one of them")
        # Before the model is built, which then shares the parameter itself.
        config.tie_word_embeddings = True

    def apply(self, build: Build, part: PreTrainedModel) -> Change:
        from preheat.models.conversions import architecture

        weight = part.get_input_embeddings().weight
        assert part.get_output_embeddings().weight is weight
        saving = f"{weight.numel():,} parameters fewer"
        if build.weights.folder is None:
            return Change(f"embedding and head are one matrix: {saving}", 1)
        # The shared parameter is read under the embedding's name; `tie` fetches the head's values.
        names = {id(module): name for name, module in part.named_modules()}
        embedding, head = (names[id(m)] for m in (part.get_input_embeddings(), part.get_output_embeddings()))

        def tie(name: str, value: Tensor) -> Tensor:
            return architecture.merge_tied_value(value, build.weights.read(f"{head}.weight"), self.keep)

        build.weights.map(rf"^{embedding}\.weight$", tie)
        source = "the mean of both" if self.keep == "mean" else f"the loaded {self.keep}"
        return Change(f"embedding and head are one matrix, {source}: {saving}, and the logits change", 1)
