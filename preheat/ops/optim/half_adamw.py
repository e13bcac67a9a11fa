"""Fused AdamW for half-precision weights, one kernel per parameter: fp32 moments, stochastic rounding or fp32 masters.

`StochasticAdamW` and `MasterAdamW` use it on CUDA. It moves 22 bytes per element (28 with a master) and needs no
scratch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.ops.cuda_kernels import name_failures

if TYPE_CHECKING:
    from preheat.ops.distributed.dtensor_utils import Runs
    from preheat.ops.optim.param_groups import ParamGroup


__all__ = ["half_adamw_", "launch"]

# Elements in each of the four parts of a program: one Philox counter yields four sets of random bits.
_LANES = 512


def half_adamw_(
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    group: ParamGroup,
    found_inf: Tensor | None,
    *,
    seed: int = 0,
    runs: Runs | None = None,
) -> None:
    """Updates a half-precision weight in place; changes nothing if `found_inf` is 1.

    Args:
        weight: contiguous, on CUDA; bf16 without a master.
        state: step, exp_avg, exp_avg_sq and optionally master, all fp32.
        group: lr, betas, eps, weight_decay.
        seed: seed of the stochastic rounding, below 2 ** 62; ignored with a master.
        runs: the ranges of the full parameter's elements that this shard consists of; select the random bits.
    """
    first, number, apart, _, inner, far = runs or (0, 1, 0, 0, 1, 0)
    (beta1, beta2), (rate, eps, decay) = group["betas"], (group["lr"], group["eps"], group["weight_decay"])
    moments = state["exp_avg"], state["exp_avg_sq"]
    update = rate, beta1, beta2, eps, decay, seed, first, number, apart, inner, far
    _update(weight, grad.contiguous(), *moments, state.get("master"), state["step"], found_inf, *update)


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
    number: int,
    apart: int,
    inner: int,
    far: int,
) -> None:
    with name_failures("half_adamw"), torch.cuda.device_of(weight):
        update = rate, beta1, beta2, eps, decay, seed, first, number, apart, inner, far
        launch(weight, grad, mean, square, master, step, found_inf, *update)
    step.add_(1.0 if found_inf is None else 1.0 - found_inf)


@_update.register_fake
def _(*arguments: object) -> None:
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
    number: int = 1,
    apart: int = 0,
    inner: int = 0,
    far: int = 0,
) -> None:
    """Launches the kernel; does not advance `step`.

    Args:
        number, apart, inner, far: the weight's elements are so many ranges of the full parameter, in groups of `inner`;
            those of a group begin `apart` elements after each other, and groups `far` elements.
    """
    from preheat.ops.triton_kernels import adamw_kernel

    assert master is not None or weight.dtype == torch.bfloat16
    count, block = weight.numel() // number, 4 * _LANES
    base, shift = divmod(first, block)
    # Other runs may begin anywhere in a block.
    programs = -(-((block - 1 if number > 1 else shift) + count) // block)
    if not count:
        return
    # The first axis of a grid may be long: an expert's matrix that is split by inputs is a range for each row.
    adamw_kernel[(number, programs) if number > 1 else (programs,)](
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
        *(seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF, base, shift, count, apart, inner or number, far),
        MASTER=master is not None,
        GUARDED=found_inf is not None,
        SHIFTED=shift > 0 or number > 1,
        RUNS=number > 1,
        LANES=_LANES,
    )
