"""A thread that records what the machine of a run uses, and what the run has used, in `system.jsonl` of its folder."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from preheat.errors import RunError
from preheat.hardware.system_metrics import SystemMeter

if TYPE_CHECKING:
    from preheat.run.writer import Writer
    from preheat.training.usage import UsageMeter

__all__ = ["SystemMonitor"]

# The first sample early, so that a short run has one; a sample takes less than a millisecond of CPU time.
_FIRST, _EVERY = 2.0, 10.0


class SystemMonitor:
    """Samples until it is closed.

    Args:
        step: returns the number of committed steps.
        usage: of the run.
    """

    def __init__(self, writer: Writer, step: Callable[[], int], usage: UsageMeter):
        self._writer, self._step, self._usage = writer, step, usage
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        meter, wait = SystemMeter(self._writer.path), _FIRST
        while not self._ended.wait(wait):
            try:
                self._writer.write_system(self._step(), meter.sample(), self._usage.read())
            except (RunError, OSError):  # a full disk ends the run when the loop writes there
                return
            wait = _EVERY

    def close(self) -> None:
        """Ends the samples and records the usage of the session; called before the writer is closed."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(RunError):  # as above
            self._writer.write_system(self._step(), {}, self._usage.read())
