"""Prints warnings that the library logs on standard error, each once and on one line."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from preheat.cli.views.output import say

__all__ = ["show_warnings"]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        # One line per warning, so that a log can be searched by lines.
        line = " ".join(record.getMessage().split())
        # A library may log the same warning for each layer.
        if line not in self._shown and os.environ.get("RANK", "0") == "0":  # only rank 0 prints
            self._shown.add(line)
            say(f"warning: {line}", error=True)


@contextlib.contextmanager
def show_warnings() -> Iterator[None]:
    """Context manager that prints the library's logged warnings."""
    log, lines = logging.getLogger("preheat"), _Lines()
    before = log.propagate
    log.addHandler(lines)
    log.propagate = False  # else a root handler would print it a second time
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.propagate = before
