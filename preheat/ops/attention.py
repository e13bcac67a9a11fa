"""Attention over [rows, heads, length, head_dim] with the mask as data (MaskSpec)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from preheat.technique import MaskSpec

__all__ = [
    "KERNELS",
    "allowed",
    "by_document",
    "in_compute_dtype",
    "packed",
    "reference_attention",
    "refuse_masks",
    "sdpa_attention",
    "sees",
    "starts_of",
]

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def sees(mask: MaskSpec, query: Tensor, key: Tensor, query_starts: Tensor | int = 0, key_starts: Tensor | int = 0) -> Tensor:
    """Which query may look at which key, elementwise over places in a row: the one definition of MaskSpec.

    Args:
        query, key: places, broadcast against each other.
        query_starts, key_starts: where the documents of the two begin.
    """
    may = query >= key if mask.causal else (query >= key) | (query < key)
    if mask.window is not None:
        near = (query - key).abs() < mask.window
        if mask.global_tokens:
            near = near | (key - key_starts < mask.global_tokens) | (query - query_starts < mask.global_tokens)
        may = may & near
    return may & (query_starts == key_starts) if mask.documents is not None else may


def starts_of(mask: MaskSpec, length: int, device: torch.device) -> Tensor:
    """Where the document of each token begins, [rows, length]; [1, length] of zeros without documents."""
    if mask.documents is None:
        return torch.zeros(1, length, dtype=torch.int64, device=device)
    rows: list[numpy.ndarray] = [numpy.repeat(numpy.cumsum((0, *cuts[:-1])), cuts) for cuts in mask.documents]
    return torch.from_numpy(numpy.stack(rows)).to(device)


def allowed(mask: MaskSpec, rows: int, length: int, device: torch.device) -> Tensor:
    """The mask as a tensor, [rows or 1, 1, length, length], true where a token may look. For references only: it is n x n."""
    place, starts = torch.arange(length, device=device), starts_of(mask, length, device)
    starts = starts[:, None]
    may = sees(mask, place[:, None], place[None, :], starts[..., :, None], starts[..., None, :])
    return may.expand(starts.shape[0], 1, length, length)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, softcap: float | None = None
) -> Tensor:
    """The plain form: all scores in memory, keys and values repeated for their groups, softmax in fp32.

    Args:
        softcap: scores are bent to softcap * tanh(score / softcap), as in Gemma 2.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed(mask, q.shape[0], q.shape[2], q.device), float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


def in_compute_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of an autocast that is on, as autocast does for torch's own attention."""
    kind = tensors[0].device.type
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors) if torch.is_autocast_enabled(kind) else tensors


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


def by_document(
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


def refuse_masks(mask: MaskSpec, length: int, who: str) -> None:
    """Raises where a kernel without windows is asked for one, or documents are not causal."""
    if mask.window is not None and mask.window < length:
        raise ValueError(f"{who} has no sliding window (asked for {mask.window} at {length} tokens); use blocks or flex")
    if packed(mask) and not mask.causal:
        raise ValueError(f"{who} keeps documents apart only where attention is causal")


def packed(mask: MaskSpec) -> bool:
    """Whether a row holds more than one document."""
    return mask.documents is not None and any(len(d) > 1 for d in mask.documents)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, kernel: str = "flash") -> Tensor:
    """Torch's fused attention by the named kernel: no scores in memory, no repeated keys and values, no mask tensor.

    Documents are attended by themselves (those of about equal length in one call), so the work falls with their length.
    A window, or documents without a causal mask, would need a mask tensor and are refused.

    Raises:
        ValueError: a window shorter than the sequence, or documents that are not causal: these kernels have no argument for them.
        RuntimeError: from torch, when the named kernel cannot serve these tensors.
    """
    refuse_masks(mask, q.shape[2], "SDPA")
    grouped = q.shape[1] != k.shape[1]
    if isinstance(q, FakeTensor) and q.device.type == "cpu":  # a dry run for a GPU: what the kernel keeps is the same
        kernel = "flash"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=mask.causal, scale=scale, enable_gqa=grouped)

    with sdpa_kernel(KERNELS[kernel]):
        return by_document(attend, q, k, v, mask.documents) if packed(mask) and mask.documents else attend(q, k, v)
