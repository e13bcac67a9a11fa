"""Fallbacks for out-of-memory errors: settings that need less memory and leave weights, data and loss unchanged.

The module names no technique. A technique of the recipe lists its own fallbacks (`Searchable.fallbacks`); one that the
recipe lacks may be added if it is `memory_saving`. Each technique gives a family of candidates, mildest first, and a
dry run checks which of them fit. If no family suffices alone, the one that saves the most is applied in full and the
others are tried on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from preheat.core import Phase, Searchable, Technique, conflicts_of, registry
from preheat.core.plan import Plan
from preheat.core.run_records import SkippedFallback
from preheat.engine.builder import list_techniques
from preheat.errors import RecipeError
from preheat.planning.plan import plan
from preheat.planning.request import Request
from preheat.recipe import Recipe

if TYPE_CHECKING:
    pass

__all__ = ["Ladder", "Fallback", "PlannedFallback", "find_fallbacks", "describe_differences", "halve_length"]

GIB = 2**30
_LESS = 0.99  # of the present need: a smaller saving would run out of memory again


@dataclass(frozen=True)
class Fallback:
    """A recipe that needs less memory.

    Attributes:
        set: differences from the original recipe, in the format of `--set`.
    """

    set: tuple[str, ...]
    recipe: Recipe

    @property
    def description(self) -> str:
        return ", ".join(self.set)


@dataclass(frozen=True)
class PlannedFallback(Fallback):
    """A fallback that was dry-run.

    Attributes:
        peak_gib: GiB at the peak, or at the peak of the phase in question.
    """

    plan: Plan
    peak_gib: float


@dataclass
class Ladder:
    """The fallbacks that were tried.

    Attributes:
        present: the recipe as it is.
        fallbacks: the fallbacks that fit, fastest first.
        skipped: the others.
        lowest: the fallback that needs the least memory.
    """

    present: PlannedFallback
    fallbacks: list[PlannedFallback]
    skipped: list[SkippedFallback]
    lowest: PlannedFallback


@dataclass(frozen=True)
class _Planner:
    """Plans the fallbacks of a request.

    Attributes:
        phase: phase whose peak counts (`evaluation`); None: all phases.
    """

    request: Request
    phase: Phase | None = None

    def fallback(self, recipe: Recipe) -> PlannedFallback:
        """Plans a recipe and returns it as a fallback of the request's recipe; raises the errors of `plan`."""
        result = plan(replace(self.request, recipe=recipe))
        need = result.phases[self.phase] if self.phase else result.peak_gib
        return PlannedFallback(describe_differences(self.request.recipe, recipe), recipe, result, need)

    def refusal(self, recipe: Recipe) -> str | None:
        """Returns why the recipe's techniques cannot be combined, without a dry run; None if they can."""
        # Checks take milliseconds and dry runs seconds, so impossible recipes are sorted out first.
        problems = conflicts_of(list_techniques(recipe), replace(self.request, recipe=recipe).context)
        return str(problems[0]) if problems else None

    def families(self, recipe: Recipe) -> Iterator[list[Recipe]]:
        """Yields a list of recipes for each setting that may change, mildest first."""
        # Evaluation in smaller batches gives the same numbers and leaves training alone, so it is the first family.
        if self.phase is Phase.EVALUATION and (rows := recipe.evaluate.micro_batch_size or recipe.batch.size) > 1:
            # rows / 2, rows / 4, ..., 1.
            halves = [rows // 2**n for n in range(1, rows.bit_length())]
            yield [replace(recipe, evaluate=replace(recipe.evaluate, micro_batch_size=n)) for n in halves]
        context = replace(self.request, recipe=recipe).context
        for name, kind in registry().items():
            present = recipe.techniques.get(name)
            others: Iterable[Technique] = ()
            if isinstance(present, Searchable):
                others = present.fallbacks(context)
            elif present is None and issubclass(kind, Searchable) and kind.memory_saving:
                others = [t for t in kind().options(context) if isinstance(t, Searchable) and t.is_memory_saving()]
            if milder := [replace(recipe, techniques={**recipe.techniques, name: other}) for other in others]:
                yield milder


def describe_differences(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """Returns the differences between two recipes, in the format of `--set`.

    Example:
        >>> from preheat.recipe import override, parse
        >>> plain = parse("stop: {max_steps: 1}")
        >>> describe_differences(plain, override(plain, "evaluate.micro_batch_size=2", "checkpoint.asynchronous=false"))
        ('evaluate.micro_batch_size=2', 'checkpoint.asynchronous=false')
    """
    changes = []
    if after.evaluate.micro_batch_size != before.evaluate.micro_batch_size:
        changes.append(f"evaluate.micro_batch_size={after.evaluate.micro_batch_size}")
    if after.checkpoint.asynchronous != before.checkpoint.asynchronous:
        changes.append(f"checkpoint.asynchronous={_format_value(after.checkpoint.asynchronous)}")
    if after.batch.seq_len != before.batch.seq_len:
        changes.append(f"batch.seq_len={after.batch.seq_len}")
    for name, t in after.techniques.items():
        if t != before.techniques.get(name):
            changes += _describe_changes(name, before.techniques.get(name), t)
    return tuple(changes)


def _describe_changes(name: str, before: Technique | None, after: Technique) -> list[str]:
    old, values = asdict(before or type(after)()), asdict(after)
    changed = [key for key, value in values.items() if value != old[key]]
    # A technique added with its defaults is reported by its first setting, if it has one.
    changed = changed or list(values)[:1]
    return [f"techniques.{name}.{key}={_format_value(values[key])}" for key in changed] or [f"techniques.{name}={{}}"]


def _format_value(value: object) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def find_fallbacks(request: Request, *, room: float | None, phase: Phase | None = None) -> Ladder:
    """Finds the fallbacks of a recipe that fit.

    Args:
        room: GiB available to the run, without the memory of the imports; None if unknown: any saving is then accepted.
        phase: phase whose peak counts (`evaluation`); all phases by default.

    Example:
        >>> find_fallbacks(request, room=1.5).fallbacks[0].set  # doctest: +SKIP
        ('evaluate.micro_batch_size=4',)
    """
    planner = _Planner(request, phase)
    present = planner.fallback(request.recipe)
    # Even with more room than the plan needs, the recipe did run out of memory: it must get smaller.
    limit = min(_LESS * present.peak_gib, present.peak_gib if room is None else room)
    ladder = Ladder(present, [], [], present)
    # Each turn tries every family on top of `base`; if none fits, the strongest setting becomes part of the base.
    base = present
    while True:
        strongest = []
        for family in planner.families(base.recipe):
            if (last := _try_family(family, planner, limit, ladder)) is not None:
                strongest.append(last)
            if (
                planner.phase and ladder.fallbacks
            ):  # the first family changes this phase only and leaves training as it is
                break
        if ladder.fallbacks:
            ladder.fallbacks.sort(key=lambda fallback: fallback.plan.seconds_per_step)
            return ladder
        ladder.lowest = min([base, *strongest], key=lambda fallback: fallback.peak_gib)
        # Nothing saves memory any more: the lowest is the answer to what a smaller recipe would need.
        if ladder.lowest.peak_gib >= _LESS * base.peak_gib:
            return ladder
        base = ladder.lowest


def _try_family(family: list[Recipe], planner: _Planner, limit: float, ladder: Ladder) -> PlannedFallback | None:
    """Appends the mildest fallback that fits to `ladder.fallbacks`; returns the strongest one if none fits."""
    able: list[Recipe] = []
    original = planner.request.recipe
    for recipe in family:
        if reason := planner.refusal(recipe):
            ladder.skipped.append(SkippedFallback(describe_differences(original, recipe), reason))
        else:
            able.append(recipe)

    def try_fallback(recipe: Recipe) -> PlannedFallback | None:
        try:
            fallback = planner.fallback(recipe)
        except RecipeError as error:
            ladder.skipped.append(SkippedFallback(describe_differences(original, recipe), str(error).splitlines()[0]))
            return None
        if fallback.peak_gib > limit:
            reason = f"would need {fallback.peak_gib:.3f} GiB, and there are {limit:.3f}"
            ladder.skipped.append(SkippedFallback(fallback.set, reason))
        return fallback

    # The strongest first: if it does not fit, none of its family does, and one dry run was enough.
    if not able or (last := try_fallback(able[-1])) is None:
        return None
    if last.peak_gib > limit:  # the milder ones of the family need more
        return last
    # It fits: look for a milder one of the family, which costs less time.
    ladder.fallbacks.append(
        next((f for r in able[:-1] if (f := try_fallback(r)) is not None and f.peak_gib <= limit), last)
    )
    return None


def halve_length(
    recipe: Recipe, request: Request, *, room: float, phase: Phase | None = None
) -> PlannedFallback | None:
    """Halves the sequence length until the recipe fits; returns None if sequences of 16 tokens do not fit either.

    Args:
        recipe: where to begin: a fallback of the request's recipe, with which the reported settings are compared.
        room, phase: as of `find_fallbacks`.
    """
    planner = _Planner(request, phase)
    while recipe.batch.seq_len >= 32:
        try:
            recipe = replace(recipe, batch=replace(recipe.batch, seq_len=recipe.batch.seq_len // 2))
            fallback = planner.fallback(recipe)
        except RecipeError:  # for example a length curriculum that begins with longer sequences
            return None
        if fallback.peak_gib <= room:
            return fallback
    return None
