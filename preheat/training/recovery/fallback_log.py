"""What is written down of a lack of memory, which rung is taken, and the recipe that holds from then on. Names no technique.

A run's events say all: `out_of_memory` with what was seen, `rung` with all settings that differ from then on from the recipe as written (`set`)
and the step that they hold from. A resumed run takes those that held at its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.core import Phase
from preheat.engine.checkpoint import is_async
from preheat.errors import RunError
from preheat.planning.fallback_ladder import Fallback, Ladder, PlanContext, find_fallbacks, halve_length, settings
from preheat.recipe import Recipe
from preheat.run_dir import Reader, is_failure, parse_json, to_json, write_atomic

__all__ = ["Failure", "choose_fallback", "effective", "write_oom_record", "oom_records", "recorded", "apply_fallbacks"]

GIB = 2**30


@dataclass(frozen=True)
class Failure:
    """A lack of memory, in numbers: it holds no tensor.

    Attributes:
        where: what the process did.
        step: optimizer steps committed by then.
        rank: of the process.
        words: of the error.
        asked: bytes of the allocation that failed; None: not told.
        room: bytes that there are for the run, less what the imports took: what was held, and what was asked for and not had; None: not known.
        beside: bytes that a plan counts beside tensors, of which not all need be held yet: so many more there may be.
        held: {parameters, gradients, optimizer, other: bytes} at that moment.
        allocator: counters of torch's CUDA allocator, bytes.
    """

    where: Phase
    step: int
    rank: int
    words: str
    asked: int | None
    room: int | None
    beside: int
    held: dict[str, int]
    allocator: dict[str, int]


def write_oom_record(run: Path, failure: Failure) -> None:
    """Writes a failure beside the run, for the processes that take the places of these."""
    write_atomic(_word(run, failure.rank), to_json(asdict(failure)))


def _word(run: Path, rank: int | str) -> Path:
    return run / f"out-of-memory-{rank}.json"


def oom_records(run: Path) -> list[Path]:
    """Failures that no rung was taken for yet."""
    return sorted(run.glob(_word(run, "*").name))


def _read(file: Path) -> Failure | None:
    """A failure that a process left; None where the file is damaged: then the run goes on as it was, and leaves another if it must."""
    try:
        value = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    if not is_failure(value) or value["where"] not in set(Phase):
        return None
    return Failure(**{key: value[key] for key in Failure.__dataclass_fields__} | {"where": Phase(value["where"])})


def effective(recipe: Recipe, events: Sequence[dict[str, Any]], step: int) -> Recipe:
    """The recipe with the rungs that held at a step.

    Args:
        recipe: as written, or settled.
        events: of the run, in order.
        step: of the checkpoint that the run goes on from; 0: none.
    """
    taken: list[dict[str, Any]] = []
    for event in events:
        if event["kind"] == "resumed":  # what was taken after that step was taken by steps that are gone
            taken = [rung for rung in taken if rung["step"] <= event["step"]]
        elif event["kind"] == "rung":
            taken.append(event)
    held = [rung for rung in taken if rung["step"] <= step]
    return recipes.override(recipe, *held[-1]["set"]) if held else recipe


def apply_fallbacks(
    recipe: Recipe, run: Path, found: Path | None, planner: PlanContext, *, afresh: bool
) -> tuple[Recipe, list[dict[str, Any]]]:
    """The recipe that a resumed run is built by, and what is to be written down of it.

    Args:
        recipe: settled.
        found: the checkpoint that it goes on from.
        afresh: the user has chosen other settings, which stand in the place of all rungs.

    Raises:
        RunError: processes failed for want of memory, and no rung suffices.
    """
    step = int(found.name.removeprefix("step-")) if found else 0
    if afresh:
        for file in oom_records(run):
            file.unlink()
        return recipe, [{"kind": "rung", "step": step, "where": "resumed with other settings", "took": [], "set": []}]
    built = effective(recipe, Reader(run).events(), step)
    failures = [failure for file in oom_records(run) if (failure := _read(file)) is not None]
    for file in oom_records(run):
        file.unlink()
    if not failures:
        return built, []
    tightest = min(failures, key=lambda f: f.room if f.room is not None else 2**62)
    ladder, rung = choose_fallback(built, tightest, planner)
    told = [{"kind": "out_of_memory", **asdict(failure)} for failure in failures]
    return rung.recipe, [*told, recorded(recipe, rung, ladder, tightest, step)]


def recorded(recipe: Recipe, rung: Fallback, ladder: Ladder | None, failure: Failure, step: int) -> dict[str, Any]:
    """The event of a rung.

    Args:
        recipe: as it is without any rung.
        step: that it holds from.
    """
    more: dict[str, Any] = {}
    if ladder is not None:
        more = {"peak_gib": rung.need, "was_gib": ladder.present.need, "skipped": ladder.skipped}
        more["seconds_per_step"] = [ladder.present.plan["seconds_per_step"], rung.plan["seconds_per_step"]]
    return {
        "kind": "rung",
        "step": step,
        "where": failure.where,
        "took": list(rung.set),
        "set": list(settings(recipe, rung.recipe)),
        **more,
    }


def choose_fallback(recipe: Recipe, failure: Failure, planner: PlanContext) -> tuple[Ladder | None, Fallback]:
    """The rung that a run goes on with: of those that suffice by a dry run, the cheapest in time.

    Raises:
        RunError: none suffices; with the smaller recipe that would fit.
    """
    if failure.where is Phase.SAVING and is_async(recipe, planner.device):  # the copy is what there was no room for
        milder = replace(recipe, checkpoint=replace(recipe.checkpoint, asynchronous=False))
        return None, Fallback(settings(recipe, milder), milder, {}, 0.0)
    planner = replace(planner, phase=Phase.EVALUATION if failure.where is Phase.EVALUATION else None)
    rooms = [None] if failure.room is None else [failure.room / GIB, (failure.room + failure.beside) / GIB]
    for room in rooms:
        ladder = find_fallbacks(recipe, planner, room=room)
        if ladder.rungs:
            return ladder, ladder.rungs[0]
    lowest, present = ladder.lowest, ladder.present
    limit = min(present.need, room or present.need, present.plan["available_gib"])
    least = f"The least that a rung needs is {lowest.need:.2f} GiB ({lowest.words})" if lowest.set else "It has no rung"
    fits = halve_length(lowest.recipe, planner, room=limit, of=recipe)
    way = (
        f"another run with {fits.words} would need {fits.need:.2f} GiB"
        if fits
        else "no shorter rows would do, only a smaller model"
    )
    raise RunError(
        f"out of memory in step {failure.step + 1} ({failure.where}): the plan says {present.need:.2f} GiB, and "
        f"there are {limit:.2f}. "
        f"{least}; {way}. Or go on with --resume where there is more memory"
    )
