"""Longest sequences that fit: for a recipe as it is, or with a search at each length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from signal import SIGINT

from preheat.core import DATA
from preheat.core.plan import LongestContext, Plan
from preheat.errors import RecipeError
from preheat.hardware.interrupts import Interrupted
from preheat.planning.plan import plan
from preheat.planning.request import Request
from preheat.planning.search.candidates import Space
from preheat.planning.search.largest_value import Attempt, find_largest, judge
from preheat.planning.search.result import SearchResult
from preheat.planning.search.search import search

__all__ = ["find_longest", "find_longest_as_stated"]

SHORTEST = 32
"""Tokens of the shortest sequence worth reporting."""


def find_longest(
    space: Space,
    *,
    passes: int = 160,
    tell: Callable[[str], None] = lambda message: None,
) -> SearchResult:
    """Finds the longest sequences that fit, with a search at each length.

    The length is doubled until nothing fits, up to the model's positions; the tokens per batch stay the same. Arguments
    and errors as of `search`.
    """
    batch = space.recipe.batch
    positions = space.model.positions or batch.seq_len
    tokens = batch.size * batch.seq_len
    best: SearchResult | None = None

    def attempt(length: int) -> Attempt[SearchResult]:
        nonlocal best
        # A technique that scales the rotary embedding extends the positions with the length.
        if best and length > positions and not _has_positions(space.request, length):
            return Attempt(None, reason=f"the model has {positions:,} positions")
        # At least one row per device, even if that makes the batch larger than the recipe's.
        size = max(tokens // length, space.world)
        recipe = replace(space.recipe, batch=replace(batch, seq_len=length, size=size))
        longer = replace(space.request, recipe=recipe)
        result = search(replace(space, request=longer), passes=passes // 3, confirm=False, tell=tell)
        if result.interrupted:
            best = best or result
            raise Interrupted(SIGINT)
        if best is None or result.best.plan.fits_safely:
            best = result
        return judge(result.best.plan, result)

    try:
        longest = find_largest(attempt, batch.seq_len, least=batch.seq_len, refine=False)
    except Interrupted as signal:
        if best is None or signal.number != SIGINT:  # before the first dry run
            raise
        return replace(best, interrupted=True)
    assert best is not None, "the first length was searched"
    if longest.largest and longest.too_large:
        length, refused = longest.too_large
        best.rejected.append((f"sequences of {length:,} tokens", refused.reason))
    return best


def find_longest_as_stated(request: Request) -> LongestContext:
    """Finds the longest sequences that fit with the recipe's own techniques and micro-batches of one sequence.

    Starts from the recipe's length and doubles it, or halves it if it does not fit.
    """
    recipe, sizes = request.recipe, request.context.sizes
    # The smallest batch: one sequence per micro-batch and data-parallel rank.
    rows = math.prod(sizes[axis] for axis in DATA) * math.prod(
        t.micro_batch_count() for t in recipe.techniques.values()
    )

    def attempt(length: int) -> Attempt[Plan]:
        longer = replace(recipe, batch=replace(recipe.batch, seq_len=length, size=rows))
        try:
            planned = plan(replace(request, recipe=longer))
        except RecipeError as error:  # the length is to blame: the recipe itself was planned before
            return Attempt(None, reason=str(error).splitlines()[0])
        return judge(planned, planned)

    longest = find_largest(attempt, recipe.batch.seq_len, least=SHORTEST, refine=False)
    length, fitting = longest.largest or (0, None)
    peak = fitting.result.peak_gib if fitting and fitting.result else None
    if longest.too_large is None:
        return LongestContext(length, peak, f"sequences of {2 * length:,} tokens were not tried")
    beyond, refused = longest.too_large
    return LongestContext(length, peak, f"sequences of {beyond:,} tokens: {refused.reason}")


def _has_positions(request: Request, length: int) -> bool:
    """True if the recipe extends the model's positions to the given length (RoPE scaling)."""
    recipe = request.recipe
    try:
        _ = replace(request, recipe=replace(recipe, batch=replace(recipe.batch, seq_len=length))).config
    except RecipeError:
        return False
    return True
