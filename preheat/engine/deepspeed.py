"""DeepSpeed as the engine of a build: ZeRO-1, 2 and 3 with its own forward, backward and step. `parallel.engine: deepspeed` chooses it.

What: each device has its share of the rows; DeepSpeed shares out optimizer states (1), gradients too (2), weights too (3), and clips and updates.
Gradients are those of the mean over the trained tokens of the whole global batch, as natively. The plan is that of the native
techniques that share out the same: DeepSpeed cannot run on fake tensors.
Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054); deepspeed 0.19.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from preheat.core import Axis, Batch, Build, Change, Context, LossSum, Slot, Stage, Tag, Technique
from preheat.engine.step import add_up, forward, transform
from preheat.errors import RunError

__all__ = ["DeepSpeed"]


class _Whole(nn.Module):
    """A part as DeepSpeed wants it: a module whose forward is all that touches its weights."""

    def __init__(self, part: nn.Module, function: Any):
        super().__init__()
        self.part, self.function = part, function

    def forward(self, batch: Batch) -> Any:
        return self.function(self.part, batch)


class _Optimizer:
    """What the step and the checkpoint ask of an optimizer, by DeepSpeed's."""

    found_inf: Tensor | None = None

    def __init__(self, engine: Any):
        self.engine = engine
        self.state: dict[Any, Any] = {}  # in DeepSpeed's own flat shares

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: its step did."""


def _gathered(p: Tensor) -> Tensor:
    """All of a parameter that ZeRO-3 has taken apart; every process must ask."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([p]):
        return p.detach().clone()


class _NotResumed:
    """What a checkpoint of DeepSpeed's holds besides the weights: that the optimizer's state is not in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": "not saved"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RunError(
            "parallel.engine: deepspeed: its checkpoints hold the weights without the optimizer's state, so a run cannot go on from one; start another run from the weights, or use engine: native"
        )


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(Technique):
    """Not a key of `techniques`: this module is read only where `parallel.engine` asks for it."""

    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Any] = "exact"
    owns: ClassVar[frozenset[Slot]] = frozenset(
        {Slot.FORWARD, Slot.FORWARD_BACKWARD, Slot.CLIP, Slot.UPDATE, Slot.OPTIMIZER}
    )
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.REDUCED_GRADIENTS})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.REDUCED_GRADIENTS, Tag.LOSS_SCALING})

    zero: Literal[1, 2, 3] = 1

    def degrees(self) -> Mapping[Axis, int]:
        return {Axis.REPLICATE: 0}

    def check(self, context: Context) -> list[str]:
        found = []
        if importlib.util.find_spec("deepspeed") is None:
            found.append("is not installed: pip install 'preheat[deepspeed]', or use parallel.engine: native")
        if context.sizes[Axis.REPLICATE] < 2:
            found.append("shares out rows among devices, and there is one; start several with --nproc")
        if context.recipe.checkpoint.every:
            found.append("checkpoint.every: a run of DeepSpeed's cannot go on from a checkpoint of ours; set it to 0")
        if self.zero == 3 and context.recipe.optimizer.lr == "auto":
            found.append("optimizer.lr: auto counts the parameters, which parallel.zero: 3 takes apart; state a rate")
        return found

    def apply(self, build: Build, part: Any) -> Change:
        plain, world = build.slot(Slot.FORWARD), build.mesh.size(Axis.REPLICATE)
        engine: Any = None

        def make(groups: Any, **settings: Any) -> Any:
            nonlocal engine
            fused = torch.optim.AdamW(groups, fused=True, **settings)
            engine = self._engine(build, _Whole(part, plain), fused)
            return _Optimizer(engine)

        def through(part: Any, batch: Batch) -> Any:
            return engine(batch)

        def forward_backward(build: Build, batches: Sequence[Batch], global_weight: Any) -> LossSum:
            metrics: dict[str, Tensor] = {}
            total: Any = 0.0
            for number, batch in enumerate(batches):
                engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
                loss = forward(build, transform(build, batch))
                add_up(metrics, loss.metrics)
                engine.backward(
                    loss.total * (world / global_weight), scale_wrt_gas=False
                )  # it takes the mean over devices
                total = total + loss.total.detach()
            return LossSum(total, global_weight, metrics)

        def clip(build: Build) -> Tensor:
            engine.step()
            return torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32, device=build.torch_device)

        def update(build: Build, norm: Tensor) -> Tensor:
            return torch.isfinite(norm).to(torch.float32)  # it is done, or was left out

        owned: dict[Slot, Callable[..., Any]] = {
            Slot.OPTIMIZER: make,
            Slot.FORWARD: through,
            Slot.FORWARD_BACKWARD: forward_backward,
            Slot.CLIP: clip,
            Slot.UPDATE: update,
        }
        for slot, function in owned.items():
            build.own(slot, function, self.name())
        build.state.saved[self.name()] = _NotResumed()
        if self.zero == 3:
            build.parallel.full_parameter = _gathered
        what = {
            1: "optimizer states",
            2: "optimizer states and gradients",
            3: "optimizer states, gradients and weights",
        }
        return Change(f"DeepSpeed's ZeRO-{self.zero}: {what[self.zero]} shared out among {world} devices", world)

    def _engine(self, build: Build, module: nn.Module, optimizer: Any) -> Any:
        if build.torch_device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported; else it looks for devices
        import deepspeed

        deepspeed.init_distributed(dist_init_required=False)
        rows = build.recipe.batch.size // build.mesh.size(Axis.REPLICATE)
        config = {
            "train_micro_batch_size_per_gpu": max(1, rows // build.state.accumulation),
            "gradient_accumulation_steps": 1,  # the boundary is told with each micro-batch
            "gradient_clipping": build.recipe.optimizer.clip,
            "zero_optimization": {"stage": self.zero, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
