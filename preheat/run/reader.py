"""Reads a run folder. `Reader` validates every file, leaves out damaged lines, keys and plans, and lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from preheat.core.plan import Plan
from preheat.errors import PreheatError, RunError
from preheat.files import parse_json, read_bytes, read_record
from preheat.run.layout import MARK, MEMORY_KEYS, METRIC_KEYS, abbreviate, read_mark
from preheat.sanitize import quoted, shorten

__all__ = ["Reader", "is_failure"]

# A check returns True if a value has the type and form that its file requires.
_Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    # In Python, True is an int.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    # Integers up to 2**53 survive readers whose numbers are all floats, as in a browser.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _time(value: Any) -> bool:
    return _number(value) and 0 <= value < 253402300800  # the year 10,000


def _none_or(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _map(check: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _has(**checks: _Check) -> _Check:
    """Checks for a mapping with all of these keys."""
    return lambda value: (
        isinstance(value, dict) and all(key in value and check(value[key]) for key, check in checks.items())
    )


def _may_have(**checks: _Check) -> _Check:
    """Checks for a mapping whose values are valid for every one of these keys that it has."""
    return lambda value: isinstance(value, dict) and all(check(value[k]) for k, check in checks.items() if k in value)


def _both(*checks: _Check) -> _Check:
    return lambda value: all(check(value) for check in checks)


_real = _none_or(_number)


def _parts(value: Any) -> bool:
    """Checks the parts of a result: equal, known keys that locate each part, and a value each."""
    if not _list(_both(_map(_real), _has(value=_real)))(value):
        return False
    # The keys that locate a part: a range of positions, or a length with a depth or a share.
    places = [{key for key in part if key not in ("low", "high", "value")} for part in value]
    known = ({"length", "depth"}, {"start", "end"}, {"length", "share"})
    complete = all(part[key] is not None for part, place in zip(value, places, strict=True) for key in place)
    return complete and all(place == places[0] and place in known for place in places)


_RESULT = _both(
    _has(metrics=_map(_none_or(_may_have(value=_real, low=_real, high=_real)))),
    _may_have(rows=_real, tokens=_real, truncated=_real, no_room=_real, parts=_parts),
)


_RESULTS = _may_have(texts=_map(_RESULT), tasks=_map(_RESULT))


# A lambda, since `_table` is defined below.
_KEPT_METRIC = _has(kind=_text, higher=lambda v: isinstance(v, bool), rows=lambda v: _table(v))


def _table(value: Any) -> bool:
    return _list(_list(_real))(value) and len({len(row) for row in value}) <= 1


_KEPT = _both(
    _has(
        rows=_count,
        identity=_text,
        tokens=_none_or(_count),
        truncated=_count,
        alone=_map(_real),
        metrics=_map(_KEPT_METRIC),
    ),
    _may_have(parts=_list(_has(place=_map(_number), metric=_KEPT_METRIC))),
)


_FILES: dict[str, dict[str, _Check]] = {
    "environment.json": {
        "device": _none_or(_text),
        "processes": _none_or(_count),
        "machine": _none_or(_may_have(device=_text, memory_gib=_number)),
        "versions": _none_or(_map(_none_or(_text))),
    },
    "changes.json": {"": _list(_both(_has(what=_text), _may_have(count=_real, kernel=_none_or(_text))))},
    "evaluation.json": {"step": _none_or(_count), "after": _RESULTS, "before": _RESULTS, "difference": _RESULTS},
    "before.json": {"texts": _map(_KEPT), "tasks": _map(_KEPT)},
    "data.json": {
        "source": lambda v: isinstance(v, str | list),
        "counts": _none_or(_may_have(train=_none_or(_may_have(documents=_number, tokens=_number)))),
        "template": _none_or(_text),
        "chat": lambda v: isinstance(v, bool),
        "classes": _none_or(_list(_text)),
    },
}
"""File -> key -> check of its value; the key "" applies to all other keys."""


_EVENTS: dict[str, _Check] = {
    "resumed": _has(step=_count),
    "checkpoint": _has(step=_count),
    "fallback": _both(
        _has(step=_count, set=_list(_text), changed=_list(_text)), _may_have(cause=_text, peak_gib=_real, was_gib=_real)
    ),
    "out_of_memory": _has(
        phase=_text,
        step=_count,
        rank=_count,
        message=_text,
        requested=_real,
        room=_real,
        overhead=_number,
        in_use=_map(_number),
        allocator=_map(_number),
    ),
    "sample": _both(
        _has(prompt=lambda v: v is None or _text(v) or _list(_may_have())(v)),
        _may_have(text=_none_or(_text), expected=_none_or(_text)),
    ),
    "finished": _both(
        _may_have(steps=_count), _may_have(**dict.fromkeys(("loss", "validation_loss", "tokens", "seconds"), _real))
    ),
    "measured": _may_have(
        **dict.fromkeys((*MEMORY_KEYS, "tokens_per_second", "seconds_per_step", "mfu"), _real),
        machine=_none_or(_may_have(alone=_none_or(lambda v: isinstance(v, bool)), own_cores=_real, other_cores=_real)),
    ),
    "baseline": _may_have(**dict.fromkeys(("vocabulary", "unigram", "bigram"), _real)),
}


is_failure = _EVENTS["out_of_memory"]
"""Checks for an out-of-memory event in the form of `training.recovery.fallback_log.Failure`."""


_EVENT = _both(_has(kind=_text), _may_have(time=_time, step=_count))


_METRIC = _both(
    _has(step=_count),
    _may_have(**dict.fromkeys((key for key in METRIC_KEYS if key != "step"), _real)),
    _may_have(expert_loads=_none_or(_list(_number)), tasks=_none_or(_map(_map(_real)))),
    _may_have(validation_loss=_real, forgetting_loss=_real),
)


def _sample(event: Mapping[str, Any]) -> dict[str, Any]:
    expected = {"expected": event["expected"]} if event.get("expected") is not None else {}
    return {"prompt": event.get("prompt"), "before": None, "text": None, **expected}


_LINE = 16 << 20
"""Maximum length of a line in bytes."""


class Reader:
    """Reads a finished or running run, leaving out damaged data.

    Attributes:
        damaged: file -> what was left out and why, for the files read so far.

    Example:
        >>> run = Reader("runs/demo")                                   # doctest: +SKIP
        >>> run.plan.peak_gib, run.metrics()[-1]["loss"]             # doctest: +SKIP
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
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
            raise RunError(f"{self.path}: is not a run (its {MARK} has kind {quoted(mark.kind)})")
        return mark.id

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.exists():
            return {}
        try:
            content = parse_json(read_bytes(file))
        except ValueError as error:
            self.damaged[name] = f"left out: {error}"
            return {}
        if not isinstance(content, dict):
            self.damaged[name] = f"left out: it holds {quoted(content)} instead of keys"
            return {}
        checks = _FILES[name]
        # The check of the key itself, or the one for all keys of the file.
        invalid = [
            key
            for key in content
            if (check := checks.get(key) or checks.get("")) is not None and not check(content[key])
        ]
        if invalid:
            self.damaged[name] = f"left out {abbreviate(invalid)}, whose values are invalid"
        return {key: value for key, value in content.items() if key not in invalid}

    def all_damaged(self) -> list[str]:
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
        # Not through `_json`: without its recipe a run cannot be read at all, so damage is an error.
        file = self.path / "recipe.yaml"
        try:
            return read_bytes(file).decode("utf-8")
        except UnicodeDecodeError:
            reason = "it is not text in UTF-8"
        except ValueError as error:
            reason = str(error)
        raise RunError(
            f"{file}: is damaged ({reason}); restore an intact copy of it, or train again into another folder"
        )

    def raw_recipe(self) -> tuple[dict[str, Any], str]:
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
            return read_record(Plan, parse_json(read_bytes(file)))
        except ValueError as error:
            self.damaged["plan.json"] = f"left out: {error} (damaged, or of another version of preheat)"
            return None

    @property
    def environment(self) -> dict[str, Any]:
        return self._json("environment.json")

    @property
    def changes(self) -> dict[str, list[dict[str, Any]]]:
        return self._json("changes.json")

    @property
    def evaluation(self) -> dict[str, Any]:
        """The newest evaluation with intervals, compared with the one before training after a step; {} if none."""
        return self._json("evaluation.json")

    @property
    def before(self) -> dict[str, Any]:
        """The evaluation before the first step, as written by `evaluation.results.serialize`; {} if there is none."""
        return self._json("before.json")

    @property
    def data(self) -> dict[str, Any]:
        """Source, layout and counts of the data; {} if the run has no data.json.

        Raises:
            RunError: the file is damaged. Readers need the layout of chats and the classes, so nothing may be left out.
        """
        values = self._json("data.json")
        if reason := self.damaged.get("data.json"):
            raise RunError(f"{self.path / 'data.json'}: is damaged ({reason}); restore an intact copy of it")
        return values

    def _lines(self, name: str, check: _Check) -> Iterator[dict[str, Any]]:
        """Yields the valid lines of a JSONL file, without a last line that is still being written."""
        file, invalid = self.path / name, list[str]()
        if not file.exists():
            return
        if not file.is_file():
            self.damaged[name] = "left out: it is not a file"
            return
        try:
            with file.open("rb") as stream:
                number = 0
                # A damaged file may have no line feed at all: read a bounded amount.
                while line := stream.readline(_LINE):
                    number += 1
                    if len(line) == _LINE and not line.endswith(b"\n"):
                        # Skips to the end of the overlong line.
                        while (more := stream.readline(_LINE)) and not more.endswith(b"\n"):
                            pass
                        invalid.append(f"line {number} (longer than {_LINE >> 20} MiB)")
                        continue
                    # The last line of a running run may be half written; it is no damage.
                    if not line.endswith(b"\n") or line.isspace():
                        continue
                    try:
                        value = parse_json(line)
                    except ValueError as error:
                        invalid.append(f"line {number} ({error})")
                        continue
                    if check(value):
                        yield value
                    else:
                        invalid.append(f"line {number} ({quoted(line.decode('utf-8').strip(), 60)})")
        except OSError as error:
            invalid.append(f"the rest, which cannot be read ({error.strerror})")
        if invalid:
            others = f" and {len(invalid) - 1} more" if len(invalid) > 1 else ""
            self.damaged[name] = f"left out {shorten(invalid[0], 160)}{others}"

    def _rows(self, steps: bool) -> list[dict[str, Any]]:
        # A step and an evaluation have lines of their own; only those of steps have a loss. A later line of a step
        # wins.
        by_step = {line["step"]: line for line in self._lines("metrics.jsonl", _METRIC) if ("loss" in line) is steps}
        return [by_step[step] for step in sorted(by_step)]

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one dict per step; for a step repeated after a crash, the last. Non-finite losses are NaN."""
        # `strict` has written them as None; a plot must show that the loss was not finite.
        not_finite = {"loss": math.nan, "gradient_norm": math.nan}
        return [
            line | {k: v for k, v in not_finite.items() if k in line and line[k] is None} for line in self._rows(True)
        ]

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns one dict per evaluation; keys that were not measured are missing.

        Keys: {step, validation_loss, tokens, forgetting_loss, tasks: {name: {metric: value}}}.
        """
        return self._rows(False)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        def is_valid(event: Any) -> bool:
            # A kind without a check of its own, e.g. of a later version, needs the common keys only.
            return _EVENT(event) and _EVENTS.get(event["kind"], _may_have())(event)

        return [e for e in self._lines("events.jsonl", is_valid) if kind is None or e["kind"] == kind]

    def samples(self) -> list[dict[str, Any]]:
        """Returns the last samples as [{prompt, before, text, expected}]; a missing text is None.

        before: the text generated for the same prompt before the first step. expected: the answer of the validation row
        that the prompt comes from, if it comes from one.
        """
        by_prompt: dict[str, dict[str, Any]] = {}
        fresh = True
        for event in self.events():
            if event["kind"] in ("started", "resumed"):
                fresh = True
            elif event["kind"] == "sample":
                # Prompts may be chat messages, which are no keys of a dict.
                key = json.dumps(event.get("prompt"))
                # Step 0: the text before training.
                if event.get("step") == 0:
                    by_prompt[key] = _sample(event) | {"before": event.get("text")}
                    continue
                if fresh:  # the session may have had other prompts
                    by_prompt = {k: {**v, "text": None} for k, v in by_prompt.items() if v["before"] is not None}
                fresh = False
                by_prompt.setdefault(key, _sample(event))["text"] = event.get("text")
        written = [v for v in by_prompt.values() if v["text"] is not None]
        # Before the first samples of training, those of step 0 are all there is.
        return written or list(by_prompt.values())

    def measured(self) -> dict[str, Any]:
        """Returns {peak_gib, tokens_per_second, ...} of the last session; {} during the first one."""
        events = self.events("measured")
        return events[-1] if events else {}

    def finished(self) -> dict[str, Any] | None:
        """Returns the event that ended the run, or None if it has not ended or was resumed since."""
        # A run that was resumed after its end is running again.
        last = [e for e in self.events() if e["kind"] in ("started", "resumed", "finished")][-1:]
        return last[0] if last and last[0]["kind"] == "finished" else None
