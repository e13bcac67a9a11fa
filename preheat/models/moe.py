"""Mixture-of-experts models of transformers: where the experts are, how their rows are computed, what their routers chose.

The router works in fp32, whatever the rest does: which experts a token goes to hangs on differences that bf16 does not have. Its scores are a softmax over
all experts (Mixtral, Qwen) or a sigmoid of each by itself (GLM-4.5, after DeepSeek-V3: groups of experts are chosen first, and what is chosen by is the
score and a bias that is part of the model). No token is dropped: each goes to all of its experts, however many tokens these have. The experts of a layer
are computed by the function that is hung onto them (`ops/grouped_mm.py` has one: a grouped product for all), by the name `preheat` in transformers' own
registry; transformers' eager loop gives the same.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "BIAS",
    "FAMILIES",
    "TOKENS",
    "RouterRecorder",
    "adapted",
    "biases",
    "coefficient",
    "compute_by",
    "expert_layers",
    "experts_of",
    "has_bias",
    "record_routers",
    "register",
    "routed",
    "routers",
    "shared_width",
    "sizes_of",
]

_BY_SOFTMAX = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text")
_BY_SIGMOID = ("deepseek_v3", "glm4_moe")
FAMILIES = (*_BY_SOFTMAX, *_BY_SIGMOID)
"""What is known to be a router by softmax or sigmoid and top-k over gated experts, with or without an expert that all tokens go to."""
NAME = "preheat"  # of our function in transformers' registry of experts
COMPUTE = "preheat_compute"  # attribute of a layer's experts: the function that computes them
ROUTED = "preheat_routed"  # attribute of a router: what it chose since it was last asked
BIAS = "e_score_correction_bias"
"""Buffer of a router, [experts] fp32: what is added to its scores where experts are chosen, and not where they are weighed. transformers' name."""
TOKENS = "expert_tokens"
"""Metric of a step: tokens of each expert, [layers, experts]."""


def sizes_of(config: Any) -> tuple[int, int, int]:
    """Experts of a layer, experts that a token goes to, inner width of one; (0, 0, 0) where the model has none."""
    if config.model_type not in FAMILIES:
        return 0, 0, 0
    width = config.intermediate_size if config.model_type == "mixtral" else config.moe_intermediate_size
    count = config.n_routed_experts if config.model_type in _BY_SIGMOID else config.num_experts
    return count, config.num_experts_per_tok, width


def expert_layers(config: Any) -> int:
    """Layers that have experts; the others have one feed-forward block for all tokens."""
    layers: int = config.num_hidden_layers
    if config.model_type not in FAMILIES or config.model_type == "mixtral":
        return layers if config.model_type in FAMILIES else 0
    if config.model_type in _BY_SIGMOID:
        return max(layers - int(config.first_k_dense_replace), 0)
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return sum(n not in dense and (n + 1) % step == 0 for n in range(layers))


def shared_width(config: Any) -> int:
    """Inner width of what all tokens go to beside the experts of a layer; 0 where there is nothing."""
    if config.model_type == "qwen2_moe":
        return int(config.shared_expert_intermediate_size)
    return int(config.n_shared_experts * config.moe_intermediate_size) if config.model_type in _BY_SIGMOID else 0


def has_bias(config: Any) -> bool:
    """Whether the model itself has a bias on the choice of experts, which its folder holds and transformers routes by."""
    return config.model_type in _BY_SIGMOID


def adapted(model: nn.Module, targets: Any) -> Any:
    """What adapters go onto: `all-linear` of a model with experts is attention's maps, by name; anything else stays as it is.

    peft takes the names of the maps of a feed-forward block for those of the experts, which are no maps here.
    """
    if targets != "all-linear" or not routers(model):
        return targets
    from torch import nn

    found = {
        leaf
        for module in model.modules()
        if type(module).__name__.lower().endswith("attention")
        for leaf, child in module.named_children()
        if isinstance(child, nn.Linear) or hasattr(child, "base_layer")  # under an adapter already
    }
    return tuple(sorted(found))


def coefficient(config: Any) -> float:
    """How much the load-balancing loss counts; 0 where there is none."""
    return float(config.router_aux_loss_coef or 0.0) if config.model_type in _BY_SOFTMAX else 0.0


@functools.cache
def register() -> str:
    """Puts our function into transformers' registry of experts, under its own name, which is returned; nothing of theirs is replaced."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts of each layer that has some: a module with gate_up_proj [experts, 2 inner, width] and down_proj [experts, width, inner]."""
    return [m for m in model.modules() if type(m).__name__.endswith("Experts") and "gate_up_proj" in m._parameters]


def routers(model: nn.Module) -> list[nn.Module]:
    """The router of each layer that has experts, in order."""
    return [m for m in model.modules() if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))]


def biases(model: nn.Module) -> dict[str, Tensor]:
    """The biases on the choice of experts that a model has, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{BIAS}")}


class RouterRecorder:
    """Whether routers write down what they choose: not while a layer is computed again in the backward pass."""

    def __init__(self) -> None:
        self.open = False


def record_routers(model: nn.Module) -> RouterRecorder:
    """Has the routers of a model compute in fp32 and write down what they chose while the ledger is open, in place."""
    ledger = RouterRecorder()
    for router in routers(model):
        router.forward = types.MethodType(functools.partial(_route, ledger), router)  # type: ignore[method-assign]
        setattr(router, ROUTED, None)
    return ledger


def _route(ledger: RouterRecorder, router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all experts [tokens, experts], and weights and numbers of those that each token goes to [tokens, chosen]."""
    import torch

    hidden = hidden.reshape(-1, router.hidden_dim)
    with torch.autocast(hidden.device.type, enabled=False):
        scores = torch.nn.functional.linear(hidden.float(), router.weight.float())
    shares, weights, chosen = (
        _by_sigmoid(router, scores) if hasattr(router, "num_group") else _by_softmax(router, scores)
    )
    flat = chosen.flatten()
    counts = shares.new_zeros(router.num_experts).scatter_add_(0, flat, torch.ones_like(flat, dtype=shares.dtype))
    sums = shares.sum(dim=0)
    if ledger.open and router.training:  # not what a reference model, which is this one without its adapters, looks at
        held = getattr(router, ROUTED)
        setattr(router, ROUTED, (counts, sums) if held is None else (held[0] + counts, held[1] + sums))
    return scores, weights, chosen


def _by_softmax(router: Any, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of all experts, and weights and numbers of the chosen."""
    shares = scores.softmax(dim=-1)
    bias = router._buffers.get(BIAS) if router.training else None  # these families' folders have no place for it
    if bias is None:
        weights, chosen = shares.topk(router.top_k, dim=-1)
    else:
        chosen = (shares.detach() + bias).topk(router.top_k, dim=-1).indices
        weights = shares.gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's always are
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return shares, weights, chosen


def _by_sigmoid(router: Any, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_by_softmax`; a group of experts is as good as its two best (DeepSeek-V3, arXiv:2412.19437)."""
    import torch

    shares = scores.sigmoid()
    choice = shares.detach() + router._buffers[BIAS]
    groups, rows = router.num_group, len(choice)
    if router.topk_group < groups:
        grouped = choice.view(rows, groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(router.topk_group, dim=-1).indices
        left_out = torch.ones(rows, groups, dtype=torch.bool, device=choice.device).scatter_(1, best, False)
        choice = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)
    chosen = choice.topk(router.top_k, dim=-1).indices
    weights = shares.gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return shares, weights * router.routed_scaling_factor, chosen


def routed(model: nn.Module) -> tuple[Tensor, Tensor]:
    """What the routers wrote down since they were last asked: tokens of each expert, and its summed probability, [layers, experts] each."""
    import torch

    found = []
    for router in routers(model):
        held = getattr(router, ROUTED)
        assert held is not None, "a router did not write down what it chose"
        setattr(router, ROUTED, None)
        found.append(held)
    return torch.stack([counts for counts, _ in found]), torch.stack([sums for _, sums in found])


def _experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' interface of experts: hidden [tokens, width], chosen and weights [tokens, k] in, [tokens, width] out."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    compute = getattr(
        experts, COMPUTE, grouped_mm_experts_forward
    )  # transformers' own in a model that was not built to be trained
    return compute(experts, hidden, chosen, weights)  # type: ignore[no-any-return]


def compute_by(model: nn.Module, function: Callable[..., Tensor]) -> None:
    """Has the experts of a model computed by `function(experts, hidden, chosen, weights)`, in place."""
    for experts in experts_of(model):
        setattr(experts, COMPUTE, function)
