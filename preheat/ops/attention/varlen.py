"""Attention over packed documents and sliding windows, by one call of torch's variable-length flash kernel.

`varlen_attention` saves its result and log-sum-exp and calls the kernel's own backward. Document offsets are sent to
the device once per batch from pinned memory, and the maximum length is known on the host, so that nothing waits for the
device. On a CPU, for tests, the operators attend document by document. On an H200 both passes agree with fp64
(benchmarks/results/gpu_check-correct.md).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from preheat.core import MaskSpec
from preheat.hardware.transfers import cache_tensors, to_device
from preheat.ops.attention.per_document import Documents, Passes

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext


__all__ = ["Bounds", "attend_varlen", "compute_bounds", "varlen_attention", "varlen_passes", "is_varlen_supported"]

_DIM, _MOST = 8, 256  # the kernel supports head dims that are multiples of 8, up to 256


class Bounds(NamedTuple):
    """Document boundaries of a batch with its rows concatenated.

    Attributes:
        offsets: [documents + 1] int32, on the device of q, k and v.
        longest: upper bound of the document lengths.
        pairs: number of query-key pairs for counting FLOPs, as if attention were not causal; a causal window counts
            double.
    """

    offsets: Tensor
    longest: int
    pairs: int


def is_varlen_supported(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> bool:
    """True if the kernel supports the mask and the head dim."""
    return (
        # The same offsets serve queries and keys, so both have the same lengths.
        q.shape[2] == k.shape[2]
        # The window is two numbers for all queries; it cannot leave some keys visible to everyone.
        and not (mask.window is not None and mask.global_tokens)
        and q.shape[3] == v.shape[3]
        and q.shape[3] % _DIM == 0
        and q.shape[3] <= _MOST
    )


def _effective_window(mask: MaskSpec, length: int) -> int:
    """Returns the effective window; 0: none."""
    return mask.window if mask.window is not None and mask.window < length else 0


def _count_pairs(n: int, causal: bool, window: int) -> int:
    """Counts the pairs of one document, as in `Bounds.pairs`."""
    if not window or window >= n:
        return n * n  # no window, or one that hides nothing
    ahead = window * n - window * (window - 1) // 2  # pairs of each query with the keys of its window, itself included
    # Callers halve the count if attention is causal. Otherwise keys after the query mirror those before it, and the
    # query itself is in both sums.
    return 2 * ahead if causal else 2 * ahead - n


@functools.lru_cache(maxsize=16)  # called by every layer, forward and backward
def _count_all_pairs(documents: Documents, causal: bool, window: int) -> int:
    return sum(_count_pairs(n, causal, window) for n in itertools.chain.from_iterable(documents))


@cache_tensors(maxsize=16)  # called by every layer, forward and backward
@torch.inference_mode(False)  # the cached tensor must also serve training if inference calls first
def _compute_offsets(documents: Documents, device: torch.device) -> Tensor:
    # Rows are concatenated: documents are numbered through all of them, and none crosses a row's end.
    sizes = list(itertools.chain.from_iterable(documents))
    return to_device(numpy.cumsum([0, *sizes], dtype=numpy.int32), device)


def compute_bounds(mask: MaskSpec, rows: int, length: int, like: Tensor) -> Bounds:
    """Returns the bounds of a batch on the device of `like`; computed once per batch, without a device sync."""
    window = _effective_window(mask, length)
    if mask.documents is None:  # created on the device, also in a traced graph
        offsets = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=like.device)
        return Bounds(offsets, length, rows * _count_pairs(length, mask.causal, window))
    # For a maximum of one token torch takes another path, which lays the log-sum-exp out differently; a bound of two
    # avoids it.
    longest, pairs = max(2, *map(max, mask.documents)), _count_all_pairs(mask.documents, mask.causal, window)
    # A fake tensor must not enter the cache, from which a real run would take it.
    if isinstance(like, FakeTensor):
        return Bounds(like.new_empty(sum(map(len, mask.documents)) + 1, dtype=torch.int32), longest, pairs)
    return Bounds(_compute_offsets(mask.documents, like.device), longest, pairs)


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
    """Computes attention over [rows, heads, length, head_dim] in bf16 or fp16; `k` and `v` may have fewer heads.

    Differentiable and traceable by torch.compile.
    """
    rows, _, length, _ = q.shape
    out, _ = varlen_attention(
        q, k, v, *compute_bounds(mask, rows, length, q), mask.causal, _effective_window(mask, length), scale
    )
    return out


def varlen_passes(q: Tensor, mask: MaskSpec, scale: float) -> Passes:
    """Returns the kernel's forward and backward below autograd, for tensors like `q`."""
    # Bounds are computed here, above autograd, so that forward and backward share one copy.
    rows, _, length, _ = q.shape
    settings = (*compute_bounds(mask, rows, length, q), mask.causal, _effective_window(mask, length), scale)
    return Passes(
        lambda q, k, v: varlen_attention(q, k, v, *settings),
        lambda grad, q, k, v, out, lse: varlen_attention_backward(grad, q, k, v, out, lse, *settings),
        statistics=True,
    )


def _flatten_rows(*tensors: Tensor) -> Iterator[Tensor]:
    """Flattens [rows, heads, length, dim] to [rows * length, heads, dim], a view of the projection's output."""
    return (t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]) for t in tensors)


def _unflatten_rows(t: Tensor, rows: int) -> Tensor:
    """Inverse of `_flatten_rows` for one tensor."""
    return t.contiguous().view(rows, -1, *t.shape[1:]).transpose(1, 2)


def _mask_arguments(is_causal: bool, window: int, scale: float) -> tuple[bool, dict[str, float]]:
    """Returns the kernel's mask arguments: visible tokens to the left and right, without itself; -1: no limit."""
    # With a window, a right limit of 0 says causal, and the kernel's own flag stays off.
    left = window - 1 if window else -1
    right = (0 if is_causal else left) if window else -1
    return is_causal and not window, {"scale": scale, "window_size_left": left, "window_size_right": right}


@torch.library.custom_op("preheat::varlen_attention", mutates_args=())
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    pairs: int,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes attention within each document.

    Args:
        q: [rows, heads, length, dim]; k, v: the same, or with fewer heads.
        offsets, longest, pairs: see `Bounds`.
        window: visible tokens, itself included; 0: all.

    Returns:
        The result, stored as [rows, length, heads, dim], and the log-sum-exp, [rows, heads, length].
    """
    # `pairs` is for the FLOP formula alone.
    rows, heads, length, _ = q.shape
    if q.device.type == "cpu":
        return _attend_by_document(q, k, v, offsets, is_causal, window, scale)
    causal, more = _mask_arguments(is_causal, window, scale)
    # Arguments in order: q, k, v, both offsets, both maximum lengths, dropout, causal, and no debug mask.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_flatten_rows(q, k, v), offsets, offsets, longest, longest, 0.0, causal, False, **more
    )
    # The kernel returns the log-sum-exp of concatenated rows: [heads, tokens].
    return _unflatten_rows(out, rows), lse.view(heads, rows, length).transpose(0, 1)


@varlen_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    pairs: int,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rows, heads, length, _ = q.shape
    # The same strides as the real operator, which torch.compile relies on.
    return _empty_output(q, v.shape[3]), q.new_empty(heads, rows, length, dtype=_statistics_dtype(q)).transpose(0, 1)


def _empty_output(t: Tensor, width: int) -> Tensor:
    rows, heads, length, _ = t.shape
    # Stored as [rows, length, heads, width], so that the output projection reads it without a copy.
    return t.new_empty(rows, length, heads, width).transpose(1, 2)


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.custom_op("preheat::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    longest: int,
    pairs: int,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of `varlen_attention` by q, k and v."""
    rows, heads, _, _ = q.shape
    if q.device.type == "cpu":
        return _attend_by_document_backward(grad, q, k, v, out, lse, offsets, is_causal, window, scale)
    causal, more = _mask_arguments(is_causal, window, scale)
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # unused RNG state: no dropout
    # [tokens, heads, dim] each, and the log-sum-exp as [heads, tokens].
    flat = [*_flatten_rows(grad, q, k, v, out), lse.transpose(0, 1).reshape(heads, -1)]
    grads = torch.ops.aten._flash_attention_backward(
        *flat, offsets, offsets, longest, longest, 0.0, causal, state, state, **more
    )
    a, b, c = (_unflatten_rows(t, rows) for t in grads)
    return a, b, c


@varlen_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    longest: int,
    pairs: int,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_output(q, q.shape[3]), _empty_output(k, k.shape[3]), _empty_output(v, v.shape[3])


def _keep(
    ctx: AutogradContext,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, int, int, bool, int, float],
    output: tuple[Tensor, Tensor],
) -> None:
    # The log-sum-exp has no gradient: without this, autograd would allocate zeros for it.
    ctx.set_materialize_grads(False)
    q, k, v, offsets, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, offsets)


def _backward(ctx: AutogradContext, grad: Tensor | None, of_lse: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    # The kernel's own buffers are invisible to a dry run, so these stand for them while the fake kernel runs.
    saved = ctx.saved_tensors  # read once: a recomputed layer unpacks them once
    scratch = _allocate_scratch(*saved) if isinstance(grad, FakeTensor) else None
    grads = varlen_attention_backward(grad, *saved, *ctx.settings)
    del scratch
    # Nine inputs, of which q, k and v have gradients.
    return (*grads, *[None] * 6)


varlen_attention.register_autograd(_backward, setup_context=_keep)


def _allocate_scratch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offsets: Tensor) -> list[Tensor]:
    """Allocates what the kernel's backward allocates, for dry runs (`mha_varlen_bwd` in torch's flash_api.cpp).

    These are query gradients and a statistic in fp32, padded by 128 positions per document, and key and value gradients
    per query head of a group.
    """
    rows, heads, length, dim = q.shape
    # The kernel rounds head dims up to 32, and to 64 above 128.
    tokens, multiple = rows * length + 128 * (offsets.shape[0] - 1), 32 if dim <= 128 else 64
    wide = -(-dim // multiple) * multiple
    buffers = [q.new_empty(tokens, heads, wide, dtype=torch.float32), q.new_empty(heads, tokens, dtype=torch.float32)]
    if k.shape[1] != heads:
        buffers += [q.new_empty(rows * length, heads, dim) for _ in (k, v)]
    return buffers


def _count_flops(q: torch.Size, v: torch.Size, pairs: int) -> int:
    # Scores take 2 * dim FLOPs per pair and head, the weighted sum of values as many for the values' dim.
    return int(2 * q[1] * pairs * (q[3] + v[3]))


@register_flop_formula(torch.ops.preheat.varlen_attention)
def _forward_flops(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    offsets: torch.Size,
    longest: int,
    pairs: int,
    *_: object,
    **__: object,
) -> int:
    """Counts FLOPs per document as if attention were not causal, as torch does."""
    return _count_flops(q, v, pairs)


@register_flop_formula(torch.ops.preheat.varlen_attention_backward)
def _backward_flops(
    grad: torch.Size,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    out: torch.Size,
    lse: torch.Size,
    offsets: torch.Size,
    longest: int,
    pairs: int,
    *_: object,
    **__: object,
) -> int:
    # Five matmuls instead of two: scores again, and gradients by probabilities, values, queries and keys.
    return _count_flops(q, v, pairs) * 5 // 2


# --- CPU implementation of the operators


def _iterate_documents(offsets: Tensor, length: int) -> Iterator[tuple[slice, slice]]:
    """Yields the row and positions of each document."""
    for begin, end in itertools.pairwise(offsets.numpy().tolist()):
        row = begin // length
        yield slice(row, row + 1), slice(begin - row * length, end - row * length)


def _window_mask(q: Tensor, n: int, is_causal: bool, window: int) -> dict[str, Tensor]:
    """Returns the mask tensor by which torch's CPU kernel gets a window."""
    if not window or window >= n:
        return {}
    apart = torch.arange(n)[:, None] - torch.arange(n)[None]  # query - key: [n, n]
    may = (apart < window) & (apart >= 0 if is_causal else apart > -window)
    return {"attn_mask": torch.zeros(n, n, dtype=q.dtype).masked_fill_(~may, float("-inf"))}


def _attend_by_document(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, is_causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    # One call per document needs neither padding nor a mask for its neighbors.
    (rows, heads, length, _), one = q.shape, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = (
        _empty_output(q, v.shape[3]),
        q.new_empty(heads, rows, length, dtype=_statistics_dtype(q)).transpose(0, 1),
    )
    for row, span in _iterate_documents(offsets, length):
        mask = _window_mask(q, span.stop - span.start, is_causal, window)
        # A mask tensor includes causality, and the kernel takes either of them.
        parts = one(q[row, :, span], k[row, :, span], v[row, :, span], 0.0, is_causal and not mask, scale=scale, **mask)
        out[row, :, span], lse[row, :, span] = parts
    return out, lse


def _attend_by_document_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    a, b, c = (_empty_output(t, t.shape[3]) for t in (q, k, v))
    for row, span in _iterate_documents(offsets, q.shape[2]):
        mask = _window_mask(q, span.stop - span.start, is_causal, window)
        # [1, heads, n, dim] each; the log-sum-exp is [1, heads, n].
        cut = (t[row, :, span] for t in (grad, q, k, v, out, lse))
        a[row, :, span], b[row, :, span], c[row, :, span] = one(*cut, 0.0, is_causal and not mask, scale=scale, **mask)
    return a, b, c
