"""RMSNorm and gated SiLU as single operators that save only their inputs and recompute the rest in backward."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from preheat.ops import rowwise_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.tensor import Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from preheat.ops.autograd_context import AutogradContext


__all__ = ["BY_PIECES", "gated_silu", "rms_norm", "register_row_sharding"]

Sharding: TypeAlias = "tuple[Sequence[Placement | None], Sequence[Placement | None]]"
"""Placements of an operator's results and of its arguments, as `register_sharding` takes them."""

_CHUNK = 1 << 18  # elements per chunk on a CPU: in fp32 they fit in the cache
BY_PIECES = {"preheat::rms_norm": 28, "preheat::rms_norm_backward": 84}
"""Operator -> bytes per element that its chunked fp32 operators read and write in a CPU's cache; the planner's time
model uses it.

Forward: 4 by the norm, 8 by each of two products and the copy. Backward: 8 by each of four products and the copy, 16 by
each of two sums of products, 12 by the difference.
"""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm over the last dimension in fp32 and rounds once; under autocast directly to its dtype.

    Saves x and one fp32 number per row for backward.

    Args:
        x: [..., width].
        weight: [width].

    Returns:
        [..., width] in autocast's dtype if it is on, else in the promoted dtype of x and weight.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
        tensor([[0.8485, 1.1314]])
    """
    kind = x.device.type
    dtype = (
        torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind)
        else torch.promote_types(x.dtype, weight.dtype)
    )
    # The second result, the scale of each row, is for the backward pass only.
    out: Tensor = _norm(x, weight, eps, dtype)[0]
    return out


def gated_silu(a: Tensor, b: Tensor) -> Tensor:
    """Computes silu(a) * b, each [..., feed_forward]. Saves a and b for backward.

    Bit-identical to torch's operators, unless the C++ kernel computes it, which rounds once.

    Example:
        >>> gated_silu(torch.tensor([1.0]), torch.tensor([2.0]))
        tensor([1.4621])
    """
    if rowwise_cpu.is_supported(a, b):
        return rowwise_cpu.gated_silu(a, b)
    out: Tensor = _GatedSilu.apply(a, b)  # type: ignore[no-untyped-call]
    return out


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        # In place on silu's result, which nothing else uses: one tensor less.
        return functional.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        # d(silu(a) b) = silu'(a) b da + silu(a) db; silu is computed again instead of saved.
        return torch.ops.aten.silu_backward(grad * b, a), functional.silu(a).mul_(grad)


@torch.library.custom_op("preheat::rms_norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the norm and the reciprocal root mean square of each row, [..., 1] fp32."""
    if x.is_cuda:
        # torch's CUDA kernel requires x and weight in one dtype.
        out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        return out.to(dtype), scale
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    wide = weight.float()
    if dtype == x.dtype and rowwise_cpu.is_supported(x, out):
        rowwise_cpu.norm_forward(x, wide, out, scale, eps)
        return out, scale
    # y = x * rsqrt(mean(x^2) + eps) * w; `one` [rows, 1] is written in place and saved for backward.
    for row, to, one in _iterate_row_chunks(x, out, scale):
        row = row.float()
        torch.linalg.vector_norm(row, dim=-1, keepdim=True, out=one)
        one.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        to.copy_((row * one).mul_(wide))
    return out, scale


@_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@torch.library.custom_op("preheat::rms_norm_backward", mutates_args=())
def _norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, by_weight: bool) -> tuple[Tensor, Tensor]:
    """Returns the gradients by x and by the weight, in their dtypes; an empty one without `by_weight`."""
    if x.is_cuda:
        by_x, slope = torch.ops.aten._fused_rms_norm_backward(
            grad.to(x.dtype), x, weight.shape, scale, weight.to(x.dtype), [True, by_weight]
        )
        return by_x, slope.to(weight.dtype) if by_weight else weight.new_empty(0)
    by_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    # On a CPU always computed: it costs no further pass.
    slope = torch.zeros_like(weight, dtype=torch.float32)
    wide = weight.float()
    if rowwise_cpu.is_supported(grad, x):
        rowwise_cpu.norm_backward(grad, x, scale, wide, by_x, slope)
        return by_x, slope.to(weight.dtype) if by_weight else weight.new_empty(0)
    # With n = x * scale and g = grad * w: dx = scale * (g - n * mean(n g)), dw = sum over rows of n * grad.
    for row, to, one, given in _iterate_row_chunks(x, by_x, scale, grad):
        normed, given = row * one, given.float()  # fp32: the scale is
        # fp32 over all chunks, rounded once at the end.
        slope += torch.linalg.vecdot(normed, given, dim=0)
        given = given * wide
        along = torch.linalg.vecdot(normed, given).unsqueeze(-1).div_(x.shape[-1])
        to.copy_(given.sub_(normed.mul_(along)).mul_(one))
    return by_x, slope.to(weight.dtype) if by_weight else weight.new_empty(0)


@_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, by_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if by_weight else 0)


def _iterate_row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Splits the tensors' rows into chunks that fit in the cache. Written tensors must be contiguous."""
    width = tensors[0].shape[-1]
    return zip(*(t.reshape(-1, t.shape[-1]).split(max(1, _CHUNK // width)) for t in tensors), strict=True)


def _keep(
    ctx: AutogradContext, inputs: tuple[Tensor, Tensor, float, torch.dtype], output: tuple[Tensor, Tensor]
) -> None:
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, output[1], weight)
    # The scale exists for the backward pass only and has no gradient.
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: AutogradContext, grad: Tensor, of_scale: Tensor | None) -> tuple[Tensor | None, ...]:
    x, scale, weight = ctx.saved_tensors
    # Under an adapter the weight is frozen.
    needed = ctx.needs_input_grad[1]
    by_x, by_weight = _norm_backward(grad, x, scale, weight, needed)
    return by_x, by_weight if needed else None, None, None


_norm.register_autograd(_backward, setup_context=_keep)


@functools.cache
def register_row_sharding() -> None:
    """Registers the norm's sharding with DTensor: rows are independent, and weight gradients are summed over them."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.preheat.rms_norm.default)
    def _(x: DTensorSpec, weight: DTensorSpec, eps: float, dtype: torch.dtype) -> list[Sharding]:
        # All dimensions but the last, whose elements the norm mixes.
        placements = [Replicate(), *(Shard(n) for n in range(x.ndim - 1))]
        # Results: norm and scale; arguments: x, weight, and two that are no tensors.
        return [([one, one], [one, Replicate(), None, None]) for one in placements]

    @register_sharding(torch.ops.preheat.rms_norm_backward.default)
    def _(
        grad: DTensorSpec, x: DTensorSpec, scale: DTensorSpec, weight: DTensorSpec, by_weight: bool
    ) -> list[Sharding]:
        # Results: by_x and the weight's gradient; arguments: grad, x, scale, weight, and one that is no tensor. With
        # rows sharded, the weight's gradient is a partial sum.
        replicated = ([Replicate()] * 2, [*[Replicate()] * 4, None])
        return [replicated, *(([Shard(n), Partial()], [*[Shard(n)] * 3, Replicate(), None]) for n in range(x.ndim - 1))]
