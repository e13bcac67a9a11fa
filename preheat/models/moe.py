"""Mixture-of-experts models of transformers: computes their experts, and records their routers' choices.

Routers compute in fp32 whatever the rest does, because the choice of experts depends on differences that bf16 cannot
represent. Scores are a softmax over all experts (Mixtral, Qwen) or a sigmoid of each (GLM-4.5, after DeepSeek-V3:
groups of experts are chosen first, by the score plus a bias that is part of the model). No token is dropped: each goes
to all of its experts, however many tokens these have. The experts of a layer are computed by a function attached to
them (`ops/grouped_mm.py`: one grouped matmul for all), under the name `preheat` in transformers' registry;
transformers' eager loop gives the same result.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from transformers import PretrainedConfig

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
"""Families with a softmax or sigmoid top-k router over gated experts, with or without a shared expert."""
NAME = "preheat"  # our function in transformers' registry of experts
COMPUTE = "preheat_compute"  # attribute of a layer's experts: the function that computes them
ROUTED = "preheat_routed"  # attribute of a router: its choices since the last call of `routed`
BIAS = "e_score_correction_bias"
"""transformers' name of a router's buffer, [experts] fp32: added to scores to choose experts, not to weigh them."""
TOKENS = "expert_tokens"
"""Metric of a step: tokens per expert, [layers, experts]."""


class Router(Protocol):
    """The attributes that transformers' top-k routers share; `nn.Module` does not declare them."""

    weight: Tensor
    hidden_dim: int
    num_experts: int
    top_k: int
    training: bool
    _buffers: dict[str, Tensor]
    # of the families with a sigmoid only
    num_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


def sizes_of(config: PretrainedConfig) -> tuple[int, int, int]:
    """Experts per layer, experts per token, inner width of an expert; (0, 0, 0) if the model has none."""
    if config.model_type not in FAMILIES:
        return 0, 0, 0
    width = config.intermediate_size if config.model_type == "mixtral" else config.moe_intermediate_size
    count = config.n_routed_experts if config.model_type in _BY_SIGMOID else config.num_experts
    return count, config.num_experts_per_tok, width


def expert_layers(config: PretrainedConfig) -> int:
    """Number of layers with experts; the others have one feed-forward block for all tokens."""
    layers: int = config.num_hidden_layers
    if config.model_type not in FAMILIES or config.model_type == "mixtral":
        return layers if config.model_type in FAMILIES else 0
    if config.model_type in _BY_SIGMOID:
        return max(layers - int(config.first_k_dense_replace), 0)
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return sum(n not in dense and (n + 1) % step == 0 for n in range(layers))


def shared_width(config: PretrainedConfig) -> int:
    """Inner width of the shared expert of a layer; 0 without one."""
    if config.model_type == "qwen2_moe":
        return int(config.shared_expert_intermediate_size)
    return int(config.n_shared_experts * config.moe_intermediate_size) if config.model_type in _BY_SIGMOID else 0


def has_bias(config: PretrainedConfig) -> bool:
    """True if the model itself has a bias on the choice of experts, saved in its folder and used by transformers."""
    return config.model_type in _BY_SIGMOID


def adapted(model: nn.Module, targets: str | Sequence[str]) -> str | Sequence[str]:
    """The target modules of adapters: `all-linear` of a model with experts means attention's linear maps, by name.

    peft would look for the linear maps of feed-forward blocks in the experts, which have stacked parameters instead.
    """
    if targets != "all-linear" or not routers(model):
        return targets
    from torch import nn

    leaves = {
        leaf
        for module in model.modules()
        if type(module).__name__.lower().endswith("attention")
        for leaf, child in module.named_children()
        if isinstance(child, nn.Linear) or hasattr(child, "base_layer")  # has an adapter already
    }
    return tuple(sorted(leaves))


def coefficient(config: PretrainedConfig) -> float:
    """Coefficient of the load-balancing loss; 0 without one."""
    return float(config.router_aux_loss_coef or 0.0) if config.model_type in _BY_SOFTMAX else 0.0


@functools.cache
def register() -> str:
    """Registers our function under its own name in transformers' registry of experts; returns the name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Each layer's experts: modules with gate_up_proj [experts, 2 inner, width], down_proj [experts, width, inner]."""
    return [m for m in model.modules() if type(m).__name__.endswith("Experts") and "gate_up_proj" in m._parameters]


def routers(model: nn.Module) -> list[nn.Module]:
    """The router of each layer that has experts, in order."""
    return [m for m in model.modules() if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))]


def biases(model: nn.Module) -> dict[str, Tensor]:
    """A model's biases on the choice of experts, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{BIAS}")}


class RouterRecorder:
    """A switch for recording routers' choices: off while a layer is recomputed in the backward pass."""

    def __init__(self) -> None:
        self.open = False


def record_routers(model: nn.Module) -> RouterRecorder:
    """Makes the routers of a model compute in fp32 and record their choices while the recorder is open, in place."""
    ledger = RouterRecorder()
    for router in routers(model):
        router.forward = types.MethodType(functools.partial(_route, ledger), router)  # type: ignore[method-assign]
        setattr(router, ROUTED, None)
    return ledger


def _route(ledger: RouterRecorder, router: Router, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all experts [tokens, experts], and weights and indices of each token's experts [tokens, chosen]."""
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
    if ledger.open and router.training:  # not in a reference model, which is this one without its adapters
        record = getattr(router, ROUTED)
        setattr(router, ROUTED, (counts, sums) if record is None else (record[0] + counts, record[1] + sums))
    return scores, weights, chosen


def _by_softmax(router: Router, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of all experts, and weights and indices of the chosen ones."""
    shares = scores.softmax(dim=-1)
    bias = router._buffers.get(BIAS) if router.training else None  # these families do not save it in their folders
    if bias is None:
        weights, chosen = shares.topk(router.top_k, dim=-1)
    else:
        chosen = (shares.detach() + bias).topk(router.top_k, dim=-1).indices
        weights = shares.gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always normalizes
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return shares, weights, chosen


def _by_sigmoid(router: Router, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_by_softmax`; a group of experts is scored by its two best (DeepSeek-V3, arXiv:2412.19437)."""
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
    """The routers' records since the last call: tokens per expert, and summed probabilities, [layers, experts] each."""
    import torch

    records = []
    for router in routers(model):
        record = getattr(router, ROUTED)
        assert record is not None, "a router did not write down what it chose"
        setattr(router, ROUTED, None)
        records.append(record)
    return torch.stack([counts for counts, _ in records]), torch.stack([sums for _, sums in records])


def _experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' interface of experts: hidden [tokens, width], chosen and weights [tokens, k] -> [tokens, width]."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    # transformers' own function for a model that was not built for training.
    compute = getattr(experts, COMPUTE, grouped_mm_experts_forward)
    return compute(experts, hidden, chosen, weights)  # type: ignore[no-any-return]


def compute_by(model: nn.Module, function: Callable[..., Tensor]) -> None:
    """Makes `function(experts, hidden, chosen, weights)` compute the experts of a model, in place."""
    for experts in experts_of(model):
        setattr(experts, COMPUTE, function)
