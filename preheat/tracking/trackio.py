"""Trackio: a local database that `trackio show` displays, or a Hugging Face Space (`TRACKIO_SPACE_ID`).

Source: Trackio's documentation, https://huggingface.co/docs/trackio (0.43).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.tracking.tracker import Start, Status, Table, Tracker, why_not_writable

if TYPE_CHECKING:
    from trackio import Run

__all__ = ["Trackio"]


def _find_folder(start: Start) -> Path:
    """Returns the folder of Trackio's databases, as Trackio chooses it."""
    if start.local is not None:
        return start.local
    if chosen := os.environ.get("TRACKIO_DIR"):
        return Path(chosen)
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "trackio"


class Trackio(Tracker):
    """A run of Trackio. It continues by name, so the name of a new run must be unused in its project."""

    name = "trackio"
    package = "trackio"
    pip = "preheat[trackio]"
    _run: Run  # from `start` on

    def __init__(self) -> None:
        self._project = ""

    @classmethod
    def conflict(cls, start: Start) -> str | None:
        folder = _find_folder(start)
        if os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"):
            return None
        if problem := why_not_writable(folder):
            return problem
        # Trackio names the file by the project's letters, digits, - and _.
        file = folder / f"{''.join(c for c in start.project if c.isalnum() or c in '-_')}.db"
        if not file.is_file():
            return None
        try:
            connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=1)
            try:
                known = connection.execute("SELECT 1 FROM metrics WHERE run_name = ? LIMIT 1", (start.name,)).fetchone()
            finally:
                connection.close()
        except sqlite3.Error:  # another layout, or busy: Trackio decides when the run starts
            return None
        return f"project {start.project} has a run {start.name} already" if known else None

    def start(self, start: Start, known: str | None) -> str:
        if start.local is not None:
            os.environ["TRACKIO_DIR"] = str(start.local)
        import trackio

        self._project = start.project
        self._run = trackio.init(
            project=start.project,
            name=start.name,
            # A run that was removed there begins anew.
            resume="allow" if known else "never",
            config=dict(start.parameters) | {"tags": ", ".join(start.tags), "preheat.run": start.run},
            embed=False,
            # The run folder has these figures, of the process that trains rather than of this one.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self._run.id)

    @property
    def url(self) -> str | None:
        space = os.environ.get("TRACKIO_SPACE_ID")
        return f"https://huggingface.co/spaces/{space}" if space else f'trackio show --project "{self._project}"'

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, step: int, name: str, table: Table) -> None:
        import trackio

        self._run.log({name: trackio.Table(columns=list(table.columns), data=[list(r) for r in table.rows])}, step=step)

    def summary(self, values: Mapping[str, float]) -> None:
        # Trackio has no summary: they are metrics of the last step.
        self._run.log(dict(values), step=max(self._run._next_step - 1, 0))

    def artifact(self, file: Path) -> None:
        self._run.log_artifact(file, name=f"{self._run.name}-{file.stem}", type="report")

    def finish(self, status: Status) -> None:
        import trackio

        if status != "finished":
            self._run.alert(title=f"run {status}", text=f"The run was {status}.", level=trackio.AlertLevel.WARN)
        self._run.finish()
