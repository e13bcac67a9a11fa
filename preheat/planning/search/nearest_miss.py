"""The least change that makes a recipe fit that is too large for every layout: more devices or shorter sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from preheat.errors import RecipeError
from preheat.planning.observation_cache import observe_cached
from preheat.planning.plan import describe
from preheat.planning.request import Request
from preheat.planning.search.candidates import Space
from preheat.planning.search.result import EvaluatedPlan, SearchResult
from preheat.planning.search.search import find_least_estimate, search

__all__ = ["find_more_devices", "find_shorter_rows"]

_DOUBLINGS = 10
_SHORTEST = 128  # tokens of the shortest row worth training on
_STATES = ("parameters", "gradients", "optimizer")


def _estimate_states(least: EvaluatedPlan) -> float:
    """Returns the GiB of a device that do not depend on the batch."""
    return float(sum(least.plan.memory[category] for category in _STATES))


def find_more_devices(
    least: EvaluatedPlan,
    space: Space,
    request_on: Callable[[int], Request | None],
    *,
    passes: int,
    tell: Callable[[str], None] = lambda message: None,
) -> tuple[int, SearchResult] | None:
    """Finds the smallest number of devices that fits, in powers of two times those of the space.

    Args:
        least: the candidate that needs the least memory, and does not fit.
        request_on: returns the request for a number of devices; None if its batch cannot be split across them.
        passes: as of `search`, for the search on the devices that fit by an estimate.

    Returns:
        The number of devices and the result on them; None if nothing fits.
    """
    for devices in (space.world * 2**n for n in range(1, _DOUBLINGS + 1)):
        # Sharding divides the states at best.
        if _estimate_states(least) * space.world / devices > least.plan.available_gib:
            continue
        request = request_on(devices)
        if request is None:
            continue
        wider = Space(request, space.allow)
        try:
            if find_least_estimate(wider) > least.plan.available_gib:
                continue
            result = search(wider, passes=passes, confirm=False, tell=tell)
        except RecipeError:  # the batch or the techniques go with no layout on so many devices
            continue
        if result.best.plan.fits_safely:
            return devices, result
    return None


def find_shorter_rows(least: EvaluatedPlan, space: Space) -> EvaluatedPlan | None:
    """Returns the candidate with the longest rows that fit, in halves of the recipe's; None if none does."""
    states, peak, room = _estimate_states(least), least.plan.peak_gib, least.plan.available_gib
    length = least.recipe.batch.seq_len // 2
    while length >= _SHORTEST:
        share = length / least.recipe.batch.seq_len
        if states + (peak - states) * share <= room:
            recipe = replace(least.recipe, batch=replace(least.recipe.batch, seq_len=length))
            request = replace(space.request, recipe=recipe)
            try:
                plan = describe(request, observe_cached(request, how="few"))
            except RecipeError:  # a technique needs longer rows
                return None
            if plan.fits_safely:
                return replace(least, recipe=recipe, plan=plan)
        length //= 2
    return None
