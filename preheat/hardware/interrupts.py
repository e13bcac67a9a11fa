"""Ctrl-C, SIGTERM and a closed terminal, as an exception: a command that meets one cleans up, says so in a line, and ends.

A run that trains handles them itself meanwhile (`preheat.training.signals`): it saves first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "check", "end_at_once", "heeded", "raising"]


class Interrupted(BaseException):
    """A signal asked this process to end. No `Exception`, as `KeyboardInterrupt` is none: nobody is to take it for a fault.

    Attributes:
        number: of the signal.
        resume: the command that goes on with what was begun, where there is one.
    """

    def __init__(self, number: int, resume: str | None = None):
        self.number, self.resume = signal.Signals(number), resume
        super().__init__(f"interrupted by {self.number.name}")

    @property
    def exit_code(self) -> int:
        """As shells have it: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


def heeded() -> list[signal.Signals]:
    """The signals that ask a process to end. SIGHUP is none of them if it is ignored, as `nohup` wants it."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if sys.platform != "win32" and "RANK" in os.environ:  # how a job tells its processes that its time is over
        numbers.append(signal.SIGUSR1)
    return numbers


def end_at_once(number: int) -> None:
    """Ends this process as if nobody handled the signal."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class _Raising:
    def __init__(self, hook: Callable[[Any], Any]):
        self.received: int | None = None
        self.hook = hook
        self._again = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and not self._again:
            end_at_once(number)
        self.received, self._again = number, False
        raise Interrupted(number)

    def unraisable(self, lost: Any) -> None:
        """Raises it once more where Python could not: in a weak reference's callback, a `__del__`, or a callback from C."""
        if not isinstance(lost.exc_value, Interrupted):
            self.hook(lost)
        elif signal.getsignal(lost.exc_value.number) == self.handle:
            self._again = True
            main = threading.main_thread().ident
            assert main is not None
            # A little later: Python is still in the callback.
            threading.Timer(0.05, signal.pthread_kill, (main, lost.exc_value.number)).start()


_current: _Raising | None = None


@contextmanager
def raising() -> Iterator[None]:
    """Within, the first signal raises `Interrupted` in the main thread, and a second one ends the process at once."""
    global _current
    if threading.current_thread() is not threading.main_thread():  # elsewhere Python cannot set handlers
        yield
        return
    outer, _current = _current, _Raising(sys.unraisablehook)
    before = {number: signal.signal(number, _current.handle) for number in heeded()}
    sys.unraisablehook = _current.unraisable
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = _current.hook
        _current = outer


def check() -> None:
    """Raises `Interrupted` if a signal was received and its exception was lost, as some libraries drop what they did not expect."""
    if _current is not None and _current.received is not None:
        raise Interrupted(_current.received)
