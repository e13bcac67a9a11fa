"""Half precision: dynamic loss scaling without host syncs, and AdamW with fp32 master weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from preheat.ops.dry_run_loops import fold_identical
from preheat.ops.optim.half_adamw import half_adamw_
from preheat.ops.optim.optimizers import Guarded, adamw_, adamw_state, local_shards

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from preheat.core.json_types import StateDict
    from preheat.ops.autograd_context import AutogradContext
    from preheat.ops.optim.param_groups import ParamGroup


__all__ = ["LossScale", "MasterAdamW", "compute_in_fp32"]

P = ParamSpec("P")
T = TypeVar("T")


def _cast(value: object, dtype: torch.dtype) -> object:
    # Token ids and masks stay as they are.
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def compute_in_fp32(module: nn.Module, back_to: torch.dtype | None = None) -> None:
    """Makes a module compute in fp32, in place: casts inputs up, disables autocast, casts results to `back_to` (None:
    keeps fp32).
    """
    # A partial of a bound method, not a closure: deepcopy binds it to the copied module, so that a copy (the reference
    # of preference tuning) computes with its own weights.
    module.forward = functools.partial(_run_in_fp32, module.forward, back_to)  # type: ignore[method-assign]


def _run_in_fp32(forward: Callable[P, T], back_to: torch.dtype | None, *args: P.args, **kwargs: P.kwargs) -> T:
    up = functools.partial(_cast, dtype=torch.float32)
    args, kwargs = tree_map(up, args), tree_map(up, kwargs)
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        out = forward(*args, **kwargs)
    return out if back_to is None else tree_map(functools.partial(_cast, dtype=back_to), out)


class _ScaledGradient(torch.autograd.Function):
    """Identity on the loss; multiplies its gradient by the scale, so that the reported loss stays in nats."""

    @staticmethod
    def forward(ctx: AutogradContext, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


class LossScale:
    """Dynamic loss scaling: fp16 flushes gradients below 6e-8 to zero, so they are scaled up and unscaled in fp32.

    Follows Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2) with the constants of torch.amp.GradScaler: a step
    with non-finite gradients halves the scale and is skipped; `interval` finite steps in a row double it. All
    arithmetic stays on the device, without host syncs.

    Example:
        >>> scale, w = LossScale("cpu", start=8.0), torch.ones(1, requires_grad=True)
        >>> scale(w.sum()).backward()
        >>> w.grad
        tensor([8.])
        >>> scale.unscale_([w])
        >>> w.grad
        tensor([1.])
        >>> scale.update(found_inf=torch.tensor(1.0)); float(scale.scale)
        4.0
    """

    def __init__(
        self,
        device: torch.device,
        *,
        start: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ):
        self.growth, self.backoff, self.interval = growth, backoff, interval
        # 2**16, as in torch.amp.GradScaler: the first steps lower it if it is too high.
        self.scale = torch.full((), start, dtype=torch.float32, device=device)
        self.finite_steps = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self, loss: Tensor) -> Tensor:
        """Returns the same loss with its gradient multiplied by the scale."""
        return _ScaledGradient.apply(loss, self.scale)

    def unscale_(self, parameters: Iterable[Tensor]) -> None:
        """Divides gradients by the scale in place. Half-precision gradients become fp32 first: dividing in half would
        underflow.
        """
        # Exact with the default constants, which are powers of 2.
        factor = self.scale.reciprocal()
        for p in parameters:
            if p.grad is None:
                continue
            if p.grad.dtype != torch.float32:
                p.grad_dtype = None  # type: ignore[attr-defined]  # lets a half parameter have an fp32 gradient
                p.grad = p.grad.float()
            p.grad.mul_(factor)

    def update(self, found_inf: Tensor) -> None:
        """Adjusts the scale after a step; `found_inf` is 1 if its gradients were not finite."""
        # The whole update by torch.where: an `if` on the flag would wait for the device.
        lost = found_inf != 0
        steps = torch.where(lost, 0, self.finite_steps + 1)
        due = steps == self.interval
        grown = self.scale * self.growth
        # A scale of infinity would never return to a finite one.
        grown = torch.where(due & torch.isfinite(grown), grown, self.scale)
        self.scale.copy_(torch.where(lost, self.scale * self.backoff, grown))
        # A skipped step has set `steps` to 0.
        self.finite_steps.copy_(torch.where(due, 0, steps))

    def state_dict(self) -> StateDict:
        # Reads the device, which is fine in a checkpoint.
        return {"scale": float(self.scale), "finite_steps": int(self.finite_steps)}

    def load_state_dict(self, state: StateDict) -> None:
        self.scale.fill_(state["scale"])
        self.finite_steps.fill_(state["finite_steps"])


class MasterAdamW(Guarded):
    """AdamW with fp32 master weights: updates the master and rounds it to the half-precision weight.

    fp32 parameters are updated without a master. Gradients may be half precision or fp32.

    Args:
        chunk: elements updated at a time, which bounds the fp32 copy of the gradient.
        fused: on CUDA, one kernel per half-precision parameter (`preheat.ops.optim.half_adamw`), without chunks.

    Example:
        >>> w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = MasterAdamW([w], lr=1e-4)
        >>> for _ in range(8):
        ...     w.grad = torch.ones_like(w); optimizer.step()
        >>> optimizer.state[w]["master"]                       # plain bf16 would stay at 1: its spacing there is 0.004
        tensor([0.9992, 0.9992, 0.9992])
    """

    def __init__(
        self,
        groups: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        chunk: int = 1 << 20,
        fused: bool = False,
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.chunk, self.fused = chunk, fused

    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        # 12 bytes per half-precision weight: two moments and the master.
        state = adamw_state(p, torch.float32)
        return state if p.dtype == torch.float32 else state | {"master": p.detach().float()}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: ParamGroup) -> None:
        p, grad, state = local_shards(p, grad, state)
        if self.fused:
            if "master" in state:
                half_adamw_(p, grad, state, group, self.found_inf)
            else:
                adamw_(p, grad.float(), state["exp_avg"], state["exp_avg_sq"], state["step"], group, self.found_inf)
            return
        # An fp32 parameter is its own master.
        value = state.get("master", p)
        flat = (value.view(-1), grad.reshape(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        step = state["step"]
        for weight, slope, mean, square in fold_identical(list(zip(*(t.split(self.chunk) for t in flat), strict=True))):
            step = state["step"].clone()  # torch increments it in every call
            adamw_(weight, slope.float(), mean, square, step, group, self.found_inf)
        state["step"].copy_(step)
        # Round to nearest: the master holds what rounding drops.
        if value is not p:
            p.copy_(value)
