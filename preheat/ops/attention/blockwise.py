"""Blockwise attention from batched matmuls: any window, any device, memory linear in length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from preheat.core import MaskSpec
from preheat.ops.attention.causal_cpu import causal_backward, causal_forward, is_supported
from preheat.ops.attention.per_document import Documents, Passes, attend
from preheat.ops.attention.sdpa import cast_to_autocast, is_packed

__all__ = ["attend_blockwise", "blocked_passes"]

# per block: small enough that causality skips nearly half of the work, large enough for full matmul rate
_QUERIES = 128
_SCRATCH = 1 << 20  # scores per tile: with their gradients they fit in a core's part of the cache


def attend_blockwise(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, softcap: float | None = None
) -> Tensor:
    """Computes attention by batched matmuls over blocks of queries, recomputing scores in backward.

    Plain causal attention on a CPU runs in a C++ kernel if `causal_cpu.is_supported`: measured 1.4 to 3.5 times as fast
    as torch's fused kernel (benchmarks/results/attention_cpu.md). Otherwise scores are rounded to the tensors' dtype,
    as in transformers' eager attention, while fused kernels keep fp32. Memory is linear in length, as with the fused
    kernels. Only keys within the window (and global tokens) are computed: the work is length x window.

    Args:
        q: [rows, heads, length, head_dim]; k, v: the same, or with fewer heads that groups of query heads share.
        softcap: caps scores as softcap * tanh(score / softcap), as in Gemma 2.

    Raises:
        ValueError: documents or global tokens without causal attention.

    Example:
        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> attend_blockwise(q, k, v, MaskSpec(window=2), 1.0).shape
        torch.Size([1, 2, 4, 8])
    """
    if not mask.causal and (is_packed(mask) or mask.global_tokens):
        raise ValueError("blocked attention supports documents and global tokens only if attention is causal; use flex")
    q, k, v = cast_to_autocast(q, k, v)

    if is_packed(mask):
        # Documents are cut out and padded per pass, so `_build_passes` sees them as rows without documents.
        return attend(_build_passes(mask, scale, softcap), q, k, v, mask.documents)
    if not (_is_plain_causal(mask, k, softcap) and is_supported(q, k, v)):
        q, k, v = (t.contiguous() for t in (q, k, v))  # copies once here instead of in both passes
    return attend(_build_passes(mask, scale, softcap), q, k, v, None)


def _build_passes(mask: MaskSpec, scale: float, softcap: float | None) -> Passes:
    plain = replace(mask, documents=None)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if _is_plain_causal(plain, k, softcap) and is_supported(q, k, v):
            return (causal_forward(q, k, v, scale),)
        return (_forward(q, k, v, plain, scale, softcap),)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if _is_plain_causal(plain, k, softcap) and is_supported(q, k, v):
            return causal_backward(grad, q, k, v, scale)
        return _backward(grad, q, k, v, plain, scale, softcap)

    return Passes(forward, backward)


def _is_plain_causal(mask: MaskSpec, k: Tensor, softcap: float | None) -> bool:
    """True if each query sees all keys up to itself, and scores are not capped."""
    return mask.causal and softcap is None and (mask.window is None or mask.window >= k.shape[2])


class _Tile(NamedTuple):
    heads: slice
    queries: slice
    keys: tuple[slice, ...]
    """Spans of visible keys: those in the window, and the global tokens if they are separate."""
    block: Tensor
    """[n, groups * queries, dim]."""
    near: Tensor
    """The keys of the spans, [n, keys, dim]."""
    probs: Tensor
    """Probabilities [n, groups * queries, keys]; overwritten by the next tile."""
    bent: Tensor | None
    """tanh of the scores if they are capped and this is backward; shaped and reused like `probs`."""


def _concat_spans(x: Tensor, heads: slice, keys: tuple[slice, ...]) -> Tensor:
    """Concatenates the spans of x [n, length, dim]; a view for a single span."""
    return x[heads, keys[0]] if len(keys) == 1 else torch.cat([x[heads, span] for span in keys], dim=1)


class _Tiles:
    """Iterates over tiles of probabilities: a group of heads, a block of queries and its visible keys.

    Head groups are powers of two, so that matmuls have few distinct shapes for any number of documents (oneDNN
    generates and caches a kernel for each).
    """

    def __init__(
        self, q: Tensor, k: Tensor, mask: MaskSpec, scale: float, softcap: float | None, *, backward: bool = False
    ):
        self.q, self.k, self.scale, self.causal, self.softcap = q, k, scale, mask.causal, softcap
        # q: [rows * key heads, groups, length, dim], k: [rows * key heads, length, dim]. A matmul of all query heads of
        # a group with their common keys needs no repeated keys.
        self.heads, self.groups, self.length, _ = q.shape
        size, total = min(_QUERIES, self.length), k.shape[1]
        self.window = mask.window if mask.window is not None and mask.window < total else None
        self.shared = mask.global_tokens if self.window is not None else 0  # without a window all tokens are global
        # Most keys that a tile can see, to size the buffer once for all tiles.
        keys = total
        if self.window is not None:
            # A block of `size` queries sees its own positions and window - 1 more, on both sides unless it is causal.
            keys = min(total, self.shared + size + (self.window - 1) * (1 if self.causal else 2))
        rows = self.groups * size
        # The largest power of two of heads whose scores fit in the scratch.
        self.most = 1 << (max(1, _SCRATCH // (rows * keys)).bit_length() - 1)
        self.buffer = q.new_empty(min(self.most, self.heads) * rows * keys)
        # Backward of the cap needs its tanh, which softmax overwrites in the buffer.
        self.bent = torch.empty_like(self.buffer) if softcap is not None and backward else None
        # Triangles of -inf, 0 elsewhere, which are added to the scores at the ends of a tile.
        hidden = q.new_full((_QUERIES, _QUERIES), float("-inf"))
        # Column c of `before` is the c-th key from the start of the first query's window; of `after`, the c-th beyond
        # its end.
        self.before = hidden.tril(-1) if self.window is not None else None
        self.after = hidden.triu_() if self.causal or self.window is not None else None

    def __iter__(self) -> Iterator[_Tile]:
        first = 0
        while first < self.heads:
            # The remaining heads split into powers of two as well: 13 are 8, 4 and 1.
            count = min(self.most, 1 << ((self.heads - first).bit_length() - 1))
            for begin in range(0, self.length, _QUERIES):
                yield self._tile(slice(first, first + count), slice(begin, min(begin + _QUERIES, self.length)), count)
            first += count

    def _spans(self, queries: slice) -> tuple[slice, ...]:
        total = self.k.shape[1]
        # Causal attention computes no key after the block's last query.
        if self.window is None:
            return (slice(0, queries.stop if self.causal else total),)
        start = max(0, queries.start - self.window + 1)  # first key in the window of the first query
        stop = queries.stop if self.causal else min(total, queries.stop + self.window - 1)
        # The window touches the global tokens: one span serves both, without a concatenation.
        if start <= self.shared:
            return (slice(0 if self.shared else start, stop),)
        return (slice(0, self.shared), slice(start, stop)) if self.shared else (slice(start, stop),)

    def _tile(self, heads: slice, queries: slice, count: int) -> _Tile:
        size, spans = queries.stop - queries.start, self._spans(queries)
        near = _concat_spans(self.k, heads, spans)
        keys = near.shape[1]
        block = self.q[heads, :, queries].reshape(count, self.groups * size, -1)
        # A flat buffer, viewed in each tile's shape: edge tiles are smaller.
        scores = self.buffer[: count * self.groups * size * keys].view(count, self.groups * size, keys)
        # [heads, groups * queries, dim] x [heads, dim, keys]. beta=0 ignores the old scores, and alpha folds the scale
        # (and the cap's divisor) into the matmul.
        torch.baddbmm(scores, block, near.transpose(1, 2), beta=0, alpha=self.scale / (self.softcap or 1), out=scores)
        bent = None
        if self.softcap is not None:
            # softcap * tanh(score / softcap)
            scores.tanh_()
            if self.bent is not None:
                bent = self.bent[: scores.numel()].view(scores.shape).copy_(scores)
            scores.mul_(self.softcap)
        # After the cap, which would turn -inf into -softcap.
        self._hide(scores.view(count, self.groups, size, keys), queries, spans)
        # In place is safe: softmax reads each full row before it writes it.
        return _Tile(heads, queries, spans, block, near, torch.softmax(scores, dim=-1, out=scores), bent)

    def _hide(self, scores: Tensor, queries: slice, spans: tuple[slice, ...]) -> None:
        """Masks hidden keys with -inf: only a triangle at each end of the tile."""
        size, stop = queries.stop - queries.start, spans[-1].stop
        first = stop - scores.shape[-1]  # start of the tile's columns if they were one span
        if self.before is not None and self.window is not None:
            # The window's lower edge: query r of the block misses keys before origin + r, except global tokens.
            origin = queries.start - self.window + 1
            low, high = max(origin, self.shared, 0), origin + size - 1
            if low < high:
                scores[..., low - first : high - first].add_(self.before[:size, low - origin : high - origin])
        if self.after is not None:
            # The upper edge: query r misses keys from origin + r on.
            origin = queries.start + (1 if self.causal else self.window or 0)
            high = min(origin + size - 1, stop)
            if origin < high:
                scores[..., origin - first : high - first].add_(self.after[:size, : high - origin])


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, softcap: float | None) -> Tensor:
    rows, heads, length, width = q.shape
    shared = k.shape[1]
    # Rows and key heads form one batch dimension, the query heads of each key head another.
    q = q.reshape(rows * shared, heads // shared, length, width)
    k, v = (t.reshape(rows * shared, *t.shape[2:]) for t in (k, v))
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    for tile in _Tiles(q, k, mask, scale, softcap):
        into = out[tile.heads, :, tile.queries]
        # [heads, groups * queries, keys] x [heads, keys, dim]
        into.copy_(torch.bmm(tile.probs, _concat_spans(v, tile.heads, tile.keys)).view(into.shape))
    return out.view(rows, heads, length, -1)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    shapes, shared = (q.shape, k.shape, v.shape), len(k) * k.shape[1]
    q = q.reshape(shared, -1, *q.shape[2:])
    k, v = (t.reshape(shared, *t.shape[2:]) for t in (k, v))
    g = grad.reshape(*q.shape[:3], v.shape[-1])  # dO, in the grouping of q
    grad_q = torch.empty_like(q)
    # Many blocks add to the same keys, so accumulate in fp32.
    grad_k, grad_v = (torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v))
    # Probabilities are computed again instead of saved, so that memory stays linear in the length.
    tiles = _Tiles(q, k, mask, scale, softcap, backward=True)
    scratch = torch.empty_like(tiles.buffer)
    for heads, queries, keys, block, near, probs, bent in tiles:
        sizes = [span.stop - span.start for span in keys]
        slope = g[heads, :, queries].reshape(*block.shape[:2], -1)
        # dV = P^T dO, summed over all queries and heads of the group by the matmul.
        for span, part in zip(keys, torch.bmm(probs.transpose(1, 2), slope).split(sizes, 1), strict=True):
            grad_v[heads, span] += part
        # dP = dO V^T, then dS = P (dP - rowsum(P dP)): hidden keys have P = 0, so dS is 0 there without a mask.
        scores = scratch[: probs.numel()].view(probs.shape)
        torch.bmm(slope, _concat_spans(v, heads, keys).transpose(1, 2), out=scores)
        torch.ops.aten._softmax_backward_data.out(scores, probs, -1, probs.dtype, grad_input=scores)
        if bent is not None:
            # d tanh(x) / dx = 1 - tanh(x)^2; the cap and its inverse cancel.
            scores.mul_(bent.square_().neg_().add_(1))
        # dQ = scale dS K: each block of queries is complete in its tile, so it is written once.
        into = grad_q[heads, :, queries]
        into.copy_(torch.bmm(scores, near).mul_(scale).view(into.shape))
        # dK = scale dS^T Q
        for span, part in zip(keys, torch.bmm(scores.transpose(1, 2), block).split(sizes, 1), strict=True):
            grad_k[heads, span].add_(part, alpha=scale)
    a, b, c = (t.to(k.dtype).view(shape) for t, shape in zip((grad_q, grad_k, grad_v), shapes, strict=True))
    return a, b, c


def blocked_passes(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, softcap: float | None = None
) -> tuple[Passes, Documents | None]:
    """Returns forward and backward of `attend_blockwise` below autograd, and the documents to separate."""
    return _build_passes(mask, scale, softcap), mask.documents if is_packed(mask) else None
