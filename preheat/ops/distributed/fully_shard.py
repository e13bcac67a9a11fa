"""Data parallelism with torch's FSDP2: sharded or replicated weights, gradients summed over ranks."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

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
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor, Shard

from preheat.ops.distributed.dtensor_utils import local, parts_of, split_dim
from preheat.ops.memory.host_transfer import to_device
from preheat.ops.memory.selective_checkpoint import pause_observation
from preheat.torch_compat import allocate_unsharded, find_fsdp_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


__all__ = [
    "OPERATORS",
    "OWN_MESH",
    "forward_through",
    "keep_gathered",
    "watch_gathers",
    "watch_reductions",
    "replicate_all",
    "shard_fully",
    "shard_lazily",
    "trace_unsharded",
]


OPERATORS = "fsdp"
"""Namespace of FSDP2's own operators, which copy weights and gradients around its collectives."""
OWN_MESH = "preheat_mesh"
"""Attribute of a module whose weights use another mesh than the rest, such as expert-parallel experts."""


def _modules_with_own_mesh(layer: nn.Module) -> list[tuple[nn.Module, DeviceMesh]]:
    return [(module, mesh) for module in layer.modules() if (mesh := getattr(module, OWN_MESH, None)) is not None]


P = ParamSpec("P")
T = TypeVar("T")


def _sum_gradients(module: nn.Module) -> None:
    """Makes FSDP sum gradients instead of averaging: the loss is already divided by the trained tokens of all ranks."""
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.set_force_sum_reduction_for_comms(True)
            m.set_gradient_divide_factor(1.0)


def _choose_shard_dim(p: nn.Parameter, ranks: int) -> Shard | None:
    """Returns the dimension along which a weight is sharded; None: the first one.

    Each rank holds as much as the first one, so 8 experts on 64 ranks would take 8 times their memory: stacks of
    matrices of which a fifth would be padding are sharded along their rows instead, if these divide evenly. Not those
    with less: FSDP copies such weights once more for each gather and each reduction.
    """
    padded = -(-p.shape[0] // ranks) * ranks
    wasteful = p.ndim >= 3 and padded > 1.25 * p.shape[0]
    dim = _unsplit_dims(p)[0]
    return Shard(dim) if wasteful and p.shape[dim] % ranks == 0 else None


def _choose_shard_dim_in_stack(p: nn.Parameter, ranks: int) -> Shard:
    """Returns a dimension that divides evenly, after dimension 0, which expert parallelism has split.

    Raises:
        ValueError: none does. FSDP pads dimension 0 only.
    """
    sizes = local(p).shape
    # A gate and up in one stack: a part of this dimension would have rows of the gate only.
    packed = {split_dim(place) for place in p.placements if parts_of(place) > 1} if isinstance(p, DTensor) else set()
    unsplit = _unsplit_dims(p)
    for dim in (*unsplit, *(dim for dim in range(1, p.ndim) if dim not in unsplit)):
        if sizes[dim] % ranks == 0 and dim not in packed:
            return Shard(dim)
    raise ValueError(
        f"leaves {ranks} devices to shard each expert's parameters, and these do not divide one of {tuple(sizes[1:])}"
    )


def _unsplit_dims(p: nn.Parameter) -> list[int]:
    """Returns the dimensions of a stack of experts, after the first, that tensor parallelism has not split, or all."""
    split = {split_dim(place) for place in p.placements} if isinstance(p, DTensor) else set()
    return [dim for dim in range(1, p.ndim) if dim not in split] or [*range(1, p.ndim)] or [0]


def _hide_hooks(inner: nn.Module) -> None:
    """Hides FSDP's hooks of a module within a layer from the modes that keep results of the layer's operators."""

    def hide_state(hook: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(hook)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with pause_observation():
                return hook(*args, **kwargs)

        return run

    for hooks in (inner._forward_pre_hooks, inner._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = hide_state(hook)


def shard_fully(
    module: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard: bool = True,
    gather: torch.dtype | None = None,
    reduce: torch.dtype = torch.float32,
    offload: bool = False,
) -> int:
    """Shards a module with FSDP2 in place, one group per layer. Gradients are summed over the mesh, not averaged.

    Modules with the attribute OWN_MESH form their own groups on that mesh. Everything outside the layers is one group,
    gathered during the whole pass.

    Args:
        layers: submodules in execution order; each must be called as a module.
        mesh: one-dimensional DeviceMesh; two-dimensional (replicate, shard) for hybrid sharding.
        reshard: free a layer's gathered weights after its forward pass and gather them again for backward.
        gather: dtype of gathered weights; None: their own.
        reduce: dtype in which gradients are reduced; in bf16 those of many ranks lose their small contributions.
        offload: keep the shards in host memory and copy them to the device for use.

    Returns:
        The number of groups.

    Raises:
        ValueError: a parameter of a module with OWN_MESH cannot be sharded evenly.

    Example:
        >>> shard_fully(model, model.model.layers, init_device_mesh("cuda", (8,)))  # doctest: +SKIP
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=reduce),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy(),
        "shard_placement_fn": functools.partial(_choose_shard_dim, ranks=mesh.size(mesh.ndim - 1)),
    }
    # `alone`: parameters that one rank holds by itself and FSDP must ignore.
    listed, alone = list(layers), set[nn.Parameter]()
    for layer in listed:
        for inner, own in _modules_with_own_mesh(layer):
            if own.size() == 1 and gather is None and not offload:
                alone |= set(inner.parameters())  # FSDP would copy these unsharded weights for each use
            else:
                placement = functools.partial(_choose_shard_dim_in_stack, ranks=own.size(own.ndim - 1))
                fully_shard(inner, **{**settings, "mesh": own, "shard_placement_fn": placement})
                _hide_hooks(inner)
        # Inner modules before their layer, for the same reason as layers before the whole.
        fully_shard(layer, **settings, ignored_params=alone)
    # Layers before the whole: FSDP gives a module all parameters that no inner module has taken yet.
    fully_shard(module, **settings, ignored_params=alone)
    _sum_gradients(module)
    return len(listed) + 1


def replicate_all(module: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> int:
    """Applies plain data parallelism in place: each layer's gradients are one bucket, reduced while backward continues.

    Args:
        layers: submodules in execution order.
        mesh: one-dimensional DeviceMesh.

    Returns:
        The number of buckets.
    """
    listed = list(layers)
    # torch holds each weight that it manages twice: as the optimizer has it, and as the model computes with it. Frozen
    # weights have no gradients to reduce.
    alone = {p for p in module.parameters() if not p.requires_grad}
    # Weights are whole on each rank: nothing is gathered, and only the dtype of reductions matters.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in listed:
        for inner, own in _modules_with_own_mesh(layer):
            if own.size() == 1:
                alone |= set(inner.parameters())
            else:
                replicate(inner, mesh=own, mp_policy=policy)
        replicate(layer, mesh=mesh, mp_policy=policy, ignored_params=alone)
    replicate(module, mesh=mesh, mp_policy=policy, ignored_params=alone)
    _sum_gradients(module)
    return len(listed) + 1


_keeping = False


@contextmanager
def keep_gathered() -> Iterator[None]:
    """Context manager in which passes without gradients keep weights gathered, because passes with gradients follow."""
    global _keeping
    before, _keeping = _keeping, True
    try:
        yield
    finally:
        _keeping = before


def forward_through(part: nn.Module) -> Callable[[nn.Module, Callable[[], T]], T]:
    """Returns a function (module, run) that calls `run` with the gathered weights of the module, `part` or another
    prepared one.

    `run` may use any submodules. Modules without FSDP just call `run`. After a call without gradients, and not within
    `keep_gathered`, the weights are resharded: FSDP would keep them for a backward pass, and a checkpoint written then
    would not see the parameters that the optimizer knows.
    """

    def let_go(module: nn.Module, args: tuple[Tensor, ...] = (), output: Tensor | None = None) -> None:
        # With gradients, FSDP frees the weights itself after the backward pass.
        if not torch.is_grad_enabled() and not _keeping:
            for m in module.modules():
                if isinstance(m, FSDPModule):
                    m.reshard()

    # FSDP gathers weights around a module's registered forward methods; `run` is any function, so it becomes one.
    part.preheat_forward = types.MethodType(lambda self, run: run(), part)  # type: ignore[assignment]
    register_fsdp_forward_method(part, "preheat_forward")
    part.register_forward_hook(let_go)

    def forward(module: nn.Module, run: Callable[[], T]) -> T:
        # Another model of the build, such as the reference of preference tuning, may not be sharded.
        shared_out = isinstance(module, FSDPModule)
        if not shared_out:
            return run()
        result: T = module.preheat_forward(run)  # type: ignore[operator]
        # Here too: `run` does not pass through the part's own forward, whose hook does the same.
        let_go(module)
        return result

    return forward


@contextmanager
def watch_gathers(
    tell: Callable[[list[Tensor]], None], resized: Callable[[], None], copied: Callable[[Tensor], None]
) -> Iterator[None]:
    """Context manager that calls `tell` with the buffers that FSDP allocates for gathered weights.

    FSDP frees and refills them by resizing their storages, which no operator shows to a dry run: it calls `resized`.

    Shards in host memory are copied to the device before each gather; under fake tensors, which are all on the CPU,
    FSDP's own copy is none. This one is an operator that the recorder knows, and `copied` is called with the result,
    which FSDP allocates on the stream of its gathers.

    Buffers of weights that one rank holds alone, such as expert-parallel experts, are filled by a plain copy.
    """
    # Resizing a storage is no operator, so FSDP's method is replaced for the dry run, and put back after it.
    original = FSDPParam.init_all_gather_outputs

    def run_and_report(self: FSDPParam, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # After the original, which creates the buffers.
        tell(self.all_gather_outputs)

    def notify(resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def run(buffer: Tensor) -> None:
            resize(buffer)
            resized()

        return run

    inputs = FSDPParam.all_gather_inputs

    def copy_and_report(self: FSDPParam) -> list[Tensor]:
        own_gather = hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        if not self.offload_to_cpu or self.sharded_state != ShardedState.SHARDED or own_gather:
            return inputs.fget(self)  # type: ignore[attr-defined,no-any-return]
        shard = to_device(self._sharded_param_data, self._sharded_param_data)
        copied(shard)
        if self.param_dtype is None or self.param_dtype == shard.dtype:
            return [shard]
        # Cast on the device: the copy crosses the link in the dtype of the shard.
        cast = shard.to(self.param_dtype)
        copied(cast)
        return [cast]

    FSDPParam.init_all_gather_outputs = run_and_report  # type: ignore[method-assign]
    FSDPParam.all_gather_inputs = property(copy_and_report)  # type: ignore[method-assign,assignment]
    alloc, free = _fsdp_param.alloc_storage, _fsdp_param.free_storage
    # Both modules hold references of their own.
    _fsdp_param.alloc_storage = _fsdp_param_group.alloc_storage = notify(alloc)  # type: ignore[assignment]
    _fsdp_param.free_storage = notify(free)  # type: ignore[assignment]
    try:
        yield
    finally:
        FSDPParam.init_all_gather_outputs = original  # type: ignore[method-assign]
        FSDPParam.all_gather_inputs = inputs  # type: ignore[method-assign]
        _fsdp_param.alloc_storage = _fsdp_param_group.alloc_storage = alloc
        _fsdp_param.free_storage = free


@contextmanager
def trace_unsharded(module: nn.Module) -> Iterator[None]:
    """Context manager for a trace on fake tensors of a module that has FSDP groups inside, such as its experts.

    The groups have fake weights of full size meanwhile, and FSDP's hooks gather and reshard nothing: they would mark
    the weights as gathered although the trace gathers no values, and a later step would compute with what the buffers
    hold.
    """
    inner = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]
    states = list({id(state): state for m in inner for state in [m._get_fsdp_state()]}.values())
    sharded = [group for state in states for group in find_fsdp_groups(state) if group.is_sharded]
    training = [state._training_state for state in states]
    try:
        for state in states:
            state._training_state = TrainingState.PRE_BACKWARD  # in which the hooks of forward passes return at once
        for group in sharded:
            group._sharded_state = ShardedState.UNSHARDED
            for p in group.fsdp_params:
                p._setattr_on_modules(_fake_of_full_size(p, group.device))
        yield
    finally:
        for state, before in zip(states, training, strict=True):
            state._training_state = before
        for group in sharded:
            group._sharded_state = ShardedState.SHARDED
            for p in group.fsdp_params:
                p._setattr_on_modules(p.sharded_param)


def _fake_of_full_size(p: FSDPParam, device: torch.device) -> nn.Parameter:
    """Returns a parameter like the gathered one, in the active fake mode."""
    full = torch.empty(p._orig_size, dtype=p.param_dtype or p.orig_dtype, device=device)
    return nn.Parameter(allocate_unsharded(p, full), requires_grad=p.sharded_param.requires_grad)


class _Chunks:
    """The chunks of a tensor along a dimension, each made when it is read."""

    def __init__(self, tensor: Tensor, number: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.length = -(-tensor.size(dim) // number)

    def __getitem__(self, n: int) -> Tensor:
        start, size = n * self.length, self.tensor.size(self.dim)
        if start >= size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.length, size - start))


@contextmanager
def shard_lazily() -> Iterator[None]:
    """Context manager in which FSDP makes the chunks of a weight that it reads, not those of all ranks.

    For dry runs on many devices: FSDP reads two of the chunks, and 16,384 fake tensors per weight take minutes.
    """
    # Replaced in the module that calls it, since that module holds a reference of its own.
    chunk = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = chunk


@contextmanager
def watch_reductions(tell: Callable[[bool], None]) -> Iterator[None]:
    """Context manager that calls `tell` when FSDP starts (True) and ends (False) reducing a bucket, copies included."""
    # Replaced in the module that calls it, since that module holds a reference of its own.
    reduce = _fsdp_param_group.foreach_reduce

    def run_and_report(*args: Any, **kwargs: Any) -> Any:
        tell(True)
        try:
            return reduce(*args, **kwargs)
        finally:
            # In `finally`: the recorder must not attribute the rest of the step to the reduction after an error.
            tell(False)

    _fsdp_param_group.foreach_reduce = run_and_report
    try:
        yield
    finally:
        _fsdp_param_group.foreach_reduce = reduce
