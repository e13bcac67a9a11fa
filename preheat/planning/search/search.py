"""The search: of all that may be added to a recipe, what fits a device and serves an aim best, and why not the others.

Candidates are put in order by a guess (`planning/search/ranking.py`), and looked at from the best on by a dry run; each
look corrects the guesses of its kin. What did not fit with some micro-batch is not tried with a larger one. Verdicts
come from dry runs alone, and the one that is chosen is dry-run with all its layers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from preheat.core import DATA, Axis, Problem, ProblemCode, Technique
from preheat.errors import RecipeError
from preheat.hardware.rates import Rates
from preheat.models import hf
from preheat.planning.observation_cache import observe_cached
from preheat.planning.plan import GIB, describe
from preheat.planning.search.candidates import NUMERICS, Settings, Space, candidate_problems, words, worst
from preheat.planning.search.ranking import Guess, estimate
from preheat.planning.search.result import EstimatedPlan, EvaluatedPlan, SearchResult, too_large
from preheat.planning.search.technique_combinations import Combination, technique_combinations
from preheat.planning.speed.roofline import Roofline
from preheat.planning.worker_pool import is_serial

__all__ = ["AIMS", "Aim", "search"]

Aim = Literal["fastest", "cheapest", "largest-batch", "closest"]
AIMS: tuple[Aim, ...] = ("fastest", "cheapest", "largest-batch", "closest")
_SLACK = 1.03  # guesses up to so much over the memory are looked at all the same
_LAYOUTS = 40  # ways to share out the work, of which all is guessed
_ALIKE = 10  # of these, by the same techniques
_LOOKS = 3  # however long they take
_CONFIRM = 1.5  # of the seconds for looking, for the best with all its layers
_OTHERS = 3  # alternatives
_WORTH = 1.01  # how much faster another must promise to be
_BESIDE = 1.1  # how far guesses of the same layout may be off
_DRAWN = 300  # candidates that a page draws


@dataclass(frozen=True)
class Candidate:
    """Techniques on one device, how the work is shared out, and into how many micro-batches a device's rows are cut."""

    kind: Settings
    layout: Settings
    cuts: Technique | None
    rows: int
    guess: Guess

    @property
    def added(self) -> Settings:
        return (*self.kind, *self.layout, *([self.cuts] if self.cuts else []))

    @property
    def names(self) -> tuple[str, ...]:
        """What shares out the work."""
        return tuple(t.name() for t in self.layout)

    @property
    def micro(self) -> int:
        """Rows of a micro-batch."""
        return math.ceil(self.rows / (self.cuts.micro_batch_count() if self.cuts else 1))


def search(
    space: Space,
    *,
    rates: Rates | Roofline,
    in_use: int = 0,
    aim: Aim = "fastest",
    seconds: float = 10.0,
    confirm: bool = True,
    tell: Callable[[str], None] = lambda message: None,
) -> SearchResult:
    """The best recipe that fits.

    Args:
        space: the recipe, what may be added to it, and on what.
        rates: of the device, measured or by the catalogue.
        in_use: bytes of the device that are taken before the run.
        aim: fastest and cheapest: most tokens a second; largest-batch: most rows in a micro-batch; closest: least given
            up of the numbers.
        seconds: of this process's work; after so many nothing more is tried, but what is needed for a verdict.
        confirm: dry-run the best with all its layers.
        tell: is told what goes on.

    Raises:
        RecipeError: the recipe contradicts itself, or cannot be shared out among the devices.

    Example:
        >>> from preheat.recipe import parse
        >>> from preheat.core import Device
        >>> recipe = parse("model: {layers: 2, width: 64, heads: 2, vocabulary: 128}\\nbatch: {size: 2, length: 16}\\nstop: {steps: 1}")
        >>> gpu = Roofline.of("H100")
        >>> search(Space(recipe, None, gpu.as_device, 1), rates=gpu).best.plan["fits"]
        True
    """
    return _Search(space, rates, in_use, aim, seconds, tell).run(confirm)


class _Search:
    def __init__(
        self, space: Space, rates: Rates | Roofline, in_use: int, aim: Aim, seconds: float, tell: Callable[[str], None]
    ):
        self.space, self.rates, self.in_use, self.aim, self.tell = space, rates, in_use, aim, tell
        self.room = space.device.memory - in_use
        self.model = hf.facts(space.config)
        self.seconds, self.until = seconds, math.inf
        self.seen: list[EvaluatedPlan] = []
        self.rejected: list[tuple[str, str]] = []
        self.guessed = 0
        self._scale: dict[
            Any, tuple[float, float]
        ] = {}  # (kind, names of the layout), these, None -> the last look over its guess: memory, tokens a second
        self._clash: dict[Any, Problem | None] = {}  # (kind, layout) -> why the two do not go together
        self._cut: dict[int, list[Technique]] = {}  # rows of a device -> settings that cut them
        self._took = 0.0  # seconds of the last look by few layers
        self._failed: dict[Any, int] = {}  # (kind, layout) -> rows of the least micro-batch that did not fit

    def run(self, confirm: bool) -> SearchResult:
        for resort in (False, True):
            kinds = technique_combinations(self.space, self.rates, self._reject, resort=resort)
            candidates = self._candidates(kinds)
            if not candidates:
                raise RecipeError(self._why_none())
            self.until = time.process_time() + self.seconds
            self._look_from_the_best(candidates)
            if any(s.plan["fits"] for s in self.seen):
                self._look_beside_the_best(candidates)
                self._look_at_others(candidates)
                break
            self._look_at_the_least(candidates)
            if any(s.plan["fits"] for s in self.seen):
                break
        if not self.seen:
            if self.space.recipe.batch.size % self.space.world:
                raise RecipeError(self._why_none())
            reasons = dict.fromkeys(why for _, why in self.rejected[:3])
            raise RecipeError(f"techniques: nothing that may be added can be planned here: {'; '.join(reasons)}")
        fitting = [s for s in self.seen if s.plan["fits"]]
        best = min(fitting, key=self._rank) if fitting else min(self.seen, key=lambda s: s.plan["peak_gib"])
        confirmed = False
        layers = self.model.layers / self.space.sizes_of(best.recipe)[Axis.PIPELINE]
        if confirm and fitting:
            quick = (
                self._took * layers / (9 if is_serial() else 5) <= _CONFIRM * self.seconds
            )  # 4 layers and 5 were looked at
            best, confirmed = self._confirm(best, "whole" if quick else "enough")
            confirmed &= quick
        guesses = self._guesses(candidates)
        result = SearchResult(best, self._others(best), self.seen, self.rejected, self.guessed, confirmed, guesses)
        self._say_why_slower(result)
        return result

    # Candidates

    def _candidates(self, kinds: list[Combination]) -> list[Candidate]:
        """All of the most promising layouts, of each set of techniques some; which these are is told by the best kinds."""
        layouts = list(self._meshes())
        if len(layouts) > _LAYOUTS:
            best = [k for k in kinds if not k.better]
            others = [
                sorted(kinds, key=lambda k: k.cost.seconds[0]),
                sorted(kinds, key=lambda k: k.cost.states[0] + k.cost.kept[0]),
            ]
            every = max(len(kinds) // 10, 1)  # to try them all would take as long as looking
            some: dict[
                Any, list[Combination]
            ] = {}  # layouts that differ in numbers of devices alone go with the same kinds, mostly
            # Those of most rows a device first, which can be cut for a pipeline.
            for layout, _ in sorted(layouts, key=lambda pair: math.prod(pair[1][axis] for axis in DATA)):
                if (shape := _shape(layout)) not in some:
                    compatible = [k for k in best if self._go_together(k, layout)]
                    firsts = (
                        next((k for k in order[::every] if self._go_together(k, layout)), None) for order in others
                    )
                    some[shape] = compatible or [k for k in firsts if k is not None]
            tried = [self._of(layout, sizes, some[_shape(layout)]) for layout, sizes in layouts]
            self.guessed += sum(map(len, tried))
            counts: Counter[tuple[str, ...]] = Counter()
            ranked = []
            for _, n in sorted((self._hope(of_layout), n) for n, of_layout in enumerate(tried)):
                counts[names := tuple(t.name() for t in layouts[n][0])] += 1
                if counts[names] <= _ALIKE:
                    ranked.append(layouts[n])
            layouts = ranked[:_LAYOUTS]
        candidates = []
        for layout, sizes in layouts:
            possible = {n: k for n, k in enumerate(kinds) if self._go_together(k, layout)}
            candidates += self._of(layout, sizes, [k for k in possible.values() if not k.better & possible.keys()])
        self.guessed += len(candidates)
        return candidates

    def _go_together(self, kind: Combination, layout: Settings) -> bool:
        """Whether a kind and a layout can be, with the whole batch at once or cut as small as it may be."""
        key = (kind.settings, layout)
        if key not in self._clash:
            both = (*kind.settings, *layout)
            why = candidate_problems(self.space, self.space.having(both))
            cuts = self._ways_to_cut(layout) if why else [None]
            if cuts[-1] is not None:
                why = candidate_problems(self.space, self.space.having((*both, cuts[-1])))
            self._clash[key] = why[0] if why else None
        return self._clash[key] is None

    def _hope(self, candidates: list[Candidate]) -> tuple[float, float]:
        """Less is better: does none fit, and how slow is the fastest that does."""
        fitting = [c for c in candidates if c.guess.bytes <= self.room * _SLACK]
        least = min((c.guess.bytes for c in candidates), default=math.inf)
        return (0.0, -max(c.guess.tokens_per_second for c in fitting)) if fitting else (1.0, least)

    def _meshes(self) -> Iterator[tuple[Settings, dict[Axis, int]]]:
        for layout in self.space.layouts():
            sizes = self.space.sizes((*self.space.recipe.techniques.values(), *layout))
            if sizes is not None and self.space.even(sizes):
                yield layout, sizes

    def _of(self, layout: Settings, sizes: dict[Axis, int], kinds: Iterable[Combination]) -> list[Candidate]:
        own, batch = tuple(self.space.recipe.techniques.values()), self.space.recipe.batch
        fixed, rows = (
            math.prod(t.micro_batch_count() for t in own),
            batch.size // math.prod(sizes[axis] for axis in DATA),
        )
        cuts = self._ways_to_cut(layout)
        candidates = []
        for kind in kinds:
            tags = frozenset(tag for t in (*own, *kind.settings, *layout) for tag in t.provided())
            for cut in cuts:
                micros = cut.micro_batch_count() if cut else fixed
                if sizes[Axis.PIPELINE] <= micros:
                    guessed = estimate(kind.cost, batch, self.model, sizes, micros, tags, self.rates)
                    candidates.append(Candidate(kind.settings, layout, cut, rows, guessed))
        return candidates

    def _ways_to_cut(self, layout: Settings) -> list[Technique | None]:
        """Ways to cut a device's rows into micro-batches, from none on, which is the only one where the recipe states how."""
        own = self.space.recipe.techniques.values()
        sizes = self.space.sizes((*own, *layout))
        rows = self.space.recipe.batch.size // math.prod(sizes[axis] for axis in DATA) if sizes else 1
        if rows == 1 or any(t.micro_batch_count() > 1 for t in own):
            return [None]
        if rows not in self._cut:
            context = self.space.context(self.space.having(layout))
            self._cut[rows] = [
                t for cls in self.space.searched() if cls().micro_batch_count() > 1 for t in cls().options(context)
            ]
        return [None, *self._cut[rows]]

    def _why_none(self) -> str:
        """Raises where what the recipe states contradicts itself already."""
        if any(t.is_parallel() for t in self.space.recipe.techniques.values()):
            self.space.context(self.space.recipe)
        size, world = self.space.recipe.batch.size, self.space.world
        simplest = sorted(
            self._clash, key=lambda pair: len(pair[0]) + len(pair[1])
        )  # before layouts that nobody asked for
        reasons = [problem for problem in dict.fromkeys(map(self._clash.get, simplest)) if problem is not None]
        # What the recipe states itself binds; what it lacks, a search might have added.
        binding = [
            problem
            for problem in reasons
            if problem.technique in self.space.recipe.techniques and problem.code is not ProblemCode.MISSING_TAG
        ]
        if size % world == 0 and reasons:
            return f"techniques: nothing that may be added can be planned here: {'; '.join(map(str, (binding or reasons)[:3]))}"
        return (
            f"batch.size: {size} rows cannot be shared out evenly among {world} devices by what may be added; use a multiple of {world}"
            f" (--batch-tokens {size // world * world * self.space.recipe.batch.length or world * self.space.recipe.batch.length}), or fewer devices"
        )

    # Looks

    def _corrected(self, c: Candidate) -> tuple[float, float]:
        """Bytes and tokens a second of the run of a guess, as looks at its kin were beside theirs: the less they have in common, the less they tell."""
        if own := self._scale.get((c.kind, c.names)):
            memory, speed = own
        elif alike := self._scale.get(c.names):
            memory, speed = math.sqrt(alike[0]), alike[1]
        else:
            memory, speed = 1.0, math.sqrt(self._scale.get(None, (1.0, 1.0))[1])
        return c.guess.bytes * memory, self.space.over_run(c.guess.tokens_per_second * speed, c.added)

    def _promise(self, c: Candidate) -> tuple[float, ...]:
        """As `_rank`, of a guess."""
        _, speed = self._corrected(c)
        slow = -round(math.log(speed) / math.log(_WORTH))
        first: tuple[float, ...] = ()
        if self.aim == "largest-batch":
            first = (-c.micro,)
        if self.aim == "closest":
            first = (NUMERICS.index(worst(c.added)),)
        return (*first, slow, -c.micro, len(c.added))

    def _speed(self, s: EvaluatedPlan) -> float:
        """Tokens a second of the whole run."""
        return self.space.over_run(s.plan["tokens_per_second"], s.added)

    def _rank(self, s: EvaluatedPlan) -> tuple[float, ...]:
        """Less is better."""
        speed = -self._speed(s)
        if self.aim == "largest-batch":
            return (-s.micro, speed)
        if self.aim == "closest":
            return (NUMERICS.index(s.trades), speed)
        return (speed,)

    def _open(self, candidates: list[Candidate]) -> list[Candidate]:
        """Those that may fit and are not ruled out by what was looked at."""
        return [
            c
            for c in candidates
            if self._corrected(c)[0] <= self.room * _SLACK and c.micro < self._failed.get((c.kind, c.layout), math.inf)
        ]

    def _look_from_the_best(self, candidates: list[Candidate]) -> None:
        left = candidates
        while left and (time.process_time() < self.until or len(self.seen) < _LOOKS):
            left = self._open(left)
            if not left:
                return
            c = min(left, key=self._promise)
            fitting = [s for s in self.seen if s.plan["fits"]]
            if fitting and self._no_better(c, min(fitting, key=self._rank)):
                return
            left = [other for other in left if other is not c]
            self._look_at(c)

    def _look_beside_the_best(self, candidates: list[Candidate]) -> None:
        """Looks at as many rows and more at a time in the best's layout, where they may be as good. Guesses are of one row at a time: what does not grow
        with rows (weights that are gathered, or made from 4 bits) is less of a step where more go at once, and memory
        may be guessed too high."""
        looked: set[tuple[Any, ...]] = {s.added for s in self.seen}
        while time.process_time() < self.until:
            best = min((s for s in self.seen if s.plan["fits"]), key=self._rank)
            nearby = [
                c
                for c in candidates
                if c.added not in looked
                and best.micro <= c.micro < self._failed.get((c.kind, c.layout), math.inf)
                and set(c.layout) <= set(best.added)
                and self._corrected(c)[0] <= self.room * _BESIDE
                and not self._no_better(c, best, 1 / _BESIDE)
            ]
            if not nearby:
                return
            c = min(nearby, key=self._promise)
            looked.add(c.added)
            self._look_at(c)

    def _no_better(self, c: Candidate, best: EvaluatedPlan, worth: float = _WORTH) -> bool:
        speed = self._corrected(c)[1]
        slower = bool(speed < self._speed(best) * worth)
        if self.aim == "largest-batch":
            return c.micro < best.micro or (c.micro == best.micro and slower)
        if self.aim == "closest":
            trade, mine = NUMERICS.index(worst(c.added)), NUMERICS.index(best.trades)
            return trade > mine or (trade == mine and slower)
        return slower

    def _look_at_the_least(self, candidates: list[Candidate]) -> None:
        """Looks at what seems to need the least memory: only then is it true that nothing fits."""
        for c in sorted(candidates, key=lambda c: c.guess.bytes)[:12]:
            s = self._look_at(c)
            if s is not None:
                return

    def _look_at_others(self, candidates: list[Candidate]) -> None:
        """Looks at the best of other sets of techniques, while there is time: they are the alternatives."""
        for c in sorted(self._open(candidates), key=self._promise):
            if time.process_time() > self.until or len({s.names for s in self.seen if s.plan["fits"]}) > _OTHERS:
                return
            if frozenset(t.name() for t in (*c.kind, *c.layout)) not in {s.names for s in self.seen}:
                self._look_at(c)

    def _guesses(self, candidates: list[Candidate]) -> list[EstimatedPlan]:
        """Every candidate as it was put in order, the fastest first; of thousands, so many as a plot can show."""
        ordered = sorted(candidates, key=lambda c: -self._corrected(c)[1])
        shown = [ordered[n * len(ordered) // _DRAWN] for n in range(_DRAWN)] if len(ordered) > _DRAWN else ordered
        return [
            EstimatedPlan(words(c.added, c.micro), words(c.added), c_bytes / GIB, speed)
            for c in shown
            for c_bytes, speed in [self._corrected(c)]
        ]

    def _look_at(self, c: Candidate) -> EvaluatedPlan | None:
        recipe = self.space.having(c.added)
        why = candidate_problems(self.space, recipe)
        if why:
            self._reject(words(c.added), str(why[0]))
            return None
        self.tell(words(c.added, c.micro))
        began = time.perf_counter()
        try:
            observation = observe_cached(
                recipe, vocabulary=self.space.vocabulary, device=self.space.device, world=self.space.world, how="few"
            )
        except RecipeError as error:  # what only a build finds out
            self._reject(words(c.added), str(error).splitlines()[0])
            return None
        plan = describe(
            recipe, observation, device=self.space.device, rates=self.rates, rows=self.space.rows, in_use=self.in_use
        )
        evaluated = EvaluatedPlan(recipe, plan, worst(c.added), c.micro, c.added)
        self.seen.append(evaluated)
        self._took = time.perf_counter() - began
        scale = (plan["peak_gib"] * GIB / c.guess.bytes, plan["tokens_per_second"] / c.guess.tokens_per_second)
        self._scale[c.kind, c.names] = self._scale[c.names] = self._scale[None] = scale
        if not plan["fits"]:
            key = (c.kind, c.layout)
            self._failed[key] = min(c.micro, self._failed.get(key, c.micro))
            self._reject(words(c.added, c.micro), too_large(plan))
        return evaluated

    def _reject(self, what: str, why: str) -> None:
        if why not in {reason for _, reason in self.rejected}:  # of many that fail alike the first is enough
            self.rejected.append((what, why))

    # The end

    def _confirm(self, best: EvaluatedPlan, how: str) -> tuple[EvaluatedPlan, bool]:
        """The best with all its layers, or with as many as tell what an allocator keeps; where those say that it does not fit, the next best."""
        for s in sorted((s for s in self.seen if s.plan["fits"]), key=self._rank):
            self.tell(f"{'all' if how == 'whole' else 'more'} layers of {words(s.added, s.micro)}")
            observation = observe_cached(
                s.recipe, vocabulary=self.space.vocabulary, device=self.space.device, world=self.space.world, how=how
            )
            plan = describe(
                s.recipe,
                observation,
                device=self.space.device,
                rates=self.rates,
                rows=self.space.rows,
                in_use=self.in_use,
            )
            confirmed = replace(s, plan=plan)
            self.seen[self.seen.index(s)] = confirmed
            if plan["fits"]:
                return confirmed, True
            self._reject(
                words(s.added, s.micro), f"{too_large(plan)}, with {'all its' if how == 'whole' else 'more'} layers"
            )
        return best, False

    def _others(self, best: EvaluatedPlan) -> list[EvaluatedPlan]:
        """The best of each other set of techniques that fits, of those that were looked at."""
        groups: dict[frozenset[str], EvaluatedPlan] = {}
        for s in sorted((s for s in self.seen if s.plan["fits"]), key=self._rank):
            if s.names != best.names:
                groups.setdefault(s.names, s)
        return list(groups.values())

    def _say_why_slower(self, result: SearchResult) -> None:
        for s in result.seen:
            if s.plan["fits"] and s is not result.best and result.best.plan["fits"]:
                share = s.plan["tokens_per_second"] / result.best.plan["tokens_per_second"] - 1
                late = s.plan["seconds_to_start"] - result.best.plan["seconds_to_start"]
                waits = (
                    f", but {late:.0f} s later to its first step, in a run this short" if share > 0 and late > 0 else ""
                )
                self._reject(
                    words(s.added, s.micro),
                    f"fits in {s.plan['peak_gib']:.1f} GiB, {share:+.0%} tokens a second{waits}",
                )


def _shape(layout: Settings) -> tuple[Any, ...]:
    """A way to share out the work, but for the numbers of devices."""
    return tuple((type(t), *(value for value in vars(t).values() if type(value) is not int)) for t in layout)
