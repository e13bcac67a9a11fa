"""Gradient accumulation: the global batch in several micro-batches, their gradients summed before one update.

What: each micro-batch runs forward and backward by itself; the loss is divided by the trained tokens of the whole
global batch, so the gradients equal those of the big batch even where sequences and masks are uneven. (Averaging the
micro-batches' means, as is often done, weighs tokens of short sequences more.)
Helps: activations shrink with the micro-batch; the optimizer sees the same batch. Hurts: very small micro-batches leave
the device idle and repeat the cost of each layer's launch.
Source: Ott et al. 2018, "Scaling Neural Machine Translation" (arXiv:1806.00187), section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.core import (
    DATA,
    Axis,
    Build,
    Change,
    Context,
    Device,
    Searchable,
    Stage,
    Tag,
    Technique,
    Trials,
    conflicts_of,
    has_room,
)
from preheat.ops.gradient_accumulation import accumulate
from preheat.recipe import Bound

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from preheat.recipe import Recipe

__all__ = ["GradientAccumulation", "train_with_gradient_accumulation"]

# Of a micro-batch, as is usual for models of 8B. By the plan of `fine-tune`, a 0.5B on an H100, 4,096 tokens run at
# 69,506 a second, 8,192 at 78,164.
_FILLS_A_GPU = 8192


def _share(criterion: Any, targets: Tensor) -> float:
    """What a criterion's mean divides by: the number of its targets, without those that it ignores."""
    from torch import nn

    if getattr(criterion, "reduction", "mean") == "sum":
        return 1.0
    classified = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
    if targets.is_floating_point():  # values, or with cross entropy a probability of each class
        classes = targets.shape[1 if targets.ndim > 1 else 0] if classified else 1
        return targets.numel() / classes
    counted = targets != (criterion.ignore_index if classified else -100)
    if classified and criterion.weight is not None:
        return float(criterion.weight[targets[counted]].sum())
    return int(counted.sum())


def train_with_gradient_accumulation(
    model: nn.Module,
    dataloader: Iterable[tuple[Any, Any]],
    optimizer: torch.optim.Optimizer,
    accumulation_steps: int,
    criterion: Callable[[Any, Any], Tensor],
    epochs: int = 1,
) -> list[float]:
    """Trains a model with one update for each `accumulation_steps` batches of the loader, in place.

    An update has the gradients of one batch that holds them all: each batch's mean counts by its number of targets, so
    batches may differ in size and in what is masked. What is left at an epoch's end makes a last, smaller update.

    Args:
        dataloader: yields (inputs, targets); read once an epoch.
        criterion: criterion(outputs, targets), the mean over the targets. Integer targets of its `ignore_index` (-100
            without one) do not count; torch's class weights and `reduction="sum"` are honoured.

    Returns:
        The loss of each update: the mean over all its targets (their sum with `reduction="sum"`).

    Raises:
        ValueError: `accumulation_steps` is less than 1, or the criterion gives no scalar.

    Example:
        >>> import torch
        >>> model, loss = torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss()
        >>> data = [(torch.randn(8, 4), torch.randint(2, (8,)))] * 6
        >>> len(train_with_gradient_accumulation(model, data, torch.optim.AdamW(model.parameters()), 4, loss, 1))
        2
    """
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps: {accumulation_steps} must be at least 1")
    device = next(model.parameters()).device
    summed = getattr(criterion, "reduction", "mean") == "sum"

    def loss_of(part: tuple[Any, Any, float]) -> Tensor:
        inputs, targets, share = part
        loss = criterion(model(inputs.to(device)), targets.to(device))
        if loss.ndim:
            raise ValueError(f"criterion: gave {tuple(loss.shape)} where a scalar is needed; use reduction='mean'")
        return loss * share

    losses = []
    model.train()
    for _ in range(epochs):
        batches = iter(dataloader)
        while group := list(itertools.islice(batches, accumulation_steps)):
            shares = [_share(criterion, targets) for _, targets in group]
            total = 1.0 if summed else sum(shares)
            # a mean over no target at all is NaN, not 0
            parts = [(*batch, share / total) for batch, share in zip(group, shares, strict=True) if share]
            if parts:
                losses.append(accumulate(parts, loss_of, global_weight=1))
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return [float(loss) for loss in losses]


def _rows(recipe: Recipe, sizes: Mapping[Axis, int]) -> tuple[int, int]:
    """Rows of a global batch that a device has at most, and the devices that share them out."""
    devices = math.prod(sizes[axis] for axis in DATA)
    return -(-recipe.batch.size // devices), devices


@dataclass(frozen=True, kw_only=True)
class GradientAccumulation(Searchable):
    stage: ClassVar[Stage] = Stage.LOADER
    numerics: ClassVar[Any] = "exact"
    trials: ClassVar[Trials] = Trials(settings=({"steps": 3},))
    supports_encoder_decoder: ClassVar[bool] = True
    memory_saving: ClassVar[bool] = True
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.MICRO_BATCH_SIZE})

    steps: Annotated[int, Bound(2)] = 4
    """Micro-batches that make one global batch of `batch.size` rows."""
    on_gpu: Literal["steps", "auto"] = "steps"
    """auto: on a GPU as few micro-batches, two or more, as have 8,192 tokens or less and fit in 90 % of the memory by
    the dry run; `steps` on a CPU, whose kernels gain nothing by more rows. The run records how many."""

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        rows, devices = _rows(context.recipe, context.sizes)
        if self.steps > rows:
            among = f" over {devices} devices, which is {rows} a device" if devices > 1 else ""
            size = context.recipe.batch.size
            return [
                f"steps: {self.steps} micro-batches cannot be cut from batch.size {size}{among}; use at most {rows}"
            ]
        return []

    def apply(self, build: Build, part: Any) -> Change:
        build.state.accumulation = self.steps
        rows, devices = _rows(build.recipe, build.mesh.sizes)
        micro = -(-rows // self.steps)
        among = f", {rows} on each of {devices} devices," if devices > 1 else ""
        return Change(
            f"{build.recipe.batch.size} rows a step{among} in {-(-rows // micro)} micro-batches of {micro}", self.steps
        )

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Mapping[str, Any]]) -> Technique:
        if self.on_gpu != "auto":
            return self
        fixed = replace(self, on_gpu="steps")
        if not self.left_open(context.device):
            return fixed
        rows, _ = _rows(context.recipe, context.sizes)
        chosen = fixed
        for steps in (n for n in range(2, rows + 1) if rows % n == 0):
            candidate = replace(fixed, steps=steps)
            large = rows // steps > 1 and rows // steps * context.recipe.batch.length > _FILLS_A_GPU
            if large or conflicts_of({**context.recipe.techniques, self.name(): candidate}.values(), context):
                continue
            prediction = plan(chosen := candidate)
            if has_room(prediction):
                break
        return chosen

    def left_open(self, device: Device) -> bool:
        return self.on_gpu == "auto" and device.kind == "cuda"

    def micro_batch_count(self) -> int:
        return self.steps

    def options(self, context: Context) -> Iterable[Technique]:
        rows, _ = _rows(context.recipe, context.sizes)
        return [GradientAccumulation(steps=n) for n in range(2, rows + 1) if rows % n == 0]

    def fallbacks(self, context: Context) -> Iterable[Technique]:
        return [t for t in self.options(context) if isinstance(t, GradientAccumulation) and t.steps > self.steps]
