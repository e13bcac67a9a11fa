"""Sizes of a new model from one setting: `size: 15M` gives depth, width, heads, feed-forward width and learning rate.

The size N counts parameters outside of embedding and head, as in Kaplan et al. 2020 (arXiv:2001.08361), where loss
follows N and hardly depends on shape for aspect ratios width / depth from about 20 to 200. We take 64 (the ratio that
nanochat trains with), heads of 64 (128 from 400M parameters on), and choose the feed-forward width so that N is met
within a few per cent. `shape: deep` takes 20, the deep end of that range: below a billion parameters deep and thin
models score better at the same size (MobileLLM, Liu et al. 2024, arXiv:2402.14905: 30 layers of width 576 at 125M,
ratio 19) and have smaller embeddings, but a step takes longer, since layers run one after another.
The learning rate is Kaplan et al.'s fit (their equation D.1): 0.003239 - 0.0001395 ln N. This module does not import
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from preheat.errors import RecipeError
from preheat.recipe.consistency import find_size_problem

__all__ = ["Dimensions", "choose_dimensions", "learning_rate", "parse_size"]


@dataclass(frozen=True)
class Dimensions:
    """Shape of a decoder-only transformer."""

    layers: int
    width: int
    heads: int
    feed_forward: int


def parse_size(size: str) -> int:
    """Parameters from text like 15M or 1.1B.

    >>> parse_size("1.5K")
    1500
    """
    if problem := find_size_problem(size):
        raise RecipeError(f"model.size: {problem}")
    return round(float(size[:-1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[size[-1]])


_ASPECT = {"balanced": 64, "deep": 20}  # width / layers


def choose_dimensions(size: str, *, gated: bool = True, shape: str = "balanced") -> Dimensions:
    """Depth, width, heads and feed-forward width for a number of parameters outside embedding and head.

    Args:
        size: e.g. 15M.
        gated: three feed-forward matrices (SwiGLU) or two.
        shape: balanced, or deep for more and thinner layers.

    >>> choose_dimensions("15M")
    Dimensions(layers=7, width=448, heads=7, feed_forward=1024)
    >>> choose_dimensions("15M", shape="deep")
    Dimensions(layers=15, width=320, heads=5, feed_forward=640)
    """
    wanted = parse_size(size)
    # N = 12 L w^2: 4 w^2 in attention and 8 w^2 in the feed-forward block of each layer.
    # With w = aspect * L this gives L = (N / (12 aspect^2))^(1/3).
    layers = max(2, round((wanted / (12 * _ASPECT[shape] ** 2)) ** (1 / 3)))
    head = 64 if wanted < 4e8 else 128
    # The rounded L changes the width: w = sqrt(N / (12 L)), in whole heads.
    width = max(head, round(math.sqrt(wanted / (12 * layers)) / head) * head)
    matrices = 3 if gated else 2
    # Takes up the rounding of both: N / L = 4 w^2 + matrices * w * feed_forward.
    feed_forward = (wanted / layers - 4 * width**2) / (matrices * width)
    feed_forward = min(max(feed_forward, 1.5 * width), 6 * width)  # a usual ratio even if rounding moved the width far
    # Multiples of 64 keep matmuls fast.
    return Dimensions(layers, width, width // head, max(64, round(feed_forward / 64) * 64))


def learning_rate(parameters: int) -> float:
    """Peak learning rate of AdamW for N parameters outside embedding and head (Kaplan et al. 2020, equation D.1).

    >>> round(learning_rate(15_000_000), 6)
    0.000934
    """
    # The fit turns negative near 1.2e10 parameters; 1e-4 bounds it from below.
    return max(0.003239 - 0.0001395 * math.log(max(parameters, 1)), 1e-4)
