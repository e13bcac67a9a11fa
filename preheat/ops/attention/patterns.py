"""Sparse attention patterns as wrappers of any kernel (q, k, v, mask, scale) -> out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from preheat.core import MaskSpec

__all__ = ["Kernel", "limit_to_shifted_groups", "limit_to_window"]

Kernel = Callable[..., Tensor]


def limit_to_window(kernel: Kernel, window: int, global_tokens: int = 0) -> Kernel:
    """Limits a kernel to the last `window` tokens (itself included) and the first `global_tokens` of each document."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
        _check_whole_group(q, k)
        # A model's own window and global tokens remain: the narrower window, the more global tokens.
        narrow = min(window, mask.window or window)
        return kernel(
            q, k, v, replace(mask, window=narrow, global_tokens=max(global_tokens, mask.global_tokens)), scale
        )

    return attend


def limit_to_shifted_groups(kernel: Kernel, group: int) -> Kernel:
    """Limits a kernel to groups of `group` tokens per document; half of the heads use groups shifted by half a group.

    Groups are passed as documents, so any kernel that separates documents works.

    Raises:
        ValueError: called with an odd number of heads.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
        _check_whole_group(q, k)
        rows, heads, length, _ = q.shape
        documents = mask.documents or ((length,),) * rows
        # Half of the heads see groups that start at 0, half those that start half a group later, so that information
        # crosses the borders of groups (LongLoRA's shifted sparse attention).
        masks = [replace(mask, documents=_cut(documents, group, shift)) for shift in (0, group // 2)]
        shared = k.shape[1]  # key and value heads
        # Key heads split evenly, each with its query heads.
        if shared % 2 == 0:
            halves = zip(*(t.chunk(2, dim=1) for t in (q, k, v)), masks, strict=True)
            return torch.cat([kernel(*half, scale) for half in halves], dim=1)
        if heads // shared % 2:
            raise ValueError(f"shifted groups need an even number of heads, not {heads}")
        # Each half takes half of the heads that share a key.
        # [rows, shared, groups, length, dim], halved over the groups.
        by_key = q.unflatten(1, (shared, -1)).chunk(2, dim=2)
        out = [kernel(half.flatten(1, 2), k, v, m, scale) for half, m in zip(by_key, masks, strict=True)]
        return torch.cat([o.unflatten(1, (shared, -1)) for o in out], dim=2).flatten(1, 2)

    return attend


def _check_whole_group(q: Tensor, k: Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        # A decode step has one query and many keys, whose positions a pattern does not know.
        raise ValueError("attention with a pattern reads whole sequences: call the model with use_cache=False")


@functools.lru_cache(maxsize=32)  # called by every layer
def _cut(documents: tuple[tuple[int, ...], ...], group: int, shift: int) -> tuple[tuple[int, ...], ...]:
    """Splits documents every `group` tokens, the first time after `shift` (0: after a full group)."""

    def split_groups(n: int) -> tuple[int, ...]:
        bounds = [0, *range(shift or group, n, group), n]
        return tuple(b - a for a, b in itertools.pairwise(bounds))

    return tuple(tuple(itertools.chain.from_iterable(split_groups(n) for n in row)) for row in documents)
