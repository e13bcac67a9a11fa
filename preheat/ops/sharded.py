"""Tensors that are spread over devices (DTensor): this device's share of them, and numbers over all shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

__all__ = ["local", "share_of", "square_sum", "whole"]


def local(t: Tensor) -> Tensor:
    """This device's share of a tensor that is spread over several; another tensor as it is."""
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t: Tensor) -> Tensor:
    """All of a tensor that is spread over several devices, gathered; each device must use it alike. Differentiable; another tensor as it is."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def share_of(whole: Tensor, like: DTensor) -> Tensor:
    """What this device would hold of a whole tensor that every device has, were it spread as `like` is. Nothing is sent."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def square_sum(tensors: Iterable[Tensor], squares: Any) -> Tensor:
    """The sum of squares over all elements of tensors, spread or not, each element counted once; the same on every device.

    Args:
        squares: list of local tensors -> their sum of squares, fp32.
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for t in tensors:
        if isinstance(t, DTensor):
            assert not any(isinstance(p, Partial) for p in t.placements), "a gradient that is not summed yet has no norm"
            cut = tuple(n for n, p in enumerate(t.placements) if not p.is_replicate())
            groups[(t.device_mesh, cut)].append(t.to_local())
        else:
            groups[(None, ())].append(t)
    total = None
    for (mesh, cut), members in groups.items():
        found = squares(members)
        for dimension in cut:
            torch.distributed.all_reduce(found, group=mesh.get_group(dimension))
        total = found if total is None else total + found
    assert total is not None, "no tensors"
    return total
