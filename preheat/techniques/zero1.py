"""ZeRO-1: shards the optimizer's states across data-parallel devices.

What: used with `data_parallel`. Each device keeps the states of its rows of every parameter, updates those rows, and
the new weights are all-gathered. Every optimizer works on its shards: AdamW and similar ones as they are, Muon on the
full matrix. Parameters are sharded by rows (torch's DTensor), while torch's ZeroRedundancyOptimizer assigns each
parameter to one owner: an embedding that is more than half of a small model would then be more than half of one
device's states, and a checkpoint could not be loaded with another number of devices.
Helps: AdamW's 8 bytes per parameter become 8 / n on n devices, with unchanged gradient buckets.
Hurts: the new weights are sent once per step, in addition to the gradients (half as much again as data parallel sends).
`fsdp` shards gradients and weights too.
Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stage 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from preheat.core import Axis, Build, Change, Numerics, Searchable, Stage, Tag, Trials

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from preheat.ops.optim.param_groups import AdamSettings, ParamGroup
    from preheat.ops.optim.zero1 import ShardedOptimizer

__all__ = ["Zero1", "shard_optimizer"]


def shard_optimizer(
    make: Callable[..., torch.optim.Optimizer], groups: Iterable[ParamGroup], mesh: DeviceMesh, **settings: Any
) -> ShardedOptimizer:
    """Returns an optimizer over this device's shards of replicated parameters (`preheat.ops.optim.zero1`).

    Gradients must be complete and equal on every device when `step` is called, as DistributedDataParallel and
    `data_parallel` leave them.

    Args:
        make: creates the optimizer: `make(groups, **settings)`. One of torch's, or any of preheat's.
        groups: of parameters.
        mesh: torch's one-dimensional mesh.

    Example:
        >>> mesh = init_device_mesh("cuda", (8,))  # doctest: +SKIP
        >>> optimizer = shard_optimizer(
        ...     torch.optim.AdamW, [{"params": model.parameters()}], mesh, fused=True
        ... )  # doctest: +SKIP
    """
    from preheat.ops.optim.zero1 import shard_optimizer

    return shard_optimizer(make, groups, mesh, **settings)


@dataclass(frozen=True, kw_only=True)
class Zero1(Searchable):
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="there is one")
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.SHARDED_STATES})
    needs: ClassVar[frozenset[Tag]] = frozenset({Tag.REPLICATED_WEIGHTS})
    # Updates in backward do not support shards; states of whole matrices cannot be sharded.
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.STEP_IN_BACKWARD, Tag.SHARDED_EXPERTS, Tag.PER_MATRIX_STATES})

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def apply(self, build: Build, part: nn.Module) -> Change:
        # All devices whose gradients are equal after the reduction.
        across = [axis for axis in (Axis.REPLICATE, Axis.CONTEXT) if build.mesh.size(axis) > 1]
        mesh = build.mesh.submesh(*across)

        def sharded(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., ShardedOptimizer]:
            def make_sharded(groups: list[ParamGroup], **settings: Unpack[AdamSettings]) -> ShardedOptimizer:
                return shard_optimizer(make, groups, mesh, modules=build.trained, **settings)

            return make_sharded

        # Around whichever optimizer the recipe has, so that its states are created for shards only.
        if part is build.trained[0]:  # once, if a pipeline has several stages on a device
            build.hooks.around_optimizer.append(sharded)
        count = sum(p.requires_grad for p in part.parameters())
        return Change(
            f"optimizer states of {count} parameters, 1/{build.mesh.size(*across)} of each on each device", count
        )
