"""Mixture-of-experts models of transformers: where the experts are, how their rows are computed, what their routers chose.

The router works in fp32, whatever the rest does: which experts a token goes to hangs on differences that bf16 does not have. The experts of a layer
are computed by the function that is hung onto them (`ops/experts.py` has one: a grouped product for all), by the name `preheat` in transformers' own
registry; transformers' eager loop gives the same.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "FAMILIES",
    "Ledger",
    "coefficient",
    "compute_by",
    "experts_of",
    "own_routers",
    "register",
    "renamed",
    "routed",
    "routers",
    "sizes_of",
    "stored",
    "turned",
]

FAMILIES = ("mixtral", "qwen3_moe", "qwen3_vl_moe_text")
"""What is known to be a router by softmax and top-k over gated experts, and nothing else: no shared experts, no bias on the choice."""
NAME = "preheat"  # of our function in transformers' registry of experts
COMPUTE = "preheat_compute"  # attribute of a layer's experts: the function that computes them
ROUTED = "preheat_routed"  # attribute of a router: what it chose since it was last asked


def sizes_of(config: Any) -> tuple[int, int, int]:
    """Experts of a layer, experts that a token goes to, inner width of one; (0, 0, 0) where the model has none."""
    if config.model_type not in FAMILIES:
        return 0, 0, 0
    width = config.intermediate_size if config.model_type == "mixtral" else config.moe_intermediate_size
    return config.num_experts, config.num_experts_per_tok, width


def coefficient(config: Any) -> float:
    """How much the load-balancing loss counts; 0 where there is none."""
    return float(config.router_aux_loss_coef or 0.0) if config.model_type in FAMILIES else 0.0


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
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


class Ledger:
    """Whether routers write down what they choose: not while a layer is computed again in the backward pass."""

    def __init__(self) -> None:
        self.open = False


def own_routers(model: nn.Module) -> Ledger:
    """Has the routers of a model compute in fp32 and write down what they chose while the ledger is open, in place."""
    ledger = Ledger()
    for router in routers(model):
        router.forward = types.MethodType(functools.partial(_route, ledger), router)  # type: ignore[method-assign]
        setattr(router, ROUTED, None)
    return ledger


def _route(ledger: Ledger, router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all experts [tokens, experts], and weights and numbers of those that each token goes to [tokens, chosen]."""
    import torch

    hidden = hidden.reshape(-1, router.hidden_dim)
    with torch.autocast(hidden.device.type, enabled=False):
        scores = torch.nn.functional.linear(hidden.float(), router.weight.float())
    shares = scores.softmax(dim=-1)
    weights, chosen = shares.topk(router.top_k, dim=-1)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's always are
        weights = weights / weights.sum(dim=-1, keepdim=True)
    flat = chosen.flatten()
    counts = shares.new_zeros(router.num_experts).scatter_add_(0, flat, torch.ones_like(flat, dtype=shares.dtype))
    sums = shares.sum(dim=0)
    if ledger.open:
        held = getattr(router, ROUTED)
        setattr(router, ROUTED, (counts, sums) if held is None else (held[0] + counts, held[1] + sums))
    return scores, weights, chosen


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


# --- how checkpoints hold experts -----------------------------------------------------------------------------------


def stored(name: str, files: Mapping[str, Path], experts: int) -> list[list[str]]:
    """How a folder of one of these families holds a parameter that it does not hold under its own name: keys of the matrices to put together.

    Returns:
        For each expert its matrices, to be joined by rows, then all to be stacked; [] where the folder does not hold it.
    """
    before, _, leaf = name.partition(".mlp.experts.")
    plans = (
        {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
        {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    )
    for place, plan in zip((".mlp.experts", ".block_sparse_moe.experts"), plans, strict=True):
        keys = [[f"{before}{place}.{n}.{part}.weight" for part in plan.get(leaf, ())] for n in range(experts)]
        if keys and all(key in files for expert in keys for key in expert) and keys[0]:
            return keys
    return []


def turned(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A parameter's value as transformers' modules have it: Qwen3-VL's published folders hold experts' matrices transposed."""
    if ".mlp.experts." in name and value.ndim == 3 and value.shape != shape and value.mT.shape == shape:
        return value.mT.contiguous()
    return value


def renamed(name: str) -> str:
    """A parameter's name as Mixtral's published folders have it."""
    return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
