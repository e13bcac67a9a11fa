"""Partial attention between the queries of one rank and the keys of another, with log-sum-exp for merging.

Both classes assume `local_positions(..., zigzag=True)`. `FlashTiles` uses torch's fused kernels, whose only mask is a
causal square: for any documents, what one zigzag chunk sees of another is such a square or a full rectangle.
`MatmulTiles` uses matmuls and supports any mask.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from preheat.core import MaskSpec
from preheat.hardware.transfers import to_device
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.sdpa import (
    flash_backward,
    flash_forward,
    is_packed,
    is_visible,
    reference_attention,
    sdpa_attention,
)
from preheat.ops.distributed.context_parallel import find_row_length, local_positions

__all__ = ["FlashTiles", "MatmulTiles", "MaskTile", "choose_tiles", "visible_tiles"]


class MaskTile(NamedTuple):
    """A block of queries and the keys they see: all of them, or with `causal` the earlier ones. Slices of local
    positions.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool


@functools.lru_cache(maxsize=256)  # called by every layer, forward and backward
def visible_tiles(documents: tuple[tuple[int, ...], ...], degree: int, rank: int, source: int) -> tuple[MaskTile, ...]:
    """Returns which keys of `source` the queries of `rank` see under a causal mask with zigzag sharding.

    Args:
        documents: document lengths of each full row.

    Example:
        >>> [(r.queries, r.keys, r.causal) for r in visible_tiles(((8,),), 2, 0, 1)]
        [(slice(2, 4, None), slice(0, 4, None), False)]
    """
    tiles = []
    # Neighbouring rows with equal documents share their tiles, so that one kernel call serves them all.
    for cuts, same in itertools.groupby(range(len(documents)), key=lambda row: documents[row]):
        rows = list(same)
        spans = _tile_own_keys(cuts, degree, rank) if source == rank else _tile_other_keys(cuts, degree, rank, source)
        tiles += [MaskTile(slice(rows[0], rows[-1] + 1), *where) for where in spans]
    return tuple(tiles)


def _tile_own_keys(cuts: tuple[int, ...], degree: int, rank: int) -> list[tuple[slice, slice, bool]]:
    """Tiles of a rank's own keys: its positions ascend, so each document is a causal square, even if another rank has
    its middle.
    """
    # The document of each local position, in the order of the rank's two chunks.
    which = numpy.repeat(numpy.arange(len(cuts)), cuts)[local_positions(sum(cuts), degree, rank, zigzag=True)]
    ends = [*(numpy.flatnonzero(numpy.diff(which)) + 1).tolist(), len(which)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise([0, *ends])]
    return [(span, span, True) for span in spans]


def _tile_other_keys(cuts: tuple[int, ...], degree: int, rank: int, source: int) -> list[tuple[slice, slice, bool]]:
    """Tiles of another rank's keys: only a document that spans both chunks is visible across them."""
    # Rank r has chunks r and 2 * degree - 1 - r of the row.
    size = sum(cuts) // (2 * degree)
    bounds = numpy.cumsum((0, *cuts))
    spans: list[tuple[slice, slice, bool]] = []
    # i and j: first or second chunk of the rank, that is, its local offset in chunks.
    for i, of_queries in enumerate((rank, 2 * degree - 1 - rank)):
        for j, of_keys in enumerate((source, 2 * degree - 1 - source)):
            # A later chunk of keys: causal queries see nothing of it.
            if of_keys > of_queries:
                continue
            end = (of_keys + 1) * size
            document = int(numpy.searchsorted(bounds, end - 1, side="right")) - 1  # contains the last of the keys
            # Queries of a later chunk see keys of an earlier one only through the document that contains the last key.
            begin, stop = int(bounds[document]), int(bounds[document + 1])
            # The document's first queries in their chunk, and its last keys in theirs.
            queries, keys = min(stop - of_queries * size, size), min(end - begin, size)
            # The document ends before the chunk of the queries.
            if queries <= 0:
                continue
            here = (slice(i * size, i * size + queries), slice((j + 1) * size - keys, (j + 1) * size), False)
            last = spans[-1] if spans else None
            # Tiles that touch are joined, so that the kernel is called less often.
            if last and last[1] == here[1] and last[0].stop == here[0].start:
                spans[-1] = (slice(last[0].start, here[0].stop), here[1], False)
            elif last and last[0] == here[0] and last[1].stop == here[1].start:
                spans[-1] = (here[0], slice(last[1].start, here[1].stop), False)
            else:
                spans.append(here)
    return spans


class PartialAttention(NamedTuple):
    """Attention of a block of queries to a block of keys: out [rows, heads, queries, dim] and its log-sum-exp."""

    rows: slice
    queries: slice
    out: Tensor
    lse: Tensor


class Slopes(NamedTuple):
    """Gradients of a partial attention."""

    rows: slice
    queries: slice
    keys: slice
    q: Tensor
    k: Tensor
    v: Tensor


class FlashTiles:
    """Partial attention by torch's fused kernels, one call per tile. Grouped keys and values are not repeated.

    Args:
        mask: mask of full rows, causal and without a window.
        rank: of this device among `degree`.
    """

    def __init__(self, mask: MaskSpec, scale: float, softcap: float | None, degree: int, rank: int):
        if not mask.causal or softcap is not None or (mask.window is not None and mask.window < find_row_length(mask)):
            raise ValueError(
                "torch's fused kernels support no window, no capped scores and only causal masks; use blocks"
            )
        # `cut_rows` has stated them, also for rows of one document.
        assert mask.documents is not None
        self.scale, self.where = scale, functools.partial(visible_tiles, mask.documents, degree, rank)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, source: int) -> Iterator[PartialAttention]:
        for rows, queries, keys, causal in self.where(source):
            out, lse = flash_forward(
                q[rows, :, queries], k[rows, :, keys], v[rows, :, keys], causal=causal, scale=self.scale
            )
            yield PartialAttention(rows, queries, out, lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, source: int
    ) -> Iterator[Slopes]:
        """Yields gradients. `out` and `lse` cover all keys, so that probabilities are those of the full row."""
        for rows, queries, keys, causal in self.where(source):
            g, q_, out_, lse_ = (t[rows, :, queries] for t in (grad, q, out, lse))
            slopes = flash_backward(
                g, q_, k[rows, :, keys], v[rows, :, keys], out_, lse_, causal=causal, scale=self.scale
            )
            yield Slopes(rows, queries, keys, *slopes)


_QUERIES = 128  # per block; its scores against all keys of another rank are in memory at once


class MatmulTiles:
    """Partial attention by matmuls over blocks of queries, for any mask; skips keys that no query of a block sees.

    Args:
        mask: mask of full rows.
        rank: of this device among `degree`.
    """

    def __init__(self, mask: MaskSpec, scale: float, softcap: float | None, degree: int, rank: int):
        # Without packing no document borders need to be compared.
        self.mask = mask if is_packed(mask) else replace(mask, documents=None)
        self.scale, self.softcap, self.rank = scale, softcap, rank
        length = find_row_length(mask)
        # For each rank the global positions of its keys.
        self.places = [local_positions(length, degree, n, zigzag=True) for n in range(degree)]
        cuts = mask.documents if is_packed(mask) and mask.documents else ((length,),)
        # [rows, length]: start of each position's document; equal starts mean the same document.
        self.starts = numpy.stack([numpy.repeat(numpy.cumsum((0, *row[:-1])), row) for row in cuts])

    def _iterate_blocks(self, source: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yields query blocks, the keys that they may see, and the mask [rows or 1, 1, 1, queries, keys] (None: all
        visible).
        """
        own_positions, key_positions = self.places[self.rank], self.places[source]
        # [rows, positions]: document starts of the queries and of the keys.
        starts = [self.starts[:, places] for places in (own_positions, key_positions)]
        # On the device once per source rank, not once per block.
        place_q, place_k, start_q, start_k = (to_device(a, device) for a in (own_positions, key_positions, *starts))
        for begin in range(0, len(own_positions), _QUERIES):
            queries = slice(begin, min(begin + _QUERIES, len(own_positions)))
            keys = self._reach(own_positions[queries], starts[0][:, queries], key_positions)
            # No query of the block sees a key of this rank.
            if keys.start >= keys.stop:
                continue
            # If every query sees every key, no mask tensor is needed.
            if self._is_all_visible(
                own_positions[queries], key_positions[keys], starts[0][:, queries], starts[1][:, keys]
            ):
                yield queries, keys, None
                continue
            s_q, s_k = start_q[:, queries, None], start_k[:, None, keys]
            # [rows or 1, queries, keys]
            may = is_visible(self.mask, place_q[None, queries, None], place_k[None, None, keys], s_q, s_k)
            yield queries, keys, may[:, None, None]

    def _reach(self, queries: numpy.ndarray, starts: numpy.ndarray, keys: numpy.ndarray) -> slice:
        """Returns the keys that any query of a block may see. Positions and document starts ascend, so the first and
        last query decide.
        """
        # No key before the first document of the block, or behind the last key.
        low, high = int(starts.min()), int(keys[-1]) + 1
        # Global tokens are seen from any distance, so a window does not bound the keys then.
        if self.mask.window is not None and not self.mask.global_tokens:
            low = max(low, int(queries[0]) - self.mask.window + 1)
        if self.mask.causal:
            high = int(queries[-1]) + 1
        # `keys` ascend, but with a gap between the two chunks: bounds are searched, not computed.
        return slice(int(numpy.searchsorted(keys, low)), int(numpy.searchsorted(keys, high)))

    def _is_all_visible(self, queries: numpy.ndarray, keys: numpy.ndarray, *starts: numpy.ndarray) -> bool:
        first, last = int(keys[0]), int(keys[-1])
        # The largest distance between a query and a key of the block.
        apart = max(int(queries[-1]) - first, last - int(queries[0]))
        return (
            (not self.mask.causal or last <= queries[0])
            and (self.mask.window is None or apart < self.mask.window)
            and all((s == starts[0][:, :1]).all() for s in starts)
        )

    def _compute_scores(
        self, q: Tensor, k: Tensor, queries: slice, keys: slice, may: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys of a block, [rows * shared, n, dim], and capped, masked fp32 scores."""
        rows, shared = k.shape[:2]
        # Query heads that share a key head become more rows of one matmul:
        # [rows * shared, heads / shared * queries, dim]
        block = _grouped(q, shared)[:, :, :, queries].flatten(2, 3).flatten(0, 1)
        near = k[:, :, keys].flatten(0, 1)
        # [rows * shared, heads / shared * queries, keys]
        scores = torch.bmm(block, near.transpose(1, 2)).float().mul_(self.scale)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if may is not None:
            scores.view(rows, shared, -1, *may.shape[-2:]).masked_fill_(~may, float("-inf"))
        return block, near, scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, source: int) -> Iterator[PartialAttention]:
        for queries, keys, may in self._iterate_blocks(source, q.device):
            _, _, scores = self._compute_scores(q, k, queries, keys, may)
            lse = torch.logsumexp(scores, dim=-1, keepdim=True)
            # The clamp avoids NaN for a query that sees nothing (lse of -inf).
            probs = scores.sub_(lse.clamp(min=torch.finfo(lse.dtype).min)).exp_()
            # [rows * shared, heads / shared * queries, dim], viewed as [rows, heads, queries, dim] below.
            out = torch.bmm(probs.to(v.dtype), v[:, :, keys].flatten(0, 1))
            shape = (q.shape[0], q.shape[1], queries.stop - queries.start)
            yield PartialAttention(slice(None), queries, out.view(*shape, -1), lse.view(shape))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, source: int
    ) -> Iterator[Slopes]:
        """Yields gradients. `out` and `lse` cover all keys, so that probabilities are those of the full row."""
        (rows, shared), heads = k.shape[:2], q.shape[1]
        for queries, keys, may in self._iterate_blocks(source, q.device):
            size = queries.stop - queries.start
            block, near, scores = self._compute_scores(q, k, queries, keys, may)
            # d cap tanh(s / cap) / ds = 1 - (capped / cap)^2; the clamp gives masked scores (-inf) a slope of 0.
            bend = None if self.softcap is None else 1 - (scores / self.softcap).clamp(min=-1).square()
            # [rows * shared, heads / shared * queries, dim or 1]
            g, o, total = (
                _grouped(t, shared)[:, :, :, queries].flatten(2, 3).flatten(0, 1)
                for t in (grad, out, lse.unsqueeze(-1))
            )
            # `total` is the log-sum-exp over the keys of all ranks, so nothing is normalized again.
            probs = scores.sub_(total).exp_()
            slopes = torch.bmm(g, v[:, :, keys].flatten(0, 1).transpose(1, 2)).float()
            # Gradient of the softmax: probabilities times (dP minus the row's sum of gradient times result).
            slopes = slopes.sub_((g.float() * o.float()).sum(-1, keepdim=True)).mul_(probs)
            slopes = (slopes if bend is None else slopes.mul_(bend)).mul_(self.scale).to(q.dtype)
            # dQ = dS K, dK = dS^T Q, dV = P^T dO, for the keys of this rank; the ring adds up the parts.
            grad_q = torch.bmm(slopes, near).view(rows, heads, size, -1)
            grad_k = torch.bmm(slopes.transpose(1, 2), block).view(rows, shared, *near.shape[1:])
            grad_v = torch.bmm(probs.to(g.dtype).transpose(1, 2), g).view(rows, shared, near.shape[1], -1)
            yield Slopes(slice(None), queries, keys, grad_q, grad_k, grad_v)


def _grouped(t: Tensor, shared: int) -> Tensor:
    """Reshapes [rows, heads, ...] to [rows, shared, heads per shared head, ...]."""
    return t.unflatten(1, (shared, -1))


def choose_tiles(kernel: Callable[..., Tensor]) -> type[FlashTiles] | type[MatmulTiles]:
    """Returns the partial-attention class equivalent to a kernel of full rows.

    Raises:
        ValueError: the kernel does not return its log-sum-exp; the message names those that do.
    """
    # Settings such as the name of SDPA's kernel are bound by functools.partial.
    plain = kernel.func if isinstance(kernel, functools.partial) else kernel
    name = kernel.keywords.get("kernel", "flash") if isinstance(kernel, functools.partial) else "flash"
    if plain is sdpa_attention and name in ("flash", "preferred"):
        return FlashTiles
    if plain in (reference_attention, attend_blockwise):
        return MatmulTiles
    label = name if plain is sdpa_attention else getattr(plain, "__name__", str(plain))
    raise ValueError(f"a ring combines partial results, which the kernel {label} does not return; flash and blocks do")
