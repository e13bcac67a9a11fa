"""The optimizer's update of a parameter in the backward pass, as soon as that parameter's gradient is whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from preheat.ops.distributed.dtensor_utils import total_norm

__all__ = ["UpdateInBackward"]


class UpdateInBackward:
    """Lets `optimizer` update each of its parameters in the backward pass and frees the gradient, by hooks on the parameters.

    A gradient that is not finite updates nothing, nor does any that comes after it in the same pass. What came before, nearer to the
    loss, has been updated already: unlike a step after the pass, this one is not all or nothing.

    Args:
        optimizer: one that honours `found_inf`: torch's fused ones and preheat's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer: Any = optimizer
        self._norms: list[Tensor] = []
        self._found: Tensor | None = None
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p, at=index: self._update(p, at))
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        ]

    def _update(self, p: Tensor, group: int) -> None:
        assert p.grad is not None
        norm = total_norm([p.grad])
        bad = 1 - torch.isfinite(norm).to(torch.float32)
        self._norms.append(norm)
        self._found = bad if self._found is None else torch.maximum(self._found, bad)
        self.optimizer.found_inf = self._found
        groups = self.optimizer.param_groups
        # The optimizer's own step, with nothing to do but this parameter.
        self.optimizer.param_groups = [{**groups[group], "params": [p]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        p.grad = None

    def reset(self) -> None:
        """Forgets what a backward pass that failed has left."""
        self._norms, self._found = [], None

    def norm(self) -> Tensor:
        """Euclidean norm over all gradients since the last call, on the device."""
        norm = torch.linalg.vector_norm(torch.stack(self._norms))
        self.reset()
        return norm

    def remove(self) -> None:
        """Takes the hooks off again."""
        for hook in self._hooks:
            hook.remove()
