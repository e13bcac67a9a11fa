"""The run folder: the only interface between running and reporting. Append-only and readable during the run. No torch.

preheat.json      marks the folder as written by preheat: {kind, id, files}; checkpoints carry the run's `id`,
                  `files` lists the files of tokenizer/
recipe.yaml       the recipe with every default written out; `preheat train recipe.yaml` repeats the run
plan.json         the prediction (see `PLAN_KEYS`)
environment.json  machine, versions, threads, command
changes.json      {technique: [{what, count, kernel, detail}]}
data.json         source, layout and counts of the data
metrics.jsonl     one line per step (see `METRIC_KEYS`; also the objective's scores, such as accuracy; counters of
                  techniques, such as recompilations; with fp16 loss scaling, `SCALING_KEYS`; and, for mixtures of
                  experts, expert_load, experts_idle, expert_loads and balance_loss: engine/moe_aux_loss.py), and one
                  line per evaluation ({step, validation_loss, tokens, validation_<score>, forgetting_loss, tasks}, as
                  far as measured; tokens: those the loss is averaged over)
before.json       the evaluation before the first step, row by row: {texts, tasks}
evaluation.json   the newest evaluation: {step, after, before, difference}, the last three of the form
                  {texts, tasks: {name: {metrics: {name: {value, low, high}}}}}
events.jsonl      {time, kind, ...}: started, resumed, checkpoint, damaged, unsaved, unevaluated, overflow (a
                  skipped step), overflows (many in a row), out_of_memory, fallback, stopping, notice, measured,
                  sample, baseline, finished, failed; for out_of_memory and fallback see
                  training/recovery/fallback_log.py
samples.json      [{prompt, before, text}] (see `Reader.samples`)
checkpoints/      step-N/ (engine/checkpoint.py)
tokenizer/        the tokenizer in transformers' format
report.html, report.json
lock              held by the process that writes the run

A new run needs a folder that is new, empty, or holds only the files of a run that was interrupted before it began.
JSON never holds NaN or infinities (`to_json`). `Reader` validates every file: it skips damaged lines and keys and lists
them in `Reader.damaged`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from preheat.errors import PreheatError, RunError
from preheat.sanitize import quoted, shorten

__all__ = [
    "DEEPEST",
    "MARK",
    "MEMORY_KEYS",
    "METRIC_KEYS",
    "PLAN_KEYS",
    "SCALING_KEYS",
    "BadJson",
    "Reader",
    "Silent",
    "Verdict",
    "Writer",
    "chance_to_fit",
    "check_folder",
    "claim",
    "expected_memory",
    "is_failure",
    "is_tight",
    "parse_json",
    "read_value",
    "require_overwritable",
    "strict",
    "to_json",
    "verdict_on",
    "write_user_file",
    "write_atomic",
    "write_generated",
]

MARK = "preheat.json"
"""The file that marks a folder as written by preheat."""

METRIC_KEYS = {
    "step": "steps committed, from 1; with fp16 loss scaling, skipped ones included",
    "tokens": "positions of all rows so far, padding included",
    "loss": (
        "mean loss of this step: a trained token in nats, or a pair, answer or document if the objective judges those"
    ),
    "lr": "learning rate of this step",
    "gradient_norm": "before clipping",
    "seconds": "wall-clock seconds of this step",
    "tokens_per_second": "of this step; counts positions, padding included, as plans and the MFU do",
    "memory": "bytes in use after this step (resident on a CPU, allocated on a GPU) less what the imports took",
    "elapsed": "seconds of training so far, over all sessions of the run",
    "length": "tokens in a row of this step",
}
SCALING_KEYS = {
    "skipped_steps": "steps so far that changed no weight because fp16 gradients overflowed",
    "loss_scale": "after this step",
}
PLAN_KEYS = {
    "fits": "whether the predicted peak is at most what the device has",
    "verdict": "`Verdict` on the memory: fits, fits tightly, does not fit safely, does not fit",
    "chance": "probability that the run fits, by `chance_to_fit`",
    "peak_gib": "predicted peak memory, GiB, less what the imports take",
    "peak_gib_interval": "[low, high]: nine in ten measured peaks lay between",
    "available_gib": "what the device has, less what was in use before the run",
    "in_use_gib": "memory in use before the run: on this machine's GPU by other processes, on its CPU by this one",
    "memory": (
        "{category: GiB} at the peak: parameters, gradients, optimizer, activations, temporary, overhead; with several "
        "devices also gathered weights and communication buffers, if any phase has them"
    ),
    "overhead": (
        "{what: GiB} of memory.overhead: rounding, what the allocator keeps, context, workspaces, process, kernels, "
        "saving"
    ),
    "overhead_sources": "{what: where its figure is from}",
    "allocated_gib": "of it tensors alone",
    "reserved_gib": (
        "tensors, and freed ones that the allocator keeps: on a GPU torch's max_memory_reserved less the workspaces"
    ),
    "phases": (
        "{phase: GiB}, the peak of each: load, forward, head and loss, backward, update, saving, evaluation, "
        "generation (if there are samples)"
    ),
    "phase_memory": "{phase: {category: GiB}} at the peak of each phase, categories as of memory",
    "export": "{category: GiB} at the peak of `preheat export`, a command of its own; None for several devices",
    "peak_phase": "the one that is the peak of all",
    "seconds_per_step": "predicted",
    "tokens_per_second": "predicted; on this machine's CPU with the machine to itself",
    "tokens_per_second_interval": "[low, high]: nine in ten measured speeds lay between",
    "mfu": "model FLOPs utilisation, predicted, of the measured matrix rate",
    "fp32_rate": (
        "FLOP/s of fp32 matmuls, if the recipe computes in bf16 and this device is slower in it; None otherwise"
    ),
    "flops_per_step": "counted by the dry run",
    "parameters": "{total, active, trained}; active: all but those of the experts that a token is not sent to",
    "steps": "steps of the run",
    "seconds_to_start": "what the run takes once, before its first step: compiling, taken as a minute on a GPU",
    "seconds_total": "predicted time to finish",
    "contended": "whether the machine was busy when its rates were measured, and is still",
    "pace": (
        "how many times as long as by this machine's rates steps of earlier runs took, in the median of the last "
        "nine of 20 s and more: in the predicted seconds; 1 if fewer than three are known"
    ),
    "now": (
        "{tokens_per_second, seconds_per_step, machine} at present, with what other processes use, if a probe found "
        "this machine's CPU more than 15 % slower than calibrated; None otherwise"
    ),
    "allocator_retries": "whether it fits only if a GPU's allocator frees cached memory in each step, which takes time",
    "heap": "why preheat's heap, whose memory is predicted, does not work on this machine; None if it does",
    "watts": "of the device's board at most; None if unknown",
}


MEMORY_KEYS = {
    "peak_gib": "peak memory, GiB: resident on a CPU, reserved and the context on a GPU",
    "allocated_gib": "on a GPU, of it tensors, with cuBLAS's workspaces",
    "reserved_gib": "on a GPU, what torch's allocator has from the driver for them",
    "context_gib": (
        "on a GPU, what the process holds in addition, by the driver; left out if it does not tell (pip install "
        "nvidia-ml-py)"
    ),
}
"""Keys of measured memory in the event `measured`; `expected_memory` gives the prediction of each."""


class Verdict(StrEnum):
    """A plan's answer to the question if a run fits in memory."""

    FITS = "fits"
    TIGHT = "fits tightly"
    """The upper end of the interval of the peak exceeds the device's memory."""
    UNSAFE = "does not fit safely"
    """The memory that must be held is above `SAFE` of the device's: such a run may be tried, and a search avoids it."""
    NO = "does not fit"


SAFE = 0.97
"""Share of a device's memory above which a predicted peak runs out of memory in practice."""
SAFE_WITH_RETRIES = 0.95
"""The same of the peak without cached memory, if the allocator must release that in each step: the pieces that it
cannot release need room, too."""


def verdict_on(plan: Mapping[str, Any]) -> Verdict:
    """Returns the verdict on a plan's memory.

    Example:
        >>> plan = {"fits": True, "peak_gib": 76.0, "peak_gib_interval": [66.9, 85.1], "available_gib": 79.1}
        >>> verdict_on(plan), verdict_on({**plan, "peak_gib": 79.0})
        (<Verdict.TIGHT: 'fits tightly'>, <Verdict.UNSAFE: 'does not fit safely'>)
    """
    if not plan["fits"]:
        return Verdict.NO
    if _held_gib(plan) > (SAFE_WITH_RETRIES if plan.get("allocator_retries") else SAFE) * plan["available_gib"]:
        return Verdict.UNSAFE
    return Verdict.TIGHT if is_tight(plan) else Verdict.FITS


def _held_gib(plan: Mapping[str, Any]) -> float:
    """Returns the GiB that a device must hold: without the cached memory that torch releases before it fails."""
    cached = plan["overhead"].get("allocator", 0.0) if plan.get("allocator_retries") else 0.0
    return float(plan["peak_gib"] - cached)


def is_tight(plan: Mapping[str, Any]) -> bool:
    """True if a plan fits, but not the upper end of its interval.

    Example:
        >>> is_tight({"fits": True, "peak_gib_interval": [68.0, 82.0], "available_gib": 79.0})
        True
    """
    # Candidates on a page have no interval.
    _, high = plan.get("peak_gib_interval") or (0.0, 0.0)
    return bool(plan["fits"] and high > plan["available_gib"])


_NINE_IN_TEN = 1.6449  # standard deviations from the mean of a normal distribution to its 95th percentile


def chance_to_fit(plan: Mapping[str, Any]) -> float:
    """Returns the probability that a device holds what it must: of a normal distribution whose 5th and 95th percentiles
    are the ends of the peak's interval, since nine in ten measured peaks lie in it.

    Example:
        >>> plan = {"peak_gib": 80.0, "peak_gib_interval": [70.0, 90.0], "available_gib": 80.0}
        >>> round(chance_to_fit(plan), 2), round(chance_to_fit({**plan, "available_gib": 90.0}), 2)
        (0.5, 0.95)
    """
    available, held = plan["available_gib"], _held_gib(plan) / plan["peak_gib"]
    low, high = (held * end for end in plan["peak_gib_interval"])
    deviation = (high - low) / (2 * _NINE_IN_TEN)
    return (1 + math.erf((available - (low + high) / 2) / (deviation * math.sqrt(2)))) / 2


def expected_memory(plan: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns a plan's predictions of `MEMORY_KEYS`; plans for a CPU have `peak_gib` alone."""
    # The lines of the plan's overhead: only a plan for a GPU has a context among them.
    lines: Mapping[str, float] = plan.get("overhead") or {}
    figures: dict[str, float | None] = {"peak_gib": plan.get("peak_gib")}
    if "context" not in lines:
        return figures
    for key in ("allocated_gib", "reserved_gib"):  # torch's allocator also serves the workspaces
        size = plan.get(key)
        figures[key] = None if size is None else size + (lines.get("workspaces") or 0.0)
    return {**figures, "context_gib": lines["context"]}


def strict(value: Any) -> Any:
    """Returns the same data with None in place of NaN and infinities, which JSON cannot express.

    Example:
        >>> strict({"loss": float("nan"), "steps": (1, 2)})
        {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Returns the JSON text of `strict` data. All of preheat writes JSON through this function.

    Example:
        >>> to_json({"loss": float("inf"), "name": "ä"})
        '{"loss": null, "name": "ä"}'
    """
    # `strict` has removed what JSON cannot express; allow_nan=False turns a gap in it into an error.
    text = json.dumps(strict(value), indent=indent, ensure_ascii=False, allow_nan=False, default=default)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot hold
        return json.dumps(strict(value), indent=indent, allow_nan=False, default=default)
    return text


DEEPEST = 100
"""Maximum nesting of JSON: readers of nested values (Python, Jinja, Arrow) fail at a few hundred levels."""
_LARGEST = 2**63


class BadJson(ValueError):
    """Rejected JSON.

    Attributes:
        message: the reason.
        line: line of the text, from 1; 0 if the error belongs to no line.
    """

    def __init__(self, message: str, line: int = 0):
        super().__init__(message)
        self.message, self.line = message, line


def read_value(text: str | bytes, *, once: bool = False) -> Any:
    """Parses JSON of a user or another program, with limits. All of preheat reads foreign JSON through this function.

    Args:
        once: reject objects that name a field twice; by default the last value wins.

    Raises:
        BadJson: the text is not JSON or not UTF-8, is nested deeper than `DEEPEST`, or has a number of thousands of
            digits.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_object if once else None)
    # A BadJson is a ValueError too: without this clause, the last one would replace its message.
    except BadJson:
        raise
    except UnicodeDecodeError:
        raise BadJson("not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadJson(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno:,}", error.lineno) from None
    except RecursionError:
        raise BadJson(f"JSON nested too deeply, more than {DEEPEST} levels; flatten it") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise BadJson("holds a number of thousands of digits, which no reader accepts; write it as text") from None
    # A cheap upper bound first: brackets within strings count too, so only a high count calls for the exact check.
    if text.count("[") + text.count("{") > DEEPEST and _deep(value):
        raise BadJson(f"JSON nested too deeply, more than {DEEPEST} levels; flatten it")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    # Fewer fields than pairs: a name occurs twice, and the dict has its last value.
    if len(fields) < len(pairs):
        names = Counter(name for name, _ in pairs)
        duplicate = next(name for name, count in names.items() if count > 1)
        raise BadJson(f"names the field {quoted(duplicate, 40)} twice; leave one of the two out")
    return fields


def _deep(value: Any) -> bool:
    """Checks, without recursion, if a value is nested deeper than `DEEPEST`."""
    # One level after the other: a recursive check would fail on the very values that it looks for.
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
        # Empty containers end here; only the others have a further level.
        level = [inner for inner in level if inner]
    return bool(level)


def parse_json(text: str | bytes) -> Any:
    """Parses JSON of a run file that may be damaged. NaN and infinities, which earlier versions wrote, become None.

    Raises:
        BadJson: as `read_value`, or a number is out of range.
    """
    return _bounded(read_value(text))


def _bounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_bounded(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not -_LARGEST < value < _LARGEST:
        raise BadJson("a number is out of range")
    return value


def write_atomic(path: Path, text: str) -> None:
    """Writes a temporary file, syncs it and renames it, so that readers never see half of the text."""
    # The name and this suffix must fit into the 255 bytes of a file name.
    temporary = path.with_name(f"{path.name[:200]}.{secrets.token_hex(4)}.writing")
    try:
        # x: another process that draws the same name gets an error, not this file.
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # On disk before the rename: after a power failure, the new name must not lead to an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    # Also after Ctrl-C, which is no Exception.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_overwritable(path: str | Path, marks: Sequence[str]) -> None:
    """Checks that writing to a path the user named loses nothing: the file is new, empty, or was written by preheat.

    Args:
        marks: beginnings of such files, after a `#!` line if there is one; for HTML, a tag in the head of the page.

    Raises:
        RunError: the path holds a foreign file.
    """
    path = Path(path)
    try:
        if not path.exists() or not path.is_file():  # writing reports a folder; a device loses nothing
            return
        with path.open("rb") as file:
            # The marks are in the first lines; a foreign file may be binary.
            head = file.read(4096).decode("utf-8", "replace")
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); name another file") from None
    # A tag counts only in the head of a page: the body may quote any text.
    start, top = re.sub(r"\A#![^\n]*\n", "", head), head.partition("<body")[0]
    if head and not any(mark in top if mark.startswith("<") else start.startswith(mark) for mark in marks):
        raise RunError(f"{path}: exists, and preheat did not write it; name another file")


def write_generated(path: str | Path, text: str, mark: str) -> Path:
    """Writes a file that the user named and may edit later, under a comment line with `mark` and the text's hash.

    Args:
        text: may begin with a `#!` line, which stays the first line.
        mark: a comment, such as "# written by preheat plan".

    Raises:
        RunError: the file cannot be written, exists and was not written by preheat, or was edited since.
    """
    path = Path(path)
    require_overwritable(path, [mark])
    # A `#!` line works only as the first line of a file, so the mark goes below it.
    shebang, body = re.fullmatch(r"(#![^\n]*\n)?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if path.is_file() and (old := path.read_text(encoding="utf-8", errors="replace")):
        header = re.match(rf"(#![^\n]*\n)?{re.escape(mark)}(?: \((\w+)\))?\n", old)
        # Another hash than that of the text below it: somebody has edited the file.
        if header and header[2] and header[2] != _digest(old[header.end() :]):
            raise RunError(f"{path}: was edited since preheat wrote it; name another file, or remove this one")
    return write_user_file(path, f"{shebang or ''}{mark} ({_digest(body)})\n{body}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def write_user_file(
    path: str | Path, text: str, *, marks: Sequence[str] = (), fix: str = "name a file in a folder that exists"
) -> Path:
    """Writes a file that the user named by `write_atomic` and returns its path.

    Args:
        marks: see `require_overwritable`; no check if empty.
        fix: advice at the end of the error message.

    Raises:
        RunError: the file cannot be written, or the path holds a foreign file.
    """
    path = Path(path)
    if marks:
        require_overwritable(path, marks)
    try:
        write_atomic(path, text)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); {fix}") from None
    return path


def _mark_of(folder: Path) -> dict[str, Any] | None:
    """Returns the mark of a folder, or None if it has none.

    Raises:
        RunError: the mark is damaged.
    """
    file = folder / MARK
    if not file.exists():
        return None
    try:
        mark = parse_json(_bytes(file))
        # A damaged mark protects nothing: its keys decide which files may be overwritten or removed.
        if not _has(kind=_text, id=_text, files=_list(_text))(mark):
            raise ValueError("its keys are not kind, id and files")
    except ValueError as error:
        raise RunError(f"{file}: is damaged ({error}); restore an intact copy of it, or name another folder") from None
    return dict(mark)


def claim(folder: str | Path, kind: str, files: Sequence[str]) -> None:
    """Creates a folder for results of preheat and marks it.

    Args:
        kind: kind of result, such as "bench".
        files: names of the files to be written; a marked folder may list more.

    Raises:
        RunError: the folder holds files that no earlier call wrote, or cannot be written.
    """
    folder = Path(folder)
    mark = _mark_of(folder)
    # Without a mark, nothing in the folder is known to be preheat's.
    if mark is None and folder.is_dir() and (names := sorted(os.listdir(folder))):
        raise RunError(
            f"{folder}: holds files that preheat did not write ({_some(names)}); name an empty or new folder with --out"
        )
    # A marked folder may list more files than this call will write.
    if mark is not None and (mark["kind"] != kind or not set(files) <= set(mark["files"])):
        raise RunError(f"{folder}: holds a {shorten(mark['kind'])} of preheat; name an empty or new folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mark is None:
            write_atomic(
                folder / MARK, to_json({"kind": kind, "id": uuid.uuid4().hex, "files": list(files)}, indent=1) + "\n"
            )
    except OSError as error:
        raise RunError(f"{folder}: cannot be made ({error.strerror}); name another folder with --out") from None


def _some(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(shorten(name, 40) for name in names[:most]) + (f" and {more} more" if more > 0 else "")


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
    "plan.json": {
        "peak_gib": _real,
        "available_gib": _real,
        "fits": lambda v: v is None or isinstance(v, bool),
        "memory": _none_or(_map(_real)),
        "phases": _none_or(_map(_real)),
        "overhead": _none_or(_map(_real)),
        "parameters": _none_or(_may_have(total=_real, active=_real, trained=_real)),
        **dict.fromkeys(
            ("seconds_per_step", "tokens_per_second", "mfu", "flops_per_step", "steps", "seconds_total"), _real
        ),
        **dict.fromkeys(("allocated_gib", "reserved_gib"), _real),
    },
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


_MOST = 1 << 28
"""Maximum size of a JSON file in bytes; runs write far smaller ones."""
_LINE = 16 << 20
"""Maximum length of a line in bytes."""


def _bytes(file: Path) -> bytes:
    """Returns the bytes of a file.

    Raises:
        ValueError: the path is not a file, cannot be read, or is larger than `_MOST`.
    """
    try:
        # A named pipe would block the read.
        if not file.is_file():
            raise ValueError("it is not a file")
        if file.stat().st_size > _MOST:
            raise ValueError(f"it has {file.stat().st_size:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None


class Reader:
    """Reads a finished or running run, leaving out damaged data.

    Attributes:
        damaged: file -> what was left out and why, for the files read so far.

    Example:
        >>> run = Reader("runs/demo")                                   # doctest: +SKIP
        >>> run.plan["peak_gib"], run.metrics()[-1]["loss"]             # doctest: +SKIP
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
        mark = _mark_of(self.path)
        if mark is None:
            raise RunError(
                f"{self.path}: was not written by this version of preheat (it has no {MARK}); "
                "open it with the version that wrote it, or train it again into another folder"
            )
        if mark["kind"] != "run":
            raise RunError(f"{self.path}: is not a run (its {MARK} has kind {quoted(mark['kind'])})")
        return str(mark["id"])

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.exists():
            return {}
        try:
            content = parse_json(_bytes(file))
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
            self.damaged[name] = f"left out {_some(invalid)}, whose values are invalid"
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
            return _bytes(file).decode("utf-8")
        except UnicodeDecodeError:
            reason = "it is not text in UTF-8"
        except ValueError as error:
            reason = str(error)
        raise RunError(
            f"{file}: is damaged ({reason}); restore an intact copy of it, or train again into another folder"
        )

    def raw_recipe(self) -> tuple[dict[str, Any], str]:
        """Returns the recipe as unchecked plain values and as text, for display; empty if it cannot be read."""
        from preheat.recipe.former_names import current_names
        from preheat.recipe.yaml_io import compose

        text = ""
        try:
            text = self.recipe_text
            values, _ = compose(text, "recipe.yaml")
        except PreheatError as error:
            self.damaged["recipe.yaml"] = f"left out: {shorten(str(error), 200)}"
            return {}, text
        # Runs keep the names that settings had when they were written.
        return current_names(values) if isinstance(values, dict) else {}, text

    @property
    def plan(self) -> dict[str, Any]:
        return self._json("plan.json")

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


_BEGINNING = ("plan.json", "changes.json", "data.json", "environment.json", "events.jsonl", "lock", MARK)
"""Files that a run writes before recipe.yaml, in addition to tokenizer/ and an empty checkpoints/."""
_PARTIAL = re.compile(
    rf"(?:{'|'.join(map(re.escape, (*_BEGINNING, 'recipe.yaml')))})\.[0-9a-f]{{8}}\.writing|tokenizer\.writing"
)


def _written(folder: Path, mark: Mapping[str, Any] | None) -> tuple[list[Path], list[Path]]:
    """Returns the existing (files, folders) that a run wrote into its folder before its recipe.yaml."""

    def is_own(place: Path) -> bool:
        """Returns False if the path goes through a symbolic link: preheat makes none, and it may lead elsewhere."""
        return not any(p.is_symlink() for p in (place, *place.parents) if p != folder and p.is_relative_to(folder))

    files = [folder / name for name in _BEGINNING if (folder / name).is_file()]
    files += [path for path in folder.iterdir() if path.is_file() and _PARTIAL.fullmatch(path.name)]
    folders = [folder / name for name in ("checkpoints", "tokenizer") if (folder / name).is_dir()]
    for name in mark["files"] if mark else ():
        place = folder / name
        # Whoever gave the folder away may have edited the mark: only files inside tokenizer/ are removed on its word.
        if place.is_relative_to(folder / "tokenizer") and ".." not in place.parts and place.is_file():
            files.append(place)
            folders += [above for above in place.parents if above.is_relative_to(folder / "tokenizer")]
    unfinished = folder / "tokenizer.writing"
    if mark and unfinished.is_dir() and is_own(unfinished):  # ours: the folder was empty when it was marked
        folders.append(unfinished)
        for place in unfinished.rglob("*"):
            (folders if place.is_dir() and not place.is_symlink() else files).append(place)
    # The deepest folders first: rmdir needs them empty.
    return [*filter(is_own, files)], sorted(filter(is_own, set(folders)), key=lambda path: -len(path.parts))


def _strangers(folder: Path) -> list[str]:
    """Returns the names in a folder that are not left from an interrupted start, and so rule out a new run there.

    Raises:
        RunError: the mark of the folder is damaged.
    """
    names = sorted(os.listdir(folder))
    mark = _mark_of(folder)
    if mark is None:  # the process may have ended between its first two files
        begun = [n for n in names if (n == "lock" or _PARTIAL.fullmatch(n)) and (folder / n).is_file()]
        # preheat's lock is always empty: one with content is foreign.
        return [
            n
            for n in names
            if n not in begun or (folder / n).is_symlink() or (n == "lock" and (folder / n).stat().st_size)
        ]
    # A result of another command: all of it is foreign to a run.
    if mark["kind"] != "run":
        return names
    files, folders = _written(folder, mark)
    known = {*files, *folders}
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*") if path not in known})


def check_folder(path: Path, *, resume: bool) -> None:
    """Checks that a run can start or resume in a folder, without writing anything.

    Raises:
        RunError: the folder holds a run or foreign files, or no run to resume, or is not writable.
    """
    try:
        # The nearest folder that exists: this is the one that must be writable.
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise _unwritable(path, "Not a directory")
        if not os.access(existing, os.W_OK | os.X_OK | os.R_OK):
            raise _unwritable(path, "Permission denied")
        has_recipe = (path / "recipe.yaml").exists()
        if resume:
            if not has_recipe:
                raise RunError(f"{path}: holds no run to resume; run it without --resume first")
            _ = Reader(path).id  # raises if the mark is missing or damaged
            return
        # A recipe.yaml without a mark is somebody's own file, which the next check reports.
        if has_recipe and _mark_of(path) is not None:
            raise RunError(
                f"{path}: holds a run already; add --resume to continue it, or name another folder with --out"
            )
        if existing == path and (names := _strangers(path)):
            raise RunError(
                f"{path}: holds files of something else ({_some(names)}), which a run could overwrite; "
                "name an empty or new folder with --out"
            )
    except OSError as error:
        raise _unwritable(path, error.strerror) from None


def _unwritable(path: Path, why: str | None) -> RunError:
    return RunError(f"{path}: cannot write there ({why}); name another folder with --out")


class Writer:
    """Writes a run. A lock admits one writer per folder.

    Args:
        path: the folder; new or empty for a new run.
        resume: continue the run that the folder holds.

    Attributes:
        id: the run's identity, which its checkpoints carry.

    Raises:
        RunError: the folder holds a run or foreign files, cannot be written, or is locked by another process.
    """

    def __init__(self, path: str | Path, *, resume: bool = False):
        self.path = Path(path)
        # Before anything is created, so that a refused start leaves no folder behind.
        check_folder(self.path, resume=resume)
        # Only a folder of this writer's own is removed with a run that never started.
        self._own_folder = not self.path.exists()
        self._files: dict[str, TextIO] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            try:
                check_folder(self.path, resume=resume)  # again under the lock: another process may have started a run
                if resume:
                    self.id = Reader(self.path).id
                    self._mark = _mark_of(self.path) or {"kind": "run", "id": self.id, "files": list[str]()}
                else:
                    # Leftovers of a start that was interrupted before its recipe.yaml.
                    self._remove()
                    self.id = uuid.uuid4().hex
                    self._mark = {"kind": "run", "id": self.id, "files": list[str]()}
                    self.json(MARK, self._mark)
                (self.path / "checkpoints").mkdir(exist_ok=True)
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise _unwritable(self.path, error.strerror) from None

    def _locked(self) -> TextIO:
        """Returns the locked file, which keeps other writers away; the system releases it when this process ends."""
        file = self.path / "lock"
        while True:
            lock = file.open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The lock must be on the file that has this name now.
                if file.exists() and os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                    return lock
            except BlockingIOError:
                lock.close()
                raise RunError(
                    f"{self.path}: another process is writing this run; wait for it or end it, or name "
                    "another folder with --out"
                ) from None
            except OSError:
                lock.close()
                raise
            lock.close()  # its former holder deleted the file, so a third process could create and lock another: retry

    def _remove(self) -> None:
        """Removes the files that a run writes before its recipe.yaml and nothing else; the lock stays."""
        files, folders = _written(self.path, _mark_of(self.path))
        for file in files:
            if file.name != "lock" or file.parent != self.path:
                file.unlink(missing_ok=True)
        for folder in folders:
            with contextlib.suppress(OSError):  # the folder holds foreign files
                folder.rmdir()

    def remove_unstarted(self) -> None:
        """Removes a run that never started training, and its folder if this writer created it."""
        self._close_files()
        # With a recipe.yaml the run has started, and its files stay.
        if (self.path / "recipe.yaml").exists() or not (self.path / MARK).exists():
            self._lock.close()
            return
        self._remove()
        (self.path / "lock").unlink(missing_ok=True)
        self._lock.close()  # last, so that no other process starts a run here earlier
        if self._own_folder:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def text(self, name: str, text: str) -> None:
        try:
            write_atomic(self.path / name, text)
        except OSError as error:
            raise RunError(f"{self.path / name}: cannot be written ({error.strerror})") from None

    def json(self, name: str, value: Any) -> None:
        self.text(name, to_json(value, indent=1) + "\n")

    def folder(self, name: str, write: Callable[[Path], Any]) -> None:
        """Writes a folder of the run, filled by `write`, and lists its files in the mark for `remove_unstarted`."""
        temporary = self.path / f"{name}.writing"
        try:
            temporary.mkdir()
            write(temporary)
            files = sorted(p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
            # The mark first: if the process ends before the rename, the next start recognizes these files.
            self._mark["files"] = sorted({*self._mark["files"], *(f"{name}/{file}" for file in files)})
            self.json(MARK, self._mark)
            temporary.rename(self.path / name)
        except OSError as error:
            raise RunError(f"{self.path / name}: cannot be written ({error.strerror or error})") from None

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            file = self._files.get(name)
            if file is None:
                path = self.path / name
                # Checked once per file, when it is opened.
                file = self._files[name] = path.open("a", encoding="utf-8")
                if not _ends_with_line_break(path):  # a killed writer left half a line: end it
                    file.write("\n")
            file.write(to_json(value) + "\n")
            # Each line is visible to readers at once, and survives the end of this process.
            file.flush()
        except OSError as error:
            raise RunError(
                f"{self.path / name}: cannot be written ({error.strerror}); free disk space and continue with --resume"
            ) from None

    def metric(self, **values: Any) -> None:
        self._append("metrics.jsonl", values)

    def event(self, kind: str, **values: Any) -> None:
        self._append("events.jsonl", {"time": time.time(), "kind": kind, **values})

    def close(self) -> None:
        self._close_files()
        self._lock.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


def _ends_with_line_break(path: Path) -> bool:
    """Returns True if the last byte of a file is a line break, or if the file is empty."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


class Silent(Writer):
    """Writes nothing; for the ranks whose run is recorded by rank 0."""

    def __init__(self, path: str | Path):
        # Without the constructor of `Writer`: no lock, no folder.
        self.path, self.id = Path(path), ""

    def text(self, name: str, text: str) -> None:
        pass

    def folder(self, name: str, write: Callable[[Path], Any]) -> None:
        pass

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        pass

    def remove_unstarted(self) -> None:
        pass

    def close(self) -> None:
        pass
