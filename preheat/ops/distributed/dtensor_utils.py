"""DTensor helpers: local shards, gathering, and norms over all shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from preheat.ops.dry_run_loops import fold_identical

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = [
    "Runs",
    "group_by_dtype",
    "full_tensor",
    "local",
    "local_shard",
    "parts_of",
    "runs_of",
    "split_dim",
    "wrap_local_shard",
    "square_sum",
    "total_norm",
]


def local(t: Tensor) -> Tensor:
    """Returns the local shard of a DTensor; other tensors unchanged."""
    return t.to_local() if isinstance(t, DTensor) else t


def local_shard(value: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's shard of a replicated tensor under the placements of `like`, without communication."""
    if not isinstance(like, DTensor):
        return value
    # No source rank: every rank slices its own copy, which is equal.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()


def wrap_local_shard(share: Tensor, like: DTensor) -> DTensor:
    """Wraps a local shard as a DTensor with the placements of `like`."""
    # With shape and stride: from a local shard alone, DTensor would assume that all shards are equal.
    return DTensor.from_local(
        share, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def full_tensor(t: Tensor) -> Tensor:
    """Gathers a DTensor, differentiably; other tensors unchanged. Every rank must use the result in the same way."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def _first_element_index(t: Tensor) -> int:
    """Returns the flat index in the full tensor of this rank's first element."""
    if not isinstance(t, DTensor):
        return 0
    with _disable_current_modes():  # the mesh's own tensors are not fake
        _, start = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    # Row-major: the offset in each dimension times its stride.
    return sum(offset * stride for offset, stride in zip(start, t.stride(), strict=True))


def split_dim(placement: Placement) -> int | None:
    """Returns the dimension that a placement splits, or None."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def parts_of(placement: Placement) -> int:
    """Returns the number of equal parts of its dimension that a placement splits each: 2 for a gate and up in one."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


class Runs(NamedTuple):
    """Ranges of the full tensor's elements that a rank's part consists of, in order: `number` ranges of `length`
    elements, in groups of `inner`. The first begins at `first`, the others of its group each `apart` elements later,
    and the next groups each `far` elements after the one before."""

    first: int
    number: int
    apart: int
    length: int
    inner: int
    far: int = 0

    def start(self, run: int) -> int:
        """Returns the flat index in the full tensor of a range's first element."""
        group, within = divmod(run, self.inner)
        return self.first + group * self.far + within * self.apart


def runs_of(t: Tensor) -> Runs:
    """Returns the ranges of a contiguous tensor that this rank holds.

    One range if the first dimension is sharded; if a later one is (stacks of experts), one for each index before it.

    Example:
        >>> runs_of(torch.zeros(3, 4))
        Runs(first=0, number=1, apart=0, length=12, inner=1, far=0)
    """
    part = local(t)
    cut = {dim for p in t.placements if (dim := split_dim(p)) is not None} if isinstance(t, DTensor) else set()
    if not isinstance(t, DTensor) or max(cut, default=0) == 0 or not part.numel():
        return Runs(_first_element_index(t), 1, 0, part.numel(), 1)
    # FSDP's strided shards come before the one that they divide; one that comes last is a gate and up in one stack.
    parts = {split_dim(t.placements[-1]): parts_of(t.placements[-1])}
    *others, dim = sorted(cut - {0})
    number, inner, far = math.prod(part.shape[:dim]) * parts.get(dim, 1), 0, 0
    if others:
        (middle,) = others
        groups = math.prod(part.shape[:middle]) * parts.get(middle, 1)
        inner, far = number // groups, t.stride()[middle - 1] // parts.get(middle, 1)
    apart = t.stride()[dim - 1] // parts.get(dim, 1)
    return Runs(_first_element_index(t), number, apart, part.numel() // number, inner or number, far)


def square_sum(tensors: Iterable[Tensor], squares: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Sums squares over all elements, counting each element of a DTensor once; the same on every rank.

    Args:
        squares: list of local tensors -> their sum of squares, fp32.
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for t in tensors:
        if isinstance(t, DTensor):
            assert not any(isinstance(p, Partial) for p in t.placements), (
                "a gradient that is not summed yet has no norm"
            )
            # Replicas hold the same elements, so their squares are not summed over the replicated axes.
            cut = tuple(n for n, p in enumerate(t.placements) if not p.is_replicate())
            # Grouped by mesh and sharded axes, so that each group takes one small all-reduce instead of one per tensor.
            groups[(t.device_mesh, cut)].append(t.to_local())
        else:
            groups[(None, ())].append(t)
    total = None
    # In the order of the first appearance, which is the same on every rank.
    for (mesh, cut), members in groups.items():
        partial = squares(members)
        for dimension in cut:
            torch.distributed.all_reduce(partial, group=mesh.get_group(dimension))
        total = partial if total is None else total + partial
    assert total is not None, "no tensors"
    return total


def group_by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by dtype: torch runs a foreach call as one kernel only if all dtypes match."""
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for t in tensors:
        groups[t.dtype].append(t)
    return list(groups.values())


def total_norm(tensors: Iterable[Tensor], chunk: int = 1 << 20, *, together: bool = False) -> Tensor:
    """Returns the Euclidean norm over all tensors in fp32, for DTensors over all shards.

    Args:
        together: one foreach call per dtype, which CUDA runs as a few kernels; changes the summation order.
        chunk: elements at a time if torch makes an fp32 copy first (half precision on a CPU).

    Example:
        >>> total_norm([torch.full((3,), 2.0), torch.full((1, 1), 2.0)])
        tensor(4.)
    """

    def norms(some: Iterable[Tensor]) -> Tensor:
        values: list[Tensor] = []
        if together:
            for members in group_by_dtype(some):
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
    # The norm of norms is that of all elements.
    return torch.linalg.vector_norm(norms(tensors))
