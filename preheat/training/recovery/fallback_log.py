"""Log of out-of-memory errors and fallbacks: records them, chooses fallbacks, and applies them to the recipe.

The run's events are the log: `out_of_memory` holds the failure, `fallback` holds all settings that differ from the
written recipe from then on (`set`) and the step from which they apply. A resumed run applies those that were active at
its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.core import Phase, run_records
from preheat.core.run_records import Event, OutOfMemory
from preheat.core.units import format_memory
from preheat.engine.checkpoint import is_async
from preheat.errors import RunError
from preheat.files import parse_json, read_record, to_json, to_plain_data, write_atomic
from preheat.planning.fallback_ladder import (
    Fallback,
    Ladder,
    PlannedFallback,
    describe_differences,
    find_fallbacks,
    halve_length,
)
from preheat.planning.request import Request
from preheat.recipe import Recipe
from preheat.run.reader import Reader

if TYPE_CHECKING:
    pass

__all__ = ["choose_fallback", "effective", "write_oom_record", "find_oom_records", "build_event", "apply_fallbacks"]

GIB = 2**30


def write_oom_record(run: Path, failure: OutOfMemory) -> None:
    """Writes a failure to the run's folder, for the processes of the next start."""
    # Atomic, because this process is out of memory and may be killed while it writes.
    values = {key: value for key, value in to_plain_data(failure).items() if key != "kind"}
    write_atomic(_record_file(run, failure.rank), to_json(values))


def _record_file(run: Path, rank: int | str) -> Path:
    return run / f"out-of-memory-{rank}.json"


def find_oom_records(run: Path) -> list[Path]:
    """Returns the records of failures for which no fallback was chosen yet."""
    return sorted(run.glob(_record_file(run, "*").name))


def _read(file: Path) -> OutOfMemory | None:
    """Reads a failure record; None if the file is damaged: the run then resumes unchanged and may fail again."""
    try:
        return read_record(OutOfMemory, parse_json(file.read_bytes()))
    # A record of another version of preheat, with other keys or phases, counts as damaged.
    except (OSError, ValueError):
        return None


def effective(recipe: Recipe, events: Sequence[Event], step: int) -> Recipe:
    """Returns the recipe with the fallbacks that are active at a step.

    Args:
        recipe: as written, or with its `auto` settings resolved.
        events: events of the run, in order.
        step: step of the checkpoint that the run resumes from; 0: none.
    """
    fallbacks: list[run_records.Fallback] = []
    for event in events:
        if isinstance(event, run_records.Resumed):  # drops the fallbacks of later steps, which were rolled back
            fallbacks = [fallback for fallback in fallbacks if fallback.step <= event.step]
        elif isinstance(event, run_records.Fallback):
            fallbacks.append(event)
    # Each event holds all settings that differ, so the last active one is enough.
    active = [fallback for fallback in fallbacks if fallback.step <= step]
    return recipes.override(recipe, *active[-1].set) if active else recipe


def apply_fallbacks(request: Request, run: Path, newest: Path | None, *, afresh: bool) -> tuple[Recipe, list[Event]]:
    """Returns the recipe with which a resumed run is built, and the events to log.

    Args:
        request: with the settings that are left to the planner resolved.
        newest: the checkpoint that the run resumes from.
        afresh: True if the user chose other settings, which replace all fallbacks.

    Raises:
        RunError: processes ran out of memory, and no fallback suffices.
    """
    # A fallback applies from its step on; without a checkpoint the run starts again from step 0.
    recipe, step = request.recipe, int(newest.name.removeprefix("step-")) if newest else 0
    if afresh:
        # The records are of the old settings; an empty `set` ends their fallbacks in the log.
        for file in find_oom_records(run):
            file.unlink()
        return recipe, [run_records.Fallback(step=step, cause="resumed with other settings", changed=(), set=())]
    built = effective(recipe, Reader(run).events(), step)
    failures = [failure for file in find_oom_records(run) if (failure := _read(file)) is not None]
    # Read once: a record that stayed would make the next start choose a fallback again.
    for file in find_oom_records(run):
        file.unlink()
    if not failures:
        return built, []
    # All ranks get the same recipe, so the fallback must fit the rank with the least room.
    # OutOfMemorys of unknown room sort last.
    tightest = min(failures, key=lambda f: f.room if f.room is not None else 2**62)
    ladder, rung = choose_fallback(replace(request, recipe=built), tightest)
    # The failed processes wrote records instead of events, because only rank 0 writes the log.
    return rung.recipe, [*failures, build_event(recipe, rung, ladder, tightest, step)]


def build_event(
    recipe: Recipe, fallback: Fallback, ladder: Ladder | None, failure: OutOfMemory, step: int
) -> run_records.Fallback:
    """Returns the event that logs a fallback.

    Args:
        recipe: the recipe without any fallback.
        step: the step from which the fallback applies.
    """
    event = run_records.Fallback(
        step=step,
        cause=failure.phase,
        changed=fallback.set,
        # All differences from the recipe as written, so that the last event alone restores the state.
        set=describe_differences(recipe, fallback.recipe),
    )
    if ladder is None or not isinstance(fallback, PlannedFallback):
        return event
    return replace(
        event,
        peak_gib=fallback.peak_gib,
        was_gib=ladder.present.peak_gib,
        skipped=tuple(ladder.skipped),
        seconds_per_step=(ladder.present.plan.seconds_per_step, fallback.plan.seconds_per_step),
    )


def choose_fallback(request: Request, failure: OutOfMemory) -> tuple[Ladder | None, Fallback]:
    """Returns the fastest fallback that fits according to a dry run.

    Raises:
        RunError: none suffices; the message names a smaller recipe that would fit.
    """
    recipe = request.recipe
    if failure.phase is Phase.SAVING and is_async(recipe, request.device):  # the asynchronous copy did not fit
        milder = replace(recipe, checkpoint=replace(recipe.checkpoint, asynchronous=False))
        return None, Fallback(describe_differences(recipe, milder), milder)
    # An evaluation that fails needs less memory in evaluation; the peak of training is no measure for it.
    phase = Phase.EVALUATION if failure.phase is Phase.EVALUATION else None
    # First without the memory that the plan counts apart from tensors: some of it may be in use by now.
    # The second room is larger: it is tried only if nothing fits the first.
    rooms = [None] if failure.room is None else [failure.room / GIB, (failure.room + failure.overhead) / GIB]
    for room in rooms:
        ladder = find_fallbacks(request, room=room, phase=phase)
        if ladder.fallbacks:
            return ladder, ladder.fallbacks[0]
    lowest, present = ladder.lowest, ladder.present
    # The failure proves that the present peak is too much, so a smaller recipe must be below it, too.
    limit = min(present.peak_gib, room or present.peak_gib, present.plan.available_gib)
    least = (
        f"The smallest fallback needs {format_memory(lowest.peak_gib)} ({lowest.description})"
        if lowest.set
        else "It has no fallback"
    )
    fits = halve_length(lowest.recipe, request, room=limit, phase=phase)
    way = (
        f"another run with {fits.description} would need {format_memory(fits.peak_gib)}"
        if fits
        else "no shorter sequences would fit, only a smaller model"
    )
    needed, has = format_memory(present.peak_gib), format_memory(limit)
    raise RunError(
        f"out of memory in step {failure.step + 1} ({failure.phase}): the plan needs {needed} of {has}. {least}; "
        f"{way}. Or continue with --resume on a device with more memory"
    )
