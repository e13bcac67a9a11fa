"""Fallbacks for out-of-memory errors: settings that need less memory and leave weights, data and loss unchanged.

The module names no technique. A technique of the recipe lists its own fallbacks (`Searchable.fallbacks`); one that the
recipe lacks may be added if it is `memory_saving`. Each technique gives a family of candidates, mildest first, and a
dry run checks which of them fit. If no family suffices alone, the one that saves the most is applied in full and the
others are tried on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from preheat.core import Device, Phase, Searchable, Technique, conflicts_of, registry
from preheat.engine.builder import context_of, techniques_of
from preheat.errors import RecipeError
from preheat.hardware.rates import Rates
from preheat.models import hf
from preheat.planning.plan import plan
from preheat.planning.speed.roofline import Roofline
from preheat.recipe import Recipe

__all__ = ["Ladder", "PlanContext", "Fallback", "find_fallbacks", "settings", "halve_length"]

GIB = 2**30
_LESS = 0.99  # of the present need: a smaller saving would run out of memory again


@dataclass(frozen=True)
class Fallback:
    """A recipe that needs less memory.

    Attributes:
        set: differences from the original recipe, in the format of `--set`.
        need: GiB at the peak, or at the peak of the phase in question.
    """

    set: tuple[str, ...]
    recipe: Recipe
    plan: Mapping[str, Any]
    need: float

    @property
    def words(self) -> str:
        return ", ".join(self.set)


@dataclass
class Ladder:
    """The fallbacks that were tried.

    Attributes:
        present: the recipe as it is.
        rungs: the fallbacks that fit, fastest first.
        skipped: [{set, reason}] for the others.
        lowest: the fallback that needs the least memory.
    """

    present: Fallback
    rungs: list[Fallback]
    skipped: list[dict[str, Any]]
    lowest: Fallback


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """The arguments that all plans of a ladder share, as of `planning.plan.plan`.

    Args:
        phase: phase whose peak counts (`evaluation`); all phases by default.
    """

    vocabulary: int | None
    device: Device
    rates: Rates | Roofline
    rows: int | None = None
    in_use: int = 0
    world: int | None = None
    phase: Phase | None = None

    def plan(self, recipe: Recipe) -> dict[str, Any]:
        """Plans a recipe with `planning.plan.plan`.

        Raises:
            RecipeError: it cannot be built.
        """
        kwargs = {key: getattr(self, key) for key in ("vocabulary", "device", "rates", "rows", "in_use", "world")}
        return plan(recipe, **kwargs)

    def rung(self, recipe: Recipe, of: Recipe) -> Fallback:
        """Plans a recipe and returns it as a fallback of `of`; raises the errors of `plan`."""
        plan = self.plan(recipe)
        need = plan["phases"][self.phase] if self.phase else plan["peak_gib"]
        return Fallback(settings(of, recipe), recipe, plan, need)

    def refusal(self, recipe: Recipe) -> str | None:
        """Returns why the recipe's techniques cannot be combined, without a dry run; None if they can."""
        config = hf.configure(recipe, self.vocabulary)
        problems = conflicts_of(techniques_of(recipe), context_of(recipe, config, self.device, self.world))
        return str(problems[0]) if problems else None

    def families(self, recipe: Recipe) -> Iterator[list[Recipe]]:
        """Yields a list of recipes for each setting that may change, mildest first."""
        if self.phase is Phase.EVALUATION and (rows := recipe.evaluate.micro_batch_size or recipe.batch.size) > 1:
            halves = [rows // 2**n for n in range(1, rows.bit_length())]
            yield [replace(recipe, evaluate=replace(recipe.evaluate, micro_batch_size=n)) for n in halves]
        context = context_of(recipe, hf.configure(recipe, self.vocabulary), self.device, self.world)
        for name, kind in registry().items():
            present = recipe.techniques.get(name)
            others: Iterable[Technique] = ()
            if isinstance(present, Searchable):
                others = present.fallbacks(context)
            elif present is None and issubclass(kind, Searchable) and kind.memory_saving:
                others = kind().options(context)
            if milder := [replace(recipe, techniques={**recipe.techniques, name: other}) for other in others]:
                yield milder


def settings(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """Returns the differences between two recipes, in the format of `--set`.

    Example:
        >>> from preheat.recipe import override, parse
        >>> plain = parse("stop: {max_steps: 1}")
        >>> settings(plain, override(plain, "evaluate.micro_batch_size=2", "checkpoint.asynchronous=false"))
        ('evaluate.micro_batch_size=2', 'checkpoint.asynchronous=false')
    """
    changes = []
    if after.evaluate.micro_batch_size != before.evaluate.micro_batch_size:
        changes.append(f"evaluate.micro_batch_size={after.evaluate.micro_batch_size}")
    if after.checkpoint.asynchronous != before.checkpoint.asynchronous:
        changes.append(f"checkpoint.asynchronous={_text(after.checkpoint.asynchronous)}")
    if after.batch.seq_len != before.batch.seq_len:
        changes.append(f"batch.seq_len={after.batch.seq_len}")
    for name, t in after.techniques.items():
        if t != before.techniques.get(name):
            changes += _changes_of(name, before.techniques.get(name), t)
    return tuple(changes)


def _changes_of(name: str, before: Technique | None, after: Technique) -> list[str]:
    old, values = asdict(before or type(after)()), asdict(after)
    changed = [key for key, value in values.items() if value != old[key]]
    # A technique added with its defaults is reported by its first setting, if it has one.
    changed = changed or list(values)[:1]
    return [f"techniques.{name}.{key}={_text(values[key])}" for key in changed] or [f"techniques.{name}={{}}"]


def _text(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def find_fallbacks(recipe: Recipe, planner: PlanContext, *, room: float | None) -> Ladder:
    """Finds the fallbacks of a recipe that fit.

    Args:
        room: GiB available to the run, without the memory of the imports; None if unknown: any saving is then accepted.

    Example:
        >>> find_fallbacks(recipe, planner, room=1.5).rungs[0].set                           # doctest: +SKIP
        ('evaluate.micro_batch_size=4',)
    """
    present = planner.rung(recipe, recipe)
    limit = min(_LESS * present.need, present.need if room is None else room)
    ladder = Ladder(present, [], [], present)
    base = present
    while True:
        strongest = []
        for family in planner.families(base.recipe):
            if (last := _try_family(family, planner, recipe, limit, ladder)) is not None:
                strongest.append(last)
            if planner.phase and ladder.rungs:  # the first family changes this phase only and leaves training as it is
                break
        if ladder.rungs:
            ladder.rungs.sort(key=lambda rung: float(rung.plan["seconds_per_step"]))
            return ladder
        ladder.lowest = min([base, *strongest], key=lambda rung: rung.need)
        if ladder.lowest.need >= _LESS * base.need:
            return ladder
        base = ladder.lowest


def _try_family(
    family: list[Recipe], planner: PlanContext, of: Recipe, limit: float, ladder: Ladder
) -> Fallback | None:
    """Appends the mildest fallback that fits to `ladder.rungs`; returns the strongest one if none fits."""
    able: list[Recipe] = []
    for recipe in family:
        if reason := planner.refusal(recipe):
            ladder.skipped.append({"set": settings(of, recipe), "reason": reason})
        else:
            able.append(recipe)

    def tried(recipe: Recipe) -> Fallback | None:
        try:
            rung = planner.rung(recipe, of)
        except RecipeError as error:
            ladder.skipped.append({"set": settings(of, recipe), "reason": str(error).splitlines()[0]})
            return None
        if rung.need > limit:
            ladder.skipped.append(
                {"set": rung.set, "reason": f"would need {rung.need:.3f} GiB, and there are {limit:.3f}"}
            )
        return rung

    if not able or (last := tried(able[-1])) is None:
        return None
    if last.need > limit:  # the milder ones of the family need more
        return last
    ladder.rungs.append(next((rung for r in able[:-1] if (rung := tried(r)) is not None and rung.need <= limit), last))
    return None


def halve_length(recipe: Recipe, planner: PlanContext, *, room: float, of: Recipe) -> Fallback | None:
    """Halves the sequence length until the recipe fits; returns None if sequences of 16 tokens do not fit either.

    Args:
        room: GiB, as of `find_fallbacks`.
        of: recipe that the reported settings are compared with.
    """
    while recipe.batch.seq_len >= 32:
        try:
            recipe = replace(recipe, batch=replace(recipe.batch, seq_len=recipe.batch.seq_len // 2))
            rung = planner.rung(recipe, of)
        except RecipeError:  # for example a length curriculum that begins with longer sequences
            return None
        if rung.need <= room:
            return rung
    return None
