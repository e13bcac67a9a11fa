"""Takes a run back to an earlier checkpoint: later ones are renamed, never deleted, and the run is then resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from preheat.core.run_records import PutBack, SetAside
from preheat.engine import checkpoint
from preheat.errors import PreheatError, RunError
from preheat.recipe import Recipe
from preheat.run.reader import Reader, count_sessions
from preheat.run.writer import Writer, check_folder
from preheat.training.resume import compare

__all__ = ["rewound"]


@contextmanager
def rewound(recipe: Recipe, out: Path, choice: str, say: Callable[[str], None]) -> Iterator[None]:
    """Sets aside the checkpoints of a run after the chosen one, from which the block resumes the run.

    If that fails before the run has resumed, they are renamed back.

    Args:
        out: the run's folder.
        choice: best, last or a step.
        say: called with a line about what was renamed.

    Raises:
        RunError: the folder holds no run, another recipe's, or no intact checkpoint of that step, or another process
            writes it.

    Example:
        with rewound(recipe, Path("runs/a"), "best", print):
            train(recipe, out="runs/a", resume=True)
    """
    check_folder(out, resume=True)
    folder, sessions = out / "checkpoints", count_sessions(out)
    step = checkpoint.chosen_step(folder, choice)
    if step is None:  # the newest intact one, which is where a run resumes anyway
        yield
        return
    best, later = checkpoint.best_step(folder), checkpoint.steps_after(folder, step)
    try:
        _set_aside(recipe, out, step, say)
        yield
    except BaseException:
        if count_sessions(out) == sessions:
            try:
                _put_back(out, later, best, say)
            # The first error says why the run did not resume.
            except PreheatError as error:
                say(f"the later checkpoints keep their new names: {error}")
        raise


def _set_aside(recipe: Recipe, out: Path, step: int, say: Callable[[str], None]) -> None:
    folder, writer = out / "checkpoints", Writer(out, resume=True)
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


def _put_back(out: Path, later: Sequence[int], best: int | None, say: Callable[[str], None]) -> None:
    folder = out / "checkpoints"
    if best is not None and checkpoint.best_step(folder) is None:
        checkpoint.mark_best(folder, best)
    if not (names := checkpoint.put_back(folder, later)):
        return
    say(f"not resumed: renamed back to {', '.join(names)}")
    writer = Writer(out, resume=True)
    try:
        writer.write_event(PutBack(checkpoints=tuple(names)))
    finally:
        writer.close()
