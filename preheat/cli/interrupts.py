"""Signals that end a command which writes a folder: what is half written goes, and one line says so."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

__all__ = ["interruptible"]


class _Ended(KeyboardInterrupt):
    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextmanager
def interruptible(words: str, *, as_json: bool) -> Iterator[None]:
    """Within, SIGTERM, Ctrl-C and SIGHUP unwind everything, so that nothing half written stays, and then end the command with 128 + the signal.

    Args:
        words: what is left, for the line.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere Python cannot set handlers
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                before[number] = signal.signal(number, end)
    try:
        yield
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, _Ended) else signal.SIGINT
        line = f"ended by {signal.Signals(number).name}; {words}"
        if as_json:
            print(json.dumps({"error": line, "exit_code": 128 + number}))
        print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(128 + number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
