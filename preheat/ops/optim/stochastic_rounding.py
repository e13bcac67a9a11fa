"""Stochastic rounding to bf16: unbiased, so that updates smaller than half the spacing are not lost."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["stochastic_round_"]


def stochastic_round_(
    target: Tensor, value: Tensor, generator: torch.Generator | None = None, *, skip: int = 0, of: int | None = None
) -> Tensor:
    """Rounds fp32 `value` into bf16 `target`, up or down with the probability that makes it unbiased. In place.

    Adds 16 random bits below bf16's last bit and truncates (as in Gopher's training, Rae et al. 2021, appendix C.2).
    Infinities and NaN are unchanged.

    Args:
        target: bf16, contiguous; value: fp32 of the same shape, overwritten as scratch.
        generator: on the tensors' device.
        skip, of: draw random bits for `of` elements and use those from index `skip` on, so that a shard is rounded as
            it is in the full tensor.

    Example:
        >>> out = torch.empty(100_000, dtype=torch.bfloat16)
        >>> _ = stochastic_round_(out, torch.full((100_000,), 1 + 2**-10))   # an eighth of bf16's spacing above 1
        >>> round(float(out.float().mean() - 1) * 2**10, 1)
        1.0
    """
    assert (target.dtype, value.dtype) == (torch.bfloat16, torch.float32)
    assert target.shape == value.shape
    # Bits for the full parameter's chunk, of which a shard uses its own: the rounding does not depend on sharding.
    count = value.numel() if of is None else of
    # One 64-bit draw yields four sets of 16 bits, at a quarter of the cost.
    # All 64 bits: from the lowest int64 to the highest (`None`: no upper limit).
    draws = torch.empty(-(-count // 4), dtype=torch.int64, device=value.device).random_(
        -(2**63), None, generator=generator
    )
    # An fp32 number's upper 16 bits are its bf16 truncation; adding noise below 2**16 carries into them with the
    # probability of the part that truncation drops. The same bits work for both signs, since they hold the magnitude.
    bits = value.view(torch.int32)
    # int16 is signed: the mask makes the noise 0 to 65535.
    bits += draws.view(torch.int16)[skip : skip + value.numel()].view(value.shape).to(torch.int32).bitwise_and_(0xFFFF)
    bits &= -0x10000  # the result is a bf16 number, so the cast below is exact
    return target.copy_(value)
