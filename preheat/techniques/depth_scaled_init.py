"""Depth-scaled initialization: the projections into the residual stream of a new model start smaller, by its depth.

What: each layer adds the outputs of its attention and of its feed-forward block to the residual stream, two sums per
layer. The matrices that write them (`o_proj`, `down_proj`) are drawn as usual and divided by sqrt(2 x layers), so that
the stream's variance at the start does not grow with depth.
Helps: deep new models train more evenly in the first steps, and tolerate a higher rate. GPT-2 and its successors in
transformers do it by themselves; Llama, Mistral and Qwen do not.
Hurts: changes little in a model of a few layers. It would have no effect in families that normalize the outputs before
the sum (Gemma 2 and 3, OLMo 2), which are refused.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), section 2.3; variance of the
stream: Zhang et al. 2019 (arXiv:1901.09321).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from preheat.core import Build, Change, Context, Numerics, Stage, Tag, Technique, Trials

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DepthScaledInit", "scale_residual_projections"]

_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Families whose layers add two outputs to the stream, unnormalized and unscaled, from matrices of these names."""
# Experts are stacked in one parameter without a module of its own.
_PROJECTION = re.compile(
    r"(^|\.)(self_attn\.o_proj\.weight|(mlp|shared_expert)\.down_proj\.weight|experts\.down_proj)$"
)


def scale_residual_projections(model: nn.Module, layers: int) -> list[str]:
    """Divides the projections into the residual stream by sqrt(2 x layers), in place.

    Args:
        layers: of the whole model, also if `model` is a part of it.

    Returns:
        Names of the parameters.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 16}
        >>> scale_residual_projections(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)), 1)
        ['model.layers.0.self_attn.o_proj.weight', 'model.layers.0.mlp.down_proj.weight']
    """
    import torch

    names = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _PROJECTION.search(name):
                parameter.mul_(1 / math.sqrt(2 * layers))
                names.append(name)
    return names


@dataclass(frozen=True, kw_only=True)
class DepthScaledInit(Technique):
    # Once the weights are drawn, and before the optimizer copies them.
    stage: ClassVar[Stage] = Stage.MATERIALIZE
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(family="llama")
    # Adapters and packed weights are trained on pretrained matrices.
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.FROZEN_BASE, Tag.QUANTIZED_BASE})
    unsupported_for_images: ClassVar[str] = "supports only text models so far; leave it out"

    def check(self, context: Context) -> list[str]:
        model, family = context.recipe.model, context.model.family
        problems = []
        if (model.path or model.preset) and model.weights == "pretrained":
            problems.append("the weights are pretrained, not drawn; leave it out, or set model.weights: random")
        if family == "gpt2":
            problems.append("transformers initializes gpt2 so already; leave it out")
        elif family not in _FAMILIES:
            problems.append(f"supports {', '.join(_FAMILIES)}, and this is a {family}; leave it out")
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        names = scale_residual_projections(part, build.model.layers)
        return Change(
            f"{len(names)} projections into the residual stream start {math.sqrt(2 * build.model.layers):.3g} times "
            "smaller",
            len(names),
        )
