"""Stochastic rounding to bf16: right on average, so that updates smaller than half a step are not lost."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["stochastic_round_"]


def stochastic_round_(
    target: Tensor, value: Tensor, generator: torch.Generator | None = None, *, skip: int = 0, of: int | None = None
) -> Tensor:
    """Writes fp32 `value` into bf16 `target`, up or down with the probability that makes the mean exact. In place.

    Adds 16 random bits below bf16's last bit and cuts them off (as in Gopher's training, Rae et al. 2021, appendix C.2).
    Infinities and NaN stay what they are.

    Args:
        target: bf16, contiguous; value: fp32 of the same shape, overwritten as scratch.
        generator: on the tensors' device.
        skip, of: the elements are those from number `skip` on of so many for which random bits are drawn: a share of them then
            is rounded as it would be among all.

    Example:
        >>> out = torch.empty(100_000, dtype=torch.bfloat16)
        >>> _ = stochastic_round_(out, torch.full((100_000,), 1 + 2**-10))   # an eighth of a step above 1
        >>> round(float(out.float().mean() - 1) * 2**10, 1)
        1.0
    """
    assert (target.dtype, value.dtype) == (torch.bfloat16, torch.float32)
    assert target.shape == value.shape
    count = value.numel() if of is None else of
    # One 64-bit draw holds four sets of 16 bits: a quarter of the cost of single draws.
    draws = torch.empty(-(-count // 4), dtype=torch.int64, device=value.device).random_(
        -(2**63), None, generator=generator
    )
    bits = value.view(torch.int32)
    bits += draws.view(torch.int16)[skip : skip + value.numel()].view(value.shape).to(torch.int32).bitwise_and_(0xFFFF)
    bits &= -0x10000  # what is left is a bf16 number, so the cast below is exact
    return target.copy_(value)
