"""Rows cut among the devices of a context axis, and attention over whole rows by exchanging heads for places (Ulysses).

A device's share of a row is one piece of it, or with `zigzag` two: the r-th from the beginning and the r-th from the end, so that each
device has as many pairs of a causal mask to compute as any other. Masks travel as data: a cut batch keeps the documents of the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from preheat.core import Batch, MaskSpec
from preheat.hardware.transfers import to_device
from preheat.ops.attention.sdpa import in_compute_dtype
from preheat.ops.losses.cross_entropy import IGNORED

__all__ = ["cut_rows", "landed", "padded", "places_of", "row_length", "ulysses_attention", "ulysses_bytes"]


def places_of(length: int, degree: int, rank: int, *, zigzag: bool) -> numpy.ndarray:
    """Which places of a row a device has, in its order.

    Args:
        length: of the whole row, a multiple of `degree` (of twice that with `zigzag`).

    Example:
        >>> places_of(8, 2, 0, zigzag=True).tolist(), places_of(8, 2, 1, zigzag=False).tolist()
        ([0, 1, 6, 7], [4, 5, 6, 7])
    """
    pieces = numpy.arange(length).reshape(2 * degree if zigzag else degree, -1)
    return numpy.concatenate([pieces[rank], pieces[-1 - rank]]) if zigzag else pieces[rank]


def padded(length: int, degree: int, *, zigzag: bool) -> int:
    """The next length that can be cut in equal pieces."""
    pieces = 2 * degree if zigzag else degree
    return -(-length // pieces) * pieces


def row_length(mask: MaskSpec) -> int:
    """Length of the whole row in the mask of a cut batch."""
    assert mask.documents is not None, "a cut batch states its documents"
    return sum(mask.documents[0])


def cut_rows(batch: Batch, degree: int, rank: int, *, zigzag: bool) -> Batch:
    """A device's share of each row: tokens, labels and positions. The mask stays that of the whole rows, its documents stated; so does the weight.

    Rows that cannot be cut in equal pieces are made longer: places without a label at the end of the last document, where nothing before
    sees them.

    Raises:
        ValueError: such rows under a mask that is not causal.
    """
    rows, length = batch.tokens.shape
    documents = batch.mask.documents or ((length,),) * rows
    more = padded(length, degree, zigzag=zigzag) - length
    tokens, labels, positions = batch.tokens, batch.labels, batch.positions
    if more:
        if not batch.mask.causal:
            raise ValueError(
                f"rows of {length} places cannot be cut in equal pieces for {degree} devices, nor padded unseen"
            )
        documents = tuple((*row[:-1], row[-1] + more) for row in documents)
        # The last position again, not the next ones: a table of learned positions may end here.
        tokens, positions = (torch.cat([t, t[:, -1:].expand(rows, more)], dim=1) for t in (tokens, positions))
        labels = torch.cat([labels, labels.new_full((rows, more), IGNORED)], dim=1)
    places = to_device(places_of(length + more, degree, rank, zigzag=zigzag), tokens.device)
    tokens, labels, positions = (t.index_select(1, places) for t in (tokens, labels, positions))
    return replace(
        batch, tokens=tokens, labels=labels, positions=positions, mask=replace(batch.mask, documents=documents)
    )


def landed(t: Tensor) -> Tensor:
    """What a collective gives, waited for."""
    return t.wait() if isinstance(t, collectives.AsyncCollectiveTensor) else t


class _AllToAll(torch.autograd.Function):
    """x [devices, ...]: piece i goes to device i, and what comes from device i stands at i. Its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return landed(collectives.all_to_all_single(x.contiguous(), None, None, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return landed(collectives.all_to_all_single(grads[0].contiguous(), None, None, ctx.group)), None


def _heads_for_places(tensors: Sequence[Tensor], group: Any, degree: int) -> list[Tensor]:
    """Each [rows, heads, places, dim] -> [rows, heads / degree, places * degree, dim], in one exchange."""
    shapes = [(t.shape[0], t.shape[1] // degree, *t.shape[2:]) for t in tensors]
    flat = [t.unflatten(1, (degree, -1)).movedim(1, 0).flatten(1) for t in tensors]
    came = _AllToAll.apply(torch.cat(flat, dim=1), group).split([f.shape[1] for f in flat], dim=1)
    return [c.view(degree, *shape).movedim(0, 2).flatten(2, 3) for c, shape in zip(came, shapes, strict=True)]


def _places_for_heads(t: Tensor, group: Any, degree: int) -> Tensor:
    """The way back: [rows, heads / degree, places * degree, dim] -> [rows, heads, places, dim]."""
    return _AllToAll.apply(t.unflatten(2, (degree, -1)).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def _copies(shared: int, degree: int) -> int:
    """How often keys and values are repeated, so that each device gets as many of their heads."""
    return math.lcm(shared, degree) // shared


def ulysses_attention(kernel: Callable[..., Tensor], group: Any) -> Callable[..., Tensor]:
    """A kernel of whole rows for rows that are cut in equal pieces: each device attends for its share of the heads.

    One all-to-all gives a device all places of its heads, another one gives its places back. Keys and values with fewer heads than there
    are devices are repeated as often as is needed, and no more.

    Args:
        kernel: (q, k, v, mask, scale) -> out, of [rows, heads, length, head_dim] each.
        group: the process group whose ranks hold the pieces in their order.

    Returns:
        (q, k, v, mask, scale) -> out of this device's places; the mask is that of whole rows. It raises ValueError for heads that cannot
        be shared out.
    """
    degree = dist.get_world_size(group)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, **more: Any) -> Tensor:
        heads, shared = q.shape[1], k.shape[1]
        if heads % degree:
            raise ValueError(f"{heads} heads cannot be shared out among {degree} devices")
        q, k, v = in_compute_dtype(q, k, v)
        if (copies := _copies(shared, degree)) > 1:
            k, v = (t.repeat_interleave(copies, dim=1) for t in (k, v))
        out = kernel(*_heads_for_places((q, k, v), group, degree), mask, scale, **more)
        return _places_for_heads(out, group, degree)

    return attend


def ulysses_bytes(*, places: int, heads: int, shared: int, head_dim: int, degree: int, size: int) -> int:
    """Bytes that a device sends for one layer's forward pass; as many again for its backward pass.

    Args:
        places: tokens that a device has of all rows together.
        heads, shared: of queries, and of keys and values.
        size: bytes of an element.

    Example:
        >>> ulysses_bytes(places=1024, heads=32, shared=8, head_dim=128, degree=4, size=2) / 2**20
        15.0
    """
    return 2 * (heads + shared * _copies(shared, degree)) * places * head_dim * size * (degree - 1) // degree
