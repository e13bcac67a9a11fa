"""torch's FSDP2 machinery on plain modules: weights shared out or replicated among devices, gradients summed over them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Shard

__all__ = ["OWN_MESH", "forward_through", "gathering", "reducing", "replicate_all", "shard_fully"]


OWN_MESH = "preheat_mesh"
"""Attribute of a module whose weights stand on another mesh than the rest, such as experts that are shared out over devices."""


def _with_own_mesh(layer: nn.Module) -> list[tuple[nn.Module, Any]]:
    return [(module, mesh) for module in layer.modules() if (mesh := getattr(module, OWN_MESH, None)) is not None]


T = TypeVar("T")


def _summed(module: nn.Module) -> None:
    """Gradients are summed, not averaged: the loss is divided by the trained tokens of all devices already."""
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.set_force_sum_reduction_for_comms(True)
            m.set_gradient_divide_factor(1.0)


def shard_fully(
    module: nn.Module,
    layers: Iterable[nn.Module],
    mesh: Any,
    *,
    reshard: bool = True,
    gather: torch.dtype | None = None,
    offload: bool = False,
) -> int:
    """Shards a module with FSDP2, each of its layers as a group of its own, in place. Gradients are summed over the mesh, not averaged.

    Modules with the attribute OWN_MESH are groups of their own on that mesh. What lies in no layer is one group, gathered throughout.

    Args:
        layers: modules inside it, in the order in which they run; each is called as a module.
        mesh: torch's mesh of one dimension; of two for hybrid sharding: (replicate, shard).
        reshard: let go of a layer's weights after its forward pass, and gather them again for its backward pass.
        gather: dtype in which weights travel and are used; None: their own. Gradients travel in fp32.
        offload: keep the shares on the host, and copy them to the device where they are used.

    Returns:
        The number of groups.

    Example:
        >>> shard_fully(model, model.model.layers, init_device_mesh("cuda", (8,)))  # doctest: +SKIP
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy(),
    }
    listed, alone = list(layers), set[nn.Parameter]()
    for layer in listed:
        for inner, own in _with_own_mesh(
            layer
        ):  # by rows of each matrix: over its first dimension it is shared out already
            if own.size() == 1 and gather is None and not offload:
                alone |= set(inner.parameters())  # FSDP would copy what is whole here for each use
            else:
                fully_shard(inner, **{**settings, "mesh": own}, shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer, **settings, ignored_params=alone)
    fully_shard(module, **settings, ignored_params=alone)
    _summed(module)
    return len(listed) + 1


def replicate_all(module: nn.Module, layers: Iterable[nn.Module], mesh: Any) -> int:
    """Plain data parallel, each layer's gradients one bucket that is summed over the mesh while backward goes on. In place.

    Args:
        layers: modules inside it, in the order in which they run.
        mesh: torch's mesh of one dimension.

    Returns:
        The number of buckets.
    """
    listed, alone = list(layers), set[nn.Parameter]()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in listed:
        for inner, own in _with_own_mesh(layer):
            if own.size() == 1:
                alone |= set(inner.parameters())
            else:
                replicate(inner, mesh=own, mp_policy=policy)
        replicate(layer, mesh=mesh, mp_policy=policy, ignored_params=alone)
    replicate(module, mesh=mesh, mp_policy=policy, ignored_params=alone)
    _summed(module)
    return len(listed) + 1


def forward_through(part: Any) -> Callable[[Any, Callable[[], T]], T]:
    """A function of (module, run) that runs as one call of the module, be it `part` or another of which this was asked: its weights are there
    for it, whichever of its modules it uses. Of a module that nobody shared out they are there anyway.

    After a call without gradients the weights are let go: nothing else would do that where they are kept for a backward pass, and to
    whoever looks then (a checkpoint) they would not be those that the optimizer knows.
    """

    def let_go(module: Any, *_: Any) -> None:
        if not torch.is_grad_enabled():
            for m in module.modules():
                if isinstance(m, FSDPModule):
                    m.reshard()

    part.preheat_forward = types.MethodType(lambda self, run: run(), part)
    register_fsdp_forward_method(part, "preheat_forward")
    part.register_forward_hook(let_go)

    def forward(module: Any, run: Callable[[], T]) -> T:
        shared_out = isinstance(module, FSDPModule)
        if not shared_out:
            return run()
        result: T = module.preheat_forward(run)
        let_go(module)
        return result

    return forward


@contextmanager
def gathering(tell: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Tells of the buffers that FSDP takes for whole weights, when it takes them; it empties and fills them anew by their storages' sizes, which no operator shows.

    Those of weights that one device holds alone, such as experts that are shared out among all devices, are filled by a plain copy.
    """
    original = FSDPParam.init_all_gather_outputs

    def reporting(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tell(self.all_gather_outputs)

    FSDPParam.init_all_gather_outputs = reporting  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParam.init_all_gather_outputs = original  # type: ignore[method-assign]


@contextmanager
def reducing(tell: Callable[[bool], None]) -> Iterator[None]:
    """Tells when FSDP begins and ends to sum the gradients of a bucket over the devices, copies into and out of it included."""
    reduce = _fsdp_param_group.foreach_reduce

    def reporting(*args: Any, **kwargs: Any) -> Any:
        tell(True)
        try:
            return reduce(*args, **kwargs)
        finally:
            tell(False)

    _fsdp_param_group.foreach_reduce = reporting
    try:
        yield
    finally:
        _fsdp_param_group.foreach_reduce = reduce
