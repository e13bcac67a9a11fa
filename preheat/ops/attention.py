"""Attention over [rows, heads, length, head_dim] with the mask as data (MaskSpec)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from preheat.technique import MaskSpec

__all__ = ["KERNELS", "allowed", "blocked_attention", "blocked_gradients", "reference_attention", "sdpa_attention"]

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def allowed(mask: MaskSpec, rows: int, length: int, device: torch.device) -> Tensor:
    """The mask as a tensor, [rows or 1, 1, length, length], true where a token may look. For references only: it is n x n."""
    place = torch.arange(length, device=device)
    may = torch.ones(length, length, dtype=torch.bool, device=device)
    if mask.causal:
        may &= place[:, None] >= place[None, :]
    if mask.window is not None:
        may &= (place[:, None] - place[None, :]).abs() < mask.window
    if mask.documents is None:
        return may[None, None]
    owner = torch.stack(
        [
            torch.repeat_interleave(torch.arange(len(d), device=device), torch.tensor(d, device=device), output_size=length)
            for d in mask.documents
        ]
    )
    return (may & (owner[:, :, None] == owner[:, None, :]))[:, None]


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
    """The plain form: all scores in memory, keys and values repeated for their groups, softmax in fp32."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    scores = scores.masked_fill(~allowed(mask, q.shape[0], q.shape[2], q.device), float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


class _Arrange(torch.autograd.Function):
    """Rows of x [n, ...] taken by `there` (-1: a row of zeros); the gradient is taken by `back`, each row from where it went."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(there, back)
        return _take(x, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, back = ctx.saved_tensors
        return _take(grads[0].contiguous(), back), None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    empty = index < 0
    out = x.index_select(0, index.clamp(min=0))
    return out.mul_((~empty).to(out.dtype).view(-1, *[1] * (x.ndim - 1)))


_BLOCK = 64


@functools.lru_cache(maxsize=16)
def _arrangement(documents: tuple[tuple[int, ...], ...]) -> tuple[list[tuple[int, int]], numpy.ndarray, numpy.ndarray]:
    """Documents sorted into groups of equal padded length, so that each group is one call of the kernel.

    Lengths are padded at their end to multiples of 64: causal attention never looks there, and few distinct lengths mean few
    kernels to generate (oneDNN makes and keeps one a shape).

    Returns:
        groups: (documents, padded length) each.
        there: for each place of the groups laid end to end, the token that stands there, or -1.
        back: for each token its place in the groups.
    """
    length = sum(documents[0])
    by_length: dict[int, list[numpy.ndarray]] = {}
    for row, cuts in enumerate(documents):
        start = row * length
        for n in cuts:
            padded = min(-(-n // _BLOCK) * _BLOCK, length)
            place: numpy.ndarray = numpy.full(padded, -1, dtype=numpy.int64)
            place[:n] = numpy.arange(start, start + n)
            by_length.setdefault(padded, []).append(place)
            start += n
    groups = [(len(places), padded) for padded, places in sorted(by_length.items())]
    there = numpy.concatenate([place for _, places in sorted(by_length.items()) for place in places])
    back: numpy.ndarray = numpy.empty(len(documents) * length, dtype=numpy.int64)
    filled = there >= 0
    back[there[filled]] = numpy.nonzero(filled)[0]
    return groups, there, back


def _by_document(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, documents: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Causal attention of each document by itself, those of about equal length in one call of `attend`."""
    rows, _, length, _ = q.shape
    groups, *places = _arrangement(documents)
    there, back = (torch.from_numpy(place).to(q.device) for place in places)
    sizes = [count * padded for count, padded in groups]
    # [rows, heads, length, dim] is a view of [tokens, heads, dim], which is what is rearranged.
    parts = [
        _Arrange.apply(t.transpose(1, 2).reshape(rows * length, *t.shape[1::2]), there, back).split(sizes) for t in (q, k, v)
    ]
    done = []
    for (count, padded), *piece in zip(groups, *parts, strict=True):
        shaped = (t.view(count, padded, *t.shape[1:]).transpose(1, 2) for t in piece)
        done.append(attend(*shaped).transpose(1, 2).reshape(count * padded, *q.shape[1::2]))
    out = _Arrange.apply(torch.cat(done), back, there)
    return out.view(rows, length, *q.shape[1::2]).transpose(1, 2)


def _refuse_masks(mask: MaskSpec, length: int, who: str) -> None:
    if mask.window is not None and mask.window < length:
        raise ValueError(f"{who} has no sliding window (asked for {mask.window} at {length} tokens)")
    if _packed(mask) and not mask.causal:
        raise ValueError(f"{who} keeps documents apart only where attention is causal")


def _packed(mask: MaskSpec) -> bool:
    return mask.documents is not None and any(len(d) > 1 for d in mask.documents)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, kernel: str = "flash") -> Tensor:
    """Torch's fused attention by the named kernel: no scores in memory, no repeated keys and values, no mask tensor.

    Documents are attended by themselves (those of about equal length in one call), so the work falls with their length.
    A window, or documents without a causal mask, would need a mask tensor and are refused.

    Raises:
        ValueError: a window shorter than the sequence, or documents that are not causal: these kernels have no argument for them.
        RuntimeError: from torch, when the named kernel cannot serve these tensors.
    """
    _refuse_masks(mask, q.shape[2], "SDPA")
    grouped = q.shape[1] != k.shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=mask.causal, scale=scale, enable_gqa=grouped)

    with sdpa_kernel(KERNELS[kernel]):
        return _by_document(attend, q, k, v, mask.documents) if _packed(mask) and mask.documents else attend(q, k, v)


# --- by blocks of queries, out of batched matrix products ----------------------------------------------------------

_QUERIES = 128  # of a block: few enough that a causal mask skips nearly half of the work, enough for full matrix rate
_SCRATCH = 1 << 20  # scores of a tile: with their gradients they stay in a core's share of the cache


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
    """Attention as batched matrix products over blocks of queries, scores made again in the backward pass.

    On a CPU in bf16 this runs at the rate of matrix products, which torch's fused kernel does not reach there: measured
    1.3 to 2 times as fast up to 1,024 tokens, slower from 4,096 on (benchmarks/results/attention_cpu.md). Memory is linear in length, as with the
    fused kernels. Scores are rounded to the tensors' dtype, as in transformers' eager attention, where the fused kernels keep fp32.

    Args:
        q: [rows, heads, length, head_dim]; k, v: the same, or with fewer heads that groups of query heads share.

    Raises:
        ValueError: a window shorter than the sequence, or documents that are not causal.

    Example:
        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> blocked_attention(q, k, v, MaskSpec(), 1.0).shape
        torch.Size([1, 2, 4, 8])
    """
    _refuse_masks(mask, q.shape[2], "blocked attention")
    if torch.is_autocast_enabled(q.device.type):  # as autocast does for torch's own attention
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Blocked.apply(q, k, v, mask.causal, scale)

    return _by_document(attend, q, k, v, mask.documents) if _packed(mask) and mask.documents else attend(q, k, v)


class _Tiles:
    """Probabilities by tiles: some heads at a time, and of those a block of queries against all keys that it may see.

    Heads are taken by powers of two: whatever number of documents a batch holds, products have few distinct shapes (oneDNN
    makes and keeps a kernel for each).
    """

    def __init__(self, q: Tensor, k: Tensor, causal: bool, scale: float):
        self.q, self.k, self.causal, self.scale = q, k, causal, scale
        self.heads, self.groups, self.length, _ = q.shape
        rows = self.groups * min(_QUERIES, self.length)
        self.most = 1 << (max(1, _SCRATCH // (rows * k.shape[1])).bit_length() - 1)
        self.buffer = q.new_empty(min(self.most, self.heads) * rows * k.shape[1])
        self.hidden = q.new_full((_QUERIES, _QUERIES), float("-inf")).triu_(1) if causal else None

    def __iter__(self) -> Iterator[tuple[slice, slice, int, Tensor, Tensor]]:
        """(heads, queries, number of keys, the block's queries [n, groups * queries, dim], probabilities [n, groups * queries, keys])."""
        first = 0
        while first < self.heads:
            count = min(self.most, 1 << ((self.heads - first).bit_length() - 1))
            heads = slice(first, first + count)
            for begin in range(0, self.length, _QUERIES):
                queries = slice(begin, min(begin + _QUERIES, self.length))
                yield heads, queries, *self._tile(heads, queries, count)
            first += count

    def _tile(self, heads: slice, queries: slice, count: int) -> tuple[int, Tensor, Tensor]:
        size = queries.stop - queries.start
        keys = queries.stop if self.causal else self.k.shape[1]
        block = self.q[heads, :, queries].reshape(count, self.groups * size, -1)
        scores = self.buffer[: count * self.groups * size * keys].view(count, self.groups * size, keys)
        torch.baddbmm(scores, block, self.k[heads, :keys].transpose(1, 2), beta=0, alpha=self.scale, out=scores)
        if self.hidden is not None:
            scores.view(count, self.groups, size, keys)[..., queries.start :].add_(self.hidden[:size, :size])
        # Softmax reads each row whole before it writes it, so it may write where it reads.
        return keys, block, torch.softmax(scores, dim=-1, out=scores)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        rows, heads, length, width = q.shape
        shared = k.shape[1]
        ctx.shapes, ctx.causal, ctx.scale = (q.shape, k.shape, v.shape), causal, scale
        q = q.reshape(rows * shared, heads // shared, length, width)
        k, v = (t.reshape(rows * shared, *t.shape[2:]) for t in (k, v))
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        for heads_, queries, keys, _, chances in _Tiles(q, k, causal, scale):
            out[heads_, :, queries] = torch.bmm(chances, v[heads_, :keys]).view(*out[heads_, :, queries].shape)
        ctx.save_for_backward(q, k, v)
        return out.view(rows, heads, length, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        g = grads[0].reshape(*q.shape[:3], v.shape[-1])
        grad_q = torch.empty_like(q)
        # Each block adds to the keys that it saw: in fp32, so that nothing is lost over many blocks.
        grad_k, grad_v = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
        tiles = _Tiles(q, k, ctx.causal, ctx.scale)
        scratch = torch.empty_like(tiles.buffer)
        for heads, queries, keys, block, chances in tiles:
            slope = g[heads, :, queries].reshape(*block.shape[:2], -1)
            grad_v[heads, :keys] += torch.bmm(chances.transpose(1, 2), slope)
            scores = scratch[: chances.numel()].view(chances.shape)
            torch.bmm(slope, v[heads, :keys].transpose(1, 2), out=scores)
            torch.ops.aten._softmax_backward_data.out(scores, chances, -1, chances.dtype, grad_input=scores)
            grad_q[heads, :, queries] = (
                torch.bmm(scores, k[heads, :keys]).mul_(ctx.scale).view(*grad_q[heads, :, queries].shape)
            )
            grad_k[heads, :keys].add_(torch.bmm(scores.transpose(1, 2), block), alpha=ctx.scale)
        made = (t.to(k.dtype).view(shape) for t, shape in zip((grad_q, grad_k, grad_v), ctx.shapes, strict=True))
        return *made, None, None


class _Gradients(_Blocked):
    """Like `_Blocked` but for the forward pass, which makes nothing: for gradients by themselves."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        rows, heads, length, width = q.shape
        shared = k.shape[1]
        ctx.shapes, ctx.causal, ctx.scale = (q.shape, k.shape, v.shape), causal, scale
        kept = q.reshape(rows * shared, heads // shared, length, width)
        ctx.save_for_backward(kept, *(t.reshape(rows * shared, *t.shape[2:]) for t in (k, v)))
        return q.new_empty(rows, heads, length, v.shape[-1])


def blocked_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `blocked_attention` by q, k and v from that by its result, without its forward pass."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Gradients.apply(q, k, v, mask.causal, scale)

    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = _by_document(attend, q, k, v, mask.documents) if _packed(mask) and mask.documents else attend(q, k, v)
        grad_q, grad_k, grad_v = torch.autograd.grad(out, (q, k, v), grad)
    return grad_q, grad_k, grad_v
