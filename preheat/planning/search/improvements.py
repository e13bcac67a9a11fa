"""Changes of a recipe that help most: each alone, and several together, all by dry runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from preheat.core.plan import Plan
from preheat.errors import RecipeError
from preheat.planning.observation_cache import observe_cached, observe_for_others, prefetch
from preheat.planning.plan import describe, plan
from preheat.planning.request import Request
from preheat.planning.worker_pool import start_worker_pool
from preheat.recipe import Recipe

__all__ = ["Found", "compute_speedup", "find_improvements"]

MOST = 3
"""Changes to report, and to make together."""
_GAIN = 1.01  # speedup that is worth a change
_LESS = 0.99  # of the memory: what a change must save to bring a plan closer to fitting


class _Kind(Protocol):
    @property
    def kind(self) -> str:
        """Of several changes of a kind, only one is made."""


_Change = TypeVar("_Change", bound=_Kind)


@dataclass(frozen=True)
class Found(Generic[_Change]):
    """The changes that help.

    Attributes:
        singles: each alone, with its plan; the best first.
        together: those that help together, in the order of their gains; empty if none helps.
        plan: with these; None if none helps.
    """

    singles: tuple[tuple[_Change, Plan], ...]
    together: tuple[_Change, ...] = ()
    plan: Plan | None = None


def compute_speedup(before: Plan, after: Plan, gain: float = 1.0) -> float:
    """Returns how many times as fast a run is: to its end if that is known for both, else by the step.

    Args:
        gain: what a change gains that the plan after it does not show.
    """
    if before.seconds_total and after.seconds_total and before.steps == after.steps:
        return gain * before.seconds_total / after.seconds_total
    return gain * after.tokens_per_second / before.tokens_per_second


def find_improvements(
    request: Request,
    planned: Plan,
    changes: Sequence[_Change],
    build: Callable[[Sequence[_Change]], Recipe | None],
    gains: Mapping[str, float],
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Found[_Change]:
    """Finds the changes that make a plan faster, or if it does not fit, those that make it fit.

    Args:
        request: of the recipe as it is.
        planned: its plan.
        build: returns the recipe with some changes; None if the user cannot make them.
        gains: kind -> times as fast as the plan with its change shows.
        tell: called with the number of dry runs so far and at most.
    """
    search = _Search(request, planned, build, gains, tell)
    return search.run(changes)


class _Search(Generic[_Change]):
    def __init__(
        self,
        request: Request,
        planned: Plan,
        build: Callable[[Sequence[_Change]], Recipe | None],
        gains: Mapping[str, float],
        tell: Callable[[int, int], None],
    ):
        self.request, self.planned, self.build, self.gains, self.tell = request, planned, build, gains, tell
        self.done = self.total = 0

    def run(self, changes: Sequence[_Change]) -> Found[_Change]:
        recipes = [(change, recipe) for change in changes if (recipe := self.build([change])) is not None]
        self.total = len(recipes) + 2 * MOST
        requests = [replace(self.request, recipe=recipe) for _, recipe in recipes]
        with start_worker_pool(observe_for_others):
            prefetch({"request": request, "how": "few"} for request in requests)
        plans = [(change, self._estimate(recipe)) for change, recipe in recipes]
        alone = self._rank([(change, each) for change, each in plans if each is not None])
        firsts = [change for change, _ in self._first_of_kind(alone)[:MOST]]
        singles = self._rank([(change, each) for change in firsts if (each := self._confirm([change])) is not None])
        together = self._combine(alone)
        if len(together) == 1 and (confirmed := next((p for change, p in singles if change is together[0]), None)):
            return Found(tuple(singles), together, confirmed)
        while together:
            after = self._confirm(together)
            if after is not None and self._helps(self.planned, after, self._gain(together)):
                return Found(tuple(singles), together, after)
            together = together[:-1]
        return Found(tuple(singles))

    def _estimate(self, recipe: Recipe) -> Plan | None:
        """Returns the plan of a recipe by the quickest dry run; None if its techniques do not go with the model."""
        self._count()
        request = replace(self.request, recipe=recipe)
        try:
            return describe(request, observe_cached(request, how="few"))
        except RecipeError:
            return None

    def _confirm(self, changes: Sequence[_Change]) -> Plan | None:
        """Returns the plan of the recipe with some changes."""
        self._count()
        recipe = self.build(changes)
        try:
            return None if recipe is None else plan(replace(self.request, recipe=recipe))
        except RecipeError:  # only a dry run of all layers finds some conflicts
            return None

    def _count(self) -> None:
        self.tell(self.done, max(self.total, self.done + 1))
        self.done += 1

    def _gain(self, changes: Sequence[_Change]) -> float:
        return math.prod(self.gains.get(change.kind, 1.0) for change in changes)

    def _speedup(self, change: _Change, after: Plan) -> float:
        return compute_speedup(self.planned, after, self._gain([change]))

    def _rank(self, plans: list[tuple[_Change, Plan]]) -> list[tuple[_Change, Plan]]:
        """Returns the changes that help, the best first: the fastest that fit, else those with the least memory."""
        if self.planned.fits_safely:
            helping = [pair for pair in plans if pair[1].fits_safely and self._speedup(*pair) > _GAIN]
            return sorted(helping, key=lambda pair: -self._speedup(*pair))
        if fitting := [pair for pair in plans if pair[1].fits_safely]:
            return sorted(fitting, key=lambda pair: -self._speedup(*pair))
        smaller = [pair for pair in plans if pair[1].peak_gib < _LESS * self.planned.peak_gib]
        return sorted(smaller, key=lambda pair: pair[1].peak_gib)

    @staticmethod
    def _first_of_kind(ranked: list[tuple[_Change, Plan]]) -> list[tuple[_Change, Plan]]:
        firsts: dict[str, tuple[_Change, Plan]] = {}
        for pair in ranked:
            firsts.setdefault(pair[0].kind, pair)
        return list(firsts.values())

    def _combine(self, ranked: list[tuple[_Change, Plan]]) -> tuple[_Change, ...]:
        """Returns the changes that help one after the other, each together with those before it."""
        if not ranked:
            return ()
        chosen, best, tries = [ranked[0][0]], ranked[0][1], 0
        enough = not self.planned.fits_safely
        for change, _ in ranked[1:]:
            # Stop at the first change with which it fits: further ones would cost speed or change more than needed.
            if len(chosen) == MOST or (enough and best.fits_safely) or tries == MOST:
                break
            if change.kind in {each.kind for each in chosen}:
                continue
            recipe, tries = self.build([*chosen, change]), tries + 1
            after = None if recipe is None else self._estimate(recipe)
            if after is not None and self._helps(best, after, self._gain([change])):
                chosen, best = [*chosen, change], after
        return tuple(chosen)

    def _helps(self, before: Plan, after: Plan, gain: float) -> bool:
        if before.fits_safely:
            return after.fits_safely and compute_speedup(before, after, gain) > _GAIN
        return after.fits_safely or after.peak_gib < _LESS * before.peak_gib
