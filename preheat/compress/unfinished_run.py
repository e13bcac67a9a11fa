"""Says that a model is of the middle of a run."""

from __future__ import annotations

from pathlib import Path

from preheat.compress.atomic_folder import home_of
from preheat.run_dir import Reader

__all__ = ["unfinished"]


def unfinished(source: str | Path, step: int | None) -> str:
    """What to know of a checkpoint that is not the end of its run; '' for one that is, and for what is no run.

    Args:
        source: a run or one of its checkpoints.
        step: of the checkpoint that was opened.
    """
    run, _ = home_of(source)
    if step is None or not (run / "events.jsonl").is_file():
        return ""
    told = Reader(run)
    ends = [event.get("steps") for event in told.events("finished")]
    if step in ends:
        return ""
    planned = told.plan.get("steps")
    of = f"step {step:,}" + (f" of {planned:,}" if isinstance(planned, int) and planned >= step else "")
    if any(isinstance(end, int) and end > step for end in ends):
        return f"this is the model at {of}, and its run went on"
    return f"this is the model at {of}: the run is not finished; preheat train {run}/recipe.yaml --out {run} --resume goes on with it"
