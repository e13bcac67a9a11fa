"""Takes a run back to an earlier checkpoint: later ones are renamed, never deleted, and the run is then resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from preheat.core.run_records import PutBack, Resumed, SetAside
from preheat.engine import checkpoint
from preheat.errors import RunError
from preheat.recipe import Recipe
from preheat.run.reader import Reader
from preheat.run.writer import Writer, check_folder
from preheat.training.resume import compare

__all__ = ["rewound"]


@contextmanager
def rewound(recipe: Recipe, out: Path, choice: str, say: Callable[[str], None]) -> Iterator[None]:
    """Sets aside the checkpoints of a run after the chosen one, from which the block resumes the run.

    If the block fails before the run has resumed, they have their names again afterwards.

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
    best, names = _rewind(recipe, out, choice, say)
    try:
        yield
    except BaseException:
        if names and not _has_resumed(out):
            _put_back(out, best, names, say)
        raise


def _rewind(recipe: Recipe, out: Path, choice: str, say: Callable[[str], None]) -> tuple[int | None, list[str]]:
    """Returns the step of the best checkpoint, and the new names of the later ones."""
    check_folder(out, resume=True)
    folder = out / "checkpoints"
    step = checkpoint.chosen_step(folder, choice)
    if step is None:  # the newest intact one, which is where a run resumes anyway
        return None, []
    writer = Writer(out, resume=True)
    try:
        # Before anything is renamed: whatever keeps the run from being resumed at this step.
        compare(recipe, Reader(out).recipe_text)
        path, damaged = checkpoint.find(folder, step, run=writer.id)
        if path is None:
            raise RunError(f"{damaged[0][0]}: {damaged[0][1]}; choose another checkpoint")
        # A later best one is no longer of this run; resuming marks the best one up to this step again.
        best = checkpoint.best_step(folder)
        if (best or 0) > step:
            (folder / checkpoint.BEST).unlink()
        if names := checkpoint.set_aside(folder, after=step):
            writer.write_event(SetAside(step=step, checkpoints=tuple(names)))
            say(f"continuing from step {step:,}: later checkpoints are set aside as {', '.join(names)}")
        return best, names
    finally:
        writer.close()


def _has_resumed(out: Path) -> bool:
    """True if the run resumed after its checkpoints were set aside."""
    events = Reader(out).events()
    last = max(number for number, event in enumerate(events) if isinstance(event, SetAside))
    return any(isinstance(event, Resumed) for event in events[last:])


def _put_back(out: Path, best: int | None, names: list[str], say: Callable[[str], None]) -> None:
    folder = out / "checkpoints"
    writer = Writer(out, resume=True)
    try:
        restored = checkpoint.put_back(folder, names)
        if best is not None:
            checkpoint.mark_best(folder, best)
        writer.write_event(PutBack(checkpoints=tuple(restored)))
    finally:
        writer.close()
    say(f"not resumed: {', '.join(restored)} {'has its name' if len(restored) == 1 else 'have their names'} again")
