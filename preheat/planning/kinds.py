"""Which techniques go together on one device, and what each combination is good for: looked at one by one, combined by guess."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from preheat.errors import RecipeError
from preheat.hardware.rates import Rates
from preheat.models import adapter
from preheat.planning.candidates import Settings, Space, problems_of, words
from preheat.planning.estimate import Look, look
from preheat.planning.layers import of_layers
from preheat.planning.recall import together
from preheat.planning.roofline import Roofline
from preheat.technique import Slot, Technique

__all__ = ["Kind", "kinds_of"]


class Choice(NamedTuple):
    """A setting, or None for doing without; its look, and that of the same without it."""

    setting: Technique | None
    look: Look
    beside: Look


class Kind(NamedTuple):
    """Techniques on one device, and what they are good for there.

    Attributes:
        better: numbers of those kinds that are worse in nothing and better in something.
    """

    settings: Settings
    look: Look
    better: frozenset[int]


def kinds_of(space: Space, rates: Rates | Roofline, reject: Callable[[str, str], None], *, resort: bool = False) -> list[Kind]:
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

    def found(self) -> list[Kind]:
        self._prepare([()])
        plain = self._look(())
        choices = self._choices(plain)
        kinds = []
        for chosen in itertools.product(*choices):
            kind = tuple(c.setting for c in chosen if c.setting is not None)
            if not self._problems(kind):
                made = plain
                for c in chosen:
                    made = made if c.setting is None else made.with_change(c.look, c.beside)
                kinds.append((kind, made))
        sums = [self._sums(made) for _, made in kinds]
        return [
            Kind(kind, made, frozenset(n for n, other in enumerate(sums) if _worse(mine, other)))
            for (kind, made), mine in zip(kinds, sums, strict=True)
        ]

    def _choices(self, plain: Look) -> list[list[Choice]]:
        """What is worth choosing from for each technique; each is tried beside the best of those before it."""
        base, under = Settings(), plain
        choices: list[list[Choice]] = []

        def added(cls: type[Technique], last: bool) -> bool:
            """Whether some setting of it can be; the best becomes part of the base."""
            nonlocal base, under
            options = self._options(cls, base)
            self._prepare([(*base, t) for t in options])
            tried = [found for t in options if (found := self._try(t, base, under, choices, last))]
            if not tried:
                return False
            without = Choice(None, under, under)
            kept = self._worth([without, *tried])
            # Worse by itself, but what excludes this technique may be worth more.
            choices.append(kept if without in kept else [without, *kept])
            # What brings an optimizer excludes others that do, and is slow to observe: not beside everything else.
            light = [c for c in kept if c.setting is None or Slot.OPTIMIZER not in c.setting.owned()]
            best = min(light or kept, key=lambda c: self._cost(c.look) / self._cost(c.beside))
            if best.setting is not None and best.beside is under:
                base, under = (*base, best.setting), best.look
            return True

        found = [cls for cls in self.space.on_one_device() if self.resort or not cls.last_resort]
        refused: list[type[Technique]] = []  # some serve only beside what comes later
        # What only the ends have shows its worth beside layers that are small already.
        for cls in sorted(found, key=lambda cls: _of_the_ends((cls(),))):
            refused = [other for other in (cls, *refused) if not added(other, last=False)]
        for cls in refused:
            added(cls, last=True)
        return choices

    def _options(self, cls: type[Technique], base: Settings) -> list[Technique]:
        """Settings whose effect is seen in a layer; of many the first, the middle and the last."""
        context = self.space.context(self.space.single(base), 1)
        found = [t for t in cls().options(context) if self.space.allowed(t) and t.period() == 1]
        return found if len(found) <= 4 else [found[0], found[len(found) // 2], found[-1]]

    def _problems(self, added: Settings) -> list[str]:
        return problems_of(self.space, self.space.single(added), 1)

    def _look(self, added: Settings, under: Look | None = None) -> Look:
        return look(
            self.space.single(added),
            vocabulary=self.space.vocabulary,
            device=self.space.device,
            rates=self.rates,
            layer=under if _of_the_ends(added) else None,
        )

    def _prepare(self, tried: list[Settings]) -> None:
        """Has what is about to be looked at observed by all processes at once."""
        singles = [(self.space.single(added), _of_the_ends(added)) for added in tried if not self._problems(added)]
        how = {"vocabulary": self.space.vocabulary, "device": self.space.device, "world": 1, "how": "step"}
        together(
            {"recipe": of_layers(recipe, layers), **how} for recipe, ends in singles for layers in ((1,) if ends else (1, 2))
        )

    def _try(self, t: Technique, base: Settings, under: Look, choices: list[list[Choice]], last: bool) -> Choice | None:
        """A setting beside the base; where the two exclude each other, beside a variant of the base."""
        try:
            why = self._problems((*base, t))
            if not why:
                return Choice(t, self._look((*base, t), under), under)
            for variant in self._variants(base, choices) if last else ():
                if not self._problems((*variant, t)):
                    beside = self._servable(variant)  # some of it may serve only beside `t`
                    return Choice(t, self._look((*beside, t)), self._look(beside))
        except RecipeError as error:  # what only a build finds out
            why = str(error).splitlines()
        if last:
            self.reject(words((t,)), why[0].removeprefix("techniques.").removeprefix(f"{t.name()}: "))
        return None

    def _servable(self, settings: Settings) -> Settings:
        """As many of these as go together without anything else."""
        kept = Settings()
        for t in settings:
            if not self._problems((*kept, t)):
                kept = (*kept, t)
        return kept

    def _variants(self, base: Settings, choices: list[list[Choice]]) -> list[Settings]:
        """The base with one of its techniques otherwise, or left out."""
        made = []
        for place, other in enumerate(base):
            for choice in next(c for c in choices if any(type(o.setting) is type(other) for o in c)):
                if choice.setting != other:
                    made.append((*base[:place], *([choice.setting] if choice.setting else []), *base[place + 1 :]))
        return made

    def _whole(self, pair: tuple[float, float]) -> float:
        return pair[0] * self._layers + pair[1]

    @property
    def _layers(self) -> int:
        return adapter.facts(self.space.config).layers

    def _bytes(self, seen: Look) -> float:
        """Of a device with a row, where all share the states."""
        return self._whole(seen.states) / self.space.world + self._whole(seen.kept)

    def _cost(self, seen: Look) -> float:
        """Bytes times seconds of one row."""
        return self._bytes(seen) * self._seconds(seen)

    def _seconds(self, seen: Look) -> float:
        """Of a row, with its part of the update."""
        return self._whole(seen.seconds) + self._whole(seen.update) / self.space.recipe.batch.size * self.space.world

    def _sums(self, seen: Look) -> tuple[float, float, float]:
        return self._whole(seen.states), self._whole(seen.kept), self._seconds(seen)

    def _worth(self, choices: list[Choice]) -> list[Choice]:
        """Those that are better than each other one in something; of equals the first."""
        sizes = [
            (self._bytes(c.look) / self._bytes(c.beside), self._seconds(c.look) / self._seconds(c.beside)) for c in choices
        ]
        kept = []
        for n, (memory, time) in enumerate(sizes):
            better = (m <= memory * 1.002 and s <= time * 1.002 and (m < memory * 0.99 or s < time * 0.99) for m, s in sizes)
            equal = (abs(m / memory - 1) < 0.01 and abs(s / time - 1) < 0.01 for m, s in sizes[:n])
            if not any(better) and not any(equal):
                kept.append(choices[n])
        return kept


def _of_the_ends(added: Settings) -> bool:
    """Whether the last of these leaves the layers as they are."""
    return bool(added) and Slot.OVER_LOGITS in added[-1].owned()


def _worse(mine: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether the one is worse in something and better in nothing, by more than a guess is worth."""
    better = any(a < b * 0.995 for a, b in zip(mine, other, strict=True))
    return not better and any(a > b * 1.005 for a, b in zip(mine, other, strict=True))
