"""Sparse weights: training that keeps zeros at zero.

What: zeros in the weights of the layers' linear maps are not trained: their gradients are dropped before clipping, and
after each update they are reset to zero, whatever the optimizer did. With `prune: 2:4` the two smallest of each four
neighbouring inputs are set to zero first; otherwise the zeros are those that `preheat compress --method wanda` or
`magnitude` made, in the folder of `model.path`.
Helps: recovers the loss from pruning without undoing it; NVIDIA's sparse tensor cores run 2:4 faster afterwards.
Hurts: training itself is neither faster nor smaller; one byte per weight between gradients and update. Merging an
adapter would fill the zeros, so the full weights are trained.
Source: Han et al. 2015 (arXiv:1506.02626), section 3.4; 2:4: Mishra et al. 2021 (arXiv:2104.08378).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.core import Build, Change, Context, Finish, Numerics, Stage, Tag, Technique, Trials
from preheat.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["KeptZeros", "SparseWeights", "zero_two_of_four"]


class KeptZeros:
    """Keeps the zeros of parameters at zero around an update, for any optimizer and any sharding.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([0.0, 1.0]))
        >>> optimizer, zeros = torch.optim.AdamW([weight], lr=0.1), KeptZeros([weight])
        >>> weight.sum().backward()
        >>> zeros.before_update(); optimizer.step(); zeros.after_update(); round(float(weight.detach()[0]), 3)
        0.0
    """

    def __init__(self, weights: Sequence[nn.Parameter]):
        self.weights = weights
        self._zeros: list[Tensor] = []

    def before_update(self) -> None:
        """Records which elements are zero and drops their gradients, so that they affect neither norm nor moments."""
        from preheat.ops.distributed.dtensor_utils import local

        # Taken before each update: one byte per weight for that time, instead of a mask for the whole run.
        self._zeros = [local(p.detach()) == 0 for p in self.weights]
        for p, zeros in zip(self.weights, self._zeros, strict=True):
            if p.grad is not None:
                local(p.grad).masked_fill_(zeros, 0.0)

    def after_update(self) -> None:
        """Resets the same elements to zero."""
        from preheat.ops.distributed.dtensor_utils import local

        for p, zeros in zip(self.weights, self._zeros, strict=True):
            local(p.detach()).masked_fill_(zeros, 0.0)
        self._zeros = []


def zero_two_of_four(maps: Sequence[nn.Module]) -> None:
    """Sets the two smallest of each four neighbouring inputs of linear layers (torch's or GPT-2's) to zero, in place.

    Raises:
        ValueError: the number of a layer's inputs, or of a device's shard of them, is not a multiple of 4.
    """
    from transformers.pytorch_utils import Conv1D

    from preheat.ops.distributed.dtensor_utils import local
    from preheat.ops.pruning_scores import mask_two_of_four

    for module in maps:
        weight: Any = local(module.weight.detach())  # type: ignore[union-attr,operator,arg-type]
        # [out, in]; GPT-2 stores its weights transposed.
        weight = weight.t() if isinstance(module, Conv1D) else weight
        if weight.shape[1] % 4:
            raise ValueError(
                f"prune: 2:4 needs inputs in groups of four, and a map has {weight.shape[1]} (on one device)"
            )
        # In place, through the transposed view too.
        weight.masked_fill_(mask_two_of_four(weight.abs()), 0.0)


@dataclass(frozen=True, kw_only=True)
class SparseWeights(Technique):
    # Weights have their values only after MATERIALIZE.
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"prune": "2:4"},), refused_on_cpu="keeps the zeros of loaded weights")
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.FROZEN_BASE, Tag.STEP_IN_BACKWARD})

    prune: Literal["none", "2:4"] = "none"
    """Additional zeros before the first step: none, or the two smallest of each four neighbouring inputs."""

    def check(self, context: Context) -> list[str]:
        model = context.recipe.model
        if self.prune == "none" and (model.path is None or model.weights == "random"):
            return [
                "keeps the zeros of loaded weights, and this model is newly initialized, without any; name a pruned "
                "folder as model.path, or set prune: 2:4"
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        from torch._subclasses.fake_tensor import FakeTensor

        from preheat.models.layerwise import linear_maps
        from preheat.ops.distributed.dtensor_utils import local

        maps = list(linear_maps(part).values())
        if self.prune == "2:4":
            try:
                zero_two_of_four(maps)
            except ValueError as error:
                raise RecipeError(f"techniques.sparse_weights.{error}") from None
        weights: list[Any] = [m.weight for m in maps]
        share = ""
        if not isinstance(local(weights[0]), FakeTensor):  # a dry run has no values
            zeros = sum(int((local(p.detach()) == 0).sum()) for p in weights)
            # A single device's shard may have none by chance, so only a whole model is judged.
            if zeros == 0 and build.mesh.world == 1:
                raise RecipeError(
                    f"techniques.sparse_weights: the weights of {build.recipe.model.path} have no zeros to "
                    "keep; prune them first (preheat compress --method wanda), or set prune: 2:4"
                )
            share = f" ({zeros / sum(local(p).numel() for p in weights):.1%})"
        keeper = KeptZeros(weights)
        # After all sums, before the norm: dropped gradients must not count in it.
        build.hooks.finish_gradients.append((Finish.UNSCALE, lambda b: keeper.before_update()))
        build.hooks.after_update.append(lambda b: keeper.after_update())
        return Change(f"zeros of {len(maps)} linear maps are kept{share}", len(maps))
