"""Longest sequences that fit: for a recipe as it is, or with a search at each length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from signal import SIGINT

from preheat.core import DATA
from preheat.core.plan import LongestContext
from preheat.errors import RecipeError
from preheat.hardware.interrupts import Interrupted
from preheat.planning.plan import plan
from preheat.planning.request import Request
from preheat.planning.search.candidates import Space
from preheat.planning.search.result import SearchResult, describe_too_large
from preheat.planning.search.search import search

__all__ = ["find_longest", "find_longest_as_stated"]

DOUBLINGS = 10
"""For a recipe as it is: each doubling costs a dry run, and 1024 times its length is beyond any practical limit."""
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
    tokens, best = batch.size * batch.seq_len, None
    length = batch.seq_len
    while True:
        # At least one row per device, even if that makes the batch larger than the recipe's.
        size = max(tokens // length, space.world)
        recipe = replace(space.recipe, batch=replace(batch, seq_len=length, size=size))
        longer = replace(space.request, recipe=recipe)
        try:
            result = search(replace(space, request=longer), passes=passes // 3, confirm=False, tell=tell)
        except Interrupted as signal:  # before the first dry run of this length
            if best is None or signal.number != SIGINT:
                raise
            return replace(best, interrupted=True)
        if result.interrupted:
            return replace(best or result, interrupted=True)
        if not result.best.plan.fits_safely:
            if best is not None:
                best.rejected.append((f"sequences of {length:,} tokens", describe_too_large(result.best.plan)))
            return best or result
        best = result
        # A technique that scales the rotary embedding extends the positions with the length.
        if 2 * length > positions and not _has_positions(space.request, 2 * length):
            best.rejected.append((f"sequences of {2 * length:,} tokens", f"the model has {positions:,} positions"))
            return best
        length *= 2


def find_longest_as_stated(request: Request) -> LongestContext:
    """Finds the longest sequences that fit with the recipe's own techniques and micro-batches of one sequence.

    Starts from the recipe's length and doubles it, or halves it if it does not fit.
    """
    recipe, sizes = request.recipe, request.context.sizes
    # The smallest batch: one sequence per micro-batch and data-parallel rank.
    rows = math.prod(sizes[axis] for axis in DATA) * math.prod(
        t.micro_batch_count() for t in recipe.techniques.values()
    )
    longest = LongestContext(0, None, "")
    length, doubled = recipe.batch.seq_len, 0
    while doubled < DOUBLINGS:
        longer = replace(recipe, batch=replace(recipe.batch, seq_len=length, size=rows))
        try:
            planned = plan(replace(request, recipe=longer))
        except RecipeError as error:  # the length is to blame: the recipe itself was planned before
            return replace(longest, limit=f"sequences of {length:,} tokens: {str(error).splitlines()[0]}")
        if planned.fits_safely:
            longest = replace(longest, length=length, peak_gib=planned.peak_gib)
            # A longer length failed before: the halving has found the answer.
            if longest.limit:
                return longest
            length, doubled = 2 * length, doubled + 1
            continue
        longest = replace(longest, limit=f"sequences of {length:,} tokens: {describe_too_large(planned)}")
        if longest.length or length < 2 * SHORTEST:
            return longest
        length //= 2
    return replace(longest, limit=f"sequences of {length:,} tokens were not tried")


def _has_positions(request: Request, length: int) -> bool:
    """True if the recipe extends the model's positions to the given length (RoPE scaling)."""
    recipe = request.recipe
    try:
        _ = replace(request, recipe=replace(recipe, batch=replace(recipe.batch, seq_len=length))).config
    except RecipeError:
        return False
    return True
