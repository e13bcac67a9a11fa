"""Context parallelism: sharding sequences across ranks, and Ulysses attention.

A rank's shard of a row is one chunk of it, or with `zigzag` two, the r-th from the start and the r-th from the end,
which balances the work of a causal mask. Masks are data: a sharded batch keeps the documents of the full row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from preheat.core import Batch, MaskSpec, SplitAttention
from preheat.hardware.transfers import to_device
from preheat.ops.attention.sdpa import cast_to_autocast
from preheat.ops.losses.cross_entropy import IGNORED
from preheat.torch_compat import gather_first_dimension, scatter_first_dimension

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from preheat.ops.autograd_context import AutogradContext


__all__ = [
    "cut_rows",
    "wait_for_collective",
    "pad_length",
    "local_positions",
    "find_row_length",
    "UlyssesAttention",
    "ulysses_bytes",
]


def local_positions(length: int, degree: int, rank: int, *, zigzag: bool) -> numpy.ndarray:
    """Returns the positions of a row that a rank holds, in its order.

    Args:
        length: length of the full row, a multiple of `degree` (of twice that with `zigzag`).

    Example:
        >>> local_positions(8, 2, 0, zigzag=True).tolist(), local_positions(8, 2, 1, zigzag=False).tolist()
        ([0, 1, 6, 7], [4, 5, 6, 7])
    """
    # [chunks, length of a chunk]
    pieces = numpy.arange(length).reshape(2 * degree if zigzag else degree, -1)
    # An early chunk sees few keys and a late one many: every pair sees about as many.
    return numpy.concatenate([pieces[rank], pieces[-1 - rank]]) if zigzag else pieces[rank]


def pad_length(length: int, degree: int, *, zigzag: bool) -> int:
    """Rounds a length up to one that splits into equal chunks."""
    pieces = 2 * degree if zigzag else degree
    return -(-length // pieces) * pieces


def find_row_length(mask: MaskSpec) -> int:
    """Returns the length of the full row from the mask of a sharded batch."""
    assert mask.documents is not None, "a cut batch states its documents"
    return sum(mask.documents[0])


def cut_rows(batch: Batch, degree: int, rank: int, *, zigzag: bool) -> Batch:
    """Returns a rank's shard of each row (tokens, labels, positions, padding, sources); mask and weight stay those of
    full rows.

    Rows that do not split evenly are padded: unlabelled positions at the end of the last document, which no earlier
    token attends to.

    Raises:
        ValueError: rows that need padding have a mask that is not causal.
    """
    rows, length = batch.tokens.shape
    documents = batch.mask.documents or ((length,),) * rows
    more = pad_length(length, degree, zigzag=zigzag) - length
    tokens, labels, positions, padding = batch.tokens, batch.labels, batch.positions, batch.padding
    sources = batch.sources
    if more:
        if not batch.mask.causal:
            raise ValueError(
                f"sequences of {length} positions cannot be split equally across {degree} devices, nor padded"
            )
        # The last document grows by the padding, so that lengths still add up to the row's.
        documents = tuple((*row[:-1], row[-1] + more) for row in documents)
        # Repeats the last position: a table of learned positions may end here.
        tokens, positions = (torch.cat([t, t[:, -1:].expand(rows, more)], dim=1) for t in (tokens, positions))
        labels = torch.cat([labels, labels.new_full((rows, more), IGNORED)], dim=1)
        padding = labels.new_zeros((rows, length), dtype=torch.bool) if padding is None else padding
        padding = torch.cat([padding, padding.new_ones((rows, more))], dim=1)
        sources = torch.cat([sources, sources.new_zeros((rows, more))], dim=1) if sources is not None else None
    # One index for all of them: with zigzag a shard is not contiguous.
    places = to_device(local_positions(length + more, degree, rank, zigzag=zigzag), tokens.device)
    tokens, labels, positions = (t.index_select(1, places) for t in (tokens, labels, positions))
    padding = padding.index_select(1, places) if padding is not None else None
    sources = sources.index_select(1, places) if sources is not None else None
    mask = replace(batch.mask, documents=documents)
    return replace(
        batch, tokens=tokens, labels=labels, positions=positions, mask=mask, padding=padding, sources=sources
    )


def wait_for_collective(t: Tensor) -> Tensor:
    """Waits for the result of a collective."""
    # Functional collectives may return before the data has arrived.
    return t.wait() if isinstance(t, collectives.AsyncCollectiveTensor) else t


class _AllToAll(torch.autograd.Function):
    """All-to-all of x [devices, ...]: slice i goes to rank i, result i comes from rank i. Backward is the same
    exchange.
    """

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return wait_for_collective(collectives.all_to_all_single(x.contiguous(), None, None, group))

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None]:
        return wait_for_collective(collectives.all_to_all_single(grads[0].contiguous(), None, None, ctx.group)), None


def _split_heads_gather_positions(tensors: Sequence[Tensor], group: ProcessGroup, degree: int) -> list[Tensor]:
    """Converts each [rows, heads, places, dim] to [rows, heads / degree, places * degree, dim] in one all-to-all."""
    shapes = [(t.shape[0], t.shape[1] // degree, *t.shape[2:]) for t in tensors]
    # Queries, keys and values travel in one message, though keys and values may have fewer heads.
    # Heads to the front by destination: [degree, rows * heads / degree * positions * dim]
    flat = [t.unflatten(1, (degree, -1)).movedim(1, 0).flatten(1) for t in tensors]
    # Slice i now has the positions of rank i, for this rank's heads.
    received = _AllToAll.apply(torch.cat(flat, dim=1), group).split([f.shape[1] for f in flat], dim=1)
    # [degree, rows, heads / degree, positions, dim] -> [rows, heads / degree, degree * positions, dim]; the positions
    # are in order, because ranks hold the chunks in order.
    return [c.view(degree, *shape).movedim(0, 2).flatten(2, 3) for c, shape in zip(received, shapes, strict=True)]


def _split_positions_gather_heads(t: Tensor, group: ProcessGroup, degree: int) -> Tensor:
    """Inverse of `_split_heads_gather_positions`: [rows, heads / degree, positions * degree, dim] -> [rows, heads,
    positions, dim].
    """
    # [rows, heads / degree, degree, positions, dim]: each rank gets its positions back, from all ranks' heads.
    return _AllToAll.apply(t.unflatten(2, (degree, -1)).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def _count_head_copies(shared: int, degree: int) -> int:
    """Returns the repetition of key/value heads that makes them divisible by the ranks."""
    return math.lcm(shared, degree) // shared


class _GatherPositions(torch.autograd.Function):
    """All-gather of [rows, positions, width] along the positions. Backward: a reduce-scatter, which sums the gradients
    that all ranks have for the positions of one.
    """

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # Positions in front: collectives concatenate along the first dimension.
        whole = gather_first_dimension(x.transpose(0, 1).contiguous(), group)
        return wait_for_collective(whole).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None]:
        own = scatter_first_dimension(grads[0].transpose(0, 1).contiguous(), ctx.group)
        return wait_for_collective(own).transpose(0, 1).contiguous(), None


class UlyssesAttention(SplitAttention):
    """Ulysses attention: a kernel of full rows applied to sequence-sharded rows, each rank with its heads.

    One all-to-all gives each rank all positions of its heads, another returns the results to their positions. If there
    are fewer key/value heads than ranks, they are repeated only as often as needed. The mask is that of full rows.

    Args:
        kernel: (q, k, v, mask, scale) -> out, each [rows, heads, length, head_dim].
        group: process group whose ranks hold the chunks in order.
        join_sinks: (kernel, q, k, v, mask, scale, sinks) -> out of full rows; required for attention with sinks.
    """

    def __init__(
        self, kernel: Callable[..., Tensor], group: ProcessGroup, join_sinks: Callable[..., Tensor] | None = None
    ):
        self._kernel, self._group, self._join_sinks = kernel, group, join_sinks
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
        **more: object,
    ) -> Tensor:
        """Raises ValueError if the heads do not divide by the ranks."""
        heads, shared = q.shape[1], k.shape[1]
        if heads % self.degree:
            raise ValueError(f"{heads} heads cannot be split across {self.degree} devices")
        q, k, v = cast_to_autocast(q, k, v)
        # The all-to-all gives all ranks equally many heads, so key/value heads are repeated until they divide.
        if (copies := _count_head_copies(shared, self.degree)) > 1:
            k, v = (t.repeat_interleave(copies, dim=1) for t in (k, v))
        # The kernel sees full rows, so any mask and any kernel work unchanged.
        whole = _split_heads_gather_positions((q, k, v), self._group, self.degree)
        if sinks is None:
            out = self._kernel(*whole, mask, scale, **more)
        else:
            assert self._join_sinks is not None, "attention with sinks needs join_sinks"
            # The ranks' gradients of the sinks are of different heads: their sum is that of all.
            own = sinks.unflatten(0, (self.degree, -1))[self.rank]
            out = self._join_sinks(functools.partial(self._kernel, **more), *whole, mask, scale, own)
        return _split_positions_gather_heads(out, self._group, self.degree)

    def gather_positions(self, x: Tensor) -> Tensor:
        gathered: Tensor = _GatherPositions.apply(x, self._group)
        return gathered

    def exchange_channels(self, x: Tensor) -> Tensor:
        # [devices, rows, positions, channels] -> [rows, devices * positions, channels]
        received = _AllToAll.apply(x.unflatten(2, (self.degree, -1)).movedim(2, 0), self._group)
        return received.movedim(0, 1).flatten(1, 2)

    def exchange_positions(self, x: Tensor) -> Tensor:
        # [devices, rows, positions, channels] -> [rows, positions, devices * channels]
        received = _AllToAll.apply(x.unflatten(1, (self.degree, -1)).movedim(1, 0), self._group)
        return received.movedim(0, 2).flatten(2, 3)


def ulysses_bytes(*, places: int, heads: int, shared: int, head_dim: int, degree: int, size: int) -> int:
    """Returns the bytes that a rank sends for one layer's forward pass; backward sends the same.

    Args:
        places: tokens per rank, over all rows.
        heads, shared: number of query heads and of key/value heads.
        size: bytes per element.

    Example:
        >>> ulysses_bytes(places=1024, heads=32, shared=8, head_dim=128, degree=4, size=2) / 2**20
        15.0
    """
    # Queries and output have `heads`, keys and values `shared` heads each; 1 / degree remains on the rank.
    return 2 * (heads + shared * _count_head_copies(shared, degree)) * places * head_dim * size * (degree - 1) // degree
