"""Fully sharded data parallel: shards weights, gradients, optimizer states and the batch across devices.

What: torch's FSDP2. A layer's weights are all-gathered before use and freed afterwards; its gradients are
reduce-scattered as soon as backward has computed them. `reshard_after_forward: false` keeps the gathered weights until
the last backward pass of a step has used them: less communication, more memory.
Helps: memory of weights, gradients and optimizer falls with the number of devices; communication overlaps with compute.
Hurts: every layer's weights are gathered twice per micro-batch (three times the bytes of data parallel's gradients), or
once per step if kept, so slow links and small batches suffer. With `replicate`, gathers stay within a group of devices
(hybrid sharding, HSDP).
Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054): `reshard_after_forward` is its stage 3, without it stage 2;
Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from preheat.core import Axis, Build, Change, Context, Numerics, Searchable, Slot, Stage, Tag, Technique, Trials
from preheat.errors import RecipeError
from preheat.recipe import Count

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FSDP", "shard_fully"]


def shard_fully(module: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, **settings: Any) -> int:
    """Shards a module with FSDP2, each of its layers as its own group, in place; gradients are summed.

    Args:
        layers: modules inside it, in execution order.
        mesh: torch's mesh: (shard,) or (replicate, shard).
        settings: as in `preheat.ops.distributed.fully_shard.shard_fully`.

    Returns:
        The number of groups.

    Raises:
        ValueError: a parameter of experts that `expert_parallel` has split cannot be sharded evenly.

    Example:
        >>> shard_fully(model, model.model.layers, init_device_mesh("cuda", (8,)))  # doctest: +SKIP
    """
    from preheat.ops.distributed import fully_shard

    return fully_shard.shard_fully(module, layers, mesh, **settings)


@dataclass(frozen=True, kw_only=True)
class FSDP(Searchable):
    stage: ClassVar[Stage] = Stage.SHARD
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="there is one")
    supports_encoder_decoder: ClassVar[bool] = True
    provides: ClassVar[frozenset[Tag]] = frozenset(
        {
            Tag.SHARDED_WEIGHTS,
            Tag.REDUCED_GRADIENTS,
            Tag.RESHARD_AFTER_FORWARD,
            Tag.REDUCE_EACH_MICRO_BATCH,
            Tag.BF16_ALL_GATHER,
        }
    )
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.UNSHARD_SCOPE})
    roles: ClassVar[frozenset[str]] = frozenset({"trained", "teacher", "reference"})

    reshard_after_forward: bool = True
    """Free a layer's weights after its forward pass and gather them again for backward (ZeRO-3); false keeps them
    until the last micro-batch of the step (ZeRO-2)."""
    replicate: Count = 1
    """Hybrid sharding: number of groups of devices that each hold a full copy of the weights; set it to the number of
    hosts to gather within hosts only."""
    gather: Literal["own", "bf16"] = "own"
    """Precision in which weights are gathered and used. bf16 sends half as much."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are sent and summed over devices, and with `reduce: last` over micro-batches. bf16
    needs half the memory and communication, and loses small contributions."""
    reduce: Literal["each", "last"] = "each"
    """With several micro-batches: reduce-scatter the gradients of each (least memory), or keep them unsharded until the
    last (least communication)."""
    offload: bool = False
    """Keep the shards on the host, and run the optimizer there (CUDA only)."""

    def provided(self) -> frozenset[Tag]:
        # Each tag belongs to one setting; those that these settings do not use are removed.
        without = {Tag.RESHARD_AFTER_FORWARD} if not self.reshard_after_forward else set()
        without |= {Tag.REDUCE_EACH_MICRO_BATCH} if self.reduce != "each" else set()
        return self.provides - without - ({Tag.BF16_ALL_GATHER} if self.gather != "bf16" else set())

    def degrees(self) -> Mapping[Axis, int]:
        # 0: all devices that other axes leave.
        return {Axis.SHARD: 0, Axis.REPLICATE: self.replicate}

    def search_numerics(self) -> Literal["exact", "rounding"]:
        return "exact" if (self.gather, self.reduce_dtype) == ("own", "fp32") else "rounding"

    def check(self, context: Context) -> list[str]:
        problems = []
        # Devices of one context group hold the same weights, so that weights are sharded across them too.
        if context.sizes[Axis.SHARD] * context.sizes[Axis.CONTEXT] < 2:
            problems.append(
                "shards weights across devices, and there is one; start several with --nproc (or plan with --count)"
            )
        if self.offload and context.device.kind == "cpu":
            problems.append("offload: the weights are already on the host; leave it out")
        if Tag.QUANTIZED_BASE in context.tags:
            from preheat.torch_compat import why_no_integer_shards

            if missing := why_no_integer_shards():
                problems.append(missing)
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        import torch

        from preheat.models.hf import embedding, find_anatomy, head
        from preheat.ops.distributed import fully_shard

        across = (Axis.SHARD,) if build.mesh.size(Axis.CONTEXT) == 1 else (Axis.SHARD, Axis.CONTEXT)
        # Hybrid sharding: gathers stay within a group, gradients are also summed across groups.
        mesh = build.mesh.submesh(*across) if self.replicate == 1 else build.mesh.submesh_2d(Axis.REPLICATE, across)
        # A pipeline stage may have neither end, or one of them.
        ends = [embedding(part), head(part)]
        shared = len({id(end.weight) for end in ends if end is not None}) < len(ends)
        # An untied embedding is its own group, so that it is freed while the layers run. With tensor parallel it
        # returns views, which FSDP2 cannot hook.
        apart = [] if shared or build.mesh.size(Axis.TENSOR) > 1 else ends[:1]
        try:
            groups = shard_fully(
                part,
                [*apart, *find_anatomy(part).blocks],
                mesh,
                reshard=self.reshard_after_forward,
                gather=torch.bfloat16 if self.gather == "bf16" else None,
                reduce=torch.bfloat16 if self.reduce_dtype == "bf16" else torch.float32,
                offload=self.offload,
            )
        except ValueError as error:  # only of experts that `expert_parallel` has split
            raise RecipeError(f"techniques.expert_parallel: degree: {error}; use a larger degree") from None
        if self.offload:
            # Weights, gradients and optimizer states then are on the host; only gathered layers are on the device.
            build.storage_device = torch.device("cpu")
        # Every access to weights goes through this slot, e.g. a loss that reads the head's matrix.
        build.claim(Slot.UNSHARD_SCOPE, fully_shard.forward_through(part), self.name())
        if not self.reshard_after_forward:
            # Called with `is_last`: weights do not change between the micro-batches of a step, so one gather is enough.
            build.hooks.before_backward.append(cast("FSDPModule", part).set_reshard_after_backward)
        if self.reduce == "last":
            # The engine calls it with `is_last`: only the last micro-batch reduces its gradients.
            build.hooks.before_backward.append(cast("FSDPModule", part).set_requires_gradient_sync)
        degree = build.mesh.size(*across)
        copies = f", {self.replicate} copies" if self.replicate > 1 else ""
        return Change(f"weights in {groups} groups, 1/{degree} of each on each device{copies}", groups)

    def options(self, context: Context) -> Iterable[Technique]:
        precisions: tuple[Literal["own", "bf16"], ...] = (
            # Gathering in bf16 rounds no further if the layers compute in bf16 anyway.
            ("own", "bf16") if Tag.BF16_COMPUTE in context.tags else ("own",)
        )
        combinations: tuple[tuple[bool, Literal["each", "last"]], ...] = (
            (True, "each"),
            (True, "last"),
            (False, "each"),
            (False, "last"),
        )
        return [
            replace(self, reshard_after_forward=again, reduce=reduce, gather=gather, replicate=copies)
            for copies in self._list_replicate_counts(context)
            for gather in precisions
            for again, reduce in combinations
        ]

    def _list_replicate_counts(self, context: Context) -> list[int]:
        """Returns the numbers of groups to try: one, and as many as keep a group within 1, 2, 8 or 32 hosts.

        A gather passes each device of its group in turn, so that large groups take long even for few bytes.
        """
        if self.replicate > 1:
            return [self.replicate]
        # Devices of context parallelism share a copy of the weights too.
        across = context.sizes[Axis.CONTEXT]
        inner = across * context.sizes[Axis.TENSOR]
        ranks = context.sizes[Axis.REPLICATE] * context.sizes[Axis.SHARD]
        shards = [hosts * context.per_host // inner for hosts in (32, 8, 2, 1) if hosts * context.per_host % inner == 0]
        return [1, *(ranks // n for n in shards if n * across > 1 and ranks > n and ranks % n == 0)]

    def fallbacks(self, context: Context) -> Iterable[Technique]:
        # Reducing each micro-batch frees unsharded gradients; resharding frees the gathered weights too.
        milder = [replace(self, reduce="each")] if self.reduce == "last" else []
        return milder + (
            [replace(self, reduce="each", reshard_after_forward=True)] if not self.reshard_after_forward else []
        )
