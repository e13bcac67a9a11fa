"""Search for the techniques, parallel layout and micro-batch size that fit a device and serve an aim best.

Candidates are ordered by an estimate (`planning/search/ranking.py`) and dry-run from the best on; each dry run
recalibrates the estimates of similar candidates. A candidate that does not fit rules out the same one with larger
micro-batches. All verdicts come from dry runs, and the chosen candidate is dry-run with all its layers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from preheat.core import DATA, Axis, Problem, ProblemCode, Technique
from preheat.errors import RecipeError
from preheat.planning.observation_cache import observe_cached
from preheat.planning.plan import GIB, describe
from preheat.planning.search.candidates import NUMERICS, Settings, Space, candidate_problems, describe_techniques, worst
from preheat.planning.search.ranking import Guess, estimate
from preheat.planning.search.result import EstimatedPlan, EvaluatedPlan, SearchResult, too_large
from preheat.planning.search.technique_combinations import Combination, technique_combinations
from preheat.planning.worker_pool import is_serial

__all__ = ["AIMS", "Aim", "search"]

Aim = Literal["fastest", "cheapest", "largest-batch", "closest"]
AIMS: tuple[Aim, ...] = ("fastest", "cheapest", "largest-batch", "closest")
_SLACK = 1.03  # of the available memory: candidates estimated up to this are dry-run, since estimates may be too high
_LAYOUTS = 40  # layouts whose candidates are all estimated
_ALIKE = 10  # of these, layouts of the same techniques that differ in degrees only
_MIN_DRY_RUNS = 3  # dry runs at least, however long they take
_CONFIRM = 1.5  # of the search's seconds: time allowed to confirm the best with all its layers
_ALTERNATIVES = 3  # alternatives to report
_GAIN = 1.01  # speedup that another candidate must promise to be dry-run
_TOLERANCE = 1.1  # error of estimates within the same layout
_PLOTTED = 300  # candidates in the plot of the report


@dataclass(frozen=True)
class Candidate:
    """Techniques on one device (`kind`), parallel layout, and gradient accumulation (`cuts`) of `rows` per device."""

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
        """Names of the techniques of the layout."""
        return tuple(t.name() for t in self.layout)

    @property
    def micro(self) -> int:
        """Micro-batch size."""
        return math.ceil(self.rows / (self.cuts.micro_batch_count() if self.cuts else 1))


def search(
    space: Space,
    *,
    aim: Aim = "fastest",
    seconds: float = 10.0,
    confirm: bool = True,
    tell: Callable[[str], None] = lambda message: None,
) -> SearchResult:
    """Finds the best recipe that fits.

    Args:
        space: the recipe, the techniques that may be added, and the devices.
        aim: fastest and cheapest: most tokens/s; largest-batch: largest micro-batch; closest: smallest change of
            numerics.
        seconds: CPU time of this process after which only the dry runs needed for a verdict are added.
        confirm: dry-run the best with all its layers.
        tell: called with a progress message before each dry run.

    Raises:
        RecipeError: the recipe contradicts itself, or cannot be split across the devices.

    Example:
        >>> from preheat.recipe import parse
        >>> model = "{num_layers: 2, hidden_size: 64, num_heads: 2, vocab_size: 128}"
        >>> recipe = parse(f"model: {model}\\nbatch: {{size: 2, seq_len: 16}}\\nstop: {{max_steps: 1}}")
        >>> from preheat.planning.request import Request
        >>> from preheat.planning.speed.roofline import Roofline
        >>> gpu = Roofline.of("H100")
        >>> search(Space(Request(recipe, gpu.as_device, world=1, rates=gpu))).best.plan["fits"]
        True
    """
    return _Search(space, aim, seconds, tell).run(confirm)


class _Search:
    def __init__(self, space: Space, aim: Aim, seconds: float, tell: Callable[[str], None]):
        assert space.request.rates is not None, "a search needs the rates of its device"
        self.space, self.rates, self.aim, self.tell = space, space.request.rates, aim, tell
        self.room = space.device.memory - space.request.in_use
        self.seconds, self.until = seconds, math.inf
        self.seen: list[EvaluatedPlan] = []
        self.rejected: list[tuple[str, str]] = []
        self.guessed = 0
        # Last dry run over its estimate (memory, tokens/s), by (kind, layout names), by layout names, and under None.
        self._corrections: dict[tuple[Settings, tuple[str, ...]] | tuple[str, ...] | None, tuple[float, float]] = {}
        # By (kind, layout): why the two are incompatible.
        self._conflicts: dict[tuple[Settings, Settings], Problem | None] = {}
        self._cuts: dict[int, list[Technique]] = {}  # rows of a device -> gradient accumulation settings
        self._seconds_per_dry_run = 0.0  # of the last dry run of few layers
        # By (kind, layout): the smallest micro-batch that did not fit.
        self._too_large: dict[tuple[Settings, Settings], int] = {}

    def run(self, confirm: bool) -> SearchResult:
        # Techniques of last resort only if nothing else fits: plans do not include their full cost in time.
        for resort in (False, True):
            kinds = technique_combinations(self.space, self._reject, resort=resort)
            candidates = self._candidates(kinds)
            if not candidates:
                raise RecipeError(self._no_candidate_message())
            # CPU time, so that a busy machine does not change the result; estimates above do not count.
            self.until = time.process_time() + self.seconds
            self._evaluate_best_first(candidates)
            # Something fits: spend the remaining time on improving it and on alternatives.
            if any(s.plan["fits"] for s in self.seen):
                self._evaluate_larger_micro_batches(candidates)
                self._evaluate_alternatives(candidates)
                break
            # Nothing was found that fits: prove it with the candidate that needs the least.
            self._evaluate_smallest(candidates)
            if any(s.plan["fits"] for s in self.seen):
                break
        # Every candidate was refused when it was built.
        if not self.seen:
            if self.space.recipe.batch.size % self.space.world:
                raise RecipeError(self._no_candidate_message())
            reasons = dict.fromkeys(why for _, why in self.rejected[:3])
            raise RecipeError(f"techniques: nothing that may be added can be planned here: {'; '.join(reasons)}")
        fitting = [s for s in self.seen if s.plan["fits"]]
        best = min(fitting, key=self._rank) if fitting else min(self.seen, key=lambda s: s.plan["peak_gib"])
        confirmed = False
        layers = self.space.model.layers / self.space.sizes_of(best.recipe)[Axis.PIPELINE]
        if confirm and fitting:
            # The dry run was of 4 and of 5 layers.
            quick = self._seconds_per_dry_run * layers / (9 if is_serial() else 5) <= _CONFIRM * self.seconds
            best, confirmed = self._confirm(best, "whole" if quick else "enough")
            # With fewer layers the verdict is sound but extrapolated, so it is not reported as confirmed.
            confirmed &= quick
        guesses = self._guesses(candidates)
        result = SearchResult(
            best, self._alternatives(best), self.seen, self.rejected, self.guessed, confirmed, guesses
        )
        self._explain_slower(result)
        return result

    # Candidates

    def _candidates(self, kinds: list[Combination]) -> list[Candidate]:
        """Returns all candidates of the most promising layouts; if there are many, a few kinds decide which."""
        # Hundreds of layouts times hundreds of kinds are too many estimates: rank the layouts by a sample of the kinds.
        layouts = list(self._meshes())
        if len(layouts) > _LAYOUTS:
            best = [k for k in kinds if not k.better]
            # The sample: kinds that nothing dominates, or the fastest and the smallest ones that the layout is
            # compatible with.
            others = [
                sorted(kinds, key=lambda k: k.cost.seconds[0]),
                sorted(kinds, key=lambda k: k.cost.states[0] + k.cost.saved[0]),
            ]
            every = max(len(kinds) // 10, 1)  # estimating all of them would take as long as the dry runs
            # Layouts that differ in degrees only are mostly compatible with the same kinds.
            some: dict[Hashable, list[Combination]] = {}
            # Layouts with the most rows per device first: these can be cut into enough micro-batches for a pipeline.
            for layout, _ in sorted(layouts, key=lambda pair: math.prod(pair[1][axis] for axis in DATA)):
                if (shape := _shape(layout)) not in some:
                    compatible = [k for k in best if self._is_compatible(k, layout)]
                    firsts = (
                        next((k for k in order[::every] if self._is_compatible(k, layout)), None) for order in others
                    )
                    some[shape] = compatible or [k for k in firsts if k is not None]
            tried = [self._candidates_of(layout, sizes, some[_shape(layout)]) for layout, sizes in layouts]
            self.guessed += sum(map(len, tried))
            counts: Counter[tuple[str, ...]] = Counter()
            ranked = []
            for _, n in sorted((self._layout_key(of_layout), n) for n, of_layout in enumerate(tried)):
                # Without this limit, layouts that differ in degrees only would crowd out other techniques.
                counts[names := tuple(t.name() for t in layouts[n][0])] += 1
                if counts[names] <= _ALIKE:
                    ranked.append(layouts[n])
            layouts = ranked[:_LAYOUTS]
        candidates = []
        for layout, sizes in layouts:
            # A kind is dropped if a better one is also compatible with this layout.
            possible = {n: k for n, k in enumerate(kinds) if self._is_compatible(k, layout)}
            candidates += self._candidates_of(
                layout, sizes, [k for k in possible.values() if not k.better & possible.keys()]
            )
        self.guessed += len(candidates)
        return candidates

    def _is_compatible(self, kind: Combination, layout: Settings) -> bool:
        """True if a kind is compatible with a layout, with the largest or the smallest micro-batches."""
        key = (kind.settings, layout)
        if key not in self._conflicts:
            both = (*kind.settings, *layout)
            why = candidate_problems(self.space, self.space.having(both))
            # A pipeline, for example, needs several micro-batches: try again with the most of them.
            cuts = self._micro_batch_options(layout) if why else [None]
            if cuts[-1] is not None:
                why = candidate_problems(self.space, self.space.having((*both, cuts[-1])))
            self._conflicts[key] = why[0] if why else None
        return self._conflicts[key] is None

    def _layout_key(self, candidates: list[Candidate]) -> tuple[float, float]:
        """Sort key of a layout: first those in which something fits, by their fastest candidate, then the others."""
        fitting = [c for c in candidates if c.guess.bytes <= self.room * _SLACK]
        least = min((c.guess.bytes for c in candidates), default=math.inf)
        return (0.0, -max(c.guess.tokens_per_second for c in fitting)) if fitting else (1.0, least)

    def _meshes(self) -> Iterator[tuple[Settings, dict[Axis, int]]]:
        for layout in self.space.layouts():
            sizes = self.space.sizes((*self.space.recipe.techniques.values(), *layout))
            if sizes is not None and self.space.even(sizes):
                yield layout, sizes

    def _candidates_of(self, layout: Settings, sizes: dict[Axis, int], kinds: Iterable[Combination]) -> list[Candidate]:
        own, batch = tuple(self.space.recipe.techniques.values()), self.space.recipe.batch
        fixed, rows = (
            math.prod(t.micro_batch_count() for t in own),
            batch.size // math.prod(sizes[axis] for axis in DATA),
        )
        cuts = self._micro_batch_options(layout)
        candidates = []
        for kind in kinds:
            tags = frozenset(tag for t in (*own, *kind.settings, *layout) for tag in t.provided())
            for cut in cuts:
                micros = cut.micro_batch_count() if cut else fixed
                # A pipeline with fewer micro-batches than stages never fills.
                if sizes[Axis.PIPELINE] <= micros:
                    guessed = estimate(kind.cost, batch, self.space.model, sizes, micros, tags, self.rates)
                    candidates.append(Candidate(kind.settings, layout, cut, rows, guessed))
        return candidates

    def _micro_batch_options(self, layout: Settings) -> list[Technique | None]:
        """Returns the gradient accumulation settings of a layout; only None if the recipe has its own."""
        own = self.space.recipe.techniques.values()
        sizes = self.space.sizes((*own, *layout))
        rows = self.space.recipe.batch.size // math.prod(sizes[axis] for axis in DATA) if sizes else 1
        # One row cannot be cut, and the recipe's own accumulation stays as it is.
        if rows == 1 or any(t.micro_batch_count() > 1 for t in own):
            return [None]
        if rows not in self._cuts:
            context = self.space.context(self.space.having(layout).recipe)
            cuts = [cls for cls in self.space.searched() if cls().micro_batch_count() > 1]
            self._cuts[rows] = [t for cls in cuts for t in self.space.settings_of(cls).options(context)]
        return [None, *self._cuts[rows]]

    def _no_candidate_message(self) -> str:
        """Returns the message for an empty search; raises RecipeError if the recipe contradicts itself."""
        if any(t.is_parallel() for t in self.space.recipe.techniques.values()):
            self.space.context(self.space.recipe)
        size, world = self.space.recipe.batch.size, self.space.world
        # Problems of the recipe itself before those of added layouts.
        simplest = sorted(self._conflicts, key=lambda pair: len(pair[0]) + len(pair[1]))
        reasons = [problem for problem in dict.fromkeys(map(self._conflicts.get, simplest)) if problem is not None]
        # Problems of the recipe's own techniques come first; a missing tag could have been added by the search.
        binding = [
            problem
            for problem in reasons
            if problem.technique in self.space.recipe.techniques and problem.code is not ProblemCode.MISSING_TAG
        ]
        if size % world == 0 and reasons:
            why = "; ".join(map(str, (binding or reasons)[:3]))
            return f"techniques: nothing that may be added can be planned here: {why}"
        length = self.space.recipe.batch.seq_len
        tokens = size // world * world * length or world * length
        return (
            f"batch.size: {size} rows cannot be split evenly across {world} devices by the techniques that may be "
            f"added; use a multiple of {world} (--batch-tokens {tokens}), or fewer devices"
        )

    # Dry runs

    def _corrected(self, c: Candidate) -> tuple[float, float]:
        """Returns bytes and tokens/s of an estimate, corrected by dry runs of the most similar candidates."""
        # From the most to the least similar; the less similar, the weaker the correction (square root).
        if own := self._corrections.get((c.kind, c.names)):
            memory, speed = own
        elif alike := self._corrections.get(c.names):
            memory, speed = math.sqrt(alike[0]), alike[1]
        else:
            # Errors of memory are specific to techniques; those of speed are partly the device's.
            memory, speed = 1.0, math.sqrt(self._corrections.get(None, (1.0, 1.0))[1])
        return c.guess.bytes * memory, self.space.over_run(c.guess.tokens_per_second * speed, c.added)

    def _estimated_rank(self, c: Candidate) -> tuple[float, ...]:
        """Sort key as `_rank`, from the estimate."""
        _, speed = self._corrected(c)
        # Speed in steps of 1 %: within one, larger micro-batches and fewer techniques come first.
        slow = -round(math.log(speed) / math.log(_GAIN))
        first: tuple[float, ...] = ()
        if self.aim == "largest-batch":
            first = (-c.micro,)
        if self.aim == "closest":
            first = (NUMERICS.index(worst(c.added)),)
        return (*first, slow, -c.micro, len(c.added))

    def _speed(self, s: EvaluatedPlan) -> float:
        """Returns the tokens/s of the whole run."""
        return self.space.over_run(s.plan["tokens_per_second"], s.added)

    def _rank(self, s: EvaluatedPlan) -> tuple[float, ...]:
        """Sort key by the aim; less is better."""
        speed = -self._speed(s)
        if self.aim == "largest-batch":
            return (-s.micro, speed)
        if self.aim == "closest":
            return (NUMERICS.index(s.trades), speed)
        return (speed,)

    def _viable(self, candidates: list[Candidate]) -> list[Candidate]:
        """Returns the candidates that may fit and are not ruled out by an earlier dry run."""
        return [
            c
            for c in candidates
            if self._corrected(c)[0] <= self.room * _SLACK
            and c.micro < self._too_large.get((c.kind, c.layout), math.inf)
        ]

    def _evaluate_best_first(self, candidates: list[Candidate]) -> None:
        left = candidates
        while left and (time.process_time() < self.until or len(self.seen) < _MIN_DRY_RUNS):
            # Again in every turn, because each dry run corrects the estimates of the others.
            left = self._viable(left)
            if not left:
                return
            c = min(left, key=self._estimated_rank)
            fitting = [s for s in self.seen if s.plan["fits"]]
            # Candidates come best first, so none of the rest can improve on the best either.
            if fitting and self._cannot_improve(c, min(fitting, key=self._rank)):
                return
            left = [other for other in left if other is not c]
            self._evaluate(c)

    def _evaluate_larger_micro_batches(self, candidates: list[Candidate]) -> None:
        """Dry-runs the same or larger micro-batches in the best candidate's layout.

        Estimates scale up a single sequence, but some costs do not grow with the micro-batch (gathering or dequantizing
        weights), so larger micro-batches may be faster and need less memory than estimated.
        """
        looked: set[Settings] = {s.added for s in self.seen}
        while time.process_time() < self.until:
            best = min((s for s in self.seen if s.plan["fits"]), key=self._rank)
            nearby = [
                c
                for c in candidates
                if c.added not in looked
                and best.micro <= c.micro < self._too_large.get((c.kind, c.layout), math.inf)
                # Only the best's own layout, in which estimates err by `_TOLERANCE` at most.
                and set(c.layout) <= set(best.added)
                and self._corrected(c)[0] <= self.room * _TOLERANCE
                and not self._cannot_improve(c, best, 1 / _TOLERANCE)
            ]
            if not nearby:
                return
            c = min(nearby, key=self._estimated_rank)
            looked.add(c.added)
            self._evaluate(c)

    def _cannot_improve(self, c: Candidate, best: EvaluatedPlan, worth: float = _GAIN) -> bool:
        speed = self._corrected(c)[1]
        slower = bool(speed < self._speed(best) * worth)
        if self.aim == "largest-batch":
            return c.micro < best.micro or (c.micro == best.micro and slower)
        if self.aim == "closest":
            trade, mine = NUMERICS.index(worst(c.added)), NUMERICS.index(best.trades)
            return trade > mine or (trade == mine and slower)
        return slower

    def _evaluate_smallest(self, candidates: list[Candidate]) -> None:
        """Dry-runs the candidate with the least estimated memory, to be sure that nothing fits."""
        # Several, because some are refused when they are built.
        for c in sorted(candidates, key=lambda c: c.guess.bytes)[:12]:
            s = self._evaluate(c)
            if s is not None:
                return

    def _evaluate_alternatives(self, candidates: list[Candidate]) -> None:
        """Dry-runs the best of other sets of techniques while time remains, as alternatives."""
        for c in sorted(self._viable(candidates), key=self._estimated_rank):
            if time.process_time() > self.until or len({s.names for s in self.seen if s.plan["fits"]}) > _ALTERNATIVES:
                return
            # One dry run for each set of techniques.
            if frozenset(t.name() for t in (*c.kind, *c.layout)) not in {s.names for s in self.seen}:
                self._evaluate(c)

    def _guesses(self, candidates: list[Candidate]) -> list[EstimatedPlan]:
        """Returns the estimates of the candidates, fastest first; at most as many as a plot can show."""
        ordered = sorted(candidates, key=lambda c: -self._corrected(c)[1])
        # A sample at equal ranks keeps the shape of the whole cloud.
        shown = [ordered[n * len(ordered) // _PLOTTED] for n in range(_PLOTTED)] if len(ordered) > _PLOTTED else ordered
        return [
            EstimatedPlan(describe_techniques(c.added, c.micro), describe_techniques(c.added), c_bytes / GIB, speed)
            for c in shown
            for c_bytes, speed in [self._corrected(c)]
        ]

    def _evaluate(self, c: Candidate) -> EvaluatedPlan | None:
        request = self.space.having(c.added)
        why = candidate_problems(self.space, request)
        if why:
            self._reject(describe_techniques(c.added), str(why[0]))
            return None
        self.tell(describe_techniques(c.added, c.micro))
        began = time.perf_counter()
        try:
            observation = observe_cached(request, how="few")
        except RecipeError as error:  # found by the build only
            self._reject(describe_techniques(c.added), str(error).splitlines()[0])
            return None
        plan = describe(request, observation)
        evaluated = EvaluatedPlan(request.recipe, plan, worst(c.added), c.micro, c.added)
        self.seen.append(evaluated)
        self._seconds_per_dry_run = time.perf_counter() - began
        # Observed over estimated, for this candidate and, weaker, for similar ones.
        scale = (plan["peak_gib"] * GIB / c.guess.bytes, plan["tokens_per_second"] / c.guess.tokens_per_second)
        self._corrections[c.kind, c.names] = self._corrections[c.names] = self._corrections[None] = scale
        if not plan["fits"]:
            key = (c.kind, c.layout)
            # Memory grows with the micro-batch: larger ones of the same candidate need no dry run.
            self._too_large[key] = min(c.micro, self._too_large.get(key, c.micro))
            self._reject(describe_techniques(c.added, c.micro), too_large(plan))
        return evaluated

    def _reject(self, what: str, why: str) -> None:
        if why not in {reason for _, reason in self.rejected}:  # one example per reason is enough
            self.rejected.append((what, why))

    # Result

    def _confirm(self, best: EvaluatedPlan, how: str) -> tuple[EvaluatedPlan, bool]:
        """Dry-runs the best with all its layers (`whole`) or with enough for the allocator.

        Continues with the next best if it does not fit.
        """
        # Extrapolated from few layers, a plan just below the limit may turn out to be above it.
        for s in sorted((s for s in self.seen if s.plan["fits"]), key=self._rank):
            self.tell(f"{'all' if how == 'whole' else 'more'} layers of {describe_techniques(s.added, s.micro)}")
            request = replace(self.space.request, recipe=s.recipe)
            plan = describe(request, observe_cached(request, how=how))
            confirmed = replace(s, plan=plan)
            self.seen[self.seen.index(s)] = confirmed
            if plan["fits"]:
                return confirmed, True
            self._reject(
                describe_techniques(s.added, s.micro),
                f"{too_large(plan)}, with {'all its' if how == 'whole' else 'more'} layers",
            )
        return best, False

    def _alternatives(self, best: EvaluatedPlan) -> list[EvaluatedPlan]:
        """Returns the best dry-run candidate of each other set of techniques that fits."""
        # Sorted by rank, so the first of each group is its best.
        groups: dict[frozenset[str], EvaluatedPlan] = {}
        for s in sorted((s for s in self.seen if s.plan["fits"]), key=self._rank):
            if s.names != best.names:
                groups.setdefault(s.names, s)
        return list(groups.values())

    def _explain_slower(self, result: SearchResult) -> None:
        for s in result.evaluated:
            if s.plan["fits"] and s is not result.best and result.best.plan["fits"]:
                share = s.plan["tokens_per_second"] / result.best.plan["tokens_per_second"] - 1
                late = s.plan["seconds_to_start"] - result.best.plan["seconds_to_start"]
                waits = (
                    f", but {late:.0f} s later to its first step, in a run this short" if share > 0 and late > 0 else ""
                )
                self._reject(
                    describe_techniques(s.added, s.micro),
                    f"fits in {s.plan['peak_gib']:.1f} GiB, {share:+.0%} tokens a second{waits}",
                )


def _shape(layout: Settings) -> Hashable:
    """Returns the layout without its parallel degrees."""
    return tuple((type(t), *(value for value in vars(t).values() if type(value) is not int)) for t in layout)
