"""Asynchronous checkpoints: a thread writes a host copy of the state while training continues, one at a time."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core import Build
from preheat.core.run_records import Checkpoint
from preheat.engine import checkpoint
from preheat.errors import PreheatError
from preheat.hardware.cpu_allocator import release_unused

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


__all__ = ["Saved", "Saving", "count_host_bytes"]


_PEAK_FACTOR = 2.5
"""Host memory while a file is assembled, over its size: peak RSS was 2.4 times for files of 62 and 125 MiB."""


def count_host_bytes(build: Build) -> int:
    """Bytes of host memory that writing a checkpoint takes on top of the build's tensors, set by its largest file."""
    # The largest file alone counts: files are written one after the other.
    sizes = {name: t.nbytes for name, t in checkpoint._collect_tensors(build).items()}
    files: Counter[int] = Counter()
    for name, file in checkpoint._assign_files(sizes).items():
        files[file] += sizes[name]
    return round(_PEAK_FACTOR * max(files.values()))


@dataclass(frozen=True)
class Saved:
    """A finished checkpoint.

    Attributes:
        wait_seconds: seconds that training waited for it.
        seconds: from the call of `save` until it was complete on disk.
    """

    step: int
    path: Path
    wait_seconds: float
    seconds: float

    def event(self, run: Path) -> Checkpoint:
        """Returns the event that records it in a run's folder."""
        return Checkpoint(
            step=self.step,
            path=str(self.path.relative_to(run)),
            wait_seconds=round(self.wait_seconds, 4),
            seconds=round(self.seconds, 4),
        )


class Saving:
    """Writes a run's checkpoints as the recipe's `checkpoint` section says. All ranks begin them in the same order.

    Args:
        last_step: the step that the build was loaded from, if any.

    Attributes:
        last_step: the newest step that is complete or being written; -1: none.
        file_per_tensor: one file per tensor, which needs the least memory.
    """

    def __init__(self, build: Build, folder: Path, *, last_step: int = -1):
        self.build, self.folder, self.last_step, self.keep = build, folder, last_step, build.recipe.checkpoint.keep
        self.file_per_tensor = False
        self._group: ProcessGroup | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._begun: tuple[Future[tuple[Path, float]], int, float, float] | None = None
        # No thread, no group: `save` then writes synchronously.
        if not checkpoint.is_async(build.recipe, build.device):
            return
        # One thread, so that writes finish in the order of their steps.
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        # For the whole process: warning filters are not per thread. See checkpoint.save.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        if build.mesh.world > 1:  # a group of its own: collectives of one group must be issued in one order
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=build.recipe.parallel.timeout))

    def save(self, progress: checkpoint.Progress, *, last: bool = False) -> list[Saved]:
        """Saves the step after waiting for the previous write. Returns the checkpoints finished since the last call.

        Args:
            last: no step follows, so the checkpoint is written synchronously.

        Raises:
            RunError: this checkpoint or the previous one cannot be written.
            MemoryError: not enough memory to write it.
        """
        start = time.perf_counter()
        # One write at a time: a second copy of the state would take as much memory again.
        finished = self.wait()
        if last or self._writer is None:
            # Host memory, whatever the device: files are assembled in memory that the steps no longer use.
            release_unused("cpu")
            path = checkpoint.save(
                self.build, progress, self.folder, keep=self.keep, file_per_tensor=self.file_per_tensor
            )
            seconds, self.last_step = time.perf_counter() - start, progress.step
            return [*finished, Saved(progress.step, path, seconds, seconds)]
        # The copy is all that training waits for; the thread then reads nothing that steps change.
        state = checkpoint.snapshot(self.build, progress, copied=True)
        future = self._writer.submit(self._write, state)
        self._begun = (future, progress.step, start, time.perf_counter() - start)
        # Optimistic, so that the loop does not save the step again; `wait` takes it back if the write fails.
        self.last_step = progress.step
        return finished

    def _write(self, state: checkpoint.Snapshot) -> tuple[Path, float]:
        path = checkpoint.write(self.build, state, self.folder, keep=self.keep, group=self._group)
        return path, time.perf_counter()

    def poll(self) -> list[Saved]:
        """Returns the checkpoint finished since the last call, if any, without waiting.

        Raises:
            RunError: it could not be written.
        """
        # `wait` returns at once if the future is done, and raises its error here, in the training thread.
        return self.wait() if self._begun is not None and self._begun[0].done() else []

    def wait(self) -> list[Saved]:
        """Waits for the checkpoint that is being written and returns it, if any."""
        if self._begun is None:
            return []
        # Cleared first: after an error the next `save` must not wait for the same write again.
        (future, step, start, waited), self._begun = self._begun, None
        self.last_step, newest = -1, self.last_step  # in case it could not be written
        path, end = future.result()
        self.last_step = newest
        return [Saved(step, path, waited, end - start)]

    def close(self) -> str | None:
        """Finishes the pending write after a failure, or returns the message of the error that prevents it."""
        try:
            self.wait()
        # The run has failed already: this error must not hide the first one.
        except (PreheatError, RuntimeError, MemoryError) as error:
            return str(error)
        return None
