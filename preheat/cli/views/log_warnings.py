"""Prints on standard error what the library logs: warnings, each once and on one line, and a measurement's progress."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from preheat.cli.views.output import print_progress, say

__all__ = ["show_warnings"]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            _show_progress(record)
            return
        # One line per warning, so that a log can be searched by lines.
        line = " ".join(record.getMessage().split())
        # A library may log the same warning for each layer.
        if line not in self._shown and os.environ.get("RANK", "0") == "0":  # only rank 0 prints
            self._shown.add(line)
            say(f"warning: {line}", error=True)


def _show_progress(record: logging.LogRecord) -> None:
    done = getattr(record, "done", None)
    if isinstance(done, float):
        print_progress(record.getMessage() if done < 1 else "")


@contextlib.contextmanager
def show_warnings() -> Iterator[None]:
    """Context manager that prints the library's logged warnings, and its progress while it measures this machine."""
    log, lines = logging.getLogger("preheat"), _Lines()
    measuring = logging.getLogger("preheat.hardware.benchmark_rates")
    before, level = log.propagate, measuring.level
    measuring.setLevel(logging.INFO)
    log.addHandler(lines)
    log.propagate = False  # else a root handler would print it a second time
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.propagate = before
        measuring.setLevel(level)
