"""Optimizer offload: keeps AdamW's states and runs its step on the host.

What: moments and fp32 weights are in pinned host memory; each step sends the gradients there, updates on the host's CPU
and sends the weights back, pipelined by parameter. With `weights: bf16` the device keeps bf16 weights and gradients,
rounded from the fp32 weights on the host.
Helps: 8 bytes per parameter less on the device, 12 with bf16 weights; for models whose optimizer does not fit.
Hurts: gradients and weights cross the link to the host in each step, and the device waits for the host's update:
seconds per step for billions of parameters. The plan takes the link's bandwidth from its data sheet and the host's
update speed from a published rate. On an H200 its gradients were those of a CPU; its speed was not measured.
Source: Ren et al. 2021, "ZeRO-Offload" (arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Unpack

from preheat.core import Build, Change, Context, Numerics, Searchable, Slot, Stage, Tag, Technique, Trials

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.optimizer import ParamsT

    from preheat.ops.optim.cpu_adamw import HostAdamW
    from preheat.ops.optim.param_groups import AdamSettings

__all__ = ["OptimizerOffload", "host_adamw"]


def host_adamw(parameters: ParamsT, **settings: Unpack[AdamSettings]) -> HostAdamW:
    """Returns the optimizer (`preheat.ops.optim.cpu_adamw.HostAdamW`); settings: lr, betas, eps, weight_decay.

    Example:
        >>> import torch
        >>> optimizer = host_adamw(torch.nn.Linear(4, 4).parameters(), lr=1e-3)
        >>> sorted(next(iter(optimizer.state.values())))
        ['exp_avg', 'exp_avg_sq', 'master', 'step']
    """
    from preheat.ops.optim.cpu_adamw import HostAdamW

    return HostAdamW(parameters, **settings)


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload(Searchable):
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "rounding"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="needs a CUDA device")
    last_resort: ClassVar[bool] = True
    training_only: ClassVar[bool] = True
    memory_saving: ClassVar[bool] = True
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OPTIMIZER})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.BF16_COMPUTE, Tag.BF16_WEIGHTS})

    weights: Literal["fp32", "bf16"] = "fp32"
    """Precision of the device's weights and gradients; the host's are fp32."""
    on_cpu: Literal["refuse", "stay"] = "refuse"
    """Without a GPU, the optimizer is on the host already: refuse reports this and stops; stay continues with plain
    AdamW, for recipes that should run on both. The run records the choice."""

    def provided(self) -> frozenset[Tag]:
        return self.provides if self.weights == "bf16" else frozenset()

    def search_numerics(self) -> Literal["rounding"]:
        return "rounding"

    def is_memory_saving(self) -> bool:
        return self.weights == "fp32"  # rounded weights give other losses

    def check(self, context: Context) -> list[str]:
        if context.device.kind == "cuda" and Tag.REDUCED_GRADIENTS in context.tags:
            return ["is for one device; on several use fsdp: {offload: true}, which keeps each shard on the host"]
        if context.device.kind == "cuda" or (self.on_cpu == "stay" and self.weights == "fp32"):
            return []
        if self.on_cpu == "stay":
            return [
                "weights: bf16 is for a CUDA device; on a CPU use mixed_precision: {mode: bf16_weights}, or weights: "
                "fp32"
            ]
        return ["needs a CUDA device: on a CPU the optimizer is on the host already; leave it out, or set on_cpu: stay"]

    def apply(self, build: Build, part: nn.Module) -> Change:
        count = sum(p.requires_grad for p in part.parameters())
        # The same recipe runs on a machine without a GPU, by the default optimizer.
        if build.device.kind == "cpu" and self.on_cpu == "stay":
            return Change(
                f"nothing to move: AdamW of {count} parameters is already on the host, since there is no GPU", count
            )

        def make(groups: ParamsT, **settings: Unpack[AdamSettings]) -> torch.optim.Optimizer:
            # First the fp32 masters on the host, then the cast: they must hold the unrounded weights.
            optimizer = host_adamw(groups, **settings)
            if self.weights == "bf16":
                for p in (p for trained in build.trained for p in trained.parameters()):
                    p.data = p.data.bfloat16()
                # Its buffers must have the new dtype.
                optimizer.prepare()
            return optimizer

        build.claim(Slot.OPTIMIZER, make, self.name())
        return Change(f"AdamW of {count} parameters on the host, the device's weights in {self.weights}", count)

    def options(self, context: Context) -> Iterable[Technique]:
        return [OptimizerOffload(weights=weights) for weights in ("fp32", "bf16")]  # type: ignore[arg-type]
