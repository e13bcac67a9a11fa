"""The index of the runs: figures of each run for the table, and its curves, kept in the cache.

A run is read once, and then only what was added. The index of a run is a folder `dashboard/ID` of the cache: index.json
(`_Saved`), the columns of its numbers (`columns`), and marks.jsonl, the events for charts. It can be deleted at any
time. Long runs are read by a thread in the background; until it is done, `RunSummary.progress` is below 1.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from preheat.cache_folder import cache_folder, make_private
from preheat.core.plan import Plan
from preheat.core.run_records import (
    Baseline,
    Event,
    Failed,
    Finished,
    Measured,
    Resumed,
    SampleEvent,
    Started,
    StepMetrics,
    Stopping,
    SystemMetrics,
    Usage,
)
from preheat.errors import RunError
from preheat.files import lock_file, parse_json, read_bytes, read_record, to_json
from preheat.report.formatting import format_headline, read_mapping
from preheat.report.report_data import name_model
from preheat.report.run_page import describe_event
from preheat.run.reader import Reader, read_event, read_metrics, read_system
from preheat.run.remote_copy import period_of
from preheat.sanitize import shorten
from preheat.web.columns import Table, TableShape
from preheat.web.growing_file import GrowingFile, Position
from preheat.web.limits import LARGEST_FILE
from preheat.web.outline import Axis, Outline, bin_items, place_items
from preheat.web.run_lock import LockTable

if TYPE_CHECKING:
    from preheat.core.run_records import EvaluationMetrics
    from preheat.web.catalogue import RunEntry

__all__ = [
    "Axis",
    "Mark",
    "Outline",
    "RunState",
    "RunSummary",
    "find_signature",
    "list_keys",
    "read_marks",
    "read_outline",
    "read_rows",
    "summarize",
]

_Record = TypeVar("_Record")

RunState: TypeAlias = Literal["running", "finished", "failed", "stopped", "killed", "elsewhere", "not started"]

_VERSION = 1
"""Of the index's files; another one is read anew."""
_SLICE_S = 0.25
"""Seconds of reading after which the index is saved and others may read it."""
_INLINE_S, _WINDOW_S = 0.5, 2.0
"""Seconds that requests may read themselves, in a window of time; the thread in the background does the rest."""
_FRESH_S = 300.0
"""Seconds after its last line for which a run that another machine writes counts as running."""
_RECENT = 32
"""Steps whose median is the present speed."""
_MOST_MARKS = 20_000
_LINES = 1 << 16
"""Bytes that are read between two looks at the clock."""
_LISTED = ("metrics.jsonl", "events.jsonl", "system.jsonl", "evaluation.json", "plan.json", "samples.json", "lock")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The figures of a run in the table.

    Attributes:
        name: of the folder, or the name that the user gave.
        state_text: the state as a sentence.
        steps: planned; None: unknown.
        tokens_per_second: measured, or of the last steps while it runs.
        peak_gib: measured; before the end of the session the most that was in use after a step.
        seconds_left: None if it does not run, or has no planned number of steps.
        cost: so far, in `currency`.
        started, updated: seconds since 1970.
        problem: a sentence on damaged files; None without any.
        progress: part of the run's files that is indexed.
    """

    id: str
    name: str
    path: Path
    state: RunState
    state_text: str
    model: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    planned_tokens_per_second: float | None = None
    peak_gib: float | None = None
    planned_peak_gib: float | None = None
    seconds_left: float | None = None
    cost: float | None = None
    planned_cost: float | None = None
    currency: str | None = None
    started: float | None = None
    updated: float | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    archived: bool = False
    problem: str | None = None
    progress: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event of a run, for a chart or a list; `is_bad` if it is a fault."""

    kind: str
    text: str
    step: int | None = None
    time: float | None = None
    is_bad: bool = False


@dataclass(frozen=True)
class _Facts:
    """The plan and the recipe in figures; `sizes` of the two files tell whether they are read anew."""

    sizes: tuple[int, ...] = ()
    model: str | None = None
    steps: int | None = None
    tokens_per_second: float | None = None
    peak_gib: float | None = None
    cost: float | None = None
    currency: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class _Session:
    """The events in figures: the state at the end of the last session, and its measurements."""

    end: Literal["open", "finished", "failed", "stopped"] = "open"
    reason: str | None = None
    started: float | None = None
    events: int = 0
    peak_gib: float | None = None
    tokens_per_second: float | None = None
    steps: int | None = None
    validation_loss: float | None = None
    cost: float | None = None
    currency: str | None = None
    marks: int = 0
    marks_bytes: int = 0


@dataclass(frozen=True)
class _Saved:
    """The content of index.json."""

    version: int = _VERSION
    path: str = ""
    metrics: Position = field(default_factory=Position)
    events: Position = field(default_factory=Position)
    system: Position = field(default_factory=Position)
    steps: TableShape = field(default_factory=TableShape)
    evaluations: TableShape = field(default_factory=TableShape)
    machine: TableShape = field(default_factory=TableShape)
    facts: _Facts = field(default_factory=_Facts)
    session: _Session = field(default_factory=_Session)
    most_memory: float = 0.0


class _RunIndex:
    """The index of one run. Its methods are called with `lock` held."""

    def __init__(self, entry: RunEntry):
        self.entry = entry
        self.lock = threading.Lock()
        self.folder = cache_folder() / "dashboard" / entry.id
        self.seen_unlocked: tuple[tuple[int, int], ...] | None = None
        self.is_elsewhere = False
        self._stored: tuple[int, int] | None = None
        self._current: tuple[tuple[int, int], ...] | None = None
        self._load(_Saved(path=str(entry.path)))

    def _load(self, saved: _Saved) -> None:
        path = self.entry.path
        self.metrics = GrowingFile(path / "metrics.jsonl", saved.metrics)
        self.events = GrowingFile(path / "events.jsonl", saved.events)
        self.system = GrowingFile(path / "system.jsonl", saved.system)
        self.steps = Table(self.folder, "steps", saved.steps)
        self.evaluations = Table(self.folder, "evaluations", saved.evaluations)
        self.machine = Table(self.folder, "machine", saved.machine, is_strict=False)
        self.facts, self.session, self.most_memory = saved.facts, saved.session, saved.most_memory

    @property
    def files(self) -> tuple[GrowingFile, ...]:
        return self.metrics, self.events, self.system

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.steps, self.evaluations, self.machine

    def count_unread(self) -> int:
        """Returns the bytes of the run that are not indexed."""
        return sum(file.count_unread() for file in self.files)

    @property
    def progress(self) -> float:
        read = sum(file.position.offset for file in self.files)
        unread = self.count_unread()
        return read / (read + unread) if unread else 1.0

    def is_current(self) -> bool:
        """Returns True if no file of the run changed since all of it was read."""
        return self._current is not None and self._current == _list_files(self.entry.path)

    def update(self, seconds: float) -> bool:
        """Reads new lines for some time and saves the index; returns True if nothing is left to be read.

        Raises:
            RunError: the cache cannot be written.
        """
        end = time.monotonic() + seconds
        files = _list_files(self.entry.path)
        try:
            make_private(self.folder)
            with (self.folder / "lock").open("a") as lock:
                lock_file(lock, wait=True)
                self.reload()
                if not all(file.is_same() for file in self.files):
                    self._load(_Saved(path=str(self.entry.path)))
                is_changed = self._read_facts()
                before = [file.position for file in self.files]
                is_done = self._read_files(end)
                if is_changed or before != [file.position for file in self.files]:
                    self._save()
        except OSError as error:
            raise RunError(
                f"{self.folder}: cannot write the index of a run there ({error.strerror}); set PREHEAT_CACHE to a "
                "folder that can be written, and start preheat ui again"
            ) from None
        # As listed before reading: what was written in the meantime is read next time.
        self._current = files if is_done else None
        return is_done

    def _read_files(self, end: float) -> bool:
        return (
            self._read_file(self.events, read_event, self._add_event, end)
            and self._read_file(self.system, read_system, self._add_system, end)
            and self._read_file(self.metrics, read_metrics, self._add_metrics, end)
        )

    def _read_file(
        self,
        file: GrowingFile,
        read: Callable[[bytes], _Record],
        store: Callable[[_Record], None],
        end: float,
    ) -> bool:
        """Reads a file until a time; returns True if nothing is left."""
        while True:
            before = file.position.offset
            for record in file.read_records(read, _LINES):
                store(record)
            if file.position.offset == before:
                return True
            if time.monotonic() > end:
                return False

    def reload(self) -> None:
        """Reads index.json if another process, or an earlier one, wrote it."""
        file = self.folder / "index.json"
        try:
            facts = file.stat()
        except OSError:
            return
        if self._stored == (facts.st_ino, facts.st_mtime_ns):
            return
        try:
            saved = read_record(_Saved, parse_json(read_bytes(file)))
        except ValueError:
            return
        if saved.version != _VERSION or saved.path != str(self.entry.path):
            return
        self._load(saved)
        self._stored = facts.st_ino, facts.st_mtime_ns
        if not all(table.is_intact() for table in self.tables):
            self._load(_Saved(path=str(self.entry.path)))

    def _save(self) -> None:
        for table in self.tables:
            table.flush()
        saved = _Saved(
            path=str(self.entry.path),
            metrics=self.metrics.position,
            events=self.events.position,
            system=self.system.position,
            steps=self.steps.shape,
            evaluations=self.evaluations.shape,
            machine=self.machine.shape,
            facts=self.facts,
            session=self.session,
            most_memory=self.most_memory,
        )
        file, partial = self.folder / "index.json", self.folder / "index.json.writing"
        # Not synced: after a power failure the run is read again.
        partial.write_text(to_json(saved), encoding="utf-8")
        partial.replace(file)
        facts = file.stat()
        self._stored = facts.st_ino, facts.st_mtime_ns

    def _read_facts(self) -> bool:
        path = self.entry.path
        sizes = tuple(number for name in ("plan.json", "recipe.yaml") for number in _read_size(path / name))
        if sizes == self.facts.sizes:
            return False
        self.facts = _find_facts(path, sizes)
        return True

    def _add_metrics(self, line: StepMetrics | EvaluationMetrics) -> None:
        if isinstance(line, StepMetrics):
            self.evaluations.drop_from(line.step)
            self.steps.append(line.step, _list_step_values(line))
            if line.memory is not None and line.memory > self.most_memory:
                self.most_memory = float(line.memory)
        else:
            self.evaluations.append(line.step, _list_evaluation_values(line))

    def _add_system(self, line: SystemMetrics) -> None:
        self.machine.append(line.step, {f"system/{key}": value for key, value in line.figures.items()})
        if line.usage is not None:
            self._add_usage(line.usage)

    def _add_usage(self, usage: Usage) -> None:
        self.session = replace(self.session, cost=usage.cost, currency=usage.currency)

    def _add_event(self, event: Event) -> None:
        session = replace(self.session, events=self.session.events + 1)
        if session.started is None:
            session = replace(session, started=event.time)
        match event:
            case Started() | Resumed():
                session = replace(session, end="open", reason=None)
            case Failed():
                session = replace(session, end="failed", reason=event.reason)
            case Stopping() if session.end != "failed":
                session = replace(session, end="stopped", reason=event.signal)
            case Finished() if session.end == "open":
                session = replace(
                    session,
                    end="finished",
                    reason=event.reason,
                    steps=event.steps,
                    validation_loss=_require_finite(event.validation_loss),
                )
            case Measured():
                session = replace(
                    session,
                    peak_gib=_require_finite(event.peak_gib),
                    tokens_per_second=_require_finite(event.tokens_per_second),
                )
        self.session = session
        if isinstance(event, Measured) and event.usage is not None:
            self._add_usage(event.usage)
        if not isinstance(event, SampleEvent | Baseline):
            self._add_mark(_build_mark(event))

    def _add_mark(self, mark: Mark) -> None:
        if self.session.marks >= _MOST_MARKS:
            return
        line = (to_json(mark) + "\n").encode()
        with (self.folder / "marks.jsonl").open("ab") as file:
            # A process that ended before it saved the index left the rest.
            if file.tell() != self.session.marks_bytes:
                file.truncate(self.session.marks_bytes)
                file.seek(self.session.marks_bytes)
            file.write(line)
        self.session = replace(
            self.session, marks=self.session.marks + 1, marks_bytes=self.session.marks_bytes + len(line)
        )

    def find_table(self, key: str) -> Table | None:
        return next((table for table in self.tables if key in table.keys and table.rows), None)


def _read_size(file: Path) -> tuple[int, int]:
    """Returns size and time of change in nanoseconds; 0 of a file that does not exist."""
    try:
        facts = file.stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns


def _require_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _find_facts(path: Path, sizes: tuple[int, ...]) -> _Facts:
    """Reads plan and recipe. The plan has the recipe too, and JSON is read a hundred times faster than YAML."""
    try:
        run = Reader(path, largest=LARGEST_FILE)
    except RunError:
        return _Facts(sizes)
    plan: Plan | None = run.plan
    recipe = plan.recipe if plan is not None and plan.recipe else run.read_raw_recipe()[0]
    model = name_model(read_mapping(recipe.get("model")))
    problem = f"{run.damage_notes[0]}." if run.damage_notes else None
    if plan is None:
        return _Facts(sizes, model and format_headline(model), problem=problem)
    return _Facts(
        sizes,
        model and format_headline(model),
        None if plan.steps is None else int(plan.steps),
        plan.tokens_per_second,
        plan.peak_gib,
        plan.predicted.cost,
        plan.currency,
        problem,
    )


_STEP_FIELDS = (
    "tokens",
    "loss",
    "lr",
    "gradient_norm",
    "seconds",
    "tokens_per_second",
    "memory",
    "elapsed",
    "length",
    "skipped_steps",
    "loss_scale",
)


def _list_step_values(line: StepMetrics) -> dict[str, float]:
    """Returns the numbers of a step; numbers that are not finite become infinity."""
    values: dict[str, float] = {}
    for key in _STEP_FIELDS:
        value = getattr(line, key)
        if value is not None:
            values[key] = math.inf if value != value else value
    for source, loss in (line.loss_by_source or {}).items():
        values[f"loss/{source}"] = math.inf if loss != loss else loss
    for key, score in line.scores.items():
        if isinstance(score, int | float):
            values.setdefault(key, math.inf if score != score else score)
    return values


def _list_evaluation_values(line: EvaluationMetrics) -> dict[str, float]:
    values: dict[str, float | None] = {
        "validation_loss": line.validation_loss,
        "forgetting_loss": line.forgetting_loss,
        **line.scores,
    }
    for source, loss in (line.validation_loss_by_source or {}).items():
        values[f"validation_loss/{source}"] = loss
    for task, metrics in (line.tasks or {}).items():
        values |= {f"tasks/{task}/{metric}": value for metric, value in metrics.items()}
    return {key: math.inf if value != value else value for key, value in values.items() if value is not None}


_FAULTS = frozenset({"failed", "damaged", "out_of_memory", "overflows", "spike", "unsaved", "unevaluated", "rewound"})


def _build_mark(event: Event) -> Mark:
    step = event.steps if isinstance(event, Finished) else getattr(event, "step", None)
    return Mark(
        kind=event.kind.replace("_", " ")[:60],
        text=shorten(describe_event(event), 300),
        step=step,
        time=event.time,
        is_bad=event.kind in _FAULTS,
    )


class _Indexes:
    """The indexes of all runs, and the thread that reads long ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: dict[str, _RunIndex] = {}
        self._queue: dict[str, _RunIndex] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._window, self._left_s = 0.0, 0.0
        self.locks = LockTable()

    def open(self, entry: RunEntry) -> _RunIndex:
        with self._lock:
            index = self._indexes.get(entry.id)
            if index is None or index.folder.parent != cache_folder() / "dashboard":
                index = self._indexes[entry.id] = _RunIndex(entry)
                # Shown at once, and then brought up to date.
                index.reload()
            return index

    def peek(self, entry: RunEntry) -> _RunIndex | None:
        return self._indexes.get(entry.id)

    @contextlib.contextmanager
    def read(self, entry: RunEntry) -> Iterator[_RunIndex]:
        """Yields the index of a run with its lock held, read as far as the time of requests allows."""
        index = self.open(entry)
        with index.lock:
            if not index.is_current() and not self._read_inline(index):
                self._enqueue(index)
            yield index

    def _read_inline(self, index: _RunIndex) -> bool:
        """Reads a run if requests have time left; returns True if all of it is read."""
        begin = time.monotonic()
        if begin - self._window > _WINDOW_S:
            self._window, self._left_s = begin, _INLINE_S
        if self._left_s <= 0 or index.entry.id in self._queue:
            return False
        is_done = index.update(min(_SLICE_S, self._left_s))
        self._left_s -= time.monotonic() - begin
        return is_done

    def _enqueue(self, index: _RunIndex) -> None:
        with self._lock:
            self._queue.setdefault(index.entry.id, index)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="preheat-index", daemon=True)
                self._thread.start()
        self._wake.set()

    def _work(self) -> None:
        """Reads the runs of the queue, in turns, so that a short one does not wait for a long one."""
        remove_stale(cache_folder() / "dashboard")
        while True:
            with self._lock:
                id, index = next(iter(self._queue.items()), (None, None))
            if id is None or index is None:
                self._wake.clear()
                self._wake.wait()
                continue
            try:
                with index.lock:
                    is_done = index.update(_SLICE_S)
            except RunError:
                is_done = True  # the next request says it
            with self._lock:
                del self._queue[id]
                if not is_done:
                    self._queue[id] = index
            # Lets requests at the index's lock.
            time.sleep(0.005)


_INDEXES = _Indexes()


def remove_stale(folder: Path) -> None:
    """Removes the indexes of runs that do not exist any more."""
    try:
        files = [*folder.glob("*/index.json")]
    except OSError:
        return
    for file in files:
        try:
            path = parse_json(read_bytes(file)).get("path")
        except (ValueError, AttributeError):
            continue
        if isinstance(path, str) and not Path(path).is_dir():
            shutil.rmtree(file.parent, ignore_errors=True)


def summarize(entry: RunEntry) -> RunSummary:
    """Returns the figures of a run. It reads what is new; of a long run, the part that is indexed so far.

    Raises:
        RunError: the cache cannot be written.
    """
    with _INDEXES.read(entry) as index:
        return _build_summary(index)


def _build_summary(index: _RunIndex) -> RunSummary:
    entry, facts, session, steps = index.entry, index.facts, index.session, index.steps
    files = _list_files(entry.path)
    step = steps.read_last("step")
    state, is_fresh = _find_state(index, files, has_lines=bool(steps.rows or session.events))
    is_live = state in ("running", "elsewhere") and is_fresh
    speeds = steps.read_newest("tokens_per_second", _RECENT)
    seconds = steps.read_newest("seconds", _RECENT)
    number = session.steps if state == "finished" and session.steps is not None else _to_int(step)
    speed = session.tokens_per_second
    if speed is None or is_live:
        speed = statistics.median(speeds) if speeds else speed
    left = None
    if is_live and facts.steps is not None and number is not None and seconds:
        left = max(0, facts.steps - number) * statistics.median(seconds)
    peak = session.peak_gib
    if peak is None and index.most_memory:
        peak = index.most_memory / 2**30
    validation = index.evaluations.read_newest("validation_loss", 1)
    return RunSummary(
        id=entry.id,
        name=entry.name,
        path=entry.path,
        state=state,
        state_text=_describe_state(state, session, number, facts.steps),
        model=facts.model,
        step=number,
        steps=facts.steps,
        loss=_require_finite(steps.read_last("loss")),
        validation_loss=validation[-1] if validation else session.validation_loss,
        tokens_per_second=speed,
        planned_tokens_per_second=facts.tokens_per_second,
        peak_gib=peak,
        planned_peak_gib=facts.peak_gib,
        seconds_left=left,
        cost=session.cost,
        planned_cost=facts.cost,
        currency=session.currency or facts.currency,
        started=session.started,
        updated=max((changed for _, changed in files), default=0) / 1e9 or None,
        problem=_find_problem(index),
        progress=index.progress,
    )


def _list_files(path: Path) -> tuple[tuple[int, int], ...]:
    return tuple(_read_size(path / name) for name in _LISTED)


def _to_int(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _find_problem(index: _RunIndex) -> str | None:
    sentences = [index.facts.problem, *(file.describe_damage() for file in index.files)]
    return next((sentence for sentence in sentences if sentence), None)


def _find_state(index: _RunIndex, files: tuple[tuple[int, int], ...], *, has_lines: bool) -> tuple[RunState, bool]:
    """Returns the state, and True if the run's files are fresh."""
    lock = index.entry.path / "lock"
    is_locked = _INDEXES.locks.is_locked(lock)
    # A copy of a run in object storage is as old as its last upload.
    limit = max(_FRESH_S, 3 * period_of(index.entry.url)) if index.entry.url else _FRESH_S
    is_fresh = time.time() - max(changed for _, changed in files) / 1e9 < limit
    end = index.session.end
    if is_locked:
        index.seen_unlocked, index.is_elsewhere = None, False
        # A run that was stopped still saves, and its session has ended when the lock is free.
        return ("running" if end == "open" or end == "stopped" else end), True
    if end != "open":
        return end, is_fresh
    if is_locked is None:  # this system does not list its locks
        return ("running" if is_fresh else "killed" if has_lines else "not started"), is_fresh
    # A killed process writes nothing: a file that changes while the lock is free is another machine's, or a copy of it.
    if index.seen_unlocked is not None and index.seen_unlocked != files:
        if _INDEXES.locks.is_locked(lock, max_age=0.0):  # it has just started
            index.seen_unlocked = None
            return "running", True
        index.is_elsewhere = True
    index.seen_unlocked = files
    if is_fresh and (index.is_elsewhere or not lock.exists()):
        return "elsewhere", True
    return ("killed" if has_lines else "not started"), is_fresh


def _describe_state(state: RunState, session: _Session, step: int | None, steps: int | None) -> str:
    at = f"step {step or 0:,}" + (f" of {steps:,}" if steps else "")
    reason = shorten(session.reason or "", 300)
    match state:
        case "running" if session.end == "stopped":
            return f"Stopping at {at}."
        case "running":
            return f"Running, {at}."
        case "finished":
            return f"Finished at {at}."
        case "failed":
            return f"Failed at {at}: {reason or 'no reason is recorded'}."
        case "stopped":
            signal = f" ({reason})." if reason else "."
            if steps and (step or 0) >= steps:
                return f"All {steps:,} steps are done and saved. The run was stopped before its last figures{signal}"
            return f"Stopped early at {at}{signal}"
        case "elsewhere":
            return f"Another machine writes it, {at}."
        case "killed":
            return f"Killed at {at}: no process writes it, and no end is recorded. Resume it with --resume."
    return "Not started: neither a step nor an event is recorded."


def find_signature(entry: RunEntry) -> tuple[int | bool | float | None, ...]:
    """Returns values that change when there is something new to show of a run; it reads no file."""
    index = _INDEXES.peek(entry)
    return (
        *(number for file in _list_files(entry.path) for number in file),
        _INDEXES.locks.is_locked(entry.path / "lock"),
        sum(file.position.offset for file in index.files) if index is not None else None,
    )


_FIRST_KEYS = ("loss", "validation_loss", "tokens_per_second", "gradient_norm", "lr", "memory")


def list_keys(entry: RunEntry) -> list[str]:
    """Returns the keys of a run's curves, the most wanted first."""
    with _INDEXES.read(entry) as index:
        keys = {key for table in index.tables if table.rows for key in table.keys} - {"step", "tokens", "elapsed"}
    return [*(key for key in _FIRST_KEYS if key in keys), *sorted(keys - {*_FIRST_KEYS})]


_COLUMNS: Mapping[Axis, str] = {"step": "step", "tokens": "tokens", "hours": "elapsed"}


def read_outline(
    entry: RunEntry,
    key: str,
    *,
    x: Axis = "step",
    first: float | None = None,
    last: float | None = None,
    points: int = 800,
) -> Outline:
    """Reads a curve in bins of equal width.

    Args:
        key: one of `list_keys`; another gives an empty curve, since it may be recorded later.
        first, last: range of x; None: from the first, up to the last.
        points: maximum number of bins.
    """
    scale = 3600.0 if x == "hours" else 1.0
    column = _COLUMNS[x]
    low, high = (None if bound is None else bound * scale for bound in (first, last))
    with _INDEXES.read(entry) as index:
        table = index.find_table(key)
        if table is None or (not index.steps.rows and table is not index.evaluations):
            return Outline(key=key, axis=x)
        steps = index.steps
        if column in table.keys:
            items = table.read_items(key, column, low, high)
        elif column in steps.keys:
            items = place_items(table, steps, key, column, low, high)
        else:
            return Outline(key=key, axis=x)
        axis = steps if column in steps.keys else table
        start, end = axis.read_first(column) / scale, axis.read_last(column) / scale
    outline = bin_items(items, key, x, scale, points)
    return replace(outline, first=_require_finite(start), last=_require_finite(end))


def read_marks(entry: RunEntry, most: int = 2_000) -> list[Mark]:
    """Returns the newest events of a run, in order, without samples and baselines."""
    with _INDEXES.read(entry) as index:
        try:
            with (index.folder / "marks.jsonl").open("rb") as file:
                lines = file.read(index.session.marks_bytes).splitlines()[-most:]
        except FileNotFoundError:
            return []
    return [read_record(Mark, parse_json(line)) for line in lines]


def read_rows(entry: RunEntry) -> Iterator[Sequence[str | float | None]]:
    """Yields the names of the columns, then the values of each step, with those of the evaluation after it.

    A missing value is None, and one that was not finite is NaN.
    """
    with _INDEXES.read(entry) as index:
        steps, evaluations = index.steps, index.evaluations
        keys, more = steps.keys, [key for key in evaluations.keys if key != "step"]
        evaluated = {
            int(step): evaluations.read_row(row, more)
            for row, step in enumerate(evaluations.read("step", 0, evaluations.rows) if evaluations.rows else ())
        }
    yield [*(keys or ["step"]), *more]
    for row in range(0, steps.rows, _ROWS):
        with index.lock:
            columns = [steps.read(key, row, row + _ROWS).tolist() for key in keys]
        for values in zip(*columns, strict=False):
            after = evaluated.pop(int(values[0]), [math.nan] * len(more))
            yield [
                None if math.isnan(value) else math.nan if math.isinf(value) else value for value in (*values, *after)
            ]


_ROWS = 4096
"""Rows that are read at once for a file of all values."""
