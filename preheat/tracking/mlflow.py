"""MLflow: a server (`MLFLOW_TRACKING_URI`), or a local SQLite database that `mlflow ui` displays.

Source: https://mlflow.org/docs/latest/api_reference/python_api (3.17).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from preheat.tracking.tracker import Start, Status, Table, Tracker, why_not_writable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

__all__ = ["MLflow"]

# MLflow's own limits of one request and of a parameter's value.
_BATCH, _LONGEST = 1_000, 6_000


class MLflow(Tracker):
    """A run of MLflow. Metrics are sent in batches; parameters cannot change, so those of the first session stay."""

    name = "mlflow"
    package = "mlflow"
    pip = "preheat[mlflow]"
    _client: MlflowClient  # from `start` on
    _STATES: ClassVar[Mapping[Status, str]] = {
        "finished": "FINISHED",
        "interrupted": "KILLED",
        "failed": "FAILED",
        "killed": "KILLED",
    }

    def __init__(self) -> None:
        self._id, self._uri = "", ""
        self._waiting: list[Metric] = []

    @classmethod
    def conflict(cls, start: Start) -> str | None:
        if os.environ.get("MLFLOW_TRACKING_URI"):
            return None
        return why_not_writable(start.local or Path())

    def start(self, start: Start, known: str | None) -> str:
        # Before the import, which reads it.
        os.environ.setdefault("MLFLOW_DISABLE_AUTO_LOGGING", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        database = (start.local or Path()).absolute() / "mlflow.db"
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"
        self._client = MlflowClient(tracking_uri=self._uri)
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._id = known
            return known
        experiment = self._client.get_experiment_by_name(start.project)
        # A local database would keep artifacts relative to whatever folder reads it.
        where = None if os.environ.get("MLFLOW_TRACKING_URI") else (database.parent / "mlartifacts").as_uri()
        number = experiment.experiment_id if experiment else self._client.create_experiment(start.project, where)
        tags = {"preheat.run": start.run, **{f"tag.{tag}": "true" for tag in start.tags}}
        self._id = self._client.create_run(number, run_name=start.name, tags=tags).info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in start.parameters.items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[first : first + 100])
        return self._id

    @property
    def url(self) -> str | None:
        return f"mlflow ui --backend-store-uri {self._uri}" if self._uri.startswith("sqlite") else self._uri

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now, step) for name, value in values.items()]
        if len(self._waiting) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        for first in range(0, len(self._waiting), _BATCH):
            self._client.log_batch(self._id, metrics=self._waiting[first : first + _BATCH])
        self._waiting = []

    def table(self, step: int, name: str, table: Table) -> None:
        # The layout of MLflow's own tables.
        rows = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self._id, rows, f"{name}/step-{step}.json")

    def summary(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value)

    def artifact(self, file: Path) -> None:
        self._client.log_artifact(self._id, str(file))

    def finish(self, status: Status) -> None:
        self.flush()
        self._client.set_terminated(self._id, self._STATES[status])
