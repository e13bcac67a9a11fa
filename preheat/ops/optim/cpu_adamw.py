"""AdamW on the CPU: optimizer state and fp32 master weights in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.ops.memory.host_transfer import HostCopy, choose_link, host_zeros, to_host
from preheat.ops.optim.optimizers import Guarded, adamw_

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from preheat.ops.optim.param_groups import ParamGroup


__all__ = ["HostAdamW"]


class HostAdamW(Guarded):
    """AdamW with moments and fp32 master weights in host memory; the CPU computes the update.

    All gradients are copied to the host at once, and weights are copied back as soon as they are updated, while later
    gradients are still arriving. The host waits for the gradients but never branches on their values.

    Args:
        link: makes the copies; chosen by the parameters' device if None.
    """

    masters = "master"

    def __init__(
        self,
        groups: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        link: HostCopy | None = None,
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        device = self.param_groups[0]["params"][0].device
        self.link = link or choose_link(device)
        # Each buffer first receives the gradient, then sends the updated weight back in the device's dtype.
        self._buffers: dict[Tensor, Tensor] = {}
        self.prepare()
        if device.type == "cuda":
            # the copies of the weights must be complete before the first step reads them
            torch.cuda.synchronize(device)

    @torch.no_grad()
    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        # Pinned for a GPU's parameters; `to_host` pins likewise.
        mean, square = (host_zeros(p.shape, torch.float32, p.is_cuda) for _ in range(2))
        step = host_zeros((), torch.float32, False)
        return {"step": step, "exp_avg": mean, "exp_avg_sq": square, "master": to_host(p.detach().float())}

    def prepare(self) -> None:
        """Allocates the host buffers for gradients in the parameters' dtype. Call it again after casting the
        parameters.
        """
        for group in self.param_groups:
            for p in group["params"]:
                # In the parameter's dtype: half-precision weights send half of what fp32 would over the link.
                self._buffers[p] = host_zeros(p.shape, p.dtype, p.is_cuda)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        # The flag first: it is tiny, and every update waits for it.
        flag = None if self.found_inf is None else self.link.out(self.found_inf)
        # All copies are queued before the first update, so that the link never idles while the CPU computes.
        sent = [self.link.out(p.grad, self._buffers[p]) for p, _ in work]
        found_inf = None if flag is None else flag.for_host()
        back = []
        for (p, group), copy in zip(work, sent, strict=True):
            # Waits for this gradient only; the later ones continue to arrive.
            state, buffer = self.state[p], copy.for_host()
            master = state["master"]
            adamw_(master, buffer.float(), state["exp_avg"], state["exp_avg_sq"], state["step"], group, found_inf)
            # The gradient in the buffer has been read, so the buffer can carry the weight back.
            if p.dtype != torch.float32:
                buffer.copy_(master)
            back.append(self.link.back(master if p.dtype == torch.float32 else buffer, p))
        # The next forward pass on the device waits for the weights; the host continues.
        for copy in back:
            copy.for_device()
