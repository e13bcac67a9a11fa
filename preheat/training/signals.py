"""SIGTERM and Ctrl-C: once means save and end after this step, the same again means now."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Signals"]


class Signals:
    """While entered, remembers the first signal in `received`; the same one again ends the process at once.

    A launcher may pass on as SIGTERM the Ctrl-C that the terminal sent to all."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python cannot set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.Signals(number).name:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = self.received or signal.Signals(number).name
