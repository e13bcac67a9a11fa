"""Note on models that are not the end of their run."""

from __future__ import annotations

from pathlib import Path

from preheat.compress.atomic_folder import choose_home
from preheat.core.run_records import Finished
from preheat.run.reader import Reader

__all__ = ["note_unfinished"]


def note_unfinished(source: str | Path, step: int | None) -> str:
    """Returns a note on a checkpoint that is not the last of its run; '' for the last one and for models without a run.

    Args:
        source: a run or one of its checkpoints.
        step: of the loaded checkpoint.
    """
    run, _ = choose_home(source)
    if step is None or not (run / "events.jsonl").is_file():
        return ""
    reader = Reader(run)
    # A run may finish several times: resuming with a later stop adds an event.
    ends = [event.steps for event in reader.events(Finished)]
    if step in ends:
        return ""
    # A step beyond the plan means that the recipe's stop was changed.
    planned = reader.plan.steps if reader.plan else None
    progress = f"step {step:,}" + (f" of {planned:,}" if planned is not None and planned >= step else "")
    if any(end is not None and end > step for end in ends):
        return f"this is the model at {progress}, and its run continued"
    return (
        f"this is the model at {progress}: the run is not finished; preheat train {run}/recipe.yaml --out {run} "
        "--resume continues it"
    )
