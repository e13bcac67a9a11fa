"""Reads a run folder and sends what is new to a tracker."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from preheat.core.run_records import (
    Baseline,
    Damaged,
    EvaluationMetrics,
    Event,
    Failed,
    Fallback,
    Finished,
    Measured,
    Notice,
    OutOfMemory,
    Overflows,
    Prompt,
    RemovedRows,
    Resumed,
    Rewound,
    Spike,
    Started,
    StepMetrics,
    SystemMetrics,
    Unevaluated,
    Unsaved,
)
from preheat.files import to_json, to_plain_data
from preheat.run.reader import Reader, read_event, read_metrics, read_system
from preheat.sanitize import shorten
from preheat.tracking.progress import SentState
from preheat.tracking.tracker import Start, Status, Table, Tracker, find, find_local_folder

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.core.schema import Tracking

__all__ = ["Sender", "finite_numbers", "flatten", "start_of"]

_LINES = 2_000
"""Lines that are sent between two records of the progress: what a killed process sends twice."""
_STATUS: Mapping[str, Status] = {"finished": "finished", "stopping": "interrupted", "failed": "failed"}
_ALARMING = (Fallback, OutOfMemory, Damaged, Unsaved, Overflows, Spike, Rewound)
"""Events that are sent when they happen."""
_SHOWN = (*_ALARMING, RemovedRows, Resumed, Unevaluated, Notice, Failed)
"""Events in the table of events."""
_Record = TypeVar("_Record")


def start_of(run: Reader, settings: Tracking, tracker: str) -> Start:
    """Returns what a tracker is told of a run.

    Raises:
        RunError: the folder holds no readable run.
    """
    values, _ = run.read_raw_recipe()
    environment = {"device": run.environment.device, **(run.environment.versions or {})}
    parameters = dict(flatten(values)) | {f"environment.{key}": value for key, value in environment.items()}
    if (plan := run.plan) is not None:
        parameters |= {f"plan.{key}": value for key, value in plan.predicted.known().items()}
        parameters |= {"plan.fits": plan.fits, "plan.available_gib": plan.available_gib}
    return Start(
        run=run.id,
        folder=run.path,
        project=settings.project,
        name=settings.name or run.path.absolute().name,
        tags=settings.tags,
        parameters=parameters,
        local=find_local_folder(settings, tracker),
    )


def flatten(values: object, at: str = "") -> Iterator[tuple[str, str | int | float | bool | None]]:
    """Yields (dotted key, value) of the leaves; a list is its text."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from flatten(value, f"{at}.{key}" if at else str(key))
    elif values is None or isinstance(values, str | int | float | bool):
        yield at, values
    else:
        yield at, str(values)


def finite_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Returns the finite numbers among the values."""
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _name_losses(by_source: Mapping[str, float] | None) -> dict[str, float]:
    # MLflow allows no other characters in names, and a slash would be another level.
    losses = finite_numbers(by_source or {})
    return {"loss/" + re.sub(r"[^-. \w]", "_", name): loss for name, loss in losses.items()}


def _collect_training(line: StepMetrics) -> dict[str, float]:
    figures = finite_numbers(to_plain_data(line))
    del figures["step"]
    figures |= _name_losses(line.loss_by_source)
    # Trackers draw an axis per name: bytes could not be compared with GiB of the plan.
    if "memory" in figures:
        figures["memory_gib"] = figures.pop("memory") / 2**30
    return {f"train/{name}": value for name, value in figures.items()}


def _collect_evaluation(line: EvaluationMetrics) -> dict[str, float]:
    scores = {f"validation/{name.removeprefix('validation_')}": value for name, value in line.scores.items()}
    losses: dict[str, float | None] = {"validation/loss": line.validation_loss, "forgetting/loss": line.forgetting_loss}
    by_source = {f"validation/{name}": value for name, value in _name_losses(line.validation_loss_by_source).items()}
    tasks = {f"tasks/{task}/{name}": value for task, of in (line.tasks or {}).items() for name, value in of.items()}
    return finite_numbers({**losses, **by_source, **scores, **tasks})


def _collect_figures(event: Event) -> dict[str, float]:
    values = to_plain_data(event)
    figures = finite_numbers({**values, **values.get("usage", {})})
    figures.pop("time", None)
    return figures


def _format_details(event: Event) -> str:
    values: JsonObject = to_plain_data(event)
    return shorten(to_json({key: value for key, value in values.items() if key not in ("time", "kind", "step")}), 500)


def _build_event_row(event: Event) -> tuple[str, str, str, str]:
    time = datetime.fromtimestamp(event.time or 0, UTC).isoformat(timespec="seconds")
    return time, str(to_plain_data(event).get("step", "")), event.kind, _format_details(event)


def _format_prompt(prompt: Prompt) -> str:
    """Returns a prompt as text; that of a chat is a list of messages."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


class Sender:
    """Sends a run to a tracker, from where the last session ended.

    Args:
        run: the run folder.
        name: the tracker's name.
        settings: project, name, tags and folder.
        report: writes the report of the run and returns its file.

    Raises:
        RecipeError: the tracker does not exist or is not installed.
        RunError: the folder holds no readable run.
    """

    def __init__(self, run: Path, name: str, settings: Tracking, report: Callable[[], Path]):
        self.run, self.name, self.settings, self.report = Reader(run), name, settings, report
        self.tracker: Tracker = find(name)()
        self.progress: SentState | None = None
        self._constants: dict[str, float] = {}
        self._end: Status = "killed"

    def begin(self) -> str | None:
        """Starts or continues the run at the tracker, and returns where to see it."""
        start = start_of(self.run, self.settings, self.name)
        self._lock = SentState.lock(self.run.path, self.name)  # held until this process ends
        self.progress = SentState.read(self.run.path, self.name)
        if self.progress is None:
            self.progress = SentState(self.name, start.project, start.name)
        else:  # a run keeps the place where it began, whatever the recipe of the resumed session says
            start = Start(**{**vars(start), "project": self.progress.project, "name": self.progress.name})
        if start.local is not None:
            start.local.mkdir(parents=True, exist_ok=True)
        self.progress.known = self.tracker.start(start, self.progress.known)
        self.progress.url = self.tracker.url
        self.progress.write(self.run.path)
        plan = self.run.plan
        self._constants = (
            {} if plan is None else {f"plan/{k}": v for k, v in finite_numbers(plan.predicted.known()).items()}
        )
        return self.progress.url

    def send(self) -> None:
        """Sends what the run has written since the last call."""
        self._send("metrics.jsonl", read_metrics, self._send_metrics)
        self._send("system.jsonl", read_system, self._send_system)
        self._send("events.jsonl", read_event, self._send_event)

    def finish(self) -> None:
        """Sends what is left, the tables and the report, and ends the session there."""
        self.send()
        for name, table in self._build_tables():
            self.tracker.table(self._sent.step, name, table)
        self.tracker.artifact(self.report())
        self.tracker.finish(self._end)
        self._sent.write(self.run.path)

    @property
    def _sent(self) -> SentState:
        assert self.progress is not None, "begin is called first"
        return self.progress

    def _send(self, name: str, read: Callable[[bytes], _Record], send: Callable[[_Record], None]) -> None:
        file = self.run.path / name
        if not file.exists():
            return
        with file.open("rb") as stream:
            stream.seek(self._sent.offsets.get(name, 0))
            count = _LINES
            while count == _LINES:
                count = 0
                # A last line without a line feed is still being written.
                while count < _LINES and (line := stream.readline()).endswith(b"\n"):
                    count += 1
                    # Damaged lines are left out here as by the report, which lists them.
                    with contextlib.suppress(ValueError):
                        send(read(line))
                    self._sent.offsets[name] = self._sent.offsets.get(name, 0) + len(line)
                if count:
                    self.tracker.flush()
                    self._sent.write(self.run.path)

    def _send_metrics(self, line: StepMetrics | EvaluationMetrics) -> None:
        # A session that resumed repeats the steps since its checkpoint: they are there already.
        if isinstance(line, StepMetrics):
            if line.step > self._sent.step:
                self.tracker.metrics(line.step, _collect_training(line) | self._constants)
                self._sent.step = line.step
        elif line.step > self._sent.evaluated:
            self.tracker.metrics(line.step, _collect_evaluation(line))
            self._sent.evaluated = line.step

    def _send_system(self, line: SystemMetrics) -> None:
        figures = {**line.figures, **finite_numbers(to_plain_data(line.usage) if line.usage else {})}
        self.tracker.metrics(line.step, {f"system/{name}": value for name, value in figures.items()})

    def _send_event(self, event: Event) -> None:
        if isinstance(event, Measured | Baseline | Finished):
            group = "final" if isinstance(event, Finished) else event.kind
            self.tracker.summary({f"{group}/{name}": value for name, value in _collect_figures(event).items()})
        if isinstance(event, Started | Resumed):
            self._end = "killed"
        self._end = _STATUS.get(event.kind, self._end)
        if isinstance(event, _ALARMING):
            self.tracker.event(event.kind, _format_details(event))

    def _build_tables(self) -> Iterator[tuple[str, Table]]:
        samples = [
            (_format_prompt(sample.prompt), sample.expected or "", sample.before or "", sample.text or "")
            for sample in self.run.samples()
        ]
        if samples:
            yield "samples", Table(("prompt", "expected", "before training", "text"), samples)
        events = [_build_event_row(event) for event in self.run.events() if isinstance(event, _SHOWN)]
        if events:
            yield "events", Table(("time", "step", "event", "details"), events)
