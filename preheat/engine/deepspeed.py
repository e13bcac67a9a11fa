"""The DeepSpeed engine of a build: ZeRO-1, 2 and 3 with its own forward, backward and step.

What: data parallelism by `parallel.engine: deepspeed`; DeepSpeed shards optimizer states (1), also gradients (2), also
weights (3), and clips and updates. Gradients are those of the mean over the trained tokens of the global batch, as in
the native engine. Plans are those of the native techniques that shard the same state, because DeepSpeed cannot run on
fake tensors.
Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054); deepspeed 0.19.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from preheat.core import (
    Axis,
    Batch,
    Build,
    Change,
    Context,
    LossSum,
    MissingPackage,
    Numerics,
    Slot,
    Stage,
    Tag,
    Technique,
)
from preheat.engine.step import add_up, forward, transform
from preheat.errors import RunError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from preheat.core import SlotFunction
    from preheat.core.json_types import StateDict
    from preheat.ops.optim.param_groups import AdamSettings, ParamGroup

__all__ = ["DeepSpeed"]


class _PartModule(nn.Module):
    """Wraps a part as DeepSpeed needs it: a module whose forward is the only code that touches its weights."""

    def __init__(self, part: nn.Module, function: SlotFunction):
        super().__init__()
        # DeepSpeed hooks this module's forward: weights that ZeRO-3 has sharded are complete only inside.
        self.part, self.function = part, function

    def forward(self, run: Callable[[], object]) -> object:
        return self.function(self.part, run)


class _Optimizer:
    """The optimizer interface that the step and the checkpoint use, backed by DeepSpeed's optimizer."""

    found_inf: Tensor | None = None

    def __init__(self, engine: DeepSpeedEngine):
        self.engine = engine
        self.state: dict[Tensor, StateDict] = {}  # empty: DeepSpeed keeps it in its own flat shards

    @property
    def param_groups(self) -> list[ParamGroup]:
        return self.engine.optimizer.param_groups  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: DeepSpeed's step clears the gradients."""


def _gather_parameter(p: Tensor) -> Tensor:
    """Gathers a parameter that ZeRO-3 has sharded; all ranks must call it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([p]):
        # A clone, because the gathered values are freed when the context ends.
        return p.detach().clone()


class _NotResumed:
    """Records in a checkpoint that DeepSpeed's optimizer state is not part of it."""

    def state_dict(self) -> StateDict:
        return {"optimizer": "not saved"}

    def load_state_dict(self, state: StateDict) -> None:
        raise RunError(
            "parallel.engine: deepspeed: its checkpoints hold the weights without the optimizer's state, so a run "
            "cannot resume from one; start another run from the weights, or use engine: native"
        )


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(Technique):
    """DeepSpeed as a technique, which `parallel.engine` selects."""

    selected_by: ClassVar[str] = "parallel.engine: deepspeed"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "exact"
    # Everything from the loss to the update: DeepSpeed's engine does all of it in `backward` and `step`.
    owns: ClassVar[frozenset[Slot]] = frozenset(
        {Slot.UNSHARD_SCOPE, Slot.FORWARD_BACKWARD, Slot.CLIP, Slot.UPDATE, Slot.OPTIMIZER}
    )
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.REDUCED_GRADIENTS})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.REDUCED_GRADIENTS, Tag.LOSS_SCALING})

    zero: Literal[1, 2, 3] = 1

    def degrees(self) -> Mapping[Axis, int]:
        # All devices that are left. The axis says how rows are split; DeepSpeed shards states along it by itself.
        return {Axis.REPLICATE: 0}

    def check(self, context: Context) -> list[str]:
        problems: list[str] = []
        # A plan of another device needs neither the package nor a rate.
        here = context.device.at_hand
        if here and importlib.util.find_spec("deepspeed") is None:
            text = "is not installed; use engine: native, or install it"
            problems.append(MissingPackage(text, "pip install 'preheat[deepspeed]'"))
        if context.sizes[Axis.REPLICATE] < 2:
            problems.append("splits the batch across devices, and there is one; start several with --nproc")
        if context.recipe.checkpoint.every:
            problems.append("checkpoint.every: a DeepSpeed run cannot resume from our checkpoints; set it to 0")
        if here and self.zero == 3 and context.recipe.optimizer.lr == "auto":
            problems.append("optimizer.lr: auto counts the parameters, which parallel.zero_stage: 3 shards; set a rate")
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        # `plain` before the claim below replaces it: the wrapped module calls it inside of DeepSpeed's forward.
        plain, world = build.slot(Slot.UNSHARD_SCOPE), build.mesh.size(Axis.REPLICATE)
        engine: DeepSpeedEngine  # set by `make`, which the build calls last

        # The step is DeepSpeed's own from here on: the optimizer that the build gets only shows its groups.
        def make(groups: list[ParamGroup], **settings: Unpack[AdamSettings]) -> _Optimizer:
            nonlocal engine
            # DeepSpeed replaces its parameters by flat shards and calls its `step` on those.
            fused = torch.optim.AdamW(groups, fused=True, **settings)
            engine = self._build_engine(build, _PartModule(part, plain), fused)
            return _Optimizer(engine)

        def through(module: nn.Module, run: Callable[[], object]) -> object:
            # A teacher or a reference is whole on each device, and no part of DeepSpeed's engine.
            return engine(run) if module is part else run()

        def forward_backward(build: Build, batches: Sequence[Batch], global_weight: float | Tensor) -> LossSum:
            metrics: dict[str, Tensor] = {}
            total: Tensor | None = None
            for number, batch in enumerate(batches):
                # DeepSpeed's step updates only after a backward pass at a boundary.
                engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
                loss = forward(build, transform(build, batch))
                add_up(metrics, loss.metrics)
                # DeepSpeed averages gradients over the devices; times `world` makes it a sum.
                engine.backward(loss.total * (world / global_weight), scale_wrt_gas=False)
                total = loss.total.detach() if total is None else total + loss.total.detach()
            assert total is not None, "a global batch has micro-batches"
            return LossSum(total, global_weight, metrics)

        def clip(build: Build) -> Tensor:
            # In CLIP, because DeepSpeed clips and updates in one call, and the norm is known only afterwards.
            engine.step()
            return torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32, device=build.torch_device)

        def update(build: Build, norm: Tensor) -> Tensor:
            return torch.isfinite(norm).to(torch.float32)  # engine.step in `clip` has updated, or skipped

        claimed: dict[Slot, SlotFunction] = {
            Slot.OPTIMIZER: make,
            Slot.UNSHARD_SCOPE: through,
            Slot.FORWARD_BACKWARD: forward_backward,
            Slot.CLIP: clip,
            Slot.UPDATE: update,
        }
        for slot, function in claimed.items():
            build.claim(slot, function, self.name())
        build.state.saved[self.name()] = _NotResumed()
        if self.zero == 3:
            build.parallel.full_parameter = _gather_parameter
        what = {
            1: "optimizer states",
            2: "optimizer states and gradients",
            3: "optimizer states, gradients and weights",
        }
        return Change(f"DeepSpeed's ZeRO-{self.zero}: {what[self.zero]} sharded across {world} devices", world)

    def _build_engine(self, build: Build, module: nn.Module, optimizer: torch.optim.Optimizer) -> DeepSpeedEngine:
        if build.torch_device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at import; otherwise it searches for accelerators
        import deepspeed

        deepspeed.init_distributed(dist_init_required=False)
        rows = build.recipe.batch.size // build.mesh.size(Axis.REPLICATE)
        config = {
            # Required. DeepSpeed's own data loader and its throughput log use it, and neither runs here.
            "train_micro_batch_size_per_gpu": max(1, rows // build.state.accumulation),
            "gradient_accumulation_steps": 1,  # forward_backward sets the boundary for each micro-batch itself
            "gradient_clipping": build.recipe.optimizer.max_grad_norm,
            # Threshold 0: by default, ZeRO-3 leaves parameters below 100,000 elements whole on every device.
            "zero_optimization": {"stage": self.zero, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            # Never: preheat prints its own progress.
            "steps_per_print": 1 << 30,
        }
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
