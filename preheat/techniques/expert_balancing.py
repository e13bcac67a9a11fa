"""Expert balancing: keeps a router from sending all tokens to the same few experts, by a bias or by an auxiliary loss.

What: `bias`: each expert has a number that is added to its score for the selection of experts, but not for their
weights. After each step it moves by `rate`: up if the expert had fewer tokens than the mean of its layer, down if it
had more, counted over the global batch of all devices; no gradient flows through it. `loss`: transformers'
load-balancing loss over the global batch (engine/moe_aux_loss.py), times `coefficient`; Mixtral and Qwen models have it
by default, with the coefficient of their configuration.
Helps: an idle expert is memory that learns nothing, and across devices all ranks wait for the busiest. The bias evens
out the load without a second objective, costs no pass over the batch, and needs no coefficient to tune.
Hurts: the loss pulls the router away from the best prediction, the more the larger it is. Only some families can store
the bias (glm4_moe); folders of Mixtral and Qwen cannot, so evaluations and exports route without it, as anyone who
loads the folder will: the reported validation loss is that of the exported model, slightly above that with the bias.
Source: Wang et al. 2024 (arXiv:2408.15664), DeepSeek-V3 (arXiv:2412.19437); the loss: Fedus et al. 2021
(arXiv:2101.03961).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import DATA, Axis, Build, Change, Numerics, Stage, Tag, Technique, Trials
from preheat.recipe import Positive

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from preheat.recipe import Recipe

__all__ = ["ExpertBalancing", "add_bias", "move_bias"]


def add_bias(model: nn.Module) -> list[Tensor]:
    """Adds a zero bias on the selection of experts to each router of a model, in place; an existing bias is unchanged.

    The routers must be ours (`preheat.models.moe.record_routers`): transformers' routers of Mixtral and Qwen ignore a
    bias.

    Returns:
        The biases, [experts] fp32 each, in the order of the layers that have experts.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        >>> config = MixtralConfig(**sizes, intermediate_size=16, vocab_size=16, num_local_experts=4)
        >>> [tuple(bias.shape) for bias in add_bias(MixtralForCausalLM(config))]
        [(4,), (4,)]
    """
    import torch

    from preheat.models.moe import BIAS, routers

    modules = routers(model)
    for router in modules:
        # GLM-4 MoE has this bias as part of the model, with its values.
        if BIAS not in router._buffers:
            weight = router.get_parameter("weight")
            zeros = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
            # Not persistent: transformers' classes for these families would not know the tensor.
            router.register_buffer(BIAS, zeros, persistent=False)
    return [router.get_buffer(BIAS) for router in modules]


def move_bias(biases: Sequence[Tensor], tokens: Tensor, rate: float) -> None:
    """Moves each bias by `rate`, in place: up for experts below their layer's mean load, down for those above.

    Args:
        biases: one per layer, [experts].
        tokens: [layers, experts], tokens routed to each expert.

    Example:
        >>> import torch
        >>> bias = torch.zeros(3)
        >>> move_bias([bias], torch.tensor([[1.0, 2.0, 3.0]]), 0.5)
        >>> bias.tolist()
        [0.5, 0.0, -0.5]
    """
    wanted = (tokens.mean(dim=1, keepdim=True) - tokens).sign()  # [layers, experts]: 1, 0 or -1
    for bias, direction in zip(biases, wanted, strict=True):
        # Only the sign counts: the step is the same for a slight and for a large imbalance (Wang et al. 2024).
        bias.add_(direction.to(bias.dtype), alpha=rate)


@dataclass(frozen=True, kw_only=True)
class ExpertBalancing(Technique):
    stage: ClassVar[Stage] = Stage.MATERIALIZE
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"method": "loss"},), family="qwen3_moe")
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.EXPERTS})
    # Adapters freeze the routers, and adapter folders cannot store a bias.
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.FROZEN_BASE, Tag.QUANTIZED_BASE})

    method: Literal["bias", "loss"] = "bias"
    """bias: moved after each step by the sign of each expert's load, without a gradient; loss: added to the language
    model's."""
    rate: Positive = 0.001
    """With `bias`: step size; runs of hundreds of steps need 0.003 or more. Scores lie between 0 and 1; for a softmax
    over many experts, near 1 / experts."""
    coefficient: Literal["auto"] | Positive = "auto"
    """Weight of the loss; auto: 0.01 with `loss`, none with `bias` (which may have a small one too)."""

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> None:
        from preheat.models import moe

        if not moe.sizes_of(config)[0]:
            raise ValueError(f"balances experts, and {config.model_type} has none; leave it out")
        # transformers computes these experts, with routers that no bias reaches.
        if config.get_text_config().model_type not in moe.FAMILIES:
            raise ValueError(
                f"cannot change the routers of {config.model_type}, which are transformers' own; leave it out"
            )
        if "router_aux_loss_coef" in recipe.model.config:
            raise ValueError("coefficient: model.config.router_aux_loss_coef sets the same; set it only here")
        # Both at once would be two forces on the load: with `bias` the loss is off unless it is asked for.
        if self.coefficient == "auto" and self.method == "bias":
            coefficient = 0.0
        else:
            coefficient = 0.01 if self.coefficient == "auto" else float(self.coefficient)
        if moe.has_bias(config):
            if coefficient:
                raise ValueError(
                    f"coefficient: {config.model_type} is balanced by its bias, and "
                    "has no loss for it; use method: bias without one"
                )
            return
        # The engine reads the coefficient from the configuration, as transformers does.
        config.router_aux_loss_coef = coefficient

    def apply(self, build: Build, part: nn.Module) -> Change:
        import torch

        from preheat.models.moe import TOKENS, coefficient, has_bias, number_of, routers

        layers = build.model.expert_layers
        if self.method == "loss":
            return Change(
                f"load-balancing loss x {coefficient(part.config):g} over {layers} layers with experts", layers
            )
        biases = add_bias(part)
        numbers = [number_of(router) for router in routers(part)]  # a pipeline stage has some of them, or none

        def move(build: Build) -> None:
            # A copy: the metrics count this device's rows, and `mesh.add` sums in place.
            tokens = build.mesh.add(build.loss.metrics[TOKENS].clone(), *DATA, Axis.CONTEXT)
            # A skipped step changes no weight, and moves no bias: without tokens, all loads are even. None: DeepSpeed.
            if (skipped := build.optimizer.found_inf) is not None:
                tokens *= skipped == 0
            # All devices see the same sums and move their copies of the bias alike.
            move_bias(biases, torch.stack([tokens[number] for number in numbers]), self.rate)

        if numbers:
            build.hooks.after_update.append(move)
        scope = (
            "part of the model and of its folder"
            if has_bias(part.config)
            else "used in training alone: evaluations and exports route without it"
        )
        return Change(
            f"a bias on the choice of {build.model.experts} experts in "
            f"{layers} layers, moved by {self.rate:g} a step; {scope}",
            layers,
        )
