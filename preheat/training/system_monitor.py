"""A thread that records a run's use of the machine in `system.jsonl`, and what its processes do in `status.json`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from preheat.core.run_records import ProcessStatus, RankState
from preheat.errors import RunError
from preheat.hardware.system_metrics import SystemMeter

if TYPE_CHECKING:
    from preheat.run.writer import Writer
    from preheat.training.usage import UsageMeter

__all__ = ["SystemMonitor"]

# The first sample early, so that a short run has one; a sample takes less than a millisecond of CPU time.
_FIRST, _EVERY = 2.0, 10.0
_STATUS_S = 5.0
"""Seconds between two statuses, the interval at which ranks publish theirs (`hang_watchdog`)."""


class SystemMonitor:
    """Samples until it is closed.

    Args:
        step: returns the number of committed steps.
        usage: of the run.
        ranks: returns what each rank does; None, as in another trainer's loop: no status is written, since signals do
            there what that trainer does with them.
        stopping: returns the signal that ends the session after the step.
    """

    def __init__(
        self,
        writer: Writer,
        step: Callable[[], int],
        usage: UsageMeter,
        *,
        ranks: Callable[[], tuple[RankState, ...]] | None = None,
        stopping: Callable[[], str | None] = lambda: None,
    ):
        self._writer, self._step, self._usage = writer, step, usage
        self._ranks, self._stopping = ranks, stopping
        self._started = psutil.Process().create_time()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        meter, due = SystemMeter(self._writer.path), time.monotonic() + _FIRST
        try:
            self._write_status()
            while not self._ended.wait(min(_STATUS_S, max(0.0, due - time.monotonic()))):
                self._write_status()
                if time.monotonic() >= due:
                    due = time.monotonic() + _EVERY
                    self._writer.write_system(self._step(), meter.sample(), self._usage.read())
        except (RunError, OSError):  # a full disk ends the run when the loop writes there
            return

    def _write_status(self) -> None:
        if self._ranks is None:
            return
        self._writer.write_status(
            ProcessStatus(
                time=time.time(),
                host=socket.gethostname(),
                pid=os.getpid(),
                started=self._started,
                stopping=self._stopping(),
                ranks=self._ranks(),
            )
        )

    def close(self) -> None:
        """Ends the samples and records the usage of the session; called before the writer is closed."""
        self._ended.set()
        self._thread.join()
        self._writer.remove_status()
        with contextlib.suppress(RunError):  # as above
            self._writer.write_system(self._step(), {}, self._usage.read())
