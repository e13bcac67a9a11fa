"""Trackers that fail, loaded by `--plugin`: one raises an error at each step, the other never starts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from preheat.tracking.tracker import Start, Status, Table, Tracker


class Failing(Tracker):
    """A tracker whose disk is full."""

    name, package, pip = "failing", "json", "nothing"

    def start(self, start: Start, known: str | None) -> str:
        return "run"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise OSError(28, "No space left on device")

    def table(self, step: int, name: str, table: Table) -> None: ...
    def summary(self, values: Mapping[str, float]) -> None: ...
    def artifact(self, file: Path) -> None: ...
    def finish(self, status: Status) -> None: ...


class Hanging(Failing):
    """A tracker whose server does not answer for a minute."""

    name = "hanging"

    def start(self, start: Start, known: str | None) -> str:
        time.sleep(60)
        return "run"
