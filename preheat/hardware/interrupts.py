"""Turns Ctrl-C, SIGTERM and SIGHUP into an exception, so that a command cleans up, prints a line and ends.

A training run has its own handlers (`preheat.training.signals`), which save a checkpoint first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

__all__ = [
    "Interrupted",
    "check",
    "end_at_once",
    "handled_signals",
    "ignore_keyboard_interrupt",
    "raise_keyboard_interrupt",
    "raise_on_signal",
]


class Interrupted(BaseException):
    """A signal asked this process to end; a `BaseException` like `KeyboardInterrupt`, so that error handlers ignore it.

    Attributes:
        number: number of the signal.
        resume: command that resumes the interrupted work, if there is one.
    """

    def __init__(self, number: int, resume: str | None = None):
        self.number, self.resume = signal.Signals(number), resume
        super().__init__(f"interrupted by {self.number.name}")

    @property
    def exit_code(self) -> int:
        """Exit code by the shell convention: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number


def handled_signals() -> list[signal.Signals]:
    """Returns the signals that ask a process to end; without SIGHUP if it is ignored, as under `nohup`."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if sys.platform != "win32" and "RANK" in os.environ:  # schedulers such as Slurm announce the time limit with it
        numbers.append(signal.SIGUSR1)
    return numbers


def end_at_once(number: int) -> None:
    """Ends this process with the default action of the signal."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class _Raising:
    def __init__(self, hook: Callable[[sys.UnraisableHookArgs], object]):
        self.received: int | None = None
        self.hook = hook
        self._again = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        # A second signal means that the user does not want to wait for the cleanup.
        if self.received is not None and not self._again:
            end_at_once(number)
        self.received, self._again = number, False
        raise Interrupted(number)

    def unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """Raises the exception again if Python dropped it: in a weakref callback, `__del__`, or a callback from C."""
        # Other lost exceptions go to the hook that was installed before.
        if not isinstance(lost.exc_value, Interrupted):
            self.hook(lost)
        # Only while this handler is installed: afterwards the signal would end the process.
        elif signal.getsignal(lost.exc_value.number) == self.handle:
            self._again = True
            main = threading.main_thread().ident
            assert main is not None
            # With a delay, because Python is still in the callback.
            threading.Timer(0.05, signal.pthread_kill, (main, lost.exc_value.number)).start()


_current: _Raising | None = None


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Context manager: the first signal raises `Interrupted` in the main thread, a second one ends the process."""
    global _current
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread only
        yield
        return
    # Contexts nest; the inner one handles signals until it ends.
    outer, _current = _current, _Raising(sys.unraisablehook)
    before = {number: signal.signal(number, _current.handle) for number in handled_signals()}
    sys.unraisablehook = _current.unraisable
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = _current.hook
        _current = outer


def raise_keyboard_interrupt() -> AbstractContextManager[None]:
    """Context manager: Ctrl-C raises `KeyboardInterrupt`, for work that it ends without ending the command."""
    return _handle_ctrl_c(signal.default_int_handler)


def ignore_keyboard_interrupt() -> AbstractContextManager[None]:
    """Context manager: Ctrl-C does nothing in this process; the processes that it starts still end by it."""
    # SIG_IGN would be inherited by child processes.
    return _handle_ctrl_c(lambda number, frame: None)


@contextmanager
def _handle_ctrl_c(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, handler)
        yield
    finally:
        try:
            signal.signal(signal.SIGINT, before)
        except KeyboardInterrupt:  # a signal that was pending: Python handles it first, and leaves the handler
            signal.signal(signal.SIGINT, before)
            raise


def check() -> None:
    """Raises `Interrupted` if a signal was received but a library swallowed its exception."""
    # Code that catches BaseException, as some libraries do around callbacks, loses the exception.
    if _current is not None and _current.received is not None:
        raise Interrupted(_current.received)
