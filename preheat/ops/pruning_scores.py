"""Pruning: importance scores of weights and units from activations, and masks of the lowest."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "score_contribution",
    "extract_blocks",
    "find_highest",
    "score_influence",
    "mask_lowest",
    "sum_moments",
    "refit",
    "mask_two_of_four",
    "score_wanda",
]


def score_wanda(weight: Tensor, squares: Tensor) -> Tensor:
    """Scores single weights: |weight| times the norm of its input (Wanda).

    Args:
        weight: [out, in].
        squares: sum of squares of each input over the calibration tokens, [in].

    Source: Sun et al. 2023 (arXiv:2306.11695), equation 1.
    """
    return weight.abs() * squares.sqrt()


def mask_lowest(scores: Tensor, share: float, *, by_row: bool) -> Tensor:
    """Returns a mask of the lowest `share` of scores [rows, columns], per row or overall. Ties go to the first.

    Example:
        >>> mask_lowest(torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), 0.5, by_row=True).int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0]]
    """
    flat = scores if by_row else scores.reshape(1, -1)
    # A fixed number per row (or in all), so that the sparsity is exact even with equal scores.
    count = round(share * flat.shape[1])
    order = flat.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order, True).view_as(scores)


def mask_two_of_four(scores: Tensor) -> Tensor:
    """Returns a mask of the two lowest of every four scores along the inputs. scores: [out, in], `in` % 4 == 0.

    NVIDIA's sparse tensor cores run this 2:4 pattern at up to twice the rate (Mishra et al. 2021, arXiv:2104.08378).
    """
    # [out, in / 4, 4]
    fours = scores.reshape(scores.shape[0], -1, 4)
    order = fours.argsort(dim=2, stable=True)[..., :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(2, order, True).view_as(scores)


def sum_moments(x: Tensor, units: int) -> Tensor:
    """Sums the second moments of each unit over tokens: x [..., units * size] -> [units, size, size].

    Example:
        >>> sum_moments(torch.tensor([[1.0, 2], [3, 4]]), 2).flatten().tolist()
        [10.0, 20.0]
    """
    # [units, tokens, size]
    parts = x.reshape(-1, units, x.shape[-1] // units).transpose(0, 1)
    return parts.transpose(1, 2) @ parts


def extract_blocks(gram: Tensor, units: int) -> Tensor:
    """Extracts the `sum_moments` of each unit from a Gram matrix: [in, in] -> [units, size, size]."""
    size = len(gram) // units
    # The diagonal blocks of [units, size, units, size]; `diagonal` puts the units last.
    return gram.view(units, size, units, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def score_contribution(weight: Tensor, second: Tensor) -> Tensor:
    """Scores each unit by its contribution to the residual stream: |its columns of `weight` @ its part|², summed over
    tokens.

    Args:
        weight: weight of the layer that writes to the stream, [width, units * size].
        second: `sum_moments` of the layer's inputs, [units, size, size].

    Returns:
        [units]; exactly 0 if removing the unit changes nothing.
    """
    # [units, width, size]
    parts = weight.reshape(weight.shape[0], *second.shape[:2]).transpose(0, 1)
    # The trace of P S P^T per unit, without the [width, width] product. Rounding may make a zero slightly negative.
    return ((parts @ second) * parts).sum(dim=(1, 2)).clamp(min=0)


def score_influence(before: Tensor, after: Tensor) -> Tensor:
    """Scores a layer by 1 - cosine of its input and output, mean over tokens. [..., width] each.

    Source: block influence, Men et al. 2024 (arXiv:2403.03853), equation 1.
    """
    return 1 - torch.nn.functional.cosine_similarity(before, after, dim=-1).mean()


def find_highest(scores: Tensor, count: int) -> Tensor:
    """Returns the ascending indices of the `count` highest scores [n]; ties go to the first.

    Example:
        >>> find_highest(torch.tensor([3.0, 1, 2]), 2).tolist()
        [0, 2]
    """
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def refit(weight: Tensor, gram: Tensor, remaining: Tensor, ridge: float = 0.01) -> Tensor:
    """Refits the weight to the remaining inputs by least squares over the calibration tokens.

    Args:
        weight: [out, in].
        gram: Gram matrix of the inputs, summed over tokens, [in, in].
        remaining: indices of the remaining inputs.
        ridge: regularization towards the original columns, as a fraction of the mean square of a remaining input.

    Returns:
        [out, remaining]; the original columns if the removed inputs are zero.

    Source: optimal update of structured pruning, Kurtic et al. 2023 (arXiv:2302.04089), closed form for all removed
    inputs.
    """
    gone = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    gone[remaining] = False
    # fp64: Gram matrices of activations are close to singular.
    inside = gram[remaining][:, remaining].double()
    damp = ridge * inside.diagonal().mean().clamp(min=1e-12)
    inside.diagonal().add_(damp)
    # [out, remaining]: the correlation of the removed inputs' output with the remaining inputs
    lost = weight[:, gone].double() @ gram[gone][:, remaining].double()
    # W' = W_r + W_g G_gr (G_rr + damp I)^-1
    return (weight[:, remaining].double() + torch.linalg.solve(inside, lost.t()).t()).to(weight.dtype)
