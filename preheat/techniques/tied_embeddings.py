"""Tied embeddings: embedding and head are one matrix.

What: a new model is built with one matrix for both. For weights that are read, `keep` says which of the two stays: the
embedding, the head, or their mean; whichever goes, the model has to be trained on.
Helps: vocabulary times width parameters less, with their gradients and optimizer state: a third of a small model. Rare
pieces learn from both ends.
Hurts: large models lose a little, since reading and predicting want different vectors; a pretrained model's loss jumps
at first.
Source: Press and Wolf 2017 (arXiv:1608.05859); Inan et al. 2017 (arXiv:1611.01462); T5: Raffel et al. 2020
(arXiv:1910.10683).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.core import Build, Change, Stage, Tag, Technique, Trials

if TYPE_CHECKING:
    from torch import nn

    from preheat.recipe import Recipe

__all__ = ["TiedEmbeddings", "tie_embeddings"]


def tie_embeddings(model: nn.Module, keep: str = "embedding") -> int:
    """Ties the head of a transformers model to its embedding, in place; of T5's family, both stacks' embeddings and the
    head.

    Args:
        keep: embedding, head or mean: the values of the one matrix. A T5 that keeps the embedding also scales the
            decoder's output by width ** -0.5, as tied T5 models do.

    Returns:
        Elements that went away.

    Raises:
        ValueError: they are one matrix already, or of different shapes.

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
    numerics: ClassVar[Any] = "different"
    trials: ClassVar[Trials] = Trials(family="llama")
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.CLASSIFICATION_HEAD})  # it has no row a piece

    keep: Literal["embedding", "head", "mean"] = "embedding"
    """Of weights that are read: which matrix stays. A new model's are drawn once, as an embedding's are."""

    def configure(self, config: Any, recipe: Recipe) -> None:
        if config.tie_word_embeddings:
            raise ValueError(
                f"embedding and head of the {config.model_type} are one matrix already; leave the technique out"
            )
        if recipe.model.tie_embeddings is False:
            raise ValueError("contradicts model.tie_embeddings: false; remove one of them")
        config.tie_word_embeddings = True

    def apply(self, build: Build, part: Any) -> Change:
        from preheat.models.conversions import architecture

        weight = part.get_input_embeddings().weight
        assert part.get_output_embeddings().weight is weight
        saving = f"{weight.numel():,} parameters fewer"
        if build.weights.folder is None:
            return Change(f"embedding and head are one matrix: {saving}", 1)
        names = {id(module): name for name, module in part.named_modules()}
        embedding, head = (names[id(m)] for m in (part.get_input_embeddings(), part.get_output_embeddings()))

        def tie(name: str, value: Any) -> Any:
            return architecture.tied_value(value, build.weights.read(f"{head}.weight"), self.keep)

        build.weights.map(rf"^{embedding}\.weight$", tie)
        source = "the mean of both" if self.keep == "mean" else f"the {self.keep} that was read"
        return Change(f"embedding and head are one matrix, {source}: {saving}, and the logits change", 1)
