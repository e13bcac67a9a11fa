"""Search for the techniques, parallel layout and micro-batch size that fit a device and serve an aim best.

Candidates are ordered by an estimate (`planning/search/cost_model.py`) and dry-run from the best on; each dry run
recalibrates the estimates of similar candidates. A candidate that does not fit rules out the same one with larger
micro-batches. All verdicts come from dry runs, and the chosen candidate is dry-run with all its layers.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from signal import SIGINT
from typing import TYPE_CHECKING, Literal

from preheat.core import DATA, Axis, Problem, ProblemCode, Searchable, Slot, Tag, Technique
from preheat.core.plan import Candidate as PlottedCandidate
from preheat.errors import RecipeError
from preheat.hardware.interrupts import Interrupted
from preheat.planning.layer_extrapolation import ENOUGH, FEW, set_layers
from preheat.planning.observation_cache import observe_cached
from preheat.planning.plan import GIB, describe
from preheat.planning.search.candidates import (
    NUMERICS,
    Settings,
    Space,
    describe_techniques,
    find_candidate_problems,
    worst_numerics,
)
from preheat.planning.search.cost_model import Guess, LayerCost, estimate, estimate_gathered_share, observe_layer
from preheat.planning.search.result import (
    LESS_MEMORY,
    BestByStart,
    EvaluatedPlan,
    SearchResult,
    describe_too_large,
    is_better_in_something,
    is_tradeoff,
)
from preheat.planning.search.technique_combinations import Combination, TechniqueCombinations
from preheat.planning.speed.roofline import Roofline

if TYPE_CHECKING:
    from preheat.recipe import Recipe

__all__ = ["AIMS", "Aim", "find_least_estimate", "count_passes", "search"]

Aim = Literal["fastest", "cheapest", "largest-batch", "closest"]
AIMS: tuple[Aim, ...] = ("fastest", "cheapest", "largest-batch", "closest")
# {largest number of devices: passes}, about as many as two cores run in 4, 25 and 30 s: more devices mean more layouts.
_PASSES = {1: 64, 64: 400}
_MANY = 480  # passes on more devices
_SLACK = 1.03  # of the available memory: candidates estimated up to this are dry-run, since estimates may be too high
_LAYOUTS = 40  # layouts whose candidates are all estimated
_ALIKE = 10  # of these, layouts of the same techniques that differ in degrees only
_MIN_DRY_RUNS = 3  # dry runs at least, however many passes they take
_OVERTIME = 3  # times the search's passes: allowed for candidates that promise more than `_FINE`
_CONFIRM = 0.25  # layers for each pass of a search: up to so many, the best is confirmed with all its layers
_ALTERNATIVES = 3  # alternatives to report
_GAIN = 1.01  # speedup that another candidate must promise to be dry-run
_FINE = 1.02  # speedup for which settings between the sampled ones are observed too
_DEGREES = 2  # other degrees of the best layout to dry-run at once
_WITH_ROOM = 2  # candidates to dry-run that may be as fast as one that fits tightly
_TOLERANCE = 1.1  # error of estimates within the same layout
_LESS = 0.95  # of the memory of every better candidate: what another micro-batch must save to be an alternative
_EXCHANGED = 2  # dry runs that only say when techniques that delay the start pay
_REFUSED = 12  # candidates that the build may refuse before nothing is said to fit
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


@dataclass(frozen=True)
class _Correction:
    """Memory and tokens/s of a dry run over its estimate, with its techniques, layout names and micro-batch size."""

    kind: Settings
    names: tuple[str, ...]
    micro: int
    memory: float
    speed: float


def search(
    space: Space,
    *,
    aim: Aim = "fastest",
    passes: int = 160,
    confirm: bool = True,
    tell: Callable[[str], None] = lambda message: None,
) -> SearchResult:
    """Finds the best recipe that fits.

    Args:
        space: the recipe, the techniques that may be added, and the devices.
        aim: fastest and cheapest: most tokens/s; largest-batch: largest micro-batch; closest: smallest change of
            numerics.
        passes: work after which only the dry runs needed for a verdict are added, as forward and backward passes of a
            micro-batch through a layer. Not seconds: the answer must not depend on the speed of the machine.
        confirm: dry-run the best with all its layers.
        tell: called with a progress message before each dry run.

    Ctrl-C (`Interrupted` by SIGINT) ends the search early: the result is the best so far, marked `interrupted`.

    Raises:
        RecipeError: the recipe contradicts itself, or cannot be split across the devices.

    Example:
        >>> from preheat.recipe import parse
        >>> model = "{num_layers: 2, hidden_size: 64, num_heads: 2, vocab_size: 128}"
        >>> recipe = parse(f"model: {model}\\nbatch: {{size: 2, seq_len: 16}}\\nstop: {{max_steps: 1}}")
        >>> from preheat.planning.request import Request
        >>> from preheat.planning.speed.roofline import Roofline
        >>> gpu = Roofline.of("H100")
        >>> search(Space(Request(recipe, gpu.as_device, world=1, rates=gpu))).best.plan.fits
        True
    """
    return _Search(space, aim, passes, tell).run(confirm)


def count_passes(devices: int) -> int:
    """Returns the passes that `preheat plan` gives a search on so many devices.

    Example:
        >>> count_passes(1), count_passes(8), count_passes(1024)
        (64, 400, 480)
    """
    return next((passes for most, passes in _PASSES.items() if devices <= most), _MANY)


def find_least_estimate(space: Space) -> float:
    """Returns the estimated GiB of a device with the candidate that needs the least; infinite without candidates.

    Raises:
        RecipeError: the recipe as it is cannot be built.
    """
    smallest = _Search(space, "fastest", 0, lambda message: None)
    combinations = TechniqueCombinations(space, smallest._refuse)
    return min((c.guess.bytes for c in smallest._list_candidates(combinations.sampled())), default=math.inf) / GIB


def _is_same_estimate(a: Guess, b: Guess) -> bool:
    return math.isclose(a.bytes, b.bytes, rel_tol=1e-4) and math.isclose(a.seconds, b.seconds, rel_tol=1e-4)


class _Search:
    def __init__(self, space: Space, aim: Aim, passes: int, tell: Callable[[str], None]):
        assert space.request.rates is not None, "a search needs the rates of its device"
        self.space, self.rates, self.aim, self.tell = space, space.request.rates, aim, tell
        self.room = space.device.memory - space.request.in_use
        self.passes, self.passed = passes, 0
        self.seen: list[EvaluatedPlan] = []
        self.candidates: list[Candidate] = []
        self.rejected: list[tuple[str, str]] = []
        self.refused: list[tuple[Technique, Problem]] = []
        self.guessed = 0
        self._tried: set[Settings] = set()  # techniques of the candidates that were dry-run, or refused by the build
        self._corrections: list[_Correction] = []
        # By (kind, layout names, micro-batch): the correction of the most similar dry run.
        self._similar: dict[tuple[Settings, tuple[str, ...], int], _Correction | None] = {}
        # By (kind, layout): why the two are incompatible.
        self._conflicts: dict[tuple[Settings, Settings], Problem | None] = {}
        self._kinds: dict[Settings, Combination] = {}  # of the candidates
        self._cuts: dict[int, list[Technique]] = {}  # rows of a device -> gradient accumulation settings
        self._gain: float | None = None  # largest speedup by more rows, once it is known
        # By (kind, layout): the smallest micro-batch that did not fit.
        self._too_large: dict[tuple[Settings, Settings], int] = {}

    def run(self, confirm: bool) -> SearchResult:
        confirmed = interrupted = False
        startup = None
        try:
            self._explore()
            best = self._choose_preferred()
            if confirm and best.plan.fits:
                best, confirmed = self._confirm(best)
            if best.plan.fits:
                startup = self._compare_startup(best)
        except Interrupted as signal:
            # Ctrl-C asks for the best so far. Other signals, and a second one, end the command.
            if signal.number != SIGINT or not self.seen:
                raise
            best, interrupted = self._choose_preferred(), True
        return SearchResult(
            best,
            self._list_alternatives(best),
            self.seen,
            [*self._list_refusals(best), *self.rejected],
            self.guessed,
            confirmed,
            self._list_guesses(self.candidates),
            interrupted,
            startup,
        )

    def _explore(self) -> None:
        """Dry-runs candidates until no estimate promises a better one; if nothing fits, the smallest."""
        for resort in (False, True):
            combinations = TechniqueCombinations(self.space, self._refuse, resort=resort)
            self.candidates = candidates = self._list_candidates(combinations.sampled())
            if not candidates:
                raise RecipeError(self._no_candidate_message())
            self.passed = 0
            self._evaluate_promising()
            if any(s.plan.fits_safely for s in self.seen):
                if self._is_limited_by_memory() and self._add_refined(combinations):
                    self._evaluate_promising()
                self._evaluate_alternatives(self.candidates)
                self._evaluate_promising()  # an alternative may be better than its estimate
                break
            # Nothing was found that fits: prove it with the candidate that needs the least.
            self._evaluate_smallest(candidates)
            if any(s.plan.fits_safely for s in self.seen):
                break
        # Every candidate was refused when it was built.
        if not self.seen:
            if self.space.recipe.batch.size % self.space.world:
                raise RecipeError(self._no_candidate_message())
            texts = [*(problem.text for _, problem in self.refused), *(why for _, why in self.rejected)]
            reasons = dict.fromkeys(texts)
            raise RecipeError(f"techniques: nothing that may be added can be planned here: {'; '.join([*reasons][:3])}")

    def _choose_best(self) -> EvaluatedPlan:
        """Returns the best candidate that fits safely; if none does, the one that needs the least memory."""
        fitting = [s for s in self.seen if s.plan.fits_safely]
        return min(fitting, key=self._rank) if fitting else min(self.seen, key=lambda s: s.plan.peak_gib)

    def _choose_preferred(self) -> EvaluatedPlan:
        """Returns the best candidate; if it fits only tightly, the best with room that is at most 1 % slower."""
        best = self._choose_best()
        if not best.plan.is_tight:
            return best
        with_room = [s for s in self.seen if s.plan.fits and not s.plan.is_tight and self._is_close(s, best)]
        return min(with_room, key=self._rank, default=best)

    def _is_close(self, s: EvaluatedPlan, best: EvaluatedPlan) -> bool:
        """True if a candidate is at most 1 % slower than the best, and not worse by the rest of the aim."""
        return self._rank(s)[:-1] <= self._rank(best)[:-1] and self._speed(s) * _GAIN >= self._speed(best)

    # Candidates

    def _list_candidates(self, kinds: list[Combination]) -> list[Candidate]:
        """Returns all candidates of the most promising layouts; if there are many, a few kinds decide which."""
        # Hundreds of layouts times hundreds of kinds are too many estimates: rank the layouts by a sample of the kinds.
        layouts = list(self._iterate_meshes())
        layouts = [pair for pair in layouts if self._may_hold_states(kinds, pair[1])] or layouts
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
                if (shape := _layout_shape(layout)) not in some:
                    compatible = [k for k in best if self._is_compatible(k, layout)]
                    firsts = (
                        next((k for k in order[::every] if self._is_compatible(k, layout)), None) for order in others
                    )
                    some[shape] = compatible or [k for k in firsts if k is not None]
            tried = [
                self._list_layout_candidates(layout, sizes, some[_layout_shape(layout)]) for layout, sizes in layouts
            ]
            self.guessed += sum(map(len, tried))
            counts: Counter[tuple[str, ...]] = Counter()
            ranked = []
            for _, n in sorted((self._layout_key(of_layout), n) for n, of_layout in enumerate(tried)):
                # Without this limit, layouts that differ in degrees only would crowd out other techniques.
                counts[names := tuple(t.name() for t in layouts[n][0])] += 1
                if counts[names] <= _ALIKE:
                    ranked.append(layouts[n])
            layouts = ranked[:_LAYOUTS]
        candidates = [c for layout, _ in layouts for c in self._remove_dominated(layout, kinds)]
        self.guessed += len(candidates)
        return candidates

    def _may_hold_states(self, kinds: list[Combination], sizes: dict[Axis, int]) -> bool:
        """True if a device may hold its part of weights and states; replicas share the optimizer's states at most."""
        model, world = self.space.model, self.space.world

        def least(cost: LayerCost) -> float:
            states, optimizer = (pair[0] * model.layers + pair[1] for pair in (cost.states, cost.optimizer))
            return (states - optimizer) * sizes[Axis.REPLICATE] / world + optimizer / world

        return min(least(k.cost) for k in kinds) <= self.room * _TOLERANCE

    def _remove_dominated(self, layout: Settings, kinds: list[Combination]) -> list[Candidate]:
        """Returns the candidates of a layout with the kinds that no other compatible one dominates."""
        sizes = self.space.sizes((*self.space.recipe.techniques.values(), *layout))
        assert sizes is not None, "only meshes of all devices are candidates"
        undominated: set[int] = set()
        # The least dominated first: most others then need no check of their own.
        for n in sorted(range(len(kinds)), key=lambda n: len(kinds[n].better)):
            better = kinds[n].better
            if better & undominated or any(self._is_compatible(kinds[other], layout) for other in better):
                continue
            if self._is_compatible(kinds[n], layout):
                undominated.add(n)
        return self._list_layout_candidates(layout, sizes, [kinds[n] for n in sorted(undominated)])

    def _is_compatible(self, kind: Combination, layout: Settings) -> bool:
        """True if a kind is compatible with a layout, with the largest or the smallest micro-batches."""
        key = (kind.settings, layout)
        if key not in self._conflicts:
            both = (*kind.settings, *layout)
            why = find_candidate_problems(self.space, self.space.add_techniques(both))
            # A pipeline, for example, needs several micro-batches: try again with the most of them.
            cuts = self._list_micro_batch_options(layout) if why else [None]
            if cuts[-1] is not None:
                why = find_candidate_problems(self.space, self.space.add_techniques((*both, cuts[-1])))
            self._conflicts[key] = why[0] if why else None
        return self._conflicts[key] is None

    def _layout_key(self, candidates: list[Candidate]) -> tuple[float, float]:
        """Sort key of a layout: first those in which something fits, by their fastest candidate, then the others."""
        fitting = [c for c in candidates if c.guess.bytes <= self.room * _SLACK]
        least = min((c.guess.bytes for c in candidates), default=math.inf)
        return (0.0, -max(c.guess.tokens_per_second for c in fitting)) if fitting else (1.0, least)

    def _iterate_meshes(self) -> Iterator[tuple[Settings, dict[Axis, int]]]:
        for layout in self.space.layouts():
            sizes = self.space.sizes((*self.space.recipe.techniques.values(), *layout))
            if sizes is not None and self.space.divides_evenly(sizes):
                yield layout, sizes

    def _list_layout_candidates(
        self, layout: Settings, sizes: dict[Axis, int], kinds: Iterable[Combination]
    ) -> list[Candidate]:
        own, batch = tuple(self.space.recipe.techniques.values()), self.space.recipe.batch
        fixed, rows = (
            math.prod(t.micro_batch_count() for t in own),
            batch.size // math.prod(sizes[axis] for axis in DATA),
        )
        cuts = self._list_micro_batch_options(layout)
        expert_degree = max(t.expert_degree(sizes) for t in (*own, *layout)) if own or layout else 1
        stages = math.prod(t.stages_per_device() for t in (*own, *layout))
        all_logits = not any(Slot.OVER_LOGITS in t.claimed() for t in layout)
        candidates = []
        for kind in kinds:
            self._kinds[kind.settings] = kind
            tags = frozenset(tag for t in (*own, *kind.settings, *layout) for tag in t.provided())
            cost = kind.cost
            if estimate_gathered_share(cost, tags) < 1 and (change := self._change_by_cast) is not None:
                cost = cost.with_change(*change)
            for cut in cuts:
                micros = cut.micro_batch_count() if cut else fixed
                # A pipeline with fewer micro-batches than stages never fills.
                if sizes[Axis.PIPELINE] <= micros:
                    idle = max((t.bubble_fraction(micros) for t in (*own, *layout)), default=0.0)
                    in_flight = max((t.micro_batches_in_flight(micros) for t in (*own, *layout)), default=1.0)
                    guessed = estimate(
                        cost,
                        batch,
                        self.space.model,
                        sizes,
                        micros,
                        tags,
                        self.rates,
                        idle=idle,
                        expert_degree=expert_degree,
                        in_flight=in_flight,
                        stages=stages,
                        all_logits=all_logits,
                    )
                    candidates.append(Candidate(kind.settings, layout, cut, rows, guessed))
        return candidates

    @cached_property
    def _change_by_cast(self) -> tuple[LayerCost, LayerCost] | None:
        """Returns the cost of a layer whose weights are gathered in bf16, and in their own precision.

        Activations are in bf16 then wherever autocast keeps fp32, such as between layers: no estimate of one device
        shows it. None if it cannot be observed.
        """
        spread = dict.fromkeys(t for layout in self.space.layouts() for t in layout)
        cast = next((t for t in spread if Tag.BF16_ALL_GATHER in t.provided()), None)
        if cast is None:
            return None
        tags = cast.provided() - {Tag.BF16_ALL_GATHER}
        own = next((t for t in spread if type(t) is type(cast) and t.provided() == tags), None)
        if own is None:
            return None
        try:
            return observe_layer(self.space.to_two_devices(cast)), observe_layer(self.space.to_two_devices(own))
        except RecipeError:  # found by the build only
            return None

    def _list_micro_batch_options(self, layout: Settings) -> list[Technique | None]:
        """Returns the gradient accumulation settings of a layout; only None if the recipe has its own."""
        own = self.space.recipe.techniques.values()
        sizes = self.space.sizes((*own, *layout))
        rows = self.space.recipe.batch.size // math.prod(sizes[axis] for axis in DATA) if sizes else 1
        # One row cannot be cut, and the recipe's own accumulation stays as it is.
        if rows == 1 or any(t.micro_batch_count() > 1 for t in own):
            return [None]
        if rows not in self._cuts:
            context = self.space.context(self.space.add_techniques(layout).recipe)
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
            f"batch.size: {size} sequences cannot be split evenly across {world} devices by the techniques that may be "
            f"added; use a multiple of {world} (--batch-tokens {tokens}), or fewer devices"
        )

    # Dry runs

    def _correct_estimate(self, c: Candidate) -> tuple[float, float]:
        """Returns bytes and tokens/s of an estimate, corrected by the dry run of the most similar candidate."""
        memory = speed = gain = 1.0
        if similar := self._find_most_similar(c):
            memory, speed = similar.memory, similar.speed
            if similar.names != c.names:
                memory, speed = 1.0, math.sqrt(speed)
            elif similar.kind != c.kind:
                memory = math.sqrt(memory)
            gain = self._estimate_micro_batch_gain(c, similar.micro)
        return c.guess.bytes * memory, self.space.over_run(c.guess.tokens_per_second * speed * gain, c.added)

    def _find_most_similar(self, c: Candidate) -> _Correction | None:
        """Returns the dry run that differs least in layout, techniques and micro-batch; of several the last."""
        key = (c.kind, c.names, c.micro)
        if key not in self._similar:
            kind = set(c.kind)
            self._similar[key] = min(
                reversed(self._corrections),
                key=lambda r: (r.names != c.names, len(kind ^ set(r.kind)), abs(math.log(r.micro / c.micro))),
                default=None,
            )
        return self._similar[key]

    def _estimate_micro_batch_gain(self, c: Candidate, micro: int) -> float:
        """Returns the speedup by micro-batches of `c.micro` instead of `micro` rows, which estimates do not see.

        The time of a row is `fixed / rows + each`, through two dry runs of the same techniques; 1 without two.
        """
        if c.micro == micro or (by_micro := self._collect_speeds(c)) is None:
            return 1.0
        few, many = sorted(by_micro, key=lambda n: abs(math.log(n / c.micro)))[:2]
        fixed = (1 / by_micro[few] - 1 / by_micro[many]) / (1 / few - 1 / many)
        each = 1 / by_micro[few] - fixed / few
        if fixed <= 0 or each <= 0:  # no gain: larger micro-batches are slower by another effect
            return 1.0
        return (fixed / micro + each) / (fixed / c.micro + each)

    def _collect_speeds(self, c: Candidate) -> dict[int, float] | None:
        """Returns tokens/s over their estimates by micro-batch size, of the same techniques or, in the same layout, of
        others; None without two dry runs that differ in the micro-batch alone."""
        ratios: dict[Settings, dict[int, float]] = {}
        for r in self._corrections:
            if r.names == c.names:
                ratios.setdefault(r.kind, {})[r.micro] = r.speed
        own = ratios.get(c.kind, {})
        return next((by_micro for by_micro in (own, *reversed(ratios.values())) if len(by_micro) > 1), None)

    def _estimate_unknown_gain(self, c: Candidate) -> float:
        """Returns the speedup by larger micro-batches that the estimate may not see."""
        return self._estimate_row_gain(c.kind) if self._collect_speeds(c) is None else _SLACK

    def _estimate_row_gain(self, kind: Settings) -> float:
        """Returns the largest speedup of one device by more rows: almost none if rows are long and layers wide."""
        one = self.space.to_single_device(kind)
        # Weights in 4 or 8 bits are dequantized for each micro-batch, however many rows it has.
        provided = (t.provided() for t in one.recipe.techniques.values())
        quantized = Tag.QUANTIZED_BASE in self.space.model.storage_tags.union(*provided)
        if quantized or not isinstance(self.rates, Roofline):
            return _TOLERANCE
        # Most techniques change what depends on rows by little: those of the first kind are observed.
        if self._gain is None:
            four = replace(one, recipe=replace(one.recipe, batch=replace(one.recipe.batch, size=4)))
            layers = self.space.model.layers
            alone, together = (
                cost.seconds[0] * layers + cost.seconds[1] for cost in (observe_layer(one), observe_layer(four))
            )
            # A step takes `fixed + rows * each` seconds.
            each = (together - alone) / 3
            self._gain = min(max(alone / each, 1.0), _TOLERANCE) if each > 0 else _TOLERANCE
        return self._gain

    def _estimated_rank(self, c: Candidate) -> tuple[float, ...]:
        """Sort key as `_rank`, from the estimate."""
        _, speed = self._correct_estimate(c)
        # Speed in steps of 1 %: within one, larger micro-batches and fewer techniques come first.
        slow = -round(math.log(speed) / math.log(_GAIN))
        first: tuple[float, ...] = ()
        if self.aim == "largest-batch":
            first = (-c.micro,)
        if self.aim == "closest":
            first = (NUMERICS.index(worst_numerics(c.added)),)
        return (*first, slow, -c.micro, len(c.added))

    def _speed(self, s: EvaluatedPlan) -> float:
        """Returns the tokens/s of the whole run."""
        return self.space.over_run(s.plan.tokens_per_second, s.added)

    def _rank(self, s: EvaluatedPlan) -> tuple[float, ...]:
        """Sort key by the aim; less is better."""
        speed = -self._speed(s)
        if self.aim == "largest-batch":
            return (-s.micro, speed)
        if self.aim == "closest":
            return (NUMERICS.index(s.trades), speed)
        return (speed,)

    def _is_late(self, times: int = 1) -> bool:
        """True if the dry runs have taken the passes of the search so many times."""
        return self.passed >= times * self.passes

    def _count_layer_passes(self, c: Candidate) -> int:
        """Returns the passes of a micro-batch through a layer in the dry run of a candidate."""
        micros = c.cuts.micro_batch_count() if c.cuts else 1
        layers = self.space.model.layers
        stages = math.prod(t.degrees().get(Axis.PIPELINE, 1) for t in c.added)
        if stages > 1:  # all layers of a stage, with micro-batches until the pipeline is full
            return math.ceil(layers / stages) * min(micros, stages + 1)
        few = layers if self.space.device.kind == "cpu" else min(layers, 2 * FEW[0] + FEW[1])
        return few * min(micros, 2)

    def _list_viable(self, candidates: list[Candidate], slack: float = _SLACK) -> list[Candidate]:
        """Returns the candidates that may fit, and are not dry-run or ruled out by an earlier dry run."""
        # A setting that does not change the estimate has no effect: `reduce`, for example, without accumulation.
        planned = {s.added for s in self.seen}
        tried = {(c.kind, c.names, c.cuts, c.guess) for c in self.candidates if c.added in planned}
        return [
            c
            for c in candidates
            if c.added not in self._tried
            and (c.kind, c.names, c.cuts, c.guess) not in tried
            and not self._was_too_large(c)
            and self._correct_estimate(c)[0] <= self.room * slack
        ]

    def _was_too_large(self, c: Candidate) -> bool:
        """True if the same techniques did not fit with micro-batches of this size or a smaller one."""
        return c.micro >= self._too_large.get((c.kind, c.layout), math.inf)

    def _evaluate_promising(self) -> None:
        """Dry-runs candidates until no estimate promises a better one; each dry run recalibrates the estimates."""
        before = -1
        while len(self.seen) > before:
            before = len(self.seen)
            self._evaluate_best_first()
            if any(s.plan.fits_safely for s in self.seen):
                self._evaluate_with_room()
                self._evaluate_larger_micro_batches()
                self._evaluate_layout_settings()

    def _evaluate_best_first(self) -> None:
        while left := self._list_viable(self.candidates):
            c = min(left, key=self._estimated_rank)
            fitting = [s for s in self.seen if s.plan.fits_safely]
            worth = _FINE if self._is_late() else _GAIN
            if fitting and self._is_optimal(c, min(fitting, key=self._rank), worth):
                return
            if self._is_late(_OVERTIME) and len(self.seen) >= _MIN_DRY_RUNS:
                return
            self._evaluate(c)

    def _evaluate_with_room(self) -> None:
        """If the best candidate fits tightly, dry-runs those that may be as fast with room for errors of the plan."""
        for _ in range(_WITH_ROOM):
            best = self._choose_preferred()
            if not best.plan.is_tight or self._is_late():
                return
            above = best.plan.peak_gib_interval.high / best.plan.peak_gib
            nearby = [
                c
                for c in self._list_viable(self.candidates, 1 / above)
                # Smaller micro-batches may be slower than estimated.
                if not self._is_optimal(
                    c, best, (self._estimate_unknown_gain(c) if c.micro < best.micro else 1.0) / _GAIN
                )
            ]
            if not nearby:
                return
            self._evaluate(min(nearby, key=self._estimated_rank))

    def _evaluate_larger_micro_batches(self) -> None:
        """Dry-runs the same or larger micro-batches in the best candidate's layout.

        Estimates scale up a single sequence, but some costs do not grow with the micro-batch (gathering or dequantizing
        weights), so larger micro-batches may be faster and need less memory than estimated.
        """
        while not self._is_late():
            best = self._choose_best()
            nearby = [
                c
                for c in self._list_viable(self.candidates, _TOLERANCE)
                if best.micro <= c.micro
                and set(c.layout) <= set(best.added)
                and not self._is_optimal(c, best, 1 / self._estimate_unknown_gain(c))
            ]
            if not nearby:
                return
            self._evaluate(min(nearby, key=self._estimated_rank))

    def _evaluate_layout_settings(self) -> None:
        """Dry-runs other settings of the parallel techniques of the best candidate, and other degrees of them.

        Estimates hide communication behind the whole step, so settings that communicate less are often estimated as
        fast, and dry runs find which part is exposed; a correction by one layout does not hold for other degrees.
        Layouts are listed without the techniques of one device; here also the settings that those allow are tried.
        """
        tried = None
        while not self._is_late() and tried is not (best := self._choose_best()):
            tried = best
            current = next((c for c in self.candidates if c.added == best.added), None)
            others = [*self._vary_settings(current, best), *self._vary_degrees(current)] if current else []
            for c in self._list_viable(others):
                if not self._is_optimal(c, best, 1 / _SLACK):
                    self._evaluate(c)

    def _vary_settings(self, current: Candidate, best: EvaluatedPlan) -> list[Candidate]:
        """Returns the candidates that differ from the best in settings of a parallel technique, not in its degrees.

        Returns only the first of several candidates with equal estimates. Their bytes may differ slightly, because
        norms stay in fp32.
        """
        context = self.space.context(best.recipe)
        alike = [c for c in self.candidates if c.kind == current.kind and c.cuts == current.cuts]
        guesses = [c.guess for c in alike if c.added in self._tried]
        candidates: list[Candidate] = []
        for n, t in enumerate(current.layout):
            assert isinstance(t, Searchable), "only these are searched"
            for other in self.space.settings_of(type(t)).options(context):
                layout = (*current.layout[:n], other, *current.layout[n + 1 :])
                if other == t or other.degrees() != t.degrees() or not self.space.is_allowed(other):
                    continue
                for c in self._list_layout_candidates(layout, dict(context.sizes), [self._kinds[current.kind]]):
                    if c.cuts == current.cuts and not any(_is_same_estimate(c.guess, guess) for guess in guesses):
                        guesses.append(c.guess)
                        candidates.append(c)
        known = {c.added for c in self.candidates}
        self.candidates = [*self.candidates, *(c for c in candidates if c.added not in known)]
        return candidates

    def _vary_degrees(self, current: Candidate) -> list[Candidate]:
        """Returns the best estimates of other divisions of the devices among the same parallel techniques."""

        def degrees(c: Candidate) -> tuple[tuple[Axis, int], ...]:
            return tuple(pair for t in c.layout for pair in t.degrees().items())

        best: dict[tuple[tuple[Axis, int], ...], Candidate] = {}
        for c in sorted(self._list_viable(self.candidates), key=self._estimated_rank):
            if c.names == current.names and degrees(c) != degrees(current):
                best.setdefault(degrees(c), c)
        return list(best.values())[:_DEGREES]

    def _is_limited_by_memory(self) -> bool:
        """True if a candidate that does not fit safely may be faster than the best by more than `_FINE`."""
        best, viable = self._choose_best(), {c.added for c in self._list_viable(self.candidates)} | self._tried
        unfit = (c for c in self.candidates if c.added not in viable or self._was_too_large(c))
        fastest = self._speed(best)
        return any(
            self._correct_estimate(c)[1] * (self._estimate_unknown_gain(c) if c.micro > best.micro else 1.0)
            > _FINE * fastest
            for c in unfit
        )

    def _add_refined(self, combinations: TechniqueCombinations) -> bool:
        """Adds candidates with settings between the sampled ones, which need less memory than one and less time than
        the next; returns False if there are none."""
        sampled = {c.kind for c in self.candidates}
        kinds = combinations.refined(_FINE)
        layouts = dict.fromkeys(c.layout for c in self.candidates)
        refined = [c for layout in layouts for c in self._remove_dominated(layout, kinds) if c.kind not in sampled]
        self.guessed += len(refined)
        self.candidates = [*self.candidates, *refined]
        return bool(refined)

    def _is_optimal(self, c: Candidate, best: EvaluatedPlan, worth: float = _GAIN) -> bool:
        speed = self._correct_estimate(c)[1]
        slower = bool(speed < self._speed(best) * worth)
        if self.aim == "largest-batch":
            return c.micro < best.micro or (c.micro == best.micro and slower)
        if self.aim == "closest":
            trade, mine = NUMERICS.index(worst_numerics(c.added)), NUMERICS.index(best.trades)
            return trade > mine or (trade == mine and slower)
        return slower

    def _evaluate_smallest(self, candidates: list[Candidate]) -> None:
        """Dry-runs the candidate with the least estimated memory, to be sure that nothing fits."""
        # Several, because some are refused when they are built: of the same techniques two, which may differ in their
        # settings.
        refused: Counter[tuple[str, ...]] = Counter()
        for c in sorted(candidates, key=lambda c: c.guess.bytes):
            names = (*(t.name() for t in c.kind), *c.names)
            if refused.total() >= _REFUSED:
                return
            if refused[names] < 2:
                if self._evaluate(c) is not None:
                    return
                refused[names] += 1

    def _evaluate_alternatives(self, candidates: list[Candidate]) -> None:
        """Dry-runs the best of other sets of techniques while passes remain, as alternatives."""
        runs = 0
        for c in sorted(self._list_viable(candidates), key=self._estimated_rank):
            best = self._choose_best()
            # As many dry runs at most as there may be alternatives: estimates may be wrong about the gain.
            if self._is_late() or runs >= _ALTERNATIVES or len(self._list_alternatives(best)) >= _ALTERNATIVES:
                return
            # One dry run for each set of techniques.
            names = frozenset(t.name() for t in (*c.kind, *c.layout))
            if names not in {s.names for s in self.seen} and self._may_gain(c, best):
                self._evaluate(c)
                runs += 1

    def _may_gain(self, c: Candidate, best: EvaluatedPlan) -> bool:
        """True if a candidate that is estimated to be slower is better than the best in something else."""
        start, others = self._start(c.added), self._start(best.added)
        milder = NUMERICS.index(worst_numerics(c.added)) < NUMERICS.index(best.trades)
        faster = self._correct_estimate(c)[1] > self._speed(best)  # with smaller micro-batches, for example
        return (
            faster or milder or start < others or self._correct_estimate(c)[0] < LESS_MEMORY * best.plan.peak_gib * GIB
        )

    def _list_guesses(self, candidates: list[Candidate]) -> list[PlottedCandidate]:
        """Returns the estimates of the candidates, fastest first; at most as many as a plot can show."""
        ordered = sorted(candidates, key=lambda c: -self._correct_estimate(c)[1])
        # A sample at equal ranks keeps the shape of the whole cloud.
        shown = [ordered[n * len(ordered) // _PLOTTED] for n in range(_PLOTTED)] if len(ordered) > _PLOTTED else ordered
        return [
            PlottedCandidate(describe_techniques(c.added, c.micro), describe_techniques(c.added), c_bytes / GIB, speed)
            for c in shown
            for c_bytes, speed in [self._correct_estimate(c)]
        ]

    def _evaluate(self, c: Candidate) -> EvaluatedPlan | None:
        self._tried.add(c.added)
        request = self.space.add_techniques(c.added)
        why = find_candidate_problems(self.space, request)
        if why:
            self._reject(describe_techniques(c.added, c.micro), str(why[0]))
            return None
        self.tell(describe_techniques(c.added, c.micro))
        self.passed += self._count_layer_passes(c)  # also of one that the build refuses
        try:
            plan = describe(request, observe_cached(request, how="few"))
        except RecipeError as error:  # found by the build only, or the device has no rate for this precision
            self._reject(describe_techniques(c.added, c.micro), str(error).splitlines()[0])
            return None
        evaluated = EvaluatedPlan(request.recipe, plan, worst_numerics(c.added), c.micro, c.added)
        self.seen.append(evaluated)
        memory, speed = plan.peak_gib * GIB / c.guess.bytes, plan.tokens_per_second / c.guess.tokens_per_second
        self._corrections.append(_Correction(c.kind, c.names, c.micro, memory, speed))
        self._similar.clear()
        if not plan.fits_safely:
            key = (c.kind, c.layout)
            # Memory grows with the micro-batch: larger ones of the same candidate need no dry run.
            self._too_large[key] = min(c.micro, self._too_large.get(key, c.micro))
            self._reject(describe_techniques(c.added, c.micro), describe_too_large(plan))
        return evaluated

    def _refuse(self, t: Technique, problem: Problem) -> None:
        """Notes that a technique goes with no other that may be added."""
        if (t.name(), problem.text) not in {(other.name(), why.text) for other, why in self.refused}:
            self.refused.append((t, problem))

    def _reject(self, what: str, why: str) -> None:
        if why not in {reason for _, reason in self.rejected}:  # one example per reason is enough
            self.rejected.append((what, why))

    # Result

    def _confirm(self, best: EvaluatedPlan) -> tuple[EvaluatedPlan, bool]:
        """Dry-runs the best with all its layers if they are not too many, else with enough for the allocator.

        Continues with the next best if it does not fit safely.

        Returns:
            The best, and whether it was dry-run with all its layers.
        """
        layers = self.space.model.layers / self.space.sizes_of(best.recipe)[Axis.PIPELINE]
        # By their number and not by the clock, so that a busy machine gives the same answer. It matters only if the log
        # of all layers cannot be extrapolated: enough layers are as many as the two dry runs have together, because
        # fewer are quicker all at once.
        on_cpu = self.space.device.kind == "cpu"  # where all layers were dry-run already, for the heap
        all_ = on_cpu or layers <= max(_CONFIRM * self.passes, 2 * ENOUGH[0] + ENOUGH[1])
        how = "whole" if all_ else "enough"
        # If nothing fits safely, what fits is the answer all the same.
        accept = operator.attrgetter("fits_safely" if best.plan.fits_safely else "fits")
        for s in sorted((s for s in self.seen if accept(s.plan)), key=lambda s: (s is not best, self._rank(s))):
            self.tell(f"{'all' if how == 'whole' else 'more'} layers of {describe_techniques(s.added, s.micro)}")
            request = replace(self.space.request, recipe=s.recipe)
            plan = describe(request, observe_cached(request, how=how))
            confirmed = replace(s, plan=plan)
            self.seen[self.seen.index(s)] = confirmed
            if accept(plan):
                return confirmed, all_
            self._reject(
                describe_techniques(s.added, s.micro),
                f"{describe_too_large(plan)}, with {'all its' if how == 'whole' else 'more'} layers",
            )
        # None fits with its layers: `seen` has the plans that say so.
        return self._choose_best(), False

    def _list_alternatives(self, best: EvaluatedPlan) -> list[EvaluatedPlan]:
        """Returns the dry-run candidates that fit safely and are worth a choice, the best first.

        These are the best of each other set of techniques, and all that need less memory than every better one, if
        they are better than `best` in something and worse in something, and better than each faster one in something.
        """
        alternatives: list[EvaluatedPlan] = []
        names, least = {best.names}, best.plan.peak_gib
        for s in sorted((s for s in self.seen if s.plan.fits_safely and s is not best), key=self._rank):
            if not is_tradeoff(s, best):
                continue
            distinct = s.names not in names or s.plan.peak_gib < least * _LESS
            if distinct and all(is_better_in_something(s, faster) for faster in alternatives):
                alternatives.append(s)
            names.add(s.names)
            least = min(least, s.plan.peak_gib)
        return alternatives

    def _compare_startup(self, best: EvaluatedPlan) -> BestByStart | None:
        """Compares the best with the fastest candidate that starts later, or sooner if the best starts late.

        The search may have dry-run none of them, or slow ones only, because they cannot be the answer for a run of this
        length. So the best is dry-run with such techniques exchanged, too.
        """
        if self._start(tuple(self.space.recipe.techniques.values())):
            return None  # the recipe itself delays the start of every candidate
        late = bool(self._start(best.added))
        exchanged = self._remove_delaying(best) if late else self._add_delaying(best)
        others = [s for s in self.seen if bool(self._start(s.added)) != late]
        others += [s for added in exchanged[:_EXCHANGED] if (s := self._plan_candidate(added, best.micro)) is not None]
        # Of two answers that the aim ranks apart (by batch, or by numerics), the start explains only a part.
        others = [s for s in others if s.plan.fits_safely and self._rank(s)[:-1] == self._rank(best)[:-1]]
        if not others:
            return None
        other = min(others, key=lambda s: s.plan.seconds_per_step)
        without, with_them = (other, best) if late else (best, other)
        return BestByStart(tuple(t.name() for t in with_them.added if self._start((t,))), without, with_them)

    def _add_delaying(self, best: EvaluatedPlan) -> list[Settings]:
        """Returns the settings of the best with a technique that delays the start, without one that excludes it."""
        settings: list[Settings] = []
        for t in self._iterate_searched_settings(best.recipe):
            others = tuple(other for other in best.added if type(other) is not type(t))
            fewer = (tuple(o for o in others if o is not left_out) for left_out in others)
            if self._start((t,)):
                settings += [(*rest, t) for rest in (others, *fewer) if self._is_valid((*rest, t))]
        return settings

    def _remove_delaying(self, best: EvaluatedPlan) -> list[Settings]:
        """Returns the settings of the best without the techniques that delay the start: first with one that these
        exclude, then alone."""
        remaining = tuple(t for t in best.added if not self._start((t,)))
        instead = (
            t
            for t in self._iterate_searched_settings(self.space.add_techniques(remaining).recipe)
            if t.name() not in {other.name() for other in best.added} and not self._is_valid((*best.added, t))
        )
        return [settings for settings in (*((*remaining, t) for t in instead), remaining) if self._is_valid(settings)]

    def _iterate_searched_settings(self, recipe: Recipe) -> Iterator[Technique]:
        context = self.space.context(recipe)
        for cls in self.space.searched():
            yield from (t for t in self.space.settings_of(cls).options(context) if self.space.is_allowed(t))

    def _is_valid(self, added: Settings) -> bool:
        return not find_candidate_problems(self.space, self.space.add_techniques(added))

    def _plan_candidate(self, added: Settings, micro: int) -> EvaluatedPlan | None:
        """Returns a candidate that only a comparison needs, by a dry run; None if the build refuses it."""
        self.tell(describe_techniques(added, micro))
        request = self.space.add_techniques(added)
        try:
            plan = describe(request, observe_cached(request, how="few"))
        except RecipeError:
            return None
        return EvaluatedPlan(request.recipe, plan, worst_numerics(added), micro, added)

    def _start(self, added: Settings) -> float:
        return sum(t.startup_seconds(self.space.device) for t in added)

    def _list_refusals(self, best: EvaluatedPlan) -> list[tuple[str, str]]:
        """Returns (settings, reason) of the refused techniques that the best recipe refuses too, with its reason."""
        refusals: list[tuple[str, str]] = []
        for t, problem in self.refused:
            others = tuple(other for other in best.added if type(other) is not type(t))
            problems = find_candidate_problems(self.space, self.space.add_techniques((*others, t)))
            if not problems and problem.code is ProblemCode.BUILD:
                problems = self._build_problems((*others, t))
            if problems:
                # The reason of the recipe's own before one of what the search added.
                own = [each for each in problems if each.technique == t.name()]
                binding = problem if problem in problems else (own or problems)[0]
                text = binding.text if binding.technique == t.name() else str(binding)
                refusals.append((describe_techniques((t,)), text))
        return refusals

    def _build_problems(self, added: Settings) -> list[Problem]:
        """Returns why a recipe that nothing else refuses cannot be built; empty if it can."""
        try:
            observe_cached(set_layers(self.space.to_single_device(added), 1), how="step")
        except RecipeError as error:
            return [Problem(added[-1].name(), ProblemCode.BUILD, str(error).splitlines()[0])]
        return []


def _layout_shape(layout: Settings) -> Hashable:
    """Returns the layout without its parallel degrees."""
    return tuple((type(t), *(value for value in vars(t).values() if type(value) is not int)) for t in layout)
