"""SIGTERM, Ctrl-C, a closed terminal and SIGUSR1: once means save and end after this step, the same again means now.

SIGUSR1 is how a job tells its processes alone: torchrun, told to end, waits for them no longer than it was set to.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from preheat.hardware.interrupts import Interrupted, end_at_once, heeded

__all__ = ["Signals", "under_agent"]

_TWICE = 5.0
"""Seconds within which the same signal counts once in a process of torchrun: who signals a whole job reaches it directly, and torchrun
passes on what it gets itself."""


def under_agent() -> bool:
    """Whether torchrun, or a job, started this process and would start it again if it failed."""
    return "RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


class Signals:
    """While entered, remembers the first signal in `received`; the same one again ends the process at once.

    A launcher may pass on as SIGTERM the Ctrl-C that the terminal sent to all."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}
        self._raises = False
        self._first = 0.0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python cannot set handlers
            for number in {*heeded(), *([] if sys.platform == "win32" else [signal.SIGUSR1])}:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within, the signal raises `Interrupted`: around what may be broken off and takes long.

        Raises:
            Interrupted: now, if there was one before.
        """
        self._raises = True  # before the look at `received`: a signal between the two would be lost
        try:
            if self.received is not None:
                raise Interrupted(signal.Signals[self.received])
            yield
        finally:
            self._raises = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received == name:
            if not (under_agent() and time.monotonic() - self._first < _TWICE):
                end_at_once(number)
            return
        if self.received is None:
            self.received, self._first = name, time.monotonic()
            if self._raises:
                raise Interrupted(number)
