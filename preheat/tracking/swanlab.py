"""SwanLab: online with a key, otherwise files on this machine (`SWANLAB_MODE=offline`; later `swanlab sync`).

Source: https://docs.swanlab.cn/en/api (0.10).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from preheat.tracking.tracker import Start, Status, Table, Tracker, why_not_writable

if TYPE_CHECKING:
    from swanlab import Run

__all__ = ["SwanLab"]


class SwanLab(Tracker):
    """An experiment of SwanLab, under the identity of the run, so that it continues there."""

    name = "swanlab"
    package = "swanlab"
    pip = "preheat[swanlab]"
    _run: Run  # from `start` on

    def __init__(self) -> None:
        self._step = 0
        self._folder, self._offline = Path(), False

    @classmethod
    def conflict(cls, start: Start) -> str | None:
        return why_not_writable(start.local or Path(os.environ.get("SWANLAB_LOG_DIR", "swanlog")))

    def start(self, start: Start, known: str | None) -> str:
        import swanlab

        self._folder = start.local or Path(os.environ.get("SWANLAB_LOG_DIR", "swanlog"))
        # Without a key it would ask at a terminal, which this process does not have.
        self._offline = swanlab.Settings().mode != "online" or not swanlab.Settings().api_key
        self._run = swanlab.init(
            project=start.project,
            name=start.name,
            id=known or start.run,
            resume="allow",
            tags=list(start.tags),
            config=dict(start.parameters),
            log_dir=str(self._folder),
            mode="offline" if self._offline else None,
        )
        return known or start.run

    @property
    def url(self) -> str | None:
        return self._run.url if not self._offline else f"offline; send it later with: swanlab sync {self._folder}"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        self._run.log(dict(values), step=step)

    def table(self, step: int, name: str, table: Table) -> None:
        self._run.log_text(key=name, data=table.render_markdown(), step=step)

    def summary(self, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=self._step)

    def artifact(self, file: Path) -> None:
        self._run.save(str(file))

    def finish(self, status: Status) -> None:
        state: Literal["success", "crashed", "aborted"] = "success" if status == "finished" else "aborted"
        if status == "failed":
            self._run.finish(state="crashed", error="the run failed; its log names the reason")
        else:
            self._run.finish(state=state)
