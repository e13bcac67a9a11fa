"""Combinations of techniques on one device: each setting is dry-run separately, combinations are estimated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from preheat.core import Problem, ProblemCode, Searchable, Slot, Tag, Technique
from preheat.errors import RecipeError
from preheat.planning.layer_extrapolation import choose_sampled_layers, set_layers
from preheat.planning.observation_cache import prefetch
from preheat.planning.search.candidates import Settings, Space, find_candidate_problems
from preheat.planning.search.cost_model import LayerCost, observe_layer

__all__ = ["Combination", "TechniqueCombinations"]


class Option(NamedTuple):
    """A setting of a technique (None: without the technique), the cost with it, and the cost of the same without it."""

    setting: Technique | None
    cost: LayerCost
    base: LayerCost


class Combination(NamedTuple):
    """Techniques on one device with their estimated cost.

    Attributes:
        better: indices of the combinations that dominate this one (worse in nothing, better in something).
    """

    settings: Settings
    cost: LayerCost
    better: frozenset[int]


class TechniqueCombinations:
    """The combinations of techniques on one device, from observations of each setting.

    Of a technique with many settings, some are observed at first (`sampled`); `refined` observes the others.

    Args:
        refuse: called with (technique, reason) for every setting that goes with nothing else that may be added.
        resort: also try techniques that are a last resort.
    """

    def __init__(self, space: Space, refuse: Callable[[Technique, Problem], None], *, resort: bool = False) -> None:
        self.space, self.refuse, self.resort = space, refuse, resort
        self._left: dict[type[Searchable], list[Technique]] = {}  # settings that are not observed yet
        self._base = Settings()

    def sampled(self) -> list[Combination]:
        """Returns the combinations of the sampled settings.

        Dominated combinations are included, because the better ones may not be compatible with every parallel layout.

        Raises:
            RecipeError: the recipe as it is cannot be built.
        """
        self._prepare([()])
        self._plain = self._observe(())
        self._choices = self._sample(self._plain)
        return self._combine()

    def refined(self, least: float) -> list[Combination]:
        """Observes the other settings of the techniques whose sampled settings differ in speed; returns all
        combinations.

        Args:
            least: smallest ratio of seconds between two sampled settings of a technique that is refined.
        """
        for cls, left in self._left.items():
            choices = self._choices.get(cls, [])
            seconds = [
                self._estimate_seconds(c.cost, (c.setting,) if c.setting else ()) / self._estimate_seconds(c.base)
                for c in choices
            ]
            if not left or not seconds or max(seconds) < least * min(seconds):
                continue
            base = tuple(t for t in self._base if type(t) is not cls)
            self._prepare([base, *((*base, t) for t in left)])
            try:
                under = self._observe(base)
            except RecipeError:  # nothing else goes without this technique
                continue
            tried = [choice for t in left if (choice := self._try(t, base, under))]
            self._choices[cls] = self._find_pareto_front([*choices, *tried])
        self._left.clear()
        return self._combine()

    def _combine(self) -> list[Combination]:
        kinds = []
        for chosen in itertools.product(*self._choices.values()):
            kind = tuple(c.setting for c in chosen if c.setting is not None)
            # Options that are fine alone may exclude each other.
            if not self._find_problems(kind):
                cost = self._plain
                for c in chosen:
                    cost = cost if c.setting is None else cost.with_change(c.cost, c.base)
                kinds.append((kind, replace(cost, once=(self._share_once * cost.seconds[0], 0.0))))
        sums = [self._sum_costs(cost, kind) for kind, cost in kinds]
        return [
            Combination(kind, cost, frozenset(n for n, other in enumerate(sums) if _is_worse(mine, other)))
            for (kind, cost), mine in zip(kinds, sums, strict=True)
        ]

    @cached_property
    def _share_once(self) -> float:
        """Returns the share of a layer's seconds that does not grow with the rows of a micro-batch.

        Few rows read all experts, so a second one takes much less than the first. Other layers take about as long for
        each row; what is left of it dry runs of larger micro-batches find.
        """
        if not self.space.model.experts:
            return 0.0
        one = self.space.to_single_device(self._base)
        two = replace(one, recipe=replace(one.recipe, batch=replace(one.recipe.batch, size=2)))
        prefetch(
            {"request": set_layers(request, layers), "how": "step"}
            for request in (one, two)
            for layers in choose_sampled_layers(request)
        )
        return min(max(2 - observe_layer(two).seconds[0] / observe_layer(one).seconds[0], 0.0), 1.0)

    def _sample(self, plain: LayerCost) -> dict[type[Searchable], list[Option]]:
        """Returns the useful options of each technique; each setting is tried on top of the best ones before it."""
        base, under = Settings(), plain
        choices: dict[type[Searchable], list[Option]] = {}
        refused: dict[type[Searchable], list[Technique]] = {}  # settings that need another technique

        def take(cls: type[Searchable], tried: list[Option]) -> None:
            """Keeps the useful options of a technique and adds the best one to the base."""
            nonlocal base, under
            without = Option(None, under, under)
            # Together with the options of an earlier turn: a technique may get here twice.
            worthwhile = self._find_pareto_front([*choices.get(cls, [without]), *tried])
            # Keep the option to do without: a technique that excludes this one may be better.
            choices[cls] = worthwhile if worthwhile[0].setting is None else [without, *worthwhile]
            # Optimizers exclude each other and are slow to observe, so they do not become part of the base.
            light = [c for c in worthwhile if c.setting is None or Slot.OPTIMIZER not in c.setting.claimed()]
            best = min(
                light or worthwhile, key=lambda c: self._estimate_cost(c.cost, c.setting) / self._estimate_cost(c.base)
            )
            # Only an option that was observed on this base extends it.
            if best.setting is not None and best.base is under:
                base, under = (*base, best.setting), best.cost

        searched = [cls for cls in self.space.single_device_techniques() if self.resort or not cls.last_resort]
        for cls in sorted(searched, key=self._priority):
            # The new technique first, then those refused before: it may provide the tag that they need.
            refused = {cls: self._list_options(cls, base), **refused}
            for each in [each for each in refused if each not in choices]:
                # All dry runs of this turn at once, so that the worker processes have something to do.
                self._prepare([(*base, t) for t in refused[each]])
                tried = [choice for t in refused[each] if (choice := self._try(t, base, under))]
                settings = [choice.setting for choice in tried]
                refused[each] = [t for t in refused[each] if t not in settings]
                if tried:
                    take(each, tried)
        # Settings that the final base excludes may still be better without a part of it.
        for cls, left in refused.items():
            if tried := [choice for t in left if (choice := self._try_elsewhere(t, base, list(choices.values())))]:
                take(cls, tried)
        self._base = base
        return choices

    def _priority(self, cls: type[Searchable]) -> tuple[bool, bool, bool]:
        """Sort key: the order in which techniques are tried.

        Attention comes first: plain attention takes memory with the square of the length, and how much depends on the
        precision, so that each precision is observed on top of the attention that it will have. On a GPU precision is
        next, because it decides which kernels the others run. Techniques that change only the ends come last: their
        benefit shows when the layers are small already.
        """
        attention = Slot.ATTENTION_KERNEL in cls().claimed()
        precision = self.space.device.kind == "cuda" and Tag.BF16_COMPUTE in cls.provides
        return _is_change_of_ends((cls(),)), not attention, not precision

    def _list_options(self, cls: type[Searchable], base: Settings) -> list[Technique]:
        """Returns the settings that show their effect in a single layer; of many the first, the middle and the last."""
        context = self.space.context(self.space.to_single_device(base).recipe, 1)
        settings = [
            t for t in self.space.settings_of(cls).options(context) if self.space.is_allowed(t) and t.period() == 1
        ]
        if len(settings) <= 4:
            return settings
        sample = [settings[0], settings[len(settings) // 2], settings[-1]]
        self._left[cls] = [t for t in settings if t not in sample]
        return sample

    def _find_problems(self, added: Settings) -> list[Problem]:
        return find_candidate_problems(self.space, self.space.to_single_device(added))

    def _observe(self, added: Settings, under: LayerCost | None = None) -> LayerCost:
        return observe_layer(self.space.to_single_device(added), layer=under if _is_change_of_ends(added) else None)

    def _prepare(self, tried: list[Settings]) -> None:
        """Observes the given settings in all worker processes at once."""
        singles = [
            (self.space.to_single_device(added), _is_change_of_ends(added))
            for added in tried
            if not self._find_problems(added)
        ]
        prefetch(
            {"request": set_layers(request, layers), "how": "step"}
            for request, ends in singles
            for layers in choose_sampled_layers(request)[: 1 if ends else 2]
        )

    def _try(self, t: Technique, base: Settings, under: LayerCost) -> Option | None:
        """Returns a setting on top of the base; None if the two are incompatible."""
        try:
            return None if self._find_problems((*base, t)) else Option(t, self._observe((*base, t), under), under)
        except RecipeError:  # found by the build only
            return None

    def _try_elsewhere(self, t: Technique, base: Settings, choices: list[list[Option]]) -> Option | None:
        """Tries a setting that conflicts with the base on the compatible part of it; reports why if there is none."""
        problems = self._find_problems((*(other for other in base if type(other) is not type(t)), t))
        place = self._find_compatible_base(t, base, choices)
        try:
            if place is not None:
                # The cost without `t` on the same techniques, so that the difference is that of `t` alone.
                rest = self._keep_compatible(place)  # some techniques may need `t`
                self._prepare([(*place, t), rest])
                return Option(t, self._observe((*place, t)), self._observe(rest))
        except RecipeError as error:  # found by the build only
            problems = [Problem(t.name(), ProblemCode.BUILD, str(error).splitlines()[0])]
        if problems:
            self.refuse(t, problems[0])
        return None

    def _find_compatible_base(self, t: Technique, base: Settings, choices: list[list[Option]]) -> Settings | None:
        """Returns the part of the base that is compatible with a setting, plus one other option if it needs one.

        Beside the settings from before the one that excludes it, if possible: there it is compared with that one, and
        what came later (recomputation) does not hide its effect.
        """
        before = next((n for n in range(len(base)) if self._find_problems((*base[: n + 1], t))), 0)
        if before and not self._find_problems((*base[:before], t)):
            return base[:before]
        others = [
            c.setting for choice in choices for c in choice if c.setting is not None and type(c.setting) is not type(t)
        ]
        places = []
        for first in (Settings(), *((other,) for other in others)):
            # Greedy: adds the techniques of the base one by one, as long as all are compatible.
            place = first
            if not self._find_problems((*place, t)):
                for other in base:
                    if type(other) not in map(type, (*place, t)) and not self._find_problems((*place, other, t)):
                        place = (*place, other)
                places.append(place)
        return max(places, key=lambda place: len(set(place) & set(base)), default=None)

    def _keep_compatible(self, settings: Settings) -> Settings:
        """Returns as many of these as are compatible by themselves."""
        servable = Settings()
        for t in settings:
            if not self._find_problems((*servable, t)):
                servable = (*servable, t)
        return servable

    def _scale_to_model(self, pair: tuple[float, float]) -> float:
        return pair[0] * self._layers + pair[1]

    @property
    def _layers(self) -> int:
        return self.space.model.layers

    def _estimate_bytes(self, cost: LayerCost) -> float:
        """Returns the bytes of a device with one sequence, with the states sharded across all devices."""
        return self._scale_to_model(cost.states) / self.space.world + self._scale_to_model(cost.saved)

    def _estimate_cost(self, cost: LayerCost, added: Technique | None = None) -> float:
        """Returns bytes times seconds of one sequence."""
        return self._estimate_bytes(cost) * self._estimate_seconds(cost, (added,) if added else ())

    def _estimate_seconds(self, cost: LayerCost, added: Settings = ()) -> float:
        """Returns the seconds of one sequence, with its part of the update and of the startup time of `added`."""
        batch = self.space.recipe.batch
        # The update runs once per batch: a row pays for its fraction of it.
        row = self._scale_to_model(cost.seconds) + self._scale_to_model(cost.update) / batch.size * self.space.world
        tokens = batch.seq_len * self.space.world
        return tokens / self.space.over_run(tokens / row, added)

    def _sum_costs(self, cost: LayerCost, added: Settings) -> tuple[float, float, float]:
        return self._scale_to_model(cost.states), self._scale_to_model(cost.saved), self._estimate_seconds(cost, added)

    def _find_pareto_front(self, choices: list[Option]) -> list[Option]:
        """Returns the options on the Pareto front of memory and time; of nearly equal ones the first."""
        # Relative to each option's own base, because options of different turns were observed on different bases.
        sizes = [
            (
                self._estimate_bytes(c.cost) / self._estimate_bytes(c.base),
                self._estimate_seconds(c.cost, (c.setting,) if c.setting else ()) / self._estimate_seconds(c.base),
            )
            for c in choices
        ]
        worthwhile = []
        for n, (memory, time) in enumerate(sizes):
            # 0.2 % worse is no worse, and 1 % better is better: differences below are noise of the estimate.
            better = (
                m <= memory * 1.002 and s <= time * 1.002 and (m < memory * 0.99 or s < time * 0.99) for m, s in sizes
            )
            equal = (abs(m / memory - 1) < 0.01 and abs(s / time - 1) < 0.01 for m, s in sizes[:n])
            if not any(better) and not any(equal):
                worthwhile.append(choices[n])
        return worthwhile


def _is_change_of_ends(added: Settings) -> bool:
    """True if the last of these techniques changes only head and loss, not the layers."""
    return bool(added) and Slot.OVER_LOGITS in added[-1].claimed()


def _is_worse(mine: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """True if `other` dominates `mine` by more than the error of an estimate."""
    better = any(a < b * 0.995 for a, b in zip(mine, other, strict=True))
    return not better and any(a > b * 1.005 for a, b in zip(mine, other, strict=True))
