"""Random search space of smaller model shapes under a parameter budget, and their relative latency."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from preheat.compress.structured_pruning import count_heads_at_once
from preheat.models.conversions.slicing import Sizes, build_parameter_counter, describe_misfit, sizes_of, width_step
from preheat.models.layerwise import plain_forward

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["draw", "smallest_sizes", "measure_relative_time"]

# Minimum fraction of the parameter budget that a shape with all its channels must use, so that all candidates have
# about the same size.
SPENT = 0.97
# Attempts per requested shape; most are rejected, because they miss the budget or repeat an earlier shape.
TRIES = 200
ROUNDS = 5  # timed forward passes per model


def draw(
    model: PreTrainedModel, *, parameters: float | None, draws: int, smallest: float, multiple: int, seed: int
) -> list[Sizes]:
    """Draws distinct shapes smaller than the model's that transformers supports.

    Returns fewer than `draws` shapes if there are no more.

    Each dimension keeps its full size with probability 1/2. Under a parameter budget, the feed-forward blocks get what
    the other dimensions leave.

    Args:
        parameters: fraction of the model's parameters to aim for, up to the granularity of channels; None: any.
        smallest: minimum fraction of each dimension.
        multiple: channels and hidden dimensions are multiples of it.
    """
    current, count, total = sizes_of(model.config), build_parameter_counter(model), model.num_parameters()
    group, rng = count_heads_at_once(current), random.Random(seed)
    budget = None if parameters is None else parameters * total
    shapes: dict[Sizes, None] = {}

    def sample(count: int) -> int:
        # Without the 1/2, nearly every shape would shrink every dimension.
        return count if rng.random() < 0.5 else rng.randint(max(math.ceil(smallest * count), 1), count)

    for _ in range(TRIES * draws):
        layers, units = sample(current.layers), sample(current.heads // group)
        heads = units * group
        # Some families need a width that is a multiple of the heads.
        step = width_step(model.config, heads, current.head_dim, multiple)
        widths = [w for w in range(step, current.hidden, step) if w >= smallest * current.hidden]
        hidden = current.hidden if not widths or rng.random() < 0.5 else rng.choice(widths)
        shape = replace(
            current, layers=layers, hidden=hidden, heads=heads, kv_heads=units if current.kv_heads > 1 else 1
        )
        if describe_misfit(model.config, shape):
            continue
        if budget is None:
            steps = current.channels // multiple
            # Fewer channels than one multiple stay as they are.
            channels = current.channels if not steps or rng.random() < 0.5 else rng.randint(1, steps) * multiple
        else:
            # Parameters are affine in the channels, so two counts give the number of channels that meets the budget.
            bare, full = (count(replace(shape, channels=c)) for c in (0, current.channels))
            channels = int((budget - bare) / (full - bare) * current.channels)
            # Down to a multiple, so that the budget holds.
            channels = current.channels if channels >= current.channels else channels // multiple * multiple
        shape = replace(shape, channels=channels)
        # Dimensions that are too large leave too few channels or none.
        if channels < max(smallest * current.channels, 1) or shape == current:
            continue
        if budget is not None and channels == current.channels and not SPENT * budget <= count(shape) <= budget:
            continue  # too far below the budget, or above it
        # A dict, which is an ordered set: the same seed gives the same order.
        shapes[shape] = None
        if len(shapes) == draws:
            break
    return list(shapes)


def smallest_sizes(model: PreTrainedModel, smallest: float, multiple: int) -> Sizes:
    """Returns the smallest shape that `draw` may draw, without the family's constraints on its width."""
    current = sizes_of(model.config)
    group = count_heads_at_once(current)
    # Rounded up, as in `draw`, whose fractions are minimums.
    units = max(math.ceil(smallest * current.heads / group), 1)

    def smallest_count(count: int) -> int:
        return min(math.ceil(smallest * count / multiple) * multiple, count)

    return Sizes(
        max(math.ceil(smallest * current.layers), 1),
        smallest_count(current.hidden),
        units * group,
        units if current.kv_heads > 1 else 1,
        smallest_count(current.channels),
        current.head_dim,
    )


def measure_relative_time(smaller: PreTrainedModel, model: PreTrainedModel, rows: Sequence[Tensor]) -> float:
    """Returns the forward time of `smaller` as a fraction of the model's, on the longest row.

    Medians of `ROUNDS` alternating passes; the first pass of each is warmup.
    """
    row = max(rows, key=lambda row: row.shape[-1]).to(model.device)
    seconds: tuple[list[float], list[float]] = ([], [])
    with plain_forward(smaller), plain_forward(model):
        # Alternating, so that the machine's load affects both models alike.
        for number in range(ROUNDS + 1):
            for timed, times in zip((smaller, model), seconds, strict=True):
                start = time.perf_counter()
                float(timed(input_ids=row).logits[0, -1, 0])  # synchronizes with the device
                if number:
                    times.append(time.perf_counter() - start)
    return median(seconds[0]) / median(seconds[1])
