"""Which techniques go together on one device, and what each combination is good for: looked at one by one, combined by guess."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from preheat.core import Problem, Searchable, Slot, Tag, Technique
from preheat.errors import RecipeError
from preheat.hardware.rates import Rates
from preheat.models import hf
from preheat.planning.layer_extrapolation import of_layers
from preheat.planning.observation_cache import prefetch
from preheat.planning.search.candidates import Settings, Space, candidate_problems, words
from preheat.planning.search.ranking import LayerCost, observe_layer
from preheat.planning.speed.roofline import Roofline

__all__ = ["Combination", "technique_combinations"]


class Option(NamedTuple):
    """A setting, or None for doing without; its look, and that of the same without it."""

    setting: Technique | None
    look: LayerCost
    beside: LayerCost


class Combination(NamedTuple):
    """Techniques on one device, and what they are good for there.

    Attributes:
        better: numbers of those kinds that are worse in nothing and better in something.
    """

    settings: Settings
    look: LayerCost
    better: frozenset[int]


def technique_combinations(
    space: Space, rates: Rates | Roofline, reject: Callable[[str, str], None], *, resort: bool = False
) -> list[Combination]:
    """Combinations of techniques on one device. Those that others better are among them: these may not go with every way to share out the work.

    Args:
        reject: is told what cannot be, and why.
        resort: with what is a last resort, too.

    Raises:
        RecipeError: the recipe as it is cannot be built.
    """
    return _Kinds(space, rates, reject, resort).found()


@dataclass
class _Kinds:
    space: Space
    rates: Rates | Roofline
    reject: Callable[[str, str], None]
    resort: bool

    def found(self) -> list[Combination]:
        self._prepare([()])
        plain = self._look(())
        choices = self._choices(plain)
        kinds = []
        for chosen in itertools.product(*choices):
            kind = tuple(c.setting for c in chosen if c.setting is not None)
            if not self._problems(kind):
                cost = plain
                for c in chosen:
                    cost = cost if c.setting is None else cost.with_change(c.look, c.beside)
                kinds.append((kind, cost))
        sums = [self._sums(cost, kind) for kind, cost in kinds]
        return [
            Combination(kind, cost, frozenset(n for n, other in enumerate(sums) if _worse(mine, other)))
            for (kind, cost), mine in zip(kinds, sums, strict=True)
        ]

    def _choices(self, plain: LayerCost) -> list[list[Option]]:
        """What is worth choosing from for each technique; each setting is tried beside the best of those before it."""
        base, under = Settings(), plain
        choices: dict[type[Searchable], list[Option]] = {}
        refused: dict[type[Searchable], list[Technique]] = {}  # settings that serve only beside others

        def take(cls: type[Searchable], tried: list[Option]) -> None:
            """Leaves what is worth choosing; the best becomes part of the base."""
            nonlocal base, under
            without = Option(None, under, under)
            worthwhile = self._worth([*choices.get(cls, [without]), *tried])
            # Worse by itself, but what excludes this technique may be worth more.
            choices[cls] = worthwhile if worthwhile[0].setting is None else [without, *worthwhile]
            # What brings an optimizer excludes others that do, and is slow to observe: not beside everything else.
            light = [c for c in worthwhile if c.setting is None or Slot.OPTIMIZER not in c.setting.owned()]
            best = min(light or worthwhile, key=lambda c: self._cost(c.look, c.setting) / self._cost(c.beside))
            if best.setting is not None and best.beside is under:
                base, under = (*base, best.setting), best.look

        searched = [cls for cls in self.space.on_one_device() if self.resort or not cls.last_resort]
        for cls in sorted(searched, key=self._late):
            refused = {cls: self._options(cls, base), **refused}
            for each in [each for each in refused if each not in choices]:
                self._prepare([(*base, t) for t in refused[each]])
                tried = [choice for t in refused[each] if (choice := self._try(t, base, under))]
                settings = [choice.setting for choice in tried]
                refused[each] = [t for t in refused[each] if t not in settings]
                if tried:
                    take(each, tried)
        for cls, left in refused.items():
            if tried := [choice for t in left if (choice := self._try_elsewhere(t, base, list(choices.values())))]:
                take(cls, tried)
        return list(choices.values())

    def _late(self, cls: type[Searchable]) -> tuple[bool, bool]:
        """Sorts techniques, which are tried in the order in which they act, but on a GPU precision first: it decides which kernels the others have.
        What only the ends have shows its worth beside layers that are small already."""
        first = self.space.device.kind == "cuda" and Tag.BF16_COMPUTE in cls.provides
        return _of_the_ends((cls(),)), not first

    def _options(self, cls: type[Searchable], base: Settings) -> list[Technique]:
        """Settings whose effect is seen in a layer; of many the first, the middle and the last."""
        context = self.space.context(self.space.single(base), 1)
        settings = [t for t in cls().options(context) if self.space.allowed(t) and t.period() == 1]
        return settings if len(settings) <= 4 else [settings[0], settings[len(settings) // 2], settings[-1]]

    def _problems(self, added: Settings) -> list[Problem]:
        return candidate_problems(self.space, self.space.single(added), 1)

    def _look(self, added: Settings, under: LayerCost | None = None) -> LayerCost:
        return observe_layer(
            self.space.single(added),
            vocabulary=self.space.vocabulary,
            device=self.space.device,
            rates=self.rates,
            layer=under if _of_the_ends(added) else None,
        )

    def _prepare(self, tried: list[Settings]) -> None:
        """Has what is about to be looked at observed by all processes at once."""
        singles = [(self.space.single(added), _of_the_ends(added)) for added in tried if not self._problems(added)]
        kwargs = {"vocabulary": self.space.vocabulary, "device": self.space.device, "world": 1, "how": "step"}
        prefetch(
            {"recipe": of_layers(recipe, layers), **kwargs}
            for recipe, ends in singles
            for layers in ((1,) if ends else (1, 2))
        )

    def _try(self, t: Technique, base: Settings, under: LayerCost) -> Option | None:
        """A setting beside the base; None where the two do not go together."""
        try:
            return None if self._problems((*base, t)) else Option(t, self._look((*base, t), under), under)
        except RecipeError:  # what only a build finds out
            return None

    def _try_elsewhere(self, t: Technique, base: Settings, choices: list[list[Option]]) -> Option | None:
        """A setting that the base refuses, beside as much of it as goes with that; where there is no such place, says why."""
        problems = self._problems((*(other for other in base if type(other) is not type(t)), t))
        why = [problem.text if problem.technique == t.name() else str(problem) for problem in problems]
        place = self._place(t, base, choices)
        try:
            if place is not None:
                rest = self._servable(place)  # some of it may serve only beside `t`
                return Option(t, self._look((*place, t)), self._look(rest))
        except RecipeError as error:  # what only a build finds out
            why = str(error).splitlines()
        if why:
            self.reject(words((t,)), why[0])
        return None

    def _place(self, t: Technique, base: Settings, choices: list[list[Option]]) -> Settings | None:
        """Of the base as much as goes with a setting, and one other choice where it needs that: another precision, for one."""
        others = [
            c.setting for choice in choices for c in choice if c.setting is not None and type(c.setting) is not type(t)
        ]
        places = []
        for first in (Settings(), *((other,) for other in others)):
            place = first
            if not self._problems((*place, t)):
                for other in base:
                    if type(other) not in map(type, (*place, t)) and not self._problems((*place, other, t)):
                        place = (*place, other)
                places.append(place)
        return max(places, key=lambda place: len(set(place) & set(base)), default=None)

    def _servable(self, settings: Settings) -> Settings:
        """As many of these as go together without anything else."""
        servable = Settings()
        for t in settings:
            if not self._problems((*servable, t)):
                servable = (*servable, t)
        return servable

    def _whole(self, pair: tuple[float, float]) -> float:
        return pair[0] * self._layers + pair[1]

    @property
    def _layers(self) -> int:
        return hf.facts(self.space.config).layers

    def _bytes(self, cost: LayerCost) -> float:
        """Of a device with a row, where all share the states."""
        return self._whole(cost.states) / self.space.world + self._whole(cost.kept)

    def _cost(self, cost: LayerCost, added: Technique | None = None) -> float:
        """Bytes times seconds of one row."""
        return self._bytes(cost) * self._seconds(cost, (added,) if added else ())

    def _seconds(self, cost: LayerCost, added: Settings = ()) -> float:
        """Of a row, with its part of the update and of what `added` take to start."""
        batch = self.space.recipe.batch
        row = self._whole(cost.seconds) + self._whole(cost.update) / batch.size * self.space.world
        tokens = batch.length * self.space.world
        return tokens / self.space.over_run(tokens / row, added)

    def _sums(self, cost: LayerCost, added: Settings) -> tuple[float, float, float]:
        return self._whole(cost.states), self._whole(cost.kept), self._seconds(cost, added)

    def _worth(self, choices: list[Option]) -> list[Option]:
        """Those that are better than each other one in something; of equals the first."""
        sizes = [
            (
                self._bytes(c.look) / self._bytes(c.beside),
                self._seconds(c.look, (c.setting,) if c.setting else ()) / self._seconds(c.beside),
            )
            for c in choices
        ]
        worthwhile = []
        for n, (memory, time) in enumerate(sizes):
            better = (
                m <= memory * 1.002 and s <= time * 1.002 and (m < memory * 0.99 or s < time * 0.99) for m, s in sizes
            )
            equal = (abs(m / memory - 1) < 0.01 and abs(s / time - 1) < 0.01 for m, s in sizes[:n])
            if not any(better) and not any(equal):
                worthwhile.append(choices[n])
        return worthwhile


def _of_the_ends(added: Settings) -> bool:
    """Whether the last of these leaves the layers as they are."""
    return bool(added) and Slot.OVER_LOGITS in added[-1].owned()


def _worse(mine: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether the one is worse in something and better in nothing, by more than a guess is worth."""
    better = any(a < b * 0.995 for a, b in zip(mine, other, strict=True))
    return not better and any(a > b * 1.005 for a, b in zip(mine, other, strict=True))
