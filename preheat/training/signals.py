"""Signal handling: the first SIGTERM, SIGINT, SIGHUP or SIGUSR1 saves and ends after the step, the second at once.
SIGUSR2 saves a checkpoint after the step, and training continues.

A batch job sends SIGUSR1 to its training processes only: torchrun, if it gets SIGTERM, kills them after its own
timeout.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from preheat.hardware.interrupts import Interrupted, end_at_once, handled_signals

__all__ = ["SAVE", "Signals", "is_under_agent"]

SAVE = "SIGUSR2"
"""The signal that asks for a checkpoint. Windows has none, and does not train."""
_TWICE = 5.0
"""Seconds within which a repeated signal counts once under torchrun: a signal to the whole job arrives twice, directly
and forwarded by torchrun."""


def is_under_agent() -> bool:
    """Returns True if torchrun or a job scheduler started this process and restarts it when it fails."""
    return "RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


class Signals:
    """Context manager that stores the first signal in `received`; the same signal again ends the process at once.

    Other signals are ignored after the first: a launcher may forward, as SIGTERM, the SIGINT that the terminal already
    sent to all processes. `SAVE` is apart from them: it sets `save_requested`, which the reader clears.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.save_requested = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._raises = False
        self._first = 0.0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers in no other thread
            # SIGUSR1 in every case, although `handled_signals` lists it under a launcher only: its default action would
            # end the run.
            for number in {*handled_signals(), *([] if sys.platform == "win32" else [signal.SIGUSR1])}:
                self._before[number] = signal.signal(number, self._handle)
            if sys.platform != "win32":
                number = signal.Signals[SAVE]
                self._before[number] = signal.signal(number, self._request_save)
        return self

    def __exit__(self, *error: object) -> None:
        # The handlers of before: the code after training may be that of a notebook or another library.
        for number, handler in self._before.items():
            # A late request to save must not end the process while it closes the run.
            late = signal.Signals(number).name == SAVE and handler is signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if late else handler)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Context manager in which a signal raises `Interrupted`, for long work that may be aborted.

        Raises:
            Interrupted: at once, if a signal was received before.
        """
        self._raises = True  # set before `received` is read: a signal between the two would be lost
        try:
            if self.received is not None:
                raise Interrupted(signal.Signals[self.received])
            yield
        finally:
            # Also after an exception: from here on, signals are only noted and the step completes.
            self._raises = False

    def _request_save(self, number: int, frame: FrameType | None) -> None:
        self.save_requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received == name:
            # A user who repeats the signal does not want to wait; a launcher that forwards it did not mean that.
            if not (is_under_agent() and time.monotonic() - self._first < _TWICE):
                end_at_once(number)
            return
        if self.received is None:
            self.received, self._first = name, time.monotonic()
            # Raised from the handler, i.e. between two bytecodes of the main thread.
            if self._raises:
                raise Interrupted(number)
