"""Grouped queries: fewer key-value heads, each shared by a group of query heads.

What: the model keeps its query heads and gets `num_kv_heads` key-value heads. Pretrained weights are mean-pooled: each
new head is the mean of the heads of its group; a new model is simply built with fewer.
Helps: the KV cache, which dominates with long contexts and many requests, shrinks by the same factor; key and value
matrices too.
Hurts: a pooled model is worse until it is trained further (the paper uses 5 % of the pretraining steps); with fewer
heads than devices, tensor parallelism has to copy heads.
Source: Ainslie et al. 2023 (arXiv:2305.13245); one head for all: Shazeer 2019 (arXiv:1911.02150).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from preheat.core import Build, Change, Numerics, Stage, Technique, Trials
from preheat.recipe import Bound

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from preheat.recipe import Recipe

__all__ = ["GroupedQueries", "group_queries"]


def group_queries(model: nn.Module, kv_heads: int) -> int:
    """Mean-pools the key-value heads of a transformers model with `k_proj` and `v_proj` (llama, qwen, ...), in place.

    Args:
        model: with its weights; its configuration is updated too, so that `save_pretrained` writes the new shape.
        kv_heads: new number of key-value heads; a divisor of the current one.

    Returns:
        The number of pooled matrices.

    Raises:
        ValueError: the projections are fused, or `kv_heads` is not a smaller divisor.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=96
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> group_queries(model, 2), model.model.layers[0].self_attn.k_proj.weight.shape
        (4, torch.Size([16, 32]))
    """
    from preheat.models.conversions import architecture

    return architecture.pool_key_value_heads(model, kv_heads)


@dataclass(frozen=True, kw_only=True)
class GroupedQueries(Technique):
    stage: ClassVar[Stage] = Stage.STRUCTURE
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(family="llama")
    unsupported_for_images: ClassVar[str] = "supports only text models so far; leave it out"

    num_kv_heads: Annotated[int, Bound(1)] = 1
    """Key-value heads of each layer: a divisor of the model's current number."""

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> None:
        from preheat.models.conversions import architecture

        # Before the model is built, so that its key and value matrices have the new shape.
        architecture.set_kv_heads(config, self.num_kv_heads)

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.errors import RecipeError
        from preheat.models.conversions import architecture

        facts = build.model
        try:
            # Fused projections have no matrices of their own to pool.
            count = len(architecture.key_value_projections(part))
        except ValueError as error:
            raise RecipeError(f"techniques.grouped_queries: {error}") from None

        # [kv heads * head_dim, width] -> [num_kv_heads * head_dim, width], the mean of each group.
        def pool(name: str, value: Tensor) -> Tensor:
            return architecture.pool_heads(value, self.num_kv_heads, facts.head_dim)

        # As weights are read: the model on meta has only the new shape.
        build.weights.map(architecture.KEYS_AND_VALUES, pool)
        origin = "new weights" if build.weights.folder is None else "the mean of each group of the loaded ones"
        return Change(
            f"{facts.heads} query heads on {self.num_kv_heads} key-value heads in {facts.layers} layers, {origin}",
            count,
        )
