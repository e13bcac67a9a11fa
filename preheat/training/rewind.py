"""Takes a run back to an earlier checkpoint: later ones are renamed, never deleted, and the run is then resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from preheat.core.run_records import SetAside
from preheat.engine import checkpoint
from preheat.errors import RunError
from preheat.recipe import Recipe
from preheat.run.reader import Reader
from preheat.run.writer import Writer, check_folder
from preheat.training.resume import compare

__all__ = ["rewind"]


def rewind(recipe: Recipe, out: Path, choice: str, say: Callable[[str], None]) -> None:
    """Sets aside the checkpoints of a run after the chosen one, from which the run can then be resumed.

    Args:
        out: the run's folder.
        choice: best, last or a step.
        say: called with a line about what was renamed.

    Raises:
        RunError: the folder holds no run, another recipe's, or no intact checkpoint of that step, or another process
            writes it.
    """
    check_folder(out, resume=True)
    folder = out / "checkpoints"
    step = checkpoint.chosen_step(folder, choice)
    if step is None:  # the newest intact one, which is where a run resumes anyway
        return
    writer = Writer(out, resume=True)
    try:
        # Before anything is renamed: whatever keeps the run from being resumed at this step.
        compare(recipe, Reader(out).recipe_text)
        path, damaged = checkpoint.find(folder, step, run=writer.id)
        if path is None:
            raise RunError(f"{damaged[0][0]}: {damaged[0][1]}; choose another checkpoint")
        # A later best one is no longer of this run; resuming marks the best one up to this step again.
        if (checkpoint.best_step(folder) or 0) > step:
            (folder / checkpoint.BEST).unlink()
        if names := checkpoint.set_aside(folder, after=step):
            writer.write_event(SetAside(step=step, checkpoints=tuple(names)))
            say(f"continuing from step {step:,}: later checkpoints are set aside as {', '.join(names)}")
    finally:
        writer.close()
