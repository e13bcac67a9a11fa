"""Quantization that minimizes the output error: clipping search, AWQ, GPTQ and SmoothQuant.

All use a layer's inputs x through their Gram matrix sum(x x^T) [in, in]: the squared output error over the calibration
tokens is tr(D gram D^T) for a change D of the weight [out, in].
"""

from __future__ import annotations

import torch
from torch import Tensor

from preheat.ops.quantization.grids import (
    HALF,
    Groups,
    compute_group_grid,
    dequantize_groups,
    quantize_groups,
    round_groups,
)

__all__ = ["quantize_awq", "quantize_gptq", "compute_output_error", "search_clipping", "smooth"]

_SHRINKS = tuple(1.0 - 0.05 * n for n in range(9))  # clipping candidates: 100 % to 60 % of a group's range
_POWERS = tuple(n / 20 for n in range(21))  # AWQ's grid of exponents


def compute_output_error(change: Tensor, gram: Tensor) -> float:
    """Returns the squared output error over all tokens for a change [out, in] of the weight.

    Example:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> compute_output_error(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), x.t() @ x)
        5.0
    """
    # tr(D G D^T) is the sum over the elements of (D G) * D, without a matrix of [out, out].
    return float(((change @ gram) * change).sum())


def search_clipping(weight: Tensor, gram: Tensor, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Searches the clipping of each group that minimizes its output error.

    Returns scales and zeros as `compute_group_grid`. Groups are searched independently, with the diagonal blocks of the
    Gram matrix.
    """
    count = weight.shape[1] // group
    blocks = gram.unflatten(0, (count, group)).unflatten(2, (count, group))  # [groups, group, groups, group]
    own = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [groups, group, group]
    best: Tensor | None = None
    grid: tuple[Tensor, Tensor | None] | None = None
    for shrink in _SHRINKS:
        scales, zeros = compute_group_grid(weight, group, symmetric=symmetric, shrink=shrink)
        change = dequantize_groups(Groups(round_groups(weight, scales, zeros), scales, zeros)) - weight
        change = change.unflatten(1, (count, group)).transpose(0, 1)  # [groups, out, group]
        error = ((change @ own) * change).sum(dim=2).t()  # [out, groups]
        if best is None or grid is None:
            best, grid = error, (scales, zeros)
            continue
        # The best shrink of each group of each output on its own.
        better = error < best
        best = torch.where(better, error, best)
        best_zeros = None if zeros is None or grid[1] is None else torch.where(better, zeros, grid[1])
        grid = torch.where(better, scales, grid[0]), best_zeros
    assert grid is not None
    return grid


def quantize_awq(weight: Tensor, gram: Tensor, group: int, *, symmetric: bool = True) -> tuple[Groups, Tensor]:
    """Activation-aware weight quantization (AWQ): finer steps for inputs that are large on average.

    The weight's columns are multiplied by s and the inputs divided by it, with s = rms(x)^a and the a in [0, 1] of
    least output error; then each group's range is chosen. Lin et al. 2023 (arXiv:2306.00978), with the root mean square
    in place of the mean magnitude.

    Args:
        weight: [out, in].
        gram: sum(x x^T) over the inputs [in, in].

    Returns:
        Codes of the weight with its columns divided by the factors, and the factors [in] in bf16, which multiply the
        inputs.

    Example:
        >>> groups, factors = quantize_awq(torch.randn(8, 64), torch.eye(64), 32)
        >>> groups.codes.shape, factors.shape
        (torch.Size([8, 64]), torch.Size([64]))
    """
    weight, gram = weight.detach().float(), gram.float()
    # Root of the summed squares; the mean's divisor cancels in the normalization below.
    size = gram.diagonal().clamp(min=1e-12).sqrt()

    def try_scale(power: float, searched: bool) -> tuple[float, Groups, Tensor]:
        s = size.pow(power)
        # Normalized by the geometric mean of the extremes, as in the authors' code, which centers the factors on 1.
        factors = (1 / (s / (s.max() * s.min()).sqrt())).to(HALF)
        wide = weight / factors.float()
        if searched:
            # The inputs of the scaled weight are x * factors, so their Gram matrix is F G F.
            grid = search_clipping(wide, gram * factors.float()[:, None] * factors.float(), group, symmetric=symmetric)
            groups = Groups(round_groups(wide, *grid), *grid)
        else:
            groups = quantize_groups(wide, group, symmetric=symmetric)
        # Compared in the original space: the quantized weight with its factors against the weight.
        return compute_output_error(dequantize_groups(groups) * factors.float() - weight, gram), groups, factors

    # The power is chosen without the search of ranges, which tries nine grids per power.
    power = min(_POWERS, key=lambda power: try_scale(power, False)[0])
    _, groups, factors = min(
        (try_scale(power, searched) for searched in (False, True)), key=lambda candidate: candidate[0]
    )
    return groups, factors


def quantize_gptq(
    weight: Tensor, gram: Tensor, group: int, *, symmetric: bool = True, damping: float = 0.01, block: int = 128
) -> Groups:
    """GPTQ: quantizes column by column and compensates each error in the remaining columns.

    Frantar et al. 2022 (arXiv:2210.17323), algorithm 1. Columns are processed by decreasing input size, on grids that
    `search_clipping` chooses beforehand, so that the column order in memory does not change.

    Args:
        weight: [out, in].
        gram: sum(x x^T) over the inputs [in, in].
        damping: added to the diagonal, as a fraction of its mean.
        block: columns between two batched updates of the remaining columns.

    Returns:
        Codes and grid.

    Example:
        >>> quantize_gptq(torch.randn(8, 64), torch.eye(64), 32).codes.dtype
        torch.uint8
    """
    original = weight.detach().float()
    scales, zeros = search_clipping(original, gram.float(), group, symmetric=symmetric)
    # The Hessian of the squared output error, up to a factor. fp64, because it may be nearly singular.
    curve = gram.double().clone()
    diagonal = curve.diagonal()  # a view: writing to it changes `curve`
    unused = diagonal <= 0  # inputs that are always zero
    diagonal[unused] = diagonal.mean().clamp(min=1e-12)
    order = diagonal.argsort(descending=True)
    diagonal += damping * diagonal.mean()
    # The upper Cholesky factor U of the inverse, H^-1 = U^T U: row n holds what GPTQ needs after columns before n are
    # fixed, so that no inverse is updated per column (arXiv:2210.17323, step 3).
    upper = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(curve[order][:, order])), upper=True
    ).float()
    # `left`: the weights still to be quantized, with compensation. `codes` keeps the original column order.
    left, codes = original[:, order].clone(), torch.empty_like(original, dtype=torch.uint8)
    columns = order.tolist()
    for start in range(0, len(columns), block):
        end = min(start + block, len(columns))
        # Errors of this block, [out, block]; columns after the block receive them in one matmul.
        lost = torch.zeros(original.shape[0], end - start, device=weight.device)
        for n in range(start, end):
            # The grid of the group in which the column lies in memory, not in processing order.
            scale = scales[:, columns[n] // group, None]
            zero = None if zeros is None else zeros[:, columns[n] // group, None]
            code = round_groups(left[:, n : n + 1], scale, zero)
            codes[:, columns[n]] = code[:, 0]
            error = (left[:, n] - dequantize_groups(Groups(code, scale, zero))[:, 0]) / upper[n, n]
            # Spreads the error over the remaining columns of the block.
            left[:, n:end] -= error[:, None] * upper[n, n:end]
            lost[:, n - start] = error
        left[:, end:] -= lost @ upper[start:end, end:]
    return Groups(codes, scales, zeros)


def smooth(weight: Tensor, largest: Tensor, strength: float = 0.5) -> Tensor:
    """Returns SmoothQuant's factors [in] in bf16, which multiply the inputs and move their outliers into the weight.

    s = max|x|^strength / max|w|^(1 - strength) for each input, and inputs are divided by it. Xiao et al. 2022
    (arXiv:2211.10438), eq. 4.

    Args:
        weight: [out, in].
        largest: [in], the largest observed magnitude of each input.

    Example:
        >>> smooth(torch.ones(2, 2), torch.tensor([4.0, 1.0])).tolist()
        [0.5, 1.0]
    """
    # Clamped, since an input that is always 0 would give a factor of infinity.
    s = largest.float().clamp(min=1e-5).pow(strength) / weight.detach().float().abs().amax(dim=0).clamp(min=1e-5).pow(
        1 - strength
    )
    return (1 / s.clamp(min=1e-5)).to(HALF)
