"""Weights & Biases, online or offline (`WANDB_MODE=offline`; later `wandb sync`).

Source: https://docs.wandb.ai/ref/python (0.31).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from preheat.tracking.tracker import Start, Status, Table, Tracker, why_not_writable

if TYPE_CHECKING:
    from wandb import Run

__all__ = ["Wandb"]


class Wandb(Tracker):
    """A run of Weights & Biases, under the identity of the run, so that it continues there.

    Without a login and a terminal to ask at it writes offline, as `wandb` itself cannot ask.
    """

    name = "wandb"
    package = "wandb"
    pip = "preheat[wandb]"
    _run: Run  # from `start` on

    @classmethod
    def conflict(cls, start: Start) -> str | None:
        return why_not_writable(start.local or Path(os.environ.get("WANDB_DIR", ".")))

    def start(self, start: Start, known: str | None) -> str:
        import wandb

        # Without a key `init` would ask at a terminal, which this process does not have.
        offline = "WANDB_MODE" not in os.environ and not _has_login()
        self._run = wandb.init(
            project=start.project,
            name=start.name,
            id=known or start.run,
            resume="allow",
            tags=list(start.tags),
            config=dict(start.parameters),
            dir=None if start.local is None else str(start.local),
            mode="offline" if offline else None,
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        # An axis of our own: W&B's internal step drops values that come later for an earlier step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step", step_sync=True)
        return str(self._run.id)

    @property
    def url(self) -> str | None:
        if self._run.offline:
            return f"offline; send it later with: wandb sync {self._run.sync_dir}"
        return self._run.url

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def table(self, step: int, name: str, table: Table) -> None:
        import wandb

        rows = [list(row) for row in table.rows]
        self._run.log({"step": step, name: wandb.Table(columns=list(table.columns), data=rows)})

    def summary(self, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def artifact(self, file: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"{file.stem}-{self._run.id}", type="report")
        artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def finish(self, status: Status) -> None:
        # W&B shows a run with another exit code as failed; one that a signal ended was saved.
        self._run.finish(exit_code=0 if status in ("finished", "interrupted") else 1)


def _has_login() -> bool:
    """Returns True if a key for W&B's server is in the environment or in netrc, where `wandb login` stores it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
