"""LoRA for MoE experts: a pair of low-rank matrices per expert and weight stack, computed by grouped matmuls.

Each expert's W becomes W + s B A. The pairs are parameters of the experts' module, stacked like the experts ([experts,
...]), so that expert parallelism shards both alike. The merged weights, as large as the experts, are never
materialized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from preheat.errors import SettingError
from preheat.ops.distributed.dtensor_utils import local
from preheat.ops.grouped_mm import ADAPTER, ExpertAdapter, shape_of_stack, stacks_of
from preheat.ops.quantization.packed import FrozenPacked

__all__ = ["OWN", "adapted_experts", "add_pairs", "draw_pairs", "merge_pairs", "view_as_peft"]

OWN = r"\.(gate_up_proj|up_proj|down_proj)_lora_[AB]$"
"""Regular expression for the names of the pairs."""


def add_pairs(experts: Sequence[nn.Module], rank: int, scale: float) -> None:
    """Adds uninitialized pairs to the experts of each layer and freezes the experts, in place.

    Args:
        experts: experts of each layer, from `preheat.models.moe.experts_of`; also on meta.
        rank: rank of each pair.
        scale: s, the factor on B A.

    Raises:
        ValueError: `rank` exceeds the matrices' rank.
    """
    for module in experts:
        # Before the pairs are added, which stay trainable.
        module.requires_grad_(False)
        device = next(module.parameters()).device
        for name in stacks_of(module):
            count, out, into = shape_of_stack(module, name)
            if rank > min(out, into):
                raise SettingError(
                    "expert_rank",
                    f"{rank} is more than the {min(out, into)} directions of an expert's matrix ({out} x {into}); "
                    "lower it",
                )
            # Stacked like the experts' weights [experts, out, in], but in fp32 whatever their dtype.
            for part, shape in (("A", (count, rank, into)), ("B", (count, out, rank))):
                pair = torch.empty(shape, dtype=torch.float32, device=device)
                module.register_parameter(f"{name}_lora_{part}", nn.Parameter(pair))
        setattr(module, ADAPTER, ExpertAdapter(scale))


def draw_pairs(module: nn.Module) -> None:
    """Initializes the pairs of a layer's experts in place: A like a linear layer's weight, B zero."""
    with torch.no_grad():
        for name in stacks_of(module):
            first = module.get_parameter(f"{name}_lora_A")
            # kaiming_uniform_(a=sqrt(5)) of nn.Linear has the bound 1 / sqrt(in). With B = 0 nothing is added at first.
            first.uniform_(-1 / math.sqrt(first.shape[-1]), 1 / math.sqrt(first.shape[-1]))
            module.get_parameter(f"{name}_lora_B").zero_()


def adapted_experts(model: nn.Module) -> list[nn.Module]:
    """Returns the expert modules that have pairs."""
    return [module for module in model.modules() if ADAPTER in vars(module)]


def view_as_peft(module: nn.Module, stack: str) -> dict[str, Tensor]:
    """Returns views of a stack's pair, by part, whose values are in the order of peft's matrices.

    peft stores A as [experts * rank, in] and B as [out, rank * experts]; the views are [experts * rank, in] and
    [out, rank, experts].
    """
    first, second = (module.get_parameter(f"{stack}_lora_{part}").detach() for part in "AB")
    return {"A": first.flatten(0, 1), "B": second.permute(1, 2, 0)}


def merge_pairs(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Merges all pairs into their experts in fp32, one expert at a time, and removes them.

    Args:
        dtype: of experts that were packed; default: fp32.

    Returns:
        The number of layers.
    """
    adapted = adapted_experts(model)
    with torch.no_grad():
        for module in adapted:
            scale = vars(module)[ADAPTER].scale
            was_packed = False
            if isinstance(module, FrozenPacked):
                module.unpack_()
                was_packed = True
            for name in stacks_of(module):
                stack, first, second = (_values(module, key) for key in (name, f"{name}_lora_A", f"{name}_lora_B"))
                stack = stack.mT if module.is_transposed else stack
                for matrix, a, b in zip(stack, first, second, strict=True):
                    matrix.copy_(matrix.float() + scale * (b.float() @ a.float()))
                for part in "AB":
                    delattr(module, f"{name}_lora_{part}")
            delattr(module, ADAPTER)
            if was_packed and dtype is not None:
                module.to(dtype)
    return len(adapted)


def _values(module: nn.Module, name: str) -> Tensor:
    # Under expert parallelism each rank merges the experts that it holds; pairs are sharded alike.
    return local(module.get_parameter(name).detach())
