"""Tensors that are spread over devices (DTensor): this device's share of them, and numbers over all shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes

from preheat.ops.dry_run_loops import fold_identical

__all__ = ["by_dtype", "first_element", "local", "share_of", "spread_as", "square_sum", "total_norm", "whole"]


def local(t: Tensor) -> Tensor:
    """This device's share of a tensor that is spread over several; another tensor as it is."""
    return t.to_local() if isinstance(t, DTensor) else t


def share_of(value: Tensor, like: Tensor) -> Tensor:
    """What this device would hold of a whole tensor that every device has, were it spread as `like` is. Nothing is sent."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()


def spread_as(share: Tensor, like: DTensor) -> DTensor:
    """This device's share as part of a tensor that is spread as `like` is."""
    return DTensor.from_local(
        share, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(t: Tensor) -> Tensor:
    """All of a tensor that is spread over several devices, gathered; each device must use it alike. Differentiable; another tensor as it is."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def first_element(t: Tensor) -> int:
    """Where this device's share begins in the whole tensor, both laid out flat."""
    if not isinstance(t, DTensor):
        return 0
    with _disable_current_modes():  # the mesh's own numbers are no fake tensors
        _, start = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return sum(offset * stride for offset, stride in zip(start, t.stride(), strict=True))


def square_sum(tensors: Iterable[Tensor], squares: Any) -> Tensor:
    """The sum of squares over all elements of tensors, spread or not, each element counted once; the same on every device.

    Args:
        squares: list of local tensors -> their sum of squares, fp32.
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for t in tensors:
        if isinstance(t, DTensor):
            assert not any(isinstance(p, Partial) for p in t.placements), (
                "a gradient that is not summed yet has no norm"
            )
            cut = tuple(n for n, p in enumerate(t.placements) if not p.is_replicate())
            groups[(t.device_mesh, cut)].append(t.to_local())
        else:
            groups[(None, ())].append(t)
    total = None
    for (mesh, cut), members in groups.items():
        partial = squares(members)
        for dimension in cut:
            torch.distributed.all_reduce(partial, group=mesh.get_group(dimension))
        total = partial if total is None else total + partial
    assert total is not None, "no tensors"
    return total


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of a dtype together: torch runs a call over a list as one kernel if all are alike."""
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for t in tensors:
        groups[t.dtype].append(t)
    return list(groups.values())


def total_norm(tensors: Iterable[Tensor], chunk: int = 1 << 20, *, together: bool = False) -> Tensor:
    """Euclidean norm over all tensors, in fp32; of those that are spread over devices, over all their shares.

    Args:
        together: all tensors of a dtype in one call, which CUDA runs as a few kernels; sums are rounded in another order.
        chunk: elements taken at a time where torch makes an fp32 copy first (a CPU's half precision).

    Example:
        >>> total_norm([torch.full((3,), 2.0), torch.full((1, 1), 2.0)])
        tensor(4.)
    """

    def norms(some: Iterable[Tensor]) -> Tensor:
        values: list[Tensor] = []
        if together:
            for members in by_dtype(some):
                values += torch._foreach_norm(members, 2, dtype=torch.float32)
            return torch.stack(values)
        for t in some:
            parts: Iterable[Tensor] = [t]
            if t.device.type == "cpu" and t.dtype != torch.float32 and t.is_contiguous():
                flat = t.view(-1)
                parts = (flat[start : start + chunk] for start in fold_identical(range(0, max(len(flat), 1), chunk)))
            values += [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
        return torch.stack(values)

    tensors = list(tensors)
    if any(isinstance(t, DTensor) for t in tensors):
        return square_sum(tensors, lambda some: norms(some).square().sum()).sqrt()
    return torch.linalg.vector_norm(norms(tensors))
