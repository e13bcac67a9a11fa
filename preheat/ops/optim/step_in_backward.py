"""Optimizer step in the backward pass: each parameter is updated as soon as its gradient is complete."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from preheat.ops.distributed.dtensor_utils import total_norm

__all__ = ["UpdateInBackward"]


class UpdateInBackward:
    """Updates each parameter of `optimizer` in the backward pass by a hook and frees its gradient.

    A non-finite gradient updates nothing, and neither does any later one in the same pass. Parameters closer to the
    loss have already been updated: unlike a step after the pass, this one is not atomic.

    Args:
        optimizer: must support `found_inf`, as torch's fused optimizers and preheat's do.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer: Any = optimizer
        self._norms: list[Tensor] = []
        self._found: Tensor | None = None
        self._hooks = [
            # `at=index` binds the value of this iteration; a plain closure would see the last one.
            p.register_post_accumulate_grad_hook(lambda p, at=index: self._update(p, at))
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        ]

    def _update(self, p: Tensor, group: int) -> None:
        assert p.grad is not None
        # Of this gradient, before it is freed: the norm over all is assembled from these.
        norm = total_norm([p.grad])
        bad = 1 - torch.isfinite(norm).to(torch.float32)
        self._norms.append(norm)
        # The maximum over the pass so far, on the device: no later parameter is updated after a non-finite gradient.
        self._found = bad if self._found is None else torch.maximum(self._found, bad)
        self.optimizer.found_inf = self._found
        groups = self.optimizer.param_groups
        # Runs the optimizer's own step on this parameter only.
        # A copy of the group's settings, read in each call: the learning rate is that of this step.
        self.optimizer.param_groups = [{**groups[group], "params": [p]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        p.grad = None

    def reset(self) -> None:
        """Clears the state that a failed backward pass left."""
        self._norms, self._found = [], None

    def norm(self) -> Tensor:
        """Returns the Euclidean norm over all gradients since the last call, on the device."""
        # The norm of the norms is that of all elements together.
        norm = torch.linalg.vector_norm(torch.stack(self._norms))
        self.reset()
        return norm

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
