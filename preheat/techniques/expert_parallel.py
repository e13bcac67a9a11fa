"""Expert parallel: splits the experts of each layer across data-parallel devices; tokens are sent to their experts.

What: each of `degree` devices holds E / degree of the E experts. A layer sends each token to the devices of its experts
by all-to-all, they compute, and the results return the same way; no token is dropped. The devices are neighbours within
those of `fsdp` (or `data_parallel`), which does the rest: attention and everything else is sharded and reduced over all
of them, an expert's weights and gradients over the devices that hold the same expert. With `pipeline_parallel` the
devices are those of a stage. With `context_parallel`, devices that have other positions of a sequence may hold other
experts too. With `tensor_parallel`, each device holds a part of its experts' width, and every device of a tensor group
sends the tokens of its group.
Helps: experts are most of such a model; FSDP alone gathers all of them on every device for every micro-batch, here only
tokens travel, and each expert's matmul has more rows.
Hurts: with uneven load, all ranks wait for the device with the busiest expert; the all-to-all overlaps with nothing;
the host reads back the token counts once per layer. A dry run has no tokens and assumes an even load.
Source: Lepikhin et al. 2020, "GShard" (arXiv:2006.16668); without dropping, Gale et al. 2022, "MegaBlocks"
(arXiv:2211.15841).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Axis, Build, Change, Context, Numerics, Searchable, Stage, Tag, Technique, Trials
from preheat.recipe import NonNegativeInt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ExpertParallel", "shard_experts"]


def shard_experts(module: nn.Module, among: DeviceMesh, alike: DeviceMesh) -> int:
    """Splits the experts of each layer across devices, in place; tokens are then sent to their experts.

    Args:
        module: a model whose experts are stacks of weights (`preheat.models.moe.experts_of`), on meta or equal on every
            device.
        among: torch's one-dimensional mesh of the devices that split the experts; their number divides that of the
            experts.
        alike: torch's mesh of the devices that hold the same experts as this one, over which their gradients are
            reduced; `shard_fully` and `replicate_all` of `preheat.ops.distributed.fully_shard` read it off the module.

    Returns:
        The number of layers.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("alike", "among"))  # doctest: +SKIP
        >>> shard_experts(model, mesh["among"], mesh["alike"])  # doctest: +SKIP
    """
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard

    from preheat.models.moe import experts_of
    from preheat.ops.distributed.fully_shard import OWN_MESH
    from preheat.ops.grouped_mm import EXCHANGE, Exchange
    from preheat.ops.quantization.packed import FrozenPacked

    modules = experts_of(module)
    if any(isinstance(experts, FrozenPacked) for experts in modules):
        raise ValueError("packed experts cannot be sharded; quantize them without experts (experts=False)")
    for experts in modules:
        for name, full in list(experts._parameters.items()):
            assert full is not None
            # A copy: a view would keep all experts in memory. [experts / degree, ...]
            part = full.detach().chunk(among.size())[among.get_local_rank()].clone()
            # Every rank has cut its own part, so nothing needs to be compared between them.
            sharded = DTensor.from_local(part, among, [Shard(0)], run_check=False)
            experts._parameters[name] = nn.Parameter(sharded, requires_grad=full.requires_grad)
        # Read by the experts' forward pass, which then sends tokens by all-to-all.
        setattr(experts, EXCHANGE, Exchange(among))
        # Read by fsdp and data_parallel: only devices with the same experts reduce their gradients.
        setattr(experts, OWN_MESH, alike)
    return len(modules)


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Searchable):
    stage: ClassVar[Stage] = Stage.PARALLEL
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="shards experts, and llama has none")
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.SHARDED_WEIGHTS, Tag.SHARDED_EXPERTS})
    needs: ClassVar[frozenset[Tag]] = frozenset({Tag.REDUCED_GRADIENTS})
    # The host reads token counts back in the middle of a layer.
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.COMPILED_LAYERS})
    roles: ClassVar[frozenset[str]] = frozenset({"trained", "reference"})

    degree: NonNegativeInt = 0
    """Devices that split the experts of a layer, neighbours among the devices that split the batch or the sequence. 0:
    all of them, or all within a replica of `fsdp`'s hybrid sharding."""

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def expert_degree(self, sizes: Mapping[Axis, int]) -> int:
        return self.degree or _count_devices(sizes)

    def check(self, context: Context) -> list[str]:
        model, sizes = context.model, context.sizes
        if not model.experts:
            return [f"shards experts, and {model.family} has none; leave it out"]
        if model.foreign_experts:
            return [f"cannot split the experts of {model.family}, which its own code computes; use fsdp"]
        if model.quantized == "mxfp4":
            return [
                "cannot split experts that stay packed in mxfp4; set model.quantized_weights: dequantized, or use fsdp"
            ]
        devices, degree = _count_devices(sizes), self.expert_degree(sizes)
        if devices < 2:
            return [
                "shards experts across devices, and one splits the batch; start several with --nproc (or plan with "
                "--count)"
            ]
        if degree < 2:
            return [f"degree: {degree} leaves all experts on each device; use 2 or more, or leave expert_parallel out"]
        if devices % degree:
            return [
                f"degree: {degree} does not divide the {devices} devices that split the batch or the sequence; use a "
                "divisor of it"
            ]
        if model.experts % degree:
            return [f"degree: {degree} does not divide the {model.experts} experts of a layer; use a divisor of both"]
        rest = devices // degree
        # FSDP shards each expert's matrices and biases, since dimension 0, the experts, is split already; with tensor
        # parallelism, the dimension that is not the expert's width.
        inner = model.width if sizes[Axis.TENSOR] > 1 else 2 * model.expert_width
        if sizes[Axis.SHARD] > 1 and (model.width % rest or inner % rest):
            return [
                f"degree: leaves {rest} devices to shard each expert's matrices, and these do not divide both its "
                f"width {2 * model.expert_width} and the model's {model.width}; use a larger degree"
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        axes = _choose_axes(build.mesh.sizes)
        degree = self.expert_degree(build.mesh.sizes)
        alike, among = build.mesh.cut(axes, degree)
        # Hybrid sharding: the same experts also exist in the other replicas.
        if Axis.SHARD in axes and build.mesh.size(Axis.REPLICATE) > 1:
            alike = build.mesh.combine_meshes(build.mesh.submesh(Axis.REPLICATE), alike)
        shard_experts(part, among, alike)
        layers = build.model.expert_layers  # a pipeline stage has some of them, or none
        parts = f", 1/{tensor} of the width each" if (tensor := build.mesh.size(Axis.TENSOR)) > 1 else ""
        summary = (
            f"{build.model.experts} experts of {layers} layers over {degree} devices, "
            f"{build.model.experts // degree} on each{parts}; tokens by all-to-all"
        )
        return Change(summary, layers)

    def options(self, context: Context) -> Iterable[Technique]:
        devices = _count_devices(context.sizes)
        return [
            replace(self, degree=d)
            # Common divisors of devices and experts.
            for d in range(2, devices + 1)
            if devices % d == 0 and context.model.experts % d == 0
        ]


def _choose_axes(sizes: Mapping[Axis, int]) -> tuple[Axis, ...]:
    """Returns the axes along which experts are split: the sharding axis if used, otherwise the replication axis.

    The devices of a context group have other tokens too, whoever has the rows: experts are split among them as well.
    """
    data = Axis.SHARD if sizes[Axis.SHARD] > 1 else Axis.REPLICATE
    return (data, Axis.CONTEXT) if sizes[Axis.CONTEXT] > 1 else (data,)


def _count_devices(sizes: Mapping[Axis, int]) -> int:
    return math.prod(sizes[axis] for axis in _choose_axes(sizes))
