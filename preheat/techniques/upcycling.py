"""Upcycling: turns a dense model into a mixture of experts, each initialized from its feed-forward block.

What: each layer gets `num_experts` copies of its feed-forward block and a new router that sends each token to
`num_experts_per_tok` of them. The weights of the chosen experts sum to 1, so with identical copies the model computes
what the dense one did; they diverge as the router sends them different tokens. `redrawn` reinitializes a fraction of
each copy's inner channels, so that they differ from the start. A llama or mistral becomes a mixtral, a qwen3 a
qwen3_moe: exported folders open in transformers.
Helps: many times the parameters for the FLOPs of `num_experts_per_tok` blocks, without starting from scratch: the paper
passes the dense model's further training with about half its pretraining compute. `redrawn` near 0.5 learns faster in
long runs (its loss starts higher).
Hurts: all experts are in memory with gradients and optimizer state; a step costs `num_experts_per_tok` times the
block's FLOPs; too few tokens leave the experts alike.
Source: Komatsuzaki et al. 2022 (arXiv:2212.05055); partial reinitialization: Nakamura et al. 2025, "Drop-Upcycling"
(arXiv:2502.19261).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from preheat.core import Axis, Build, Change, Numerics, Stage, Tag, Technique, Trials
from preheat.recipe import Bound, Count, Fraction

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.recipe import Recipe

__all__ = ["Upcycling", "upcycle"]


def upcycle(model: nn.Module, experts: int = 8, *, chosen: int = 2, redrawn: float = 0.0, seed: int = 0) -> nn.Module:
    """Returns a mixture-of-experts copy of a dense transformers model (llama, mistral, qwen3), which is unchanged.

    Args:
        experts: experts per layer.
        chosen: experts per token.
        redrawn: fraction of each expert's inner channels that are reinitialized, normal with the mean and deviation of
            their matrix.
        seed: for the reinitialization; the router uses torch's generator, as in transformers.

    Raises:
        ValueError: the model is of another family, or has settings that the family with experts does not support.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 16}
        >>> upcycled = upcycle(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)), 4)
        >>> type(upcycled).__name__, tuple(upcycled.model.layers[0].mlp.experts.down_proj.shape)
        ('MixtralForCausalLM', (4, 16, 24))
    """
    from preheat.models.conversions import upcycling

    upcycled: nn.Module = upcycling.upcycle(model, experts, chosen, redrawn, seed)
    return upcycled


@dataclass(frozen=True, kw_only=True)
class Upcycling(Technique):
    stage: ClassVar[Stage] = Stage.STRUCTURE
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"num_experts": 4, "num_experts_per_tok": 1},), family="llama")
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.EXPERTS})
    # Frozen copies would stay identical; experts need a gated block.
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.FROZEN_BASE, Tag.QUANTIZED_BASE, Tag.UNGATED_MLP})

    num_experts: Annotated[int, Bound(2)] = 8
    """Experts of each layer, each as wide as the dense block."""
    num_experts_per_tok: Count = 2
    """Experts per token."""
    redrawn: Fraction = 0.0
    """Fraction of each expert's inner channels that are reinitialized; 0: the first loss is the dense model's."""

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> PretrainedConfig:
        from preheat.models.conversions.upcycling import expert_config

        # A configuration of another family, e.g. Mixtral for a Llama: the model is built from it.
        return expert_config(config, self.num_experts, self.num_experts_per_tok)

    def apply(self, build: Build, part: PreTrainedModel) -> Change:
        from preheat.models.conversions.upcycling import EXPERTS, expert_matrices
        from preheat.models.moe import routers

        layers, weights, seed = len(routers(part)), build.weights, build.recipe.seed
        origin = "new weights"
        if weights.folder is not None:
            router_ids = {id(router) for router in routers(part)}
            names = [name for name, module in part.named_modules() if id(module) in router_ids]
            # Each expert's matrices are assembled from the dense block's, as they are read.
            weights.compose(
                EXPERTS, lambda name: expert_matrices(name, weights.read, self.num_experts, self.redrawn, seed)
            )
            # In a pipeline, the blocks of other stages are read there.
            if build.mesh.size(Axis.PIPELINE) > 1:
                weights.leave(r"\.mlp\.(gate|up|down)_proj\.weight$")
            # The dense model has no router, so each is initialized as transformers would.
            weights.fresh(r"\.mlp\.gate\.weight$", names, part._init_weights)
            redrawn_note = f", {self.redrawn:.0%} of the inner channels reinitialized" if self.redrawn else ""
            origin = f"each a copy of the dense block{redrawn_note}; routers new"
        summary = (
            f"{self.num_experts} experts in each of {layers} layers, {self.num_experts_per_tok} for a "
            f"token, {origin}: now a {part.config.model_type}"
        )
        return Change(summary, layers)
