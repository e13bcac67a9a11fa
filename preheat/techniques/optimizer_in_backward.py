"""Optimizer in backward: updates each parameter as soon as its gradient is complete, and frees the gradient.

What: a hook on each parameter runs the optimizer's step for it during the backward pass. The update is identical to
that of a step after the pass; only the gradients of the whole model are never in memory at once.
Helps: gradients take the memory of a layer or two instead of the model (4 bytes per parameter in fp32). Works with
every optimizer.
Hurts: the global gradient norm is known only after all weights have been updated, so there is no clipping by it, and a
global batch must be one micro-batch. A non-finite gradient stops its own update and all later ones in the pass; weights
closer to the loss have already been updated, so the run stops with weights between two steps: resume from the last
checkpoint.
Source: Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO,
arXiv:2306.09782).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Batch, Build, Change, Context, LossSum, Numerics, Searchable, Slot, Stage, Tag, Trials
from preheat.errors import RecipeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from preheat.ops.optim.step_in_backward import UpdateInBackward

__all__ = ["OptimizerInBackward", "update_in_backward"]


def update_in_backward(optimizer: torch.optim.Optimizer) -> UpdateInBackward:
    """Makes the optimizer update each parameter in `loss.backward()`, in place; `optimizer.step()` is no longer called.

    The learning rate is that of the optimizer's groups when `backward` is called.

    Args:
        optimizer: one that honours `found_inf` (torch's fused ones, preheat's).

    Returns:
        An object with `.norm()`, the norm of all gradients of the last pass, and `.remove()`, which removes the hooks.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> before = layer.weight.detach().clone()
        >>> updates = update_in_backward(torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0, fused=True))
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> (before - layer.weight.detach()).round(decimals=3), layer.weight.grad
        (tensor([[0.1000, 0.1000]]), None)
    """
    from preheat.ops.optim.step_in_backward import UpdateInBackward

    return UpdateInBackward(optimizer)


@dataclass(frozen=True, kw_only=True)
class OptimizerInBackward(Searchable):
    stage: ClassVar[Stage] = Stage.LOADER  # the only stage after the optimizer is created
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(recipe=("optimizer.max_grad_norm=0",))
    supports_encoder_decoder: ClassVar[bool] = True
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.FORWARD_BACKWARD, Slot.CLIP, Slot.UPDATE})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.STEP_IN_BACKWARD})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.MICRO_BATCH_SIZE, Tag.LOSS_SCALING})

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        clip = context.recipe.optimizer.max_grad_norm
        if clip > 0:
            return [
                f"optimizer.max_grad_norm: {clip:g}: weights are updated before the norm over all gradients is known; "
                "set optimizer.max_grad_norm: 0"
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        import torch

        # These hooks run after the pass, on gradients that are gone by then.
        if build.hooks.finish_gradients:
            raise RecipeError(
                "techniques.optimizer_in_backward: another technique reads the gradients after the backward pass, "
                "when they are already freed; leave one of them out"
            )
        updates = update_in_backward(build.optimizer)
        # Wraps whatever runs the pass so far.
        inner = build.slot(Slot.FORWARD_BACKWARD)

        def forward_backward(build: Build, batches: Sequence[Batch], global_weight: float) -> LossSum:
            if len(batches) > 1:
                raise RecipeError(
                    f"techniques.optimizer_in_backward: a global batch of {len(batches)} micro-batches would be "
                    f"{len(batches)} updates; use one micro-batch"
                )
            # A pass that failed may have left norms behind.
            updates.reset()
            loss: LossSum = inner(build, batches, global_weight)
            return loss

        def update(build: Build, norm: Tensor) -> Tensor:
            return torch.isfinite(norm).to(torch.float32)  # the updates are done

        build.claim(Slot.FORWARD_BACKWARD, forward_backward, self.name())
        # Nothing to clip any more: the norm is reported only.
        build.claim(Slot.CLIP, lambda build: updates.norm(), self.name())
        build.claim(Slot.UPDATE, update, self.name())
        count = sum(p.requires_grad for p in part.parameters())
        return Change(f"{count} parameters updated in the backward pass, their gradients freed one by one", count)
