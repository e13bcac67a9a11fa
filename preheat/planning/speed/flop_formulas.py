"""FLOPs of operators: torch's formulas, and our own for operators without one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["FUSED", "Formula", "count_kernel_flops", "find_formula"]

FUSED = "preheat::fused_"
"""Prefix of operators that represent another package's kernels in a dry run, and state their FLOPs."""

Formula: TypeAlias = Callable[..., int]
"""Computes FLOPs from the shapes of an operator's arguments and `out_val`, the shape of its result."""


def _count_attention_flops(q: torch.Size, k: torch.Size, v: torch.Size) -> int:
    """Returns the FLOPs of one forward pass without masking, as torch's formulas count: 4 rows heads n m head_dim."""
    rows, heads, n, width = q
    # 2 n m d for Q K^T and 2 n m d for P V; q, k, v: (rows, heads, tokens, head_dim).
    return int(2 * rows * heads * n * k[2] * (width + v[3]))


def count_kernel_flops(formula: Formula | None, args: Sequence[object], out: object) -> int:
    if formula is None:
        return 0
    args = tuple(a for a in args if not isinstance(a, torch.dtype))  # the dtype of the result, which no formula takes
    # Formulas read shapes only, so equal shapes share a cache entry.
    shapes = tuple(a.shape if isinstance(a, Tensor) else a for a in args)
    try:
        return _count_flops(formula, shapes, out.shape if isinstance(out, Tensor) else None)
    except TypeError:  # list arguments, as in convolutions, are not hashable
        return int(formula(*args, out_val=out))


@functools.lru_cache(4096)
def _count_flops(formula: Formula, shapes: tuple[object, ...], out: torch.Size | None) -> int:
    return int(formula(*shapes, out_val=out))


def find_formula(operator: OpOverload) -> Formula | None:
    """Returns the FLOP formula of an operator (argument shapes, result shape -> FLOPs); None if it has none."""
    from torch.utils.flop_counter import flop_registry

    aten, packet = torch.ops.aten, operator._overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:  # torch has no formula for the CPU kernel
        return lambda q, k, v, *_, out_val: _count_attention_flops(q, k, v)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        # Five products in backward (scores again, dV, dP, dQ, dK) for two in forward.
        return lambda _, q, k, v, *more, out_val: _count_attention_flops(q, k, v) * 5 // 2
    if operator._schema.name == "preheat::causal_attention":
        return lambda q, k, v, *_, out_val: _count_attention_flops(q, k, v)
    if operator._schema.name == "preheat::causal_attention_backward":
        return lambda _, q, k, v, *more, out_val: _count_attention_flops(q, k, v) * 5 // 2
    if operator._schema.name.startswith(FUSED):
        return lambda inputs, sizes, ranks, dtypes, flops, *, out_val: flops  # it states them
    # Torch registers no in-place matmuls.
    packet = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}.get(packet, packet)
    return flop_registry.get(packet)
