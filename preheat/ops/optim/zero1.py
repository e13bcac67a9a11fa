"""ZeRO-1 around any optimizer: each rank updates its shard of every parameter and gathers the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from preheat.ops.distributed.dtensor_utils import local, split_dim

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from preheat.core.json_types import StateDict
    from preheat.ops.optim.param_groups import ParamGroup


__all__ = ["ShardedOptimizer", "shard_optimizer"]


def _cut(t: Tensor, mesh: DeviceMesh) -> DTensor:
    """Returns this rank's rows of a replicated tensor, or of a tensor-parallel shard, as a DTensor, sharing memory."""
    # Along the first dimension of its mesh, a DTensor is replicated over the ranks that share the rows.
    others = t.placements[1:] if isinstance(t, DTensor) else ()
    whole = local(t.detach())
    rows_per_rank = -(-whole.shape[0] // mesh.size())  # fewer or none on the last ranks, as DTensor shards
    start = min(torch.distributed.get_rank(mesh.get_group()) * rows_per_rank, whole.shape[0])
    # A view: what the optimizer writes to the shard is in the parameter already.
    rows = whole[start : start + rows_per_rank]
    if not isinstance(t, DTensor) or not others:
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    # With the tensor axis, so that a checkpoint has the states of all its ranks. Rows that it splits are split again.
    parts = math.prod(t.device_mesh.size(n) for n, place in enumerate(others, 1) if split_dim(place) == 0)
    first = _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)
    return DTensor.from_local(rows, t.device_mesh, [first, *others], run_check=False, shape=t.shape, stride=t.stride())


@contextmanager
def _swap_parameters(modules: Iterable[nn.Module], others: dict[Tensor, nn.Parameter]) -> Iterator[None]:
    """Context manager that swaps the modules' parameters for `others`, so that an optimizer that inspects modules sees
    its own.
    """
    # All occurrences first: a tied parameter has two, and the dictionaries must not change while they are traversed.
    slots = [
        (store, name, p)
        for module in modules
        for store in (m._parameters for m in module.modules())
        for name, p in store.items()
        if p is not None and p in others
    ]
    for store, name, p in slots:
        store[name] = others[p]
    try:
        yield
    finally:
        for store, name, p in slots:
            store[name] = p


class ShardedOptimizer:
    """An optimizer over this rank's shards of replicated parameters. Created by `shard_optimizer`.

    After `step` every rank has all new weights. `state` is keyed by the full parameters and holds DTensors, so that a
    checkpoint can be loaded on another number of ranks.
    """

    def __init__(self, optimizer: Any, shares: dict[Tensor, Any], mesh: DeviceMesh):
        self.optimizer, self.shares, self.mesh = optimizer, shares, mesh

    @property
    def param_groups(self) -> list[ParamGroup]:
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    @property
    def state(self) -> dict[Tensor, StateDict]:
        return {p: self.optimizer.state[share] for p, share in self.shares.items() if share in self.optimizer.state}

    @property
    def found_inf(self) -> Tensor | None:
        """Device flag: 1 if this step must change nothing."""
        return self.optimizer.found_inf

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        self.optimizer.found_inf = value

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters; gradients must be complete and equal on every rank."""
        for p, share in self.shares.items():
            # A view of the full gradient, so it takes no memory.
            share.grad = None if p.grad is None else _cut(p.grad, self.mesh)
        # This rank's rows only: its states are 1 / ranks of the full ones.
        self.optimizer.step()
        for p, share in self.shares.items():
            if share.grad is not None:
                share.grad = None
                # An all-gather for each parameter. The gathered tensor is temporary, one at a time.
                whole = local(p)
                rows = DTensor.from_local(
                    share.to_local(), self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
                )
                whole.copy_(rows.full_tensor())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.shares:
            # The inner optimizer's own gradients are set and cleared within `step`.
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def state_dict(self) -> StateDict:
        return self.optimizer.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: StateDict) -> None:
        self.optimizer.load_state_dict(state)


def shard_optimizer(
    make: Callable[..., torch.optim.Optimizer],
    groups: Iterable[ParamGroup],
    mesh: DeviceMesh,
    *,
    modules: Iterable[nn.Module] = (),
    **settings: Any,
) -> ShardedOptimizer:
    """Creates the optimizer `make(groups, **settings)` over this rank's shards of the parameters.

    Args:
        groups: parameter groups, replicated on every rank of the mesh with equal values.
        mesh: a one-dimensional DeviceMesh.
        modules: the modules that own the parameters, for a `make` that inspects them.
    """
    shares: dict[Tensor, Any] = {}
    cut = []
    for group in groups:
        for p in group["params"]:
            # Keyed by the full parameter: checkpoints and the engine know only that one.
            shares[p] = nn.Parameter(_cut(p, mesh))
            shares[p].grad_dtype = None  # allows fp32 gradients of half-precision weights
        cut.append({**group, "params": [shares[p] for p in group["params"]]})
    # Only while the optimizer is created: the forward pass needs the full parameters.
    with _swap_parameters(modules, shares):
        return ShardedOptimizer(make(cut, **settings), shares, mesh)
