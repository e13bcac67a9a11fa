"""Attention by torch's FlexAttention, which generates a kernel for the mask.

On an H200 both passes agree with fp64 (benchmarks/results/gpu_check-correct.md). On a CPU torch has no backward pass
for it; the compiled forward agrees with the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from preheat.core import MaskSpec
from preheat.hardware.transfers import cache_tensors
from preheat.ops.attention.sdpa import cast_to_autocast, is_visible, starts_of
from preheat.ops.attention.varlen import attend_varlen

__all__ = ["build_block_mask", "compiled_flex_attention"]

_BLOCK = 128  # FlexAttention's default block size


@cache_tensors(maxsize=8)  # the layers of a model share the mask of a batch
def build_block_mask(mask: MaskSpec, length: int, device: torch.device) -> BlockMask:
    """Returns the mask in 128 x 128 blocks: empty, full, or evaluated per token.

    Computed from block boundaries in (length / 128)² work, not length² as torch's `create_block_mask` unless compiled.
    """
    starts = starts_of(mask, length, device)

    # Evaluated per element in partial blocks; all heads share the mask.
    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if mask.documents is None:
            return is_visible(mask, query, key)
        return is_visible(mask, query, key, starts[row, query], starts[row, key])

    # First and last position of each block; `some`: the block has a visible pair, `every`: all its pairs are visible.
    # Both are [rows or 1, blocks of queries, blocks of keys].
    first = torch.arange(0, length, _BLOCK, device=device)
    last = (first + _BLOCK - 1).clamp(max=length - 1)
    some: Tensor = torch.ones(len(starts), len(first), len(first), dtype=torch.bool, device=device)
    # A block that the end of the row truncates never counts as full.
    complete = last - first == _BLOCK - 1
    every = some & complete[:, None] & complete[None, :]
    q0, q1, k0, k1 = first[:, None], last[:, None], first[None, :], last[None, :]
    if mask.causal:
        # Visible if the last query is not before the first key; full if no query is before any key.
        some, every = some & (q1 >= k0), every & (q0 >= k1)
    if mask.window is not None:
        # Smallest distance of the two blocks in either direction, then the largest.
        near = (q0 - k1 < mask.window) & (k0 - q1 < mask.window)
        inside = (q1 - k0 < mask.window) & (k1 - q0 < mask.window)
        if mask.global_tokens:
            place = torch.arange(length, device=device)
            shared = (place - starts < mask.global_tokens).split(_BLOCK, dim=1)
            # Per block of tokens: some or all of them are global, [rows or 1, blocks].
            any_, all_ = (torch.stack([f(s, dim=1) for s in shared], dim=1) for f in (torch.any, torch.all))
            near = near | any_[:, None, :] | any_[:, :, None]
            inside = inside | all_[:, None, :] | all_[:, :, None]
        some, every = some & near, every & inside
    if mask.documents is not None:  # starts ascend along a row: two blocks share a document if their ranges overlap
        s0, s1 = starts[:, first], starts[:, last]
        some = some & (s0[:, :, None] <= s1[:, None, :]) & (s0[:, None, :] <= s1[:, :, None])
        # Full only if both blocks lie within one document, and it is the same.
        every = every & (s0 == s1)[:, :, None] & (s0 == s1)[:, None, :] & (s0[:, :, None] == s0[:, None, :])
    return BlockMask.from_kv_blocks(
        *_list_blocks(some & ~every),
        *_list_blocks(every),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(length, length),
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of blocks [rows, 1, queries] and their indices first [rows, 1, queries, keys]."""
    # Stable: blocks of keys stay in ascending order, as flex reads them. No value is read back to the host.
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


@functools.cache
def _compile_kernel() -> Callable[..., Tensor]:
    # Uncompiled, flex_attention materializes all scores.
    return torch.compile(flex_attention, dynamic=False)


@functools.cache  # one function per cap, so that each compiles once
def _build_softcap(softcap: float) -> Callable[..., Tensor]:
    return lambda score, row, head, query, key: softcap * torch.tanh(score / softcap)


def compiled_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, softcap: float | None = None
) -> Tensor:
    """Computes attention over [rows, heads, length, head_dim] with any MaskSpec; skips fully masked blocks.

    In a dry run (fake tensors), flash attention's kernel replaces it: one kernel per pass too, with the same results
    and nearly the same scratch. Global tokens and caps are left out of the FLOPs.

    Raises:
        NotImplementedError: raised by torch if gradients are required on a CPU.
    """
    if isinstance(q, FakeTensor):
        return attend_varlen(q, k, v, mask, scale)
    q, k, v = cast_to_autocast(q, k, v)
    blocks = build_block_mask(mask, q.shape[2], q.device)
    bend = None if softcap is None else _build_softcap(softcap)
    return _compile_kernel()(
        q, k, v, score_mod=bend, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
