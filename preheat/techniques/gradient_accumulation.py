"""Gradient accumulation: splits the global batch into micro-batches and sums their gradients before one update.

What: each micro-batch runs forward and backward by itself; the loss is divided by the trained tokens of the whole
global batch, so the gradients equal those of the full batch even if sequences and masks are uneven. (Averaging the
micro-batches' means, as is often done, gives tokens of short sequences more weight.)
Helps: activations shrink with the micro-batch; the optimizer sees the same batch.
Hurts: very small micro-batches leave the device idle and repeat the launch cost of each layer.
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
    Numerics,
    Searchable,
    Stage,
    Tag,
    Technique,
    Trials,
    conflicts_of,
)
from preheat.ops.gradient_accumulation import accumulate
from preheat.recipe import Bound

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from preheat.core.plan import Plan
    from preheat.recipe import Recipe

__all__ = ["GradientAccumulation", "train_with_gradient_accumulation"]

# Tokens per micro-batch, as is usual for 8B models. The plan of `fine-tune` (0.5B on an H100) predicts 69,506 tokens/s
# with 4,096 tokens and 78,164 with 8,192.
_MAX_GPU_TOKENS = 8192


def _find_mean_divisor(criterion: Any, targets: Tensor) -> float:
    """Returns the divisor of a criterion's mean: the number of its targets that are not ignored."""
    from torch import nn

    if getattr(criterion, "reduction", "mean") == "sum":
        return 1.0
    # Only these have class weights and an `ignore_index`.
    classified = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
    if targets.is_floating_point():  # regression targets, or class probabilities for cross entropy
        # Class probabilities have one more dimension: their mean is over positions, not elements.
        classes = targets.shape[1 if targets.ndim > 1 else 0] if classified else 1
        return targets.numel() / classes
    counted = targets != (criterion.ignore_index if classified else -100)
    # torch's weighted mean divides by the weights of its targets.
    if classified and criterion.weight is not None:
        return float(criterion.weight[targets[counted]].sum())
    return int(counted.sum())


def train_with_gradient_accumulation(
    model: nn.Module,
    dataloader: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    accumulation_steps: int,
    criterion: Callable[[Tensor, Tensor], Tensor],
    epochs: int = 1,
) -> list[float]:
    """Trains a model with one update per `accumulation_steps` batches of the loader, in place.

    An update has the gradients of one batch that contains them all: each batch's mean is weighted by its number of
    targets, so batches may differ in size and masking. The remainder of an epoch makes a last, smaller update.

    Args:
        dataloader: yields (inputs, targets); read once per epoch.
        criterion: criterion(outputs, targets), the mean over the targets. Integer targets equal to its `ignore_index`
            (-100 if it has none) do not count; torch's class weights and `reduction="sum"` are supported.

    Returns:
        The loss of each update: the mean over all its targets (their sum with `reduction="sum"`).

    Raises:
        ValueError: `accumulation_steps` is less than 1, or the criterion returns no scalar.

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

    def compute_loss(part: tuple[Tensor, Tensor, float]) -> Tensor:
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
            # The share of each batch in the mean over the whole group.
            shares = [_find_mean_divisor(criterion, targets) for _, targets in group]
            total = 1.0 if summed else sum(shares)
            # skips batches without targets: their mean is NaN, not 0
            parts = [(*batch, share / total) for batch, share in zip(group, shares, strict=True) if share]
            if parts:
                # The shares add up to 1 already.
                losses.append(accumulate(parts, compute_loss, global_weight=1))
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    # Read back once at the end: each float() would wait for the device.
    return [float(loss) for loss in losses]


def _count_rows(recipe: Recipe, sizes: Mapping[Axis, int]) -> tuple[int, int]:
    """Returns the rows of a global batch on one device (rounded up) and the number of data-parallel devices."""
    devices = math.prod(sizes[axis] for axis in DATA)
    return -(-recipe.batch.size // devices), devices


@dataclass(frozen=True, kw_only=True)
class GradientAccumulation(Searchable):
    stage: ClassVar[Stage] = Stage.LOADER
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(settings=({"steps": 3},))
    supports_encoder_decoder: ClassVar[bool] = True
    memory_saving: ClassVar[bool] = True
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.MICRO_BATCH_SIZE})

    steps: Annotated[int, Bound(2)] = 4
    """Micro-batches per global batch of `batch.size` sequences."""
    on_gpu: Literal["steps", "auto"] = "steps"
    """auto: on a GPU the fewest micro-batches, two or more, that have 8,192 tokens or less and fit in 90 % of the
    memory according to the dry run; `steps` on a CPU, whose kernels gain nothing from more sequences. The run records
    the number."""

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        rows, devices = _count_rows(context.recipe, context.sizes)
        if self.steps > rows:
            among = f" over {devices} devices, which is {rows} a device" if devices > 1 else ""
            size = context.recipe.batch.size
            return [
                (
                    f"steps: {self.steps} micro-batches are more than the sequences of batch.size {size}{among}; use "
                    f"at most {rows}"
                )
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        build.state.accumulation = self.steps
        rows, devices = _count_rows(build.recipe, build.mesh.sizes)
        micro = -(-rows // self.steps)
        among = f", {rows} on each of {devices} devices," if devices > 1 else ""
        return Change(
            f"{build.recipe.batch.size} sequences a step{among} in {-(-rows // micro)} micro-batches of {micro}",
            self.steps,
        )

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Plan]) -> Technique:
        if self.on_gpu != "auto":
            return self
        fixed = replace(self, on_gpu="steps")
        if not self.left_open(context.device):
            return fixed
        rows, _ = _count_rows(context.recipe, context.sizes)
        chosen = fixed
        # Divisors only: all micro-batches then have the same shape. From the fewest on, which are the fastest.
        for steps in (n for n in range(2, rows + 1) if rows % n == 0):
            candidate = replace(fixed, steps=steps)
            # A single row may exceed the limit: it cannot be split.
            large = rows // steps > 1 and rows // steps * context.recipe.batch.seq_len > _MAX_GPU_TOKENS
            if large or conflicts_of({**context.recipe.techniques, self.name(): candidate}.values(), context):
                continue
            # Assigned before it is known to fit: if none does, the smallest micro-batches remain.
            prediction = plan(chosen := candidate)
            if prediction.has_room:
                break
        return chosen

    def left_open(self, device: Device) -> bool:
        return self.on_gpu == "auto" and device.kind == "cuda"

    def micro_batch_count(self) -> int:
        return self.steps

    def options(self, context: Context) -> Iterable[Technique]:
        rows, _ = _count_rows(context.recipe, context.sizes)
        return [GradientAccumulation(steps=n) for n in range(2, rows + 1) if rows % n == 0]

    def fallbacks(self, context: Context) -> Iterable[Technique]:
        # A checkpoint may be continued with more micro-batches, which use less memory.
        return [t for t in self.options(context) if isinstance(t, GradientAccumulation) and t.steps > self.steps]
