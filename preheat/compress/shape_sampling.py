"""Shapes of a smaller model under a budget, drawn at random, and how long one takes beside the whole model."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from preheat.compress.structured_pruning import heads_at_once
from preheat.models.conversions.slicing import Sizes, counter, misfit, sizes_of, width_step
from preheat.models.layerwise import plainly

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["draw", "least", "relative_time"]

SPENT = 0.97  # share of a budget of parameters that a shape with all its channels makes use of at least: shapes are compared at one size
TRIES = 200  # draws for each shape that is wanted; most are refused, since they meet no budget or were drawn before
ROUNDS = 5


def draw(
    model: PreTrainedModel, *, parameters: float | None, draws: int, smallest: float, multiple: int, seed: int
) -> list[Sizes]:
    """Different shapes smaller than the model's, that transformers has; fewer than `draws`, or none, where there are no more.

    Each kind is left whole half of the time. Under a budget of parameters, the feed-forward blocks get what the rest leaves of it.

    Args:
        parameters: share of the model's that a shape may have, and has as nearly as channels go; None: any.
        smallest: least share of each kind.
        multiple: channels and stream dimensions are multiples of it.
    """
    now, count, whole = sizes_of(model.config), counter(model), model.num_parameters()
    group, rng = heads_at_once(now), random.Random(seed)
    budget = None if parameters is None else parameters * whole
    found: dict[Sizes, None] = {}

    def some(count: int) -> int:
        return count if rng.random() < 0.5 else rng.randint(max(math.ceil(smallest * count), 1), count)

    for _ in range(TRIES * draws):
        layers, units = some(now.layers), some(now.heads // group)
        heads = units * group
        step = width_step(model.config, heads, now.head_dim, multiple)
        widths = [w for w in range(step, now.hidden, step) if w >= smallest * now.hidden]
        hidden = now.hidden if not widths or rng.random() < 0.5 else rng.choice(widths)
        shape = replace(now, layers=layers, hidden=hidden, heads=heads, kv_heads=units if now.kv_heads > 1 else 1)
        if misfit(model.config, shape):
            continue
        if budget is None:
            channels = now.channels if rng.random() < 0.5 else rng.randint(1, now.channels // multiple) * multiple
        else:
            bare, full = (count(replace(shape, channels=c)) for c in (0, now.channels))
            channels = int((budget - bare) / (full - bare) * now.channels)
            channels = now.channels if channels >= now.channels else channels // multiple * multiple
        shape = replace(shape, channels=channels)
        if channels < max(smallest * now.channels, 1) or shape == now:
            continue
        if budget is not None and channels == now.channels and not SPENT * budget <= count(shape) <= budget:
            continue  # it leaves more of the budget than the steps of channels do
        found[shape] = None
        if len(found) == draws:
            break
    return list(found)


def least(model: PreTrainedModel, smallest: float, multiple: int) -> Sizes:
    """The smallest of the shapes that `draw` may draw, but for what a family asks of its width."""
    now = sizes_of(model.config)
    group = heads_at_once(now)
    units = max(math.ceil(smallest * now.heads / group), 1)

    def part(count: int) -> int:
        return min(math.ceil(smallest * count / multiple) * multiple, count)

    return Sizes(
        max(math.ceil(smallest * now.layers), 1),
        part(now.hidden),
        units * group,
        units if now.kv_heads > 1 else 1,
        part(now.channels),
        now.head_dim,
    )


def relative_time(made: PreTrainedModel, model: PreTrainedModel, rows: Sequence[Tensor]) -> float:
    """Time of `made` for the longest row, as a share of the model's: medians of a few passes that take turns, after one each."""
    row = max(rows, key=lambda row: row.shape[-1]).to(model.device)
    seconds: tuple[list[float], list[float]] = ([], [])
    with plainly(made), plainly(model):
        for number in range(ROUNDS + 1):
            for one, own in zip((made, model), seconds, strict=True):
                begun = time.perf_counter()
                float(one(input_ids=row).logits[0, -1, 0])  # waits for a device to be done
                if number:
                    own.append(time.perf_counter() - begun)
    return median(seconds[0]) / median(seconds[1])
