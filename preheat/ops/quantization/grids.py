"""Integer quantization grids, rounding and packing of codes.

int8 has one scale per output: w = code * scale. int4 has one scale per `group` of inputs of an output: w = (code - 8) *
scale (+ zero). Scales and zeros are rounded to bf16 *before* codes are chosen, so that the stored grid is the one that
was rounded to. In a symmetric group the extreme value is code 0 (-8 scales) and the scale has the opposite sign: all
sixteen codes are used, requantizing changes nothing, and the grid equals llama.cpp's Q4_0 (group 32), which holds the
same codes without loss. Sources: Q4_0 in ggml; groups with a zero: Frantar et al. 2022 (arXiv:2210.17323), section 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "HALF",
    "Groups",
    "nearest_divisor",
    "compute_group_grid",
    "dequantize_groups",
    "pack",
    "quantize_groups",
    "quantize_rows",
    "round_groups",
    "round_inputs",
    "unpack",
]

HALF = torch.bfloat16
"""Dtype of scales, zeros and everything that is not quantized."""
_TINY = 1e-30  # smallest scale, against division by zero


class Groups(NamedTuple):
    """A weight [out, in] in int4.

    Attributes:
        codes: uint8 [out, in], from 0 to 15.
        scales: bf16 [out, in / group].
        zeros: bf16 [out, in / group]; None: symmetric.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def quantize_rows(weight: Tensor, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes a weight to int8 with one scale per output.

    Args:
        weight: [out, in].
        limit: [out], the magnitude that maps to 127; the row's largest if None.

    Returns:
        codes int8 [out, in] and scales bf16 [out].

    Example:
        >>> codes, scales = quantize_rows(torch.tensor([[1.0, -0.5, 0.25]]))
        >>> codes.tolist()
        [[127, -64, 32]]
    """
    weight = weight.detach().float()
    limit = weight.abs().amax(dim=1) if limit is None else limit
    # 127 and not 128, so that the grid is symmetric and -128 is never used.
    scales = (limit / 127).clamp(min=_TINY).to(HALF)
    return (weight / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def compute_group_grid(
    weight: Tensor, group: int, *, symmetric: bool, shrink: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Returns scales and zeros for a weight [out, in], bf16 [out, in / group] each; zeros are None if symmetric.

    Args:
        group: inputs per scale; divides `in`.
        symmetric: no zeros.
        shrink: fraction of a group's range that the codes span; values beyond it are clipped.
    """
    blocks = weight.detach().float().unflatten(1, (-1, group))  # [out, groups, group]
    if symmetric:
        at = blocks.abs().argmax(dim=2, keepdim=True)
        extreme = blocks.gather(2, at)[..., 0] * shrink  # [out, groups], with its sign
        scales = (extreme / -8).to(HALF)
        # A group of zeros: any scale but 0 serves. Scales have a sign, so clamp cannot be used.
        return torch.where(scales.abs() < _TINY, torch.ones_like(scales), scales), None
    low, high = blocks.amin(dim=2) * shrink, blocks.amax(dim=2) * shrink
    # Sixteen codes have fifteen steps from low to high.
    scales = ((high - low) / 15).clamp(min=_TINY).to(HALF)
    # Code 0 is (0 - 8) * scale + zero = low.
    return scales, (low + 8 * scales.float()).to(HALF)


def round_groups(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Returns the nearest codes, uint8 [out, in], on a given grid."""
    blocks = weight.detach().float().unflatten(1, (scales.shape[1], -1))
    if zeros is not None:
        blocks = blocks - zeros.float()[..., None]
    return (blocks / scales.float()[..., None] + 8).round().clamp(0, 15).to(torch.uint8).flatten(1)


def quantize_groups(weight: Tensor, group: int, *, symmetric: bool = True, shrink: float = 1.0) -> Groups:
    """Quantizes a weight [out, in] to int4 by rounding to nearest.

    Example:
        >>> groups = quantize_groups(torch.tensor([[-8.0, 7.0, 0.4, 1.0]]), 4)
        >>> groups.codes.tolist(), dequantize_groups(groups).tolist()
        ([[0, 15, 8, 9]], [[-8.0, 7.0, 0.0, 1.0]])
    """
    scales, zeros = compute_group_grid(weight, group, symmetric=symmetric, shrink=shrink)
    return Groups(round_groups(weight, scales, zeros), scales, zeros)


def dequantize_groups(groups: Groups, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantizes to a weight [out, in]."""
    codes = groups.codes.to(dtype).unflatten(1, (groups.scales.shape[1], -1)).sub_(8)  # [out, groups, group]
    codes.mul_(groups.scales.to(dtype)[..., None])
    if groups.zeros is not None:
        codes.add_(groups.zeros.to(dtype)[..., None])
    return codes.flatten(1)


def pack(codes: Tensor) -> Tensor:
    """Packs codes [out, in] below 16 into uint8 [out, ceil(in / 2)]; even positions go to the low half.

    Example:
        >>> pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8)).tolist()
        [[33, 3]]
    """
    # With an odd number of inputs `high` is a column shorter, and the last high half stays 0.
    low, high = codes[:, 0::2], codes[:, 1::2]
    packed = low.clone()
    packed[:, : high.shape[1]] |= high << 4
    return packed


def unpack(packed: Tensor, inputs: int) -> Tensor:
    """Inverts `pack`: returns codes uint8 [out, inputs]."""
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :inputs]


def round_inputs(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes the inputs of a layer to int8.

    Args:
        x: [tokens, in].
        scale: one static scale for all tokens; None: a dynamic scale per token from its largest value.

    Returns:
        Codes as fp32 [tokens, in], whole numbers from -127 to 127, and scales fp32, [tokens, 1] or [].
    """
    wide = x.float()
    scale = (wide.abs().amax(dim=1, keepdim=True) / 127).clamp(min=_TINY) if scale is None else scale.float()
    return (wide / scale).round_().clamp_(-127, 127), scale


def nearest_divisor(inputs: int, wanted: int) -> int:
    """Returns the divisor of `inputs` nearest to `wanted` (the smaller on a tie); 1 only for `inputs` 1.

    Example:
        >>> nearest_divisor(172, 32), nearest_divisor(768, 32), nearest_divisor(7, 4)
        (43, 32, 7)
    """
    # From 2: a group of one input would store a scale per weight.
    divisors = [n for n in range(2, inputs + 1) if inputs % n == 0] or [1]
    return min(divisors, key=lambda n: (abs(n - wanted), n))
