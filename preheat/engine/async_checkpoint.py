"""Checkpoints that are written beside the steps that follow: from a copy in the host's memory, by one thread, one at a time."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from preheat.core import Build
from preheat.engine import checkpoint
from preheat.errors import PreheatError
from preheat.hardware.cpu_allocator import release_unused

__all__ = ["Saved", "Saving", "room"]


_HELD = (
    2.5  # of a file, while it is put together; resident pages at their highest were 2.4 times files of 62 and 125 MiB
)


def room(build: Build) -> int:
    """Bytes of the host's memory that writing a checkpoint takes beside the build's tensors: for its largest file."""
    sizes = {name: t.nbytes for name, t in checkpoint._tensors(build).items()}
    numbers = checkpoint._files(sizes)
    return round(_HELD * max(sum(n for name, n in sizes.items() if numbers[name] == file) for file in numbers.values()))


@dataclass(frozen=True)
class Saved:
    """A checkpoint that stands.

    Attributes:
        held: seconds that the steps waited for it.
        seconds: from its beginning until it stood.
    """

    step: int
    path: Path
    held: float
    seconds: float

    def facts(self, run: Path) -> dict[str, Any]:
        """What the run's events say of it."""
        path = str(self.path.relative_to(run))
        return {"step": self.step, "path": path, "held": round(self.held, 4), "seconds": round(self.seconds, 4)}


class Saving:
    """Writes a run's checkpoints as `checkpoint` in the recipe says. All processes of the run begin the same in the same order.

    Args:
        at: the step that the build was read from, if any.

    Attributes:
        at: the newest step that stands, or is being written; -1: none.
        apart: a file for each tensor, which takes the least memory.
    """

    def __init__(self, build: Build, folder: Path, *, at: int = -1):
        self.build, self.folder, self.at, self.keep = build, folder, at, build.recipe.checkpoint.keep
        self.apart = False
        self._group: Any = None
        self._writer: ThreadPoolExecutor | None = None
        self._begun: tuple[Future[tuple[Path, float]], int, float, float] | None = None
        if not checkpoint.is_async(build.recipe, build.device):
            return
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        # For the whole process, since a thread cannot do so for itself alone: see checkpoint.save.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        if build.mesh.world > 1:  # collectives of one group come in one order: the steps' have theirs
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=build.recipe.parallel.timeout))

    def begin(self, progress: checkpoint.Progress, *, last: bool = False) -> list[Saved]:
        """Saves the step, after the one before has been written. Returns what stands by now and was not returned yet.

        Args:
            last: no step follows that it could be written beside.

        Raises:
            RunError: this one or the one before cannot be written.
            MemoryError: there is no memory to write it with.
        """
        start = time.perf_counter()
        found = self.wait()
        if last or self._writer is None:
            # The host's memory, whatever the device: files are put together in place of what steps alone need, not beside it.
            release_unused("cpu")
            path = checkpoint.save(self.build, progress, self.folder, keep=self.keep, apart=self.apart)
            seconds, self.at = time.perf_counter() - start, progress.step
            return [*found, Saved(progress.step, path, seconds, seconds)]
        taken = checkpoint.snapshot(self.build, progress, copied=True)
        future = self._writer.submit(self._write, taken)
        self._begun = (future, progress.step, start, time.perf_counter() - start)
        self.at = progress.step
        return found

    def _write(self, taken: checkpoint.Snapshot) -> tuple[Path, float]:
        path = checkpoint.write(self.build, taken, self.folder, keep=self.keep, group=self._group)
        return path, time.perf_counter()

    def look(self) -> list[Saved]:
        """The checkpoint that stands since the last look, if any.

        Raises:
            RunError: it could not be written.
        """
        return self.wait() if self._begun is not None and self._begun[0].done() else []

    def wait(self) -> list[Saved]:
        """The same, after waiting for the one that is being written."""
        if self._begun is None:
            return []
        (future, step, start, held), self._begun = self._begun, None
        self.at, newest = -1, self.at  # in case that it could not be written
        path, end = future.result()
        self.at = newest
        return [Saved(step, path, held, end - start)]

    def close(self) -> str | None:
        """After a failure: what is being written is written to its end, or the words of what keeps it from that are returned."""
        try:
            self.wait()
        except (PreheatError, RuntimeError, MemoryError) as error:
            return str(error)
        return None
