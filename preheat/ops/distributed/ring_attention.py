"""Ring attention: keys and values rotate around the ranks; each rank attends with its own queries to every block.

Partial results are merged by their log-sum-exp in fp32. In the backward pass keys and values rotate again, together
with their fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as collectives

from preheat.core import MaskSpec, SplitAttention
from preheat.ops.attention.sdpa import cast_to_autocast
from preheat.ops.distributed.context_parallel import wait_for_collective
from preheat.ops.distributed.ring_attention_blocks import choose_tiles

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from preheat.ops.autograd_context import AutogradContext


__all__ = ["RingAttention", "ring_bytes"]


def _pass_on(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sends x to the next rank of the ring and returns the tensor of the previous one.

    Call `wait_for_collective` before use.
    """
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    # An all-to-all in which each rank sends to one and receives from one: torch's functional collectives have no send.
    to, come = ([x.numel() if n == (rank + step) % degree else 0 for n in range(degree)] for step in (1, -1))
    return collectives.all_to_all_single(x, come, to, group)


def _split_pair(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a flat tensor into two with the shapes of k and v."""
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pieces: Any, group: ProcessGroup
    ) -> Tensor:
        rank, degree = dist.get_rank(group), dist.get_world_size(group)
        # fp32, because one partial result per rank is merged into it.
        # [rows, heads, positions, head_dim]
        out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=torch.float32)
        # [rows, heads, positions]; -inf is the log of an empty sum. A sink is its first term, with a value of 0.
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
        if sinks is not None:
            lse.copy_(sinks[None, :, None])
        # Keys and values in one tensor: one message per step instead of two.
        current = torch.cat([k.flatten(), v.flatten()])
        for step in range(degree):
            # The transfer overlaps with this step's compute. The first step uses the rank's own keys: every query sees
            # itself, so no softmax is empty.
            coming = _pass_on(current, group) if step < degree - 1 else current
            # In step s the keys are those of rank - s.
            for part in pieces.forward(q, *_split_pair(current, k, v), (rank - step) % degree):
                _merge(out[part.rows, :, part.queries], lse[part.rows, :, part.queries], part.out, part.lse)
            current = wait_for_collective(coming)
        # Rounded once, after all merges. `lse` stays in fp32: backward recomputes probabilities from it.
        out = out.to(q.dtype)
        # The rank's own keys only: backward sends them around again, instead of keeping all ranks' in memory.
        ctx.save_for_backward(q, k, v, out, lse, *(() if sinks is None else (sinks,)))
        ctx.pieces, ctx.group = pieces, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        rank, degree = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        # `current`: keys and values on their way around; `carried`: their gradients, one hop behind.
        current, carried = torch.cat([k.flatten(), v.flatten()]), None
        for step in range(degree):
            coming = _pass_on(current, ctx.group) if step < degree - 1 else current
            # This rank's contribution to the gradients of the keys that it has now.
            own = current.new_zeros(current.shape, dtype=torch.float32)
            own_k, own_v = _split_pair(own, k, v)
            for rows, queries, keys, *slopes in ctx.pieces.backward(
                grads[0], q, *_split_pair(current, k, v), out, lse, (rank - step) % degree
            ):
                grad_q[rows, :, queries] += slopes[0]
                own_k[rows, :, keys] += slopes[1]
                own_v[rows, :, keys] += slopes[2]
            # Adds what the ranks before have contributed to the same keys.
            if carried is not None:
                own += wait_for_collective(carried)
            # After the last step the gradients are back on the rank of their keys.
            carried, current = _pass_on(own, ctx.group), wait_for_collective(coming)
        assert carried is not None
        grad_k, grad_v = _split_pair(wait_for_collective(carried), k, v)
        grad_sinks = None
        if sinks:
            # d out / d sink = -p out, with the sink's probability p: its value is 0.
            slopes = (sinks[0].float()[None, :, None] - lse).exp_() * (grads[0].float() * out.float()).sum(-1)
            grad_sinks = slopes.sum((0, 2)).neg_().to(sinks[0].dtype)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merges a partial result into `out` and `lse`, in place."""
    # out = (e^lse out + e^lse' out') / (e^lse + e^lse'), with both weights at most 1.
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1)).add_(more * (more_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


class RingAttention(SplitAttention):
    """Ring attention equivalent to `kernel` for zigzag-sharded rows: (q, k, v, mask, scale) -> local out.

    Grouped keys and values are sent without repetition. torch's fused kernel serves causal masks, packed or not;
    blockwise matmuls serve the reference kernel and `attend_blockwise`, including windows. The mask is that of full
    rows.

    Args:
        group: the process group whose ranks are the ring.

    Raises:
        ValueError: the kernel does not provide partial results.
    """

    def __init__(self, kernel: Callable[..., Tensor], group: ProcessGroup):
        self._tiles, self._group = choose_tiles(kernel), group
        self.rank, self.degree = dist.get_rank(group), dist.get_world_size(group)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskSpec,
        scale: float,
        *,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        q, k, v = cast_to_autocast(q, k, v)
        out: Tensor = _Ring.apply(
            q, k, v, sinks, self._tiles(mask, scale, softcap, self.degree, self.rank), self._group
        )
        return out

    def gather_positions(self, x: Tensor) -> Tensor:
        raise AssertionError("the zigzag of a ring keeps no order of positions: `check` refuses it for such models")

    exchange_channels = exchange_positions = gather_positions


def ring_bytes(*, places: int, shared: int, head_dim: int, degree: int, size: int, backward: bool = False) -> int:
    """Returns the bytes that a rank sends for one layer's forward pass, or its backward pass.

    In the backward pass fp32 gradients make one more hop than the keys and values.

    Args:
        places: tokens per rank, over all rows.
        shared: number of key/value heads.
        size: bytes per element.

    Example:
        >>> ring_bytes(places=1024, shared=8, head_dim=128, degree=4, size=2) / 2**20
        12.0
    """
    # Keys and values.
    elements = 2 * shared * places * head_dim
    return elements * (degree - 1) * size + (elements * degree * 4 if backward else 0)
