"""Feed-forward block: another activation, gated or not, for a new model with the same number of parameters.

What: swiglu, geglu and reglu multiply the activation of one linear map with another (three matrices); gelu and relu
have no gate (two). If the number of matrices changes, the inner width changes by 2/3 or 3/2, so that the parameter
count is unchanged. `model.intermediate_size` sets the width of the family's own block.
Helps: gated blocks reach a lower loss at equal parameters; relu produces many zeros, which sparse kernels can skip.
Hurts: a gate is one more activation to keep for the backward pass; a block that the family does not have in
transformers (gelu or relu in a llama, a gate in a GPT-2) cannot be exported to a Hugging Face folder.
Source: Shazeer 2020 (arXiv:2002.05202).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Build, Change, Numerics, Stage, Tag, Technique, Trials

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.recipe import Recipe

__all__ = ["FeedForward", "replace_feed_forward", "set_feed_forward"]


def set_feed_forward(config: PretrainedConfig, activation: str) -> None:
    """Sets activation and inner width of a transformers configuration (llama, qwen, mistral, gpt2), in place.

    The inner width keeps the number of parameters.

    Args:
        activation: swiglu, geglu, reglu, gelu or relu.

    Raises:
        ValueError: the family is unknown, or already has that block.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=512, num_attention_heads=8, intermediate_size=1024)
        >>> set_feed_forward(config, "relu")
        >>> config.hidden_act, config.intermediate_size
        ('relu', 1536)
    """
    from preheat.models.conversions import architecture

    architecture.set_feed_forward(config, activation)


def replace_feed_forward(model: nn.Module, activation: str) -> int:
    """Replaces the blocks of such a model if transformers has no class for them, in place; works on meta.

    Returns:
        The number of replaced blocks; 0 if the configuration suffices.
    """
    from preheat.models.conversions import architecture

    return architecture.replace_feed_forward(model, activation)


@dataclass(frozen=True, kw_only=True)
class FeedForward(Technique):
    stage: ClassVar[Stage] = Stage.STRUCTURE
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"activation": "relu"},))
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.UNGATED_MLP})
    unsupported_for_images: ClassVar[str] = "supports only text models so far; leave it out"

    activation: Literal["swiglu", "geglu", "reglu", "gelu", "relu"] = "geglu"
    """swiglu, geglu, reglu: gated; gelu, relu: not gated. A llama has swiglu by default, a GPT-2 gelu."""

    def provided(self) -> frozenset[Tag]:
        # Upcycled experts need a gate.
        return self.provides if self.activation in ("gelu", "relu") else frozenset()

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> None:
        # Trained weights expect the activation that they were trained with.
        if recipe.model.path and recipe.model.weights == "pretrained":
            raise ValueError(
                "is for new models: the weights of model.path were trained with "
                "their own block; remove it, or set model.weights: random"
            )
        set_feed_forward(config, self.activation)

    def apply(self, build: Build, part: PreTrainedModel) -> Change:
        from preheat.models.conversions import architecture
        from preheat.models.hf import find_anatomy

        replaced = replace_feed_forward(part, self.activation)
        # GPT-2 scales its output projection with depth; transformers does so only in its own block.
        draw = architecture.feed_forward_draw(part.config)
        if replaced and draw:
            names = [name for name, _ in part.named_modules() if name.endswith(".mlp")]
            build.weights.fresh(r"\.mlp\.down_proj\.weight$", names, draw)
        inner = getattr(part.config, "intermediate_size", None) or part.config.n_inner
        layers = len(find_anatomy(part).layers)
        own = ", a block that transformers does not have" if replaced else ""
        return Change(f"{self.activation} of inner width {inner} in {layers} layers{own}", layers)
