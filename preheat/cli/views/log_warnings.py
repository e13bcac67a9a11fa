"""Warnings that the library logs, on standard error: a line each, once."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from preheat.cli.views.output import say

__all__ = ["warnings_shown"]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if line not in self._shown and os.environ.get("RANK", "0") == "0":  # of several processes the first speaks
            self._shown.add(line)
            say(f"warning: {line}", error=True)


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Within, what the library warns of is shown."""
    log, lines = logging.getLogger("preheat"), _Lines()
    before = log.propagate
    log.addHandler(lines)
    log.propagate = False  # or it is shown twice where a root handler stands
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.propagate = before
