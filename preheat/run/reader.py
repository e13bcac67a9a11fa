"""Reads a run folder. `Reader` validates every file, leaves out damaged lines, keys and plans, and lists them."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

from preheat.core.plan import Plan
from preheat.core.run_records import (
    DataRecord,
    Environment,
    Evaluation,
    EvaluationMetrics,
    Event,
    Finished,
    Measured,
    OtherEvent,
    ProcessStatus,
    Resumed,
    SampleEvent,
    SampleTexts,
    Started,
    StepMetrics,
    StoredResults,
    SystemMetrics,
    Usage,
    event_type,
)
from preheat.core.slots import Change
from preheat.errors import PreheatError, RunError
from preheat.files import BadJson, parse_json, read_bytes, read_intact, read_record, read_value
from preheat.run.layout import MARK, STATUS, abbreviate, read_mark
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["Reader", "count_sessions", "read_event", "read_metrics", "read_system"]

_Event = TypeVar("_Event", bound=Event)
_Metrics = TypeVar("_Metrics", StepMetrics, EvaluationMetrics)
_Record = TypeVar("_Record")

_LARGEST = 2**63
_EXACT = 2**53
"""Integers below it survive readers whose numbers are all floats, as in a browser."""
_NO_SCORES: Mapping[str, float] = {}  # one for all lines


def read_event(line: bytes) -> Event:
    """Reads a line of events.jsonl.

    Raises:
        ValueError: it is damaged.
    """
    values = _parse_object(parse_json(line))
    kind = values.pop("kind", None)
    if not isinstance(kind, str):
        raise BadJson(f"kind: {quote_value(kind, 40)}: not text")
    record = event_type(kind)
    if record is OtherEvent:
        common: JsonObject = {key: values.pop(key) for key in ("time", "step") if key in values}
        return read_record(OtherEvent, {**common, "kind": kind, "values": values})
    counters = {"counters": _read_counters(values)} if record is Measured else {}
    return read_record(record, {**values, **counters})


def _read_counters(event: JsonObject) -> JsonObject:
    """Returns the counters of an event: the numbers that have no field."""
    return {
        key: value
        for key, value in event.items()
        if key not in Measured.__dataclass_fields__ and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _parse_object(value: object) -> JsonObject:
    if not isinstance(value, dict):
        raise BadJson(f"{quote_value(value, 40)} instead of keys")
    return value


# Lines of metrics are read without pydantic: a long run has a million.


def read_metrics(line: bytes) -> StepMetrics | EvaluationMetrics:
    """Reads the line of a step or of an evaluation: only those of steps have a loss.

    Raises:
        ValueError: it is damaged.
    """
    values = _parse_object(read_value(line))
    step = values.pop("step", None)
    if type(step) is not int or not 0 <= step < _EXACT:
        raise BadJson(f"step: {quote_value(step, 40)}: not a number of steps")
    if "loss" in values:
        return StepMetrics(
            step,
            _read_number(values, "tokens"),
            _read_real(values, "loss"),
            _read_number(values, "lr"),
            _read_real(values, "gradient_norm"),
            _read_number(values, "seconds"),
            _read_number(values, "tokens_per_second"),
            _read_number(values, "memory"),
            _read_number(values, "elapsed"),
            _read_number(values, "length"),
            _read_number(values, "skipped_steps"),
            _read_number(values, "loss_scale"),
            _read_by_source(values.pop("loss_by_source", None)),
            _read_scores(values) if values else _NO_SCORES,
        )
    return EvaluationMetrics(
        step,
        _read_real(values, "validation_loss"),
        _read_real(values, "forgetting_loss"),
        _read_number(values, "tokens"),
        tasks=_read_tasks(values.pop("tasks", None)),
        validation_loss_by_source=_read_by_source(values.pop("validation_loss_by_source", None)),
        scores={key: value for key, value in values.items() if _is_number(value)},
    )


def read_system(line: bytes) -> SystemMetrics:
    """Reads a line of system.jsonl.

    Raises:
        ValueError: it is damaged.
    """
    values = _parse_object(parse_json(line))
    common = {key: values.pop(key) for key in ("time", "step", "usage") if key in values}
    return read_record(SystemMetrics, common | {"figures": {k: v for k, v in values.items() if _is_number(v)}})


def _read_number(values: JsonObject, key: str) -> float | None:
    """Takes a number from a line; None if it is missing or not finite."""
    value: float | None = values.pop(key, None)
    if type(value) is float:
        return value if math.isfinite(value) else None
    if value is None or (type(value) is int and -_LARGEST < value < _LARGEST):
        return value
    raise BadJson(f"{key}: {quote_value(value, 40)}: not a number")


def _read_real(values: JsonObject, key: str) -> float | None:
    """Takes a number from a line; NaN if it is not finite, so that a plot shows that, and None if it is missing."""
    if key not in values:
        return None
    value = _read_number(values, key)
    return math.nan if value is None else value


def _is_number(value: object) -> bool:
    # In Python, True is an int.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _read_scores(values: JsonObject) -> dict[str, float | Sequence[float]]:
    """Returns the numbers that have no field; other values are of a later version."""
    loads = values.get("expert_loads", ())
    if loads is not None and not (isinstance(loads, Sequence) and all(map(_is_number, loads))):
        raise BadJson(f"expert_loads: {quote_value(loads, 40)}: no list of numbers")
    return {key: value for key, value in values.items() if _is_number(value) or (key == "expert_loads" and value)}


def _read_by_source(losses: object) -> dict[str, float] | None:
    if losses is None:
        return None
    values = _parse_object(losses)
    return {name: value for name in [*values] if (value := _read_real(values, name)) is not None}


def _read_tasks(tasks: object) -> dict[str, dict[str, float]] | None:
    if tasks is None:
        return None
    by_task = {}
    for task, metrics in _parse_object(tasks).items():
        values = _parse_object(metrics)
        by_task[task] = {name: value for name in [*values] if (value := _read_real(values, name)) is not None}
    return by_task


_TAIL = 16 << 10
"""Bytes at the end of system.jsonl: dozens of samples."""
_LINE = 16 << 20
"""Maximum length of a line in bytes."""


def count_sessions(folder: Path) -> int:
    """Returns how often a run was started or resumed; 0 for a folder without a readable run."""
    if not (folder / "recipe.yaml").exists():  # marks a run that has begun
        return 0
    try:
        return sum(isinstance(event, Started | Resumed) for event in Reader(folder).events())
    except PreheatError:
        return 0


class Reader:
    """Reads a finished or running run, leaving out damaged data.

    Args:
        largest: bytes of a JSON file, or of a line of a JSONL file, from which it is left out, to bound the memory
            that damaged files take; of the lines of a file, eight times as many are read. None: as large as runs write.

    Attributes:
        damaged: file -> what was left out and why, for the files read so far.

    Example:
        >>> run = Reader("runs/demo")                                   # doctest: +SKIP
        >>> run.plan.peak_gib, run.metrics()[-1].loss                # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, largest: int | None = None):
        self.path = Path(path)
        self._largest = largest
        self.damaged: dict[str, str] = {}
        # The recipe is written last at the start of a run: a folder without it holds no run.
        if not (self.path / "recipe.yaml").is_file():
            raise RunError(f"{self.path}: is not a run (it has no recipe.yaml)")

    @property
    def damage_notes(self) -> list[str]:
        """Damage found so far, one line per file."""
        return [f"{name}: {what}" for name, what in self.damaged.items()]

    @property
    def id(self) -> str:
        """The run's identity, which its checkpoints carry.

        Raises:
            RunError: the run has no identity, or the file is damaged.
        """
        mark = read_mark(self.path)
        if mark is None:
            raise RunError(
                f"{self.path}: was not written by this version of preheat (it has no {MARK}); "
                "open it with the version that wrote it, or train it again into another folder"
            )
        if mark.kind != "run":
            raise RunError(f"{self.path}: is not a run (its {MARK} has kind {quote_value(mark.kind)})")
        return mark.id

    def _read_json(self, name: str, kind: type[_Record], empty: _Record) -> _Record:
        """Reads the intact keys of a file; `empty` if there is no such file, or it is damaged as a whole."""
        file = self.path / name
        if not file.exists():
            return empty
        try:
            content = parse_json(read_bytes(file, self._largest))
        except ValueError as error:
            self.damaged[name] = f"left out: {error}"
            return empty
        if not isinstance(content, dict):
            self.damaged[name] = f"left out: it holds {quote_value(content)} instead of keys"
            return empty
        record, invalid = read_intact(kind, content)
        if invalid:
            self.damaged[name] = f"left out {abbreviate(invalid)}, whose values are invalid"
        return record

    def find_damage(self) -> list[str]:
        """Reads every file of the run and returns the damage, one line per file."""
        # Each access reads its file and records the damage.
        _ = self.plan, self.environment, self.changes, self.evaluation, self.before, self.metrics(), self.events()
        return self.damage_notes

    @property
    def recipe_text(self) -> str:
        """The recipe as YAML.

        Raises:
            RunError: the file cannot be read.
        """
        # Not through `_read_json`: without its recipe a run cannot be read at all, so damage is an error.
        file = self.path / "recipe.yaml"
        try:
            return read_bytes(file, self._largest).decode("utf-8")
        except UnicodeDecodeError:
            reason = "it is not text in UTF-8"
        except ValueError as error:
            reason = str(error)
        raise RunError(
            f"{file}: is damaged ({reason}); restore an intact copy of it, or train again into another folder"
        )

    def read_raw_recipe(self) -> tuple[JsonObject, str]:
        """Returns the recipe as unchecked plain values and as text, for display; empty if it cannot be read."""
        from preheat.recipe.yaml_io import compose

        text = ""
        try:
            text = self.recipe_text
            values, _ = compose(text, "recipe.yaml")
        except PreheatError as error:
            self.damaged["recipe.yaml"] = f"left out: {shorten(str(error), 200)}"
            return {}, text
        return values if isinstance(values, dict) else {}, text

    @property
    def plan(self) -> Plan | None:
        """The prediction; None if it is missing, damaged, or of another version of preheat."""
        file = self.path / "plan.json"
        if not file.exists():
            return None
        try:
            return read_record(Plan, parse_json(read_bytes(file, self._largest)))
        except ValueError as error:
            self.damaged["plan.json"] = f"left out: {error} (damaged, or of another version of preheat)"
            return None

    @property
    def environment(self) -> Environment:
        return self._read_json("environment.json", Environment, Environment())

    @property
    def changes(self) -> dict[str, list[Change]]:
        """The changes by technique."""
        return self._read_json("changes.json", dict[str, list[Change]], {})

    @property
    def evaluation(self) -> Evaluation:
        """The newest evaluation with intervals, compared with the one before training after a step; empty if none."""
        return self._read_json("evaluation.json", Evaluation, Evaluation())

    @property
    def before(self) -> StoredResults:
        """The evaluation before the first step; empty if there is none."""
        return self._read_json("before.json", StoredResults, StoredResults())

    @property
    def data(self) -> DataRecord:
        """Source, layout and counts of the data; empty if the run has no data.json.

        Raises:
            RunError: the file is damaged. Readers need the layout of chats and the classes, so nothing may be left out.
        """
        record = self._read_json("data.json", DataRecord, DataRecord())
        if reason := self.damaged.get("data.json"):
            raise RunError(f"{self.path / 'data.json'}: is damaged ({reason}); restore an intact copy of it")
        return record

    def _read_lines(self, name: str, read: Callable[[bytes], _Record]) -> Iterator[_Record]:
        """Yields the records of a JSONL file, without damaged lines and a last line that is still being written.

        Args:
            read: reads a line; raises ValueError if it is damaged.
        """
        file, invalid = self.path / name, list[str]()
        longest = _LINE if self._largest is None else self._largest
        if not file.exists():
            return
        if not file.is_file():
            self.damaged[name] = "left out: it is not a file"
            return
        try:
            with file.open("rb") as stream:
                number = size = 0
                # A damaged file may have no line feed at all: read a bounded amount.
                while line := stream.readline(longest):
                    number += 1
                    size += len(line)
                    if self._largest is not None and size > 8 * self._largest:
                        invalid.append(f"the rest, from line {number} on, as it has more than {size >> 20} MiB")
                        break
                    if len(line) == longest and not line.endswith(b"\n"):
                        # Skips to the end of the overlong line.
                        while (more := stream.readline(longest)) and not more.endswith(b"\n"):
                            size += len(more)
                            if self._largest is not None and size > 8 * self._largest:
                                break
                        invalid.append(f"line {number} (longer than {longest >> 20} MiB)")
                        continue
                    # The last line of a running run may be half written; it is no damage.
                    if not line.endswith(b"\n") or line.isspace():
                        continue
                    try:
                        record = read(line)
                    except ValueError as error:
                        invalid.append(f"line {number} ({error})")
                        continue
                    yield record
        except OSError as error:
            invalid.append(f"the rest, which cannot be read ({error.strerror})")
        if invalid:
            others = f" and {len(invalid) - 1} more" if len(invalid) > 1 else ""
            self.damaged[name] = f"left out {shorten(invalid[0], 160)}{others}"

    def _read_metrics(self, kind: type[_Metrics]) -> list[_Metrics]:
        lines: list[_Metrics] = []
        for line in self._read_lines("metrics.jsonl", read_metrics):
            if not isinstance(line, StepMetrics | kind):
                continue
            # The run went back to an earlier step, after a crash or on request: later lines are not of this model.
            while lines and lines[-1].step >= line.step:
                lines.pop()
            if isinstance(line, kind):
                lines.append(line)
        return lines

    def metrics(self) -> list[StepMetrics]:
        """Returns the metrics of each step; of steps that were trained again, the last. Non-finite losses are NaN."""
        return self._read_metrics(StepMetrics)

    def evaluations(self) -> list[EvaluationMetrics]:
        """Returns the values of each evaluation; those that were not measured are None.

        Evaluations of steps that the run went back from are left out until they are repeated.
        """
        return self._read_metrics(EvaluationMetrics)

    @overload
    def events(self) -> list[Event]: ...

    @overload
    def events(self, kind: type[_Event]) -> list[_Event]: ...

    def events(self, kind: type[Event] = Event) -> Sequence[Event]:
        """Returns the events in order, or those of one kind."""
        return [event for event in self._read_lines("events.jsonl", read_event) if isinstance(event, kind)]

    def samples(self) -> list[SampleTexts]:
        """Returns the last samples."""
        by_prompt: dict[str, SampleTexts] = {}
        fresh = True
        for event in self.events():
            if isinstance(event, Started | Resumed):
                fresh = True
            elif isinstance(event, SampleEvent):
                # Prompts may be chat messages, which are no keys of a dict.
                key = json.dumps(event.prompt)
                # Step 0: the text before training.
                if event.step == 0:
                    by_prompt[key] = SampleTexts(event.prompt, event.text, None, event.expected)
                    continue
                if fresh:  # the session may have had other prompts
                    by_prompt = {k: replace(v, text=None) for k, v in by_prompt.items() if v.before is not None}
                fresh = False
                sample = by_prompt.get(key) or SampleTexts(event.prompt, None, None, event.expected)
                by_prompt[key] = replace(sample, text=event.text)
        written = [sample for sample in by_prompt.values() if sample.text is not None]
        # Before the first samples of training, those of step 0 are all there is.
        return written or list(by_prompt.values())

    def measured(self) -> Measured:
        """Returns the measurements of the last session; empty during the first one."""
        events = self.events(Measured)
        return events[-1] if events else Measured()

    def usage(self) -> Usage | None:
        """Returns what the run has used so far, over all sessions; None if that is not recorded."""
        usage = None
        for line in self._read_lines("system.jsonl", read_system):
            usage = line.usage or usage
        return usage

    def status(self) -> ProcessStatus | None:
        """Returns the process that writes the run, as last recorded; None if a session ended, or the file is damaged.

        The status of a process that was killed stays.
        """
        if not (self.path / STATUS).exists():
            return None
        try:
            return read_record(ProcessStatus, parse_json(read_bytes(self.path / STATUS, self._largest)))
        except ValueError as error:
            self.damaged[STATUS] = f"left out: {shorten(str(error), 160)}"
            return None

    def newest_system(self) -> list[SystemMetrics]:
        """Returns the newest intact samples of the machine, from the last 16 KiB of a file that may be long."""
        # A named pipe would block the read.
        if not (self.path / "system.jsonl").is_file():
            return []
        try:
            with (self.path / "system.jsonl").open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - _TAIL))
                lines = file.read(_TAIL).split(b"\n")
        except OSError:
            return []
        samples = []
        # Without the first, of which the beginning may be cut off, and the last, which may be half written.
        for line in lines[end > _TAIL : -1]:
            with contextlib.suppress(ValueError):
                samples.append(read_system(line))
        return samples

    def finished(self) -> Finished | None:
        """Returns the event that ended the run, or None if it has not ended or was resumed since."""
        # A run that was resumed after its end is running again.
        last = [event for event in self.events() if isinstance(event, Started | Resumed | Finished)][-1:]
        return last[0] if last and isinstance(last[0], Finished) else None
