"""AdamW of half weights as one operator a parameter: moments in fp32, the weight rounded stochastically or from its fp32 master.

What `StochasticAdamW` and `MasterAdamW` take on CUDA. 22 bytes are read and written for an element, 28 with a master, and there is no scratch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from preheat.ops.cuda_kernels import named_failures

__all__ = ["half_adamw_", "launch"]

_LANES = 512  # elements of each of the four parts of a program: a counter of Philox gives four sets of random bits


def half_adamw_(
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    group: dict[str, Any],
    found_inf: Tensor | None,
    *,
    seed: int = 0,
    first: int = 0,
) -> None:
    """One update of a half weight, in place; none where `found_inf` is 1.

    Args:
        weight: contiguous, on CUDA; bf16 without a master.
        state: step, exp_avg, exp_avg_sq and, where the weight has one, master; fp32.
        group: lr, betas, eps, weight_decay.
        seed: of the random bits that round the weight, below 2 ** 62; not read with a master.
        first: the weight's elements are those from this number on of a larger one, whose other elements draw other bits.
    """
    (beta1, beta2), (rate, eps, decay) = group["betas"], (group["lr"], group["eps"], group["weight_decay"])
    moments = state["exp_avg"], state["exp_avg_sq"]
    _update(
        weight,
        grad.contiguous(),
        *moments,
        state.get("master"),
        state["step"],
        found_inf,
        rate,
        beta1,
        beta2,
        eps,
        decay,
        seed,
        first,
    )


@torch.library.custom_op(
    "preheat::half_adamw_", mutates_args=("weight", "mean", "square", "master", "step"), device_types="cuda"
)
def _update(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    master: Tensor | None,
    step: Tensor,
    found_inf: Tensor | None,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    seed: int,
    first: int,
) -> None:
    with named_failures("half_adamw"), torch.cuda.device_of(weight):
        launch(weight, grad, mean, square, master, step, found_inf, rate, beta1, beta2, eps, decay, seed, first)
    step.add_(1.0 if found_inf is None else 1.0 - found_inf)


@_update.register_fake
def _(*arguments: Any) -> None:
    pass


def launch(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    master: Tensor | None,
    step: Tensor,
    found_inf: Tensor | None,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    seed: int,
    first: int,
) -> None:
    """Starts the kernel; `step` is left as it is."""
    from preheat.ops.triton_kernels import adamw_kernel

    assert master is not None or weight.dtype == torch.bfloat16
    count, block = weight.numel(), 4 * _LANES
    base, shift = divmod(first, block)
    programs = -(-(shift + count) // block)
    if not count:
        return
    adamw_kernel[(programs,)](
        *(
            weight,
            grad,
            mean,
            square,
            mean if master is None else master,
            step,
            step if found_inf is None else found_inf,
        ),
        *(rate, 1.0 - rate * decay, 1.0 - beta1, beta2, 1.0 - beta2, math.log(beta1), math.log(beta2), eps),
        *(seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF, base, shift, count),
        MASTER=master is not None,
        GUARDED=found_inf is not None,
        SHIFTED=shift > 0,
        LANES=_LANES,
    )
