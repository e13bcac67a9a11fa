"""The device mesh: sizes of the parallel axes and this process's coordinates. Imports torch lazily.

    pipeline x replicate x shard x context x tensor = devices

The last axis is the innermost: its neighbours are neighbours on a host, where links are fastest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DATA", "Axis", "Mesh", "sizes_of"]


class Axis(StrEnum):
    """A parallel axis: what is split across its devices."""

    PIPELINE = "pipeline"  #   layers
    REPLICATE = "replicate"  # rows of the batch; weights are replicated
    SHARD = "shard"  #         rows of the batch and weights
    CONTEXT = "context"  #     positions of a sequence
    TENSOR = "tensor"  #       rows or columns of matrices


DATA = (Axis.REPLICATE, Axis.SHARD)
"""The data-parallel axes: they split the rows of the batch."""
_REDUCED_AXES = (DATA, (Axis.SHARD, Axis.CONTEXT), (Axis.REPLICATE, Axis.CONTEXT), (*DATA, Axis.CONTEXT))
"""Combinations of axes over which a step reduces."""


class Spread(Protocol):
    """The part of a technique's interface that `sizes_of` uses."""

    @classmethod
    def name(cls) -> str: ...

    def degrees(self) -> Mapping[Axis, int]: ...


def sizes_of(techniques: Iterable[Spread], world: int) -> dict[Axis, int]:
    """Returns the number of devices along each axis as requested by the techniques; 0 takes all that others leave.

    Args:
        world: total number of devices.

    Raises:
        ValueError: the axes do not multiply to `world`; the message suggests a fix.

    Example:
        >>> class Tensor:
        ...     name = classmethod(lambda cls: "tensor_parallel")
        ...     degrees = lambda self: {Axis.TENSOR: 2, Axis.SHARD: 0}
        >>> sizes_of([Tensor()], 8)[Axis.SHARD]
        4
    """
    # All axes, so that no caller needs a default.
    sizes = dict.fromkeys(Axis, 1)
    rest: dict[Axis, str] = {}
    for t in techniques:
        for axis, size in t.degrees().items():
            if size == 0:
                rest[axis] = t.name()
            else:
                # The maximum, because 1 is no request (fsdp's `replicate` by default).
                sizes[axis] = max(sizes[axis], size)
    fixed = math.prod(sizes.values())
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 device"
    # Two axes that both take the rest have no unique answer.
    if len(rest) > 1:
        raise ValueError(f"{' and '.join(sorted(rest.values()))} both take the devices that are left; leave one out")
    if world % fixed or (not rest and world != fixed):
        if fixed == 1:
            raise ValueError(
                f"the recipe's techniques use 1 device, not {world}; add data_parallel or fsdp for the others"
            )
        left = "" if rest or world % fixed else "; add data_parallel or fsdp for the others"
        raise ValueError(f"{product} does not multiply to {world} device{'s' if world > 1 else ''}{left}")
    for axis in rest:
        sizes[axis] *= world // fixed
    return sizes


@dataclass(frozen=True, eq=False)
class Mesh:
    """The devices of a run by axis, and this process's position. The default is a single device.

    Attributes:
        sizes: devices along each axis.
        rank: number of this process, in row-major order of the axes.
        devices: torch's mesh, with a dimension named after each axis; None on one device.
    """

    sizes: Mapping[Axis, int] = field(default_factory=lambda: dict.fromkeys(Axis, 1))
    rank: int = 0
    devices: DeviceMesh | None = None

    @classmethod
    def create_mesh(cls, sizes: Mapping[Axis, int], kind: str) -> Mesh:
        """Creates the mesh over torch.distributed's default group (a fake one in a dry run).

        Args:
            kind: device type: cpu or cuda.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if math.prod(sizes.values()) == 1:
            return cls()
        # The enum's order is that of the ranks: row-major, the last axis innermost.
        order = list(Axis)
        devices = init_device_mesh(kind, tuple(sizes[a] for a in order), mesh_dim_names=tuple(map(str, order)))
        mesh = cls(dict(sizes), dist.get_rank(), devices)
        # Create the groups now: it is a collective operation, and a dry run creates none in the middle of a step.
        for axes in _REDUCED_AXES:
            if mesh.size(*axes) > 1:
                mesh.submesh(*axes)
        return mesh

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    def size(self, *axes: Axis) -> int:
        """Returns the product of the sizes of some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, *axes: Axis) -> int:
        """Returns this device's index along some axes combined, from 0; their order matters."""
        coordinates, remainder = {}, self.rank
        # Row-major: the innermost axis is the remainder of the first division.
        for axis in reversed(Axis):
            remainder, coordinates[axis] = divmod(remainder, self.sizes[axis])
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + coordinates[axis]
        return index

    def axes_between(self, ranks: Iterable[int]) -> tuple[Axis, ...]:
        """Returns the axes along which the coordinates of some devices differ.

        Example:
            >>> Mesh({**dict.fromkeys(Axis, 1), Axis.SHARD: 4, Axis.TENSOR: 2}).axes_between([0, 2, 4, 6])
            (<Axis.SHARD: 'shard'>,)
        """
        meshes = [Mesh(self.sizes, rank) for rank in ranks]
        # Several coordinates along an axis mean that the devices differ there.
        return tuple(axis for axis in Axis if len({mesh.index(axis) for mesh in meshes}) > 1)

    def submesh(self, *axes: Axis) -> DeviceMesh:
        """Returns torch's one-dimensional mesh of the devices along some axes that contains this device.

        Every process must request the same meshes in the same order: creating groups is a collective operation.
        """
        # Axes of size 1 change nothing: dropping them lets equal groups share one mesh, created once.
        return self._build_submesh(tuple(axis for axis in axes if self.sizes[axis] > 1) or axes[:1])

    @functools.cache  # noqa: B019  # a mesh lives as long as the process groups
    def _build_submesh(self, axes: tuple[Axis, ...]) -> DeviceMesh:
        assert self.devices is not None, "one device has no mesh"
        from torch.utils._python_dispatch import _disable_current_modes

        names = tuple(map(str, axes))
        with _disable_current_modes():  # mesh tensors must be real, also if first requested in a dry run
            return self.devices[names[0]] if len(names) == 1 else self.devices[names]._flatten("_".join(names))

    @functools.cache  # noqa: B019
    def submesh_2d(self, outer: Axis, inner: tuple[Axis, ...]) -> DeviceMesh:
        """Returns torch's two-dimensional mesh of one axis and some others combined."""
        return self.combine_meshes(self.submesh(outer), self.submesh(*inner))

    @functools.cache  # noqa: B019
    def cut(self, axes: tuple[Axis, ...], inner: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Splits some axes combined into groups of `inner` neighbours; returns torch's meshes across and within the
        groups."""
        names = (f"{'_'.join(axes)}_outer_{inner}", f"{'_'.join(axes)}_inner_{inner}")
        both = self.submesh(*axes)._unflatten(0, (self.size(*axes) // inner, inner), names)
        return both[names[0]], both[names[1]]

    @staticmethod
    def combine_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
        """Combines two one-dimensional torch meshes into a two-dimensional one."""
        from torch.distributed.device_mesh import DeviceMesh

        # torch has no public function for it.
        return DeviceMesh._concatenate([outer, inner])

    def group(self, *axes: Axis) -> ProcessGroup:
        """Returns the process group of the devices along some axes that contains this device."""
        return self.submesh(*axes).get_group()

    def add(self, value: Tensor, *axes: Axis) -> Tensor:
        """All-reduces `value` (sum) over the devices along some axes, all by default, in place."""
        import torch.distributed as dist

        if self.size(*(axes or Axis)) > 1:
            # None is the default group of all ranks, which needs no mesh.
            dist.all_reduce(value, group=self.group(*axes) if axes else None)
        return value

    def max_over_ranks(self, value: int, device: torch.device) -> int:
        """Returns the maximum of a value over all devices; synchronizes with the device, so not for every step."""
        import torch
        import torch.distributed as dist

        if self.world == 1:
            return value
        largest = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)


@contextmanager
def fake_process_group(world: int, rank: int = 0) -> Iterator[None]:
    """Creates a fake process group of `world` ranks, in which collectives send nothing."""
    import torch.distributed as dist

    if world == 1:
        yield
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a dry run of several devices is made before the real ones meet"
    # The fake backend of torch's own tests: shapes are right, values are not.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its entries refer to destroyed groups, and an equal mesh would reuse them
