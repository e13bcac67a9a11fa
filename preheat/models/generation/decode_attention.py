"""Decoding attention over a bf16 KV cache on CPU: a C++ kernel (`decode_attention.cpp`) for few queries.

torch's CPU flash attention is built for many queries: with one query in bf16 it takes 4 times as long over 140 keys and
14 times as long over 8,000. This is a plain ctypes call, because the dispatch of a torch operator would take as long as
the kernel; tracers get torch's attention.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from preheat.hardware.cpp_build import load_native_library

__all__ = ["attend_cache", "is_supported"]

FEW = 16
"""Most queries that the kernel is used for; torch's matmuls win beyond."""
_WIDE = 16  # numbers per vector instruction of the kernel


def is_supported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """True if `attend_cache` supports these tensors and is faster than torch's attention."""
    queries, keys = q.shape[2], k.shape[2]
    # Without a mask all queries see all keys; with several queries, causality must come from the mask.
    plain_mask = queries == 1 if mask is None else mask.dtype == torch.bool and mask.shape[1:] == (1, queries, keys)
    graded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not plain_mask or graded or not all(map(_has_supported_types, (q, k, v))):
        return False
    if torch.compiler.is_compiling():
        return queries == 1
    watched = torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0  # by tracers that need operators
    return queries <= FEW and not watched and _load_library() is not None


def _has_supported_types(t: Tensor) -> bool:
    return t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.shape[3] % _WIDE == 0 and t.stride(3) == 1


def attend_cache(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T scale) v; scores and their sums in fp32.

    Args:
        q: bf16 [rows, heads, queries, width].
        k, v: bf16 [rows, pairs, keys, width] and [rows, pairs, keys, values]; heads that share a pair are adjacent.
        mask: bool [rows or 1, 1, queries, keys], true for visible keys; None: all are. A query without visible keys
            gets zeros (NaN when compiled).

    Returns:
        bf16 [rows, queries, heads, values].
    """
    if torch.compiler.is_compiling():
        return _attend_fused(q, k, v, mask, scale)
    # The kernel takes strides, so q, k and v may be views of a cache; only the mask must be dense.
    library = _load_library()
    assert library is not None, "of_use() comes first"
    rows, heads, queries, width = q.shape
    pairs, keys, values = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty(rows, queries, heads, values)
    dense = None if mask is None else mask.contiguous()
    apart = 0 if dense is None or dense.shape[0] == 1 else queries * keys
    # The order is that of `struct Sizes` in the C++ file.
    sizes = (rows, heads, pairs, queries, keys, width, values, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], apart)
    # ctypes holds no reference to the tensors: the local names keep their memory alive during the call.
    places = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (q, k, v, dense, out)]
    library.preheat_cached_attention(
        *places, (ctypes.c_int64 * len(sizes))(*sizes), ctypes.c_float(scale), torch.get_num_threads()
    )
    return out


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The same for one query in operators that torch.compile fuses: a C++ call would be opaque and copy the cache."""
    rows, heads, _, width = q.shape
    pairs = k.shape[1]
    # [rows, pairs, heads / pairs, keys]. Products and sums fuse into one loop over the bf16 cache; a matmul would
    # first write an fp32 copy of it.
    scores = (q.reshape(rows, pairs, heads // pairs, 1, width).float() * k[:, :, None].float()).sum(-1) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    shares = torch.softmax(scores, -1)[..., None]  # [rows, pairs, heads / pairs, keys, 1]
    return (shares * v[:, :, None].float()).sum(-2).to(q.dtype).view(rows, 1, heads, v.shape[3])


@functools.cache
def _load_library() -> ctypes.CDLL | None:
    return load_native_library(
        Path(__file__).with_suffix(".cpp"),
        ("attention over the KV cache uses torch's kernel, which takes several times as long"),
    )
