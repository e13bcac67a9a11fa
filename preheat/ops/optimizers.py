"""Optimizers that torch does not have, and the creation of optimizer state before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from preheat.ops.rounding import stochastic_round_

__all__ = ["StochasticAdamW", "decay_groups", "fused_adamw", "prepare_state"]


def decay_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; norms, biases and other vectors without."""
    named = list(named)
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def prepare_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates AdamW's state at build time, as torch would in the first step: a failure inside a step then finds all or nothing."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }


def fused_adamw(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """torch's fused AdamW with its state created."""
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    prepare_state(optimizer)
    return optimizer


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW for bf16 weights: moments and arithmetic in fp32, the new weight rounded stochastically.

    Where bf16's step is larger than the update, plain rounding loses the update every time; here it lands with the right
    probability. fp32 parameters among the rest are updated as usual. Draws depend on `seed` and the step's number alone,
    so a resumed run draws the same.

    Args:
        number: says which step is being taken; counted here when not given.
        chunk: elements of a parameter that are updated at a time, so that fp32 scratch stays small.
    """

    def __init__(
        self,
        groups: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
        number: Callable[[], int] | None = None,
        chunk: int = 1 << 20,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seed, self.chunk = seed, chunk
        self._taken = 0
        self._number = number or (lambda: self._taken)
        self._generator = torch.Generator(device=self.param_groups[0]["params"][0].device)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; none where `self.found_inf` is 1, as with torch's fused optimizers."""
        assert closure is None
        self._generator.manual_seed((self.seed << 32) + self._number())
        self._taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], group)

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        flat = [
            t.reshape(-1) if t.is_contiguous() else t.contiguous().view(-1)
            for t in (p, grad, state["exp_avg"], state["exp_avg_sq"])
        ]
        assert p.is_contiguous(), "parameters are contiguous"
        step = state["step"]
        for weight, slope, mean, square in zip(*(t.split(self.chunk) for t in flat), strict=True):
            low = weight.dtype != torch.float32
            value = weight.float() if low else weight
            step = state["step"].clone()  # torch counts it up in every call
            self._adamw(value, slope.float(), mean, square, step, group)
            if low:
                stochastic_round_(weight, value, self._generator)
        state["step"].copy_(step)

    def _adamw(self, value: Tensor, slope: Tensor, mean: Tensor, square: Tensor, step: Tensor, group: dict[str, Any]) -> None:
        adamw(
            [value],
            [slope],
            [mean],
            [square],
            [],
            [step],
            fused=True,
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
