"""Log of out-of-memory errors and fallbacks: records them, chooses fallbacks, and applies them to the recipe.

The run's events are the log: `out_of_memory` holds the failure, `fallback` holds all settings that differ from the
written recipe from then on (`set`) and the step from which they apply. A resumed run applies those that were active at
its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.core import Phase
from preheat.engine.checkpoint import is_async
from preheat.errors import RunError
from preheat.files import parse_json, to_json, write_atomic
from preheat.planning.fallback_ladder import Fallback, Ladder, PlannedFallback, find_fallbacks, halve_length, settings
from preheat.planning.request import Request
from preheat.recipe import Recipe
from preheat.run.reader import Reader, is_failure

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["Failure", "choose_fallback", "effective", "write_oom_record", "oom_records", "recorded", "apply_fallbacks"]

GIB = 2**30


@dataclass(frozen=True)
class Failure:
    """An out-of-memory error in numbers; it holds no tensors.

    Attributes:
        phase: phase of the step in which it happened.
        step: optimizer steps committed by then.
        rank: rank of the process.
        message: message of the error.
        requested: bytes of the allocation that failed; None: unknown.
        room: bytes available to the run without the imports: those held plus those requested; None: unknown.
        overhead: bytes that the plan counts apart from tensors; up to this many may not be in use yet and add to
            `room`.
        in_use: {parameters, gradients, optimizer, other: bytes} at that moment.
        allocator: counters of torch's CUDA allocator, in bytes.
    """

    phase: Phase
    step: int
    rank: int
    message: str
    requested: int | None
    room: int | None
    overhead: int
    in_use: dict[str, int]
    allocator: dict[str, int]


def write_oom_record(run: Path, failure: Failure) -> None:
    """Writes a failure to the run's folder, for the processes of the next start."""
    # Atomic, because this process is out of memory and may be killed while it writes.
    write_atomic(_record_file(run, failure.rank), to_json(asdict(failure)))


def _record_file(run: Path, rank: int | str) -> Path:
    return run / f"out-of-memory-{rank}.json"


def oom_records(run: Path) -> list[Path]:
    """Returns the records of failures for which no fallback was chosen yet."""
    return sorted(run.glob(_record_file(run, "*").name))


def _read(file: Path) -> Failure | None:
    """Reads a failure record; None if the file is damaged: the run then resumes unchanged and may fail again."""
    try:
        value = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    # A record of another version of preheat, with other keys or phases, counts as damaged.
    if not is_failure(value) or (phase := Phase.of(value["phase"])) is None:
        return None
    return Failure(**{key: value[key] for key in Failure.__dataclass_fields__} | {"phase": phase})


def effective(recipe: Recipe, events: Sequence[JsonObject], step: int) -> Recipe:
    """Returns the recipe with the fallbacks that are active at a step.

    Args:
        recipe: as written, or with its `auto` settings resolved.
        events: events of the run, in order.
        step: step of the checkpoint that the run resumes from; 0: none.
    """
    fallbacks: list[JsonObject] = []
    for event in events:
        if event["kind"] == "resumed":  # drops the fallbacks of later steps, which were rolled back
            fallbacks = [rung for rung in fallbacks if rung["step"] <= event["step"]]
        elif event["kind"] == "fallback":
            fallbacks.append(event)
    # Each event holds all settings that differ, so the last active one is enough.
    active = [rung for rung in fallbacks if rung["step"] <= step]
    return recipes.override(recipe, *active[-1]["set"]) if active else recipe


def apply_fallbacks(
    request: Request, run: Path, newest: Path | None, *, afresh: bool
) -> tuple[Recipe, list[JsonObject]]:
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
        for file in oom_records(run):
            file.unlink()
        return recipe, [
            {"kind": "fallback", "step": step, "cause": "resumed with other settings", "changed": [], "set": []}
        ]
    built = effective(recipe, Reader(run).events(), step)
    failures = [failure for file in oom_records(run) if (failure := _read(file)) is not None]
    # Read once: a record that stayed would make the next start choose a fallback again.
    for file in oom_records(run):
        file.unlink()
    if not failures:
        return built, []
    # All ranks get the same recipe, so the fallback must fit the rank with the least room.
    # Failures of unknown room sort last.
    tightest = min(failures, key=lambda f: f.room if f.room is not None else 2**62)
    ladder, rung = choose_fallback(replace(request, recipe=built), tightest)
    # The failed processes wrote records instead of events, because only rank 0 writes the log.
    events = [{"kind": "out_of_memory", **asdict(failure)} for failure in failures]
    return rung.recipe, [*events, recorded(recipe, rung, ladder, tightest, step)]


def recorded(recipe: Recipe, fallback: Fallback, ladder: Ladder | None, failure: Failure, step: int) -> JsonObject:
    """Returns the event that logs a fallback.

    Args:
        recipe: the recipe without any fallback.
        step: the step from which the fallback applies.
    """
    more: JsonObject = {}
    if ladder is not None and isinstance(fallback, PlannedFallback):
        more = {"peak_gib": fallback.peak_gib, "was_gib": ladder.present.peak_gib, "skipped": ladder.skipped}
        more["seconds_per_step"] = [ladder.present.plan.seconds_per_step, fallback.plan.seconds_per_step]
    return {
        "kind": "fallback",
        "step": step,
        "cause": failure.phase,
        "changed": list(fallback.set),
        # All differences from the recipe as written, so that the last event alone restores the state.
        "set": list(settings(recipe, fallback.recipe)),
        **more,
    }


def choose_fallback(request: Request, failure: Failure) -> tuple[Ladder | None, Fallback]:
    """Returns the fastest fallback that fits according to a dry run.

    Raises:
        RunError: none suffices; the message names a smaller recipe that would fit.
    """
    recipe = request.recipe
    if failure.phase is Phase.SAVING and is_async(recipe, request.device):  # the asynchronous copy did not fit
        milder = replace(recipe, checkpoint=replace(recipe.checkpoint, asynchronous=False))
        return None, Fallback(settings(recipe, milder), milder)
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
        f"The smallest fallback needs {lowest.peak_gib:.2f} GiB ({lowest.description})"
        if lowest.set
        else "It has no fallback"
    )
    fits = halve_length(lowest.recipe, request, room=limit, phase=phase)
    way = (
        f"another run with {fits.description} would need {fits.peak_gib:.2f} GiB"
        if fits
        else "no shorter rows would fit, only a smaller model"
    )
    raise RunError(
        f"out of memory in step {failure.step + 1} ({failure.phase}): the plan needs {present.peak_gib:.2f} GiB of "
        f"{limit:.2f}. {least}; {way}. Or continue with --resume on a device with more memory"
    )
