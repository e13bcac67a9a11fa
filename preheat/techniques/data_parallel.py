"""Data parallel: each device holds all weights and a shard of the batch; gradients are all-reduced during backward.

What: torch's replicated form of FSDP2 (what DistributedDataParallel does, on plain modules): each layer's gradients
form one bucket, reduced as soon as they are ready. With gradient accumulation, buckets are reduced once, with the last
micro-batch.
Helps: throughput grows with the number of devices, and communication overlaps with backward.
Hurts: saves no memory: each device holds all weights, gradients and optimizer states (`fsdp` and `zero1` shard them).
Source: Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from preheat.core import Axis, Build, Change, Context, Numerics, Searchable, Slot, Stage, Tag, Trials

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

__all__ = ["DataParallel", "replicate_all"]


def replicate_all(module: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> int:
    """Replicates a module over a mesh, in place: backward all-reduces each layer's gradients as one bucket.

    Args:
        layers: modules inside it, in execution order.
        mesh: torch's one-dimensional mesh.

    Returns:
        The number of buckets.

    Example:
        >>> replicate_all(model, model.model.layers, init_device_mesh("cuda", (8,)))  # doctest: +SKIP
    """
    from preheat.ops.distributed import fully_shard

    return fully_shard.replicate_all(module, layers, mesh)


@dataclass(frozen=True, kw_only=True)
class DataParallel(Searchable):
    stage: ClassVar[Stage] = Stage.SHARD
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="there is one")
    supports_encoder_decoder: ClassVar[bool] = True
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.REPLICATED_WEIGHTS, Tag.REDUCED_GRADIENTS})
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.UNSHARD_SCOPE})

    def degrees(self) -> Mapping[Axis, int]:
        # 0: all devices that other axes leave.
        return {Axis.REPLICATE: 0}

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        if context.sizes[Axis.REPLICATE] * context.sizes[Axis.CONTEXT] < 2:
            return [
                "splits the batch across devices, and there is one; start several with --nproc (or plan with --count)"
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models.hf import find_anatomy
        from preheat.ops.distributed.fully_shard import forward_through

        # Devices of one context group have gradients of different positions: these are summed too.
        across = [axis for axis in (Axis.REPLICATE, Axis.CONTEXT) if build.mesh.size(axis) > 1]
        buckets = replicate_all(part, find_anatomy(part).blocks, build.mesh.submesh(*across))
        # torch reduces gradients around a registered forward method, so every pass must go through it.
        build.claim(Slot.UNSHARD_SCOPE, forward_through(part), self.name())
        # Called with `is_last`: only the last micro-batch reduces its gradients.
        build.hooks.before_backward.append(cast("FSDPModule", part).set_requires_gradient_sync)
        return Change(f"gradients in {buckets} buckets, summed over {build.mesh.size(*across)} devices", buckets)
