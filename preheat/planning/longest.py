"""The longest rows that fit: a search for each length, until none fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from preheat.hardware.rates import Rates
from preheat.models import adapter
from preheat.planning.candidates import Space
from preheat.planning.found import Found, too_large
from preheat.planning.roofline import Roofline
from preheat.planning.search import search

__all__ = ["longest"]


def longest(
    space: Space,
    *,
    rates: Rates | Roofline,
    in_use: int = 0,
    seconds: float = 10.0,
    confirm: bool = True,
    tell: Callable[[str], None] = lambda words: None,
) -> Found:
    """The longest rows that fit, as `search` finds them: doubled until they do not, up to the model's positions; tokens a batch stay what they are.

    Arguments and errors as of `search`.
    """
    batch = space.recipe.batch
    positions = adapter.facts(space.config).positions or batch.length
    tokens, best = batch.size * batch.length, None
    length = batch.length
    while True:
        size = max(tokens // length, space.world)
        recipe = replace(space.recipe, batch=replace(batch, length=length, size=size))
        found = search(replace(space, recipe=recipe), rates=rates, in_use=in_use, seconds=seconds / 3, confirm=False, tell=tell)
        if not found.best.plan["fits"]:
            if best is not None:
                best.rejected.append((f"rows of {length:,} tokens", too_large(found.best.plan)))
            return best or found
        best = found
        if 2 * length > positions:
            best.rejected.append((f"rows of {2 * length:,} tokens", f"the model has {positions:,} positions"))
            return best
        length *= 2
