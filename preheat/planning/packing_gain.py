"""The gain of packing over padding: tokens of the data per second, by two dry runs and the lengths of its rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from preheat.core import DATA
from preheat.core.plan import Plan
from preheat.planning.observation_cache import observe_cached
from preheat.planning.plan import describe
from preheat.planning.request import Request

if TYPE_CHECKING:
    from preheat.data.packing import Rows

__all__ = ["average_longest", "estimate_packing_gain"]

_MULTIPLE = 8
"""Trainers pad micro-batches to a multiple of this many tokens."""


def average_longest(lengths: np.ndarray, count: int) -> float:
    """Returns the expected length of the longest of `count` rows that are drawn at random.

    Example:
        >>> average_longest(np.array([1, 3]), 1), average_longest(np.array([1, 3]), 2)
        (2.0, 2.5)
    """
    # The share of draws of which all are among the shortest n rows.
    shares = (np.arange(len(lengths) + 1) / len(lengths)) ** count
    return float(np.diff(shares) @ np.sort(lengths))


def estimate_packing_gain(request: Request, planned: Plan, rows: Rows) -> float:
    """Returns how many times as many tokens of the data a second packed rows train as padded ones.

    A padded micro-batch is as long as its longest row.

    Args:
        request: of the recipe, whose sequences have their full length.
        planned: its plan.
        rows: the data, packed whole.
    """
    recipe, sizes = request.recipe, request.context.sizes
    ranks = math.prod(sizes[axis] for axis in DATA)
    micro_batches = math.prod(t.micro_batch_count() for t in recipe.techniques.values())
    lengths = rows.example_lengths
    longest = average_longest(lengths, max(recipe.batch.size // (ranks * micro_batches), 1))
    padded = min(math.ceil(longest / _MULTIPLE) * _MULTIPLE, recipe.batch.seq_len)
    shorter = replace(request, recipe=replace(recipe, batch=replace(recipe.batch, seq_len=padded)))
    as_padded = describe(shorter, observe_cached(shorter)).tokens_per_second * float(lengths.mean()) / padded
    as_packed = planned.tokens_per_second * rows.tokens_total / (len(rows) * rows.length)
    return as_packed / as_padded
