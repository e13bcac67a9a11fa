"""Reads and writes JSON, and writes files atomically. No torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import re
import secrets
import sys
import typing
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from preheat.core.json_types import INLINE, OMITTED, Record
from preheat.errors import RunError
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = [
    "DEEPEST",
    "BadJson",
    "compute_sha256",
    "lock_file",
    "parse_json",
    "read_bytes",
    "read_intact",
    "read_record",
    "read_value",
    "require_overwritable",
    "build_schema",
    "to_plain_data",
    "to_json",
    "write_atomic",
    "write_generated",
    "write_user_file",
]


def to_plain_data(value: Any) -> Any:
    """Returns plain data: records as dicts, and None in place of NaN and infinities, which JSON cannot express.

    Example:
        >>> to_plain_data({"loss": float("nan"), "steps": (1, 2)})
        {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(k): to_plain_data(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_data(v) for v in value]
    if isinstance(value, Record):
        return _record_to_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _record_to_dict(record: Record) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, marks in record.marks().items():
        content = getattr(record, name)
        if INLINE in marks:
            values |= to_plain_data(content)
        elif content is not None or OMITTED not in marks:
            values[name] = to_plain_data(content)
    return values


def to_json(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Returns the JSON text of `to_plain_data` data. All of preheat writes JSON through this function.

    Example:
        >>> to_json({"loss": float("inf"), "name": "ä"})
        '{"loss": null, "name": "ä"}'
    """
    # `to_plain_data` has removed what JSON cannot express; allow_nan=False turns a gap in it into an error.
    text = json.dumps(to_plain_data(value), indent=indent, ensure_ascii=False, allow_nan=False, default=default)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot hold
        return json.dumps(to_plain_data(value), indent=indent, allow_nan=False, default=default)
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
        value = json.loads(text, object_pairs_hook=_parse_object if once else None)
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
    if text.count("[") + text.count("{") > DEEPEST and _is_too_deep(value):
        raise BadJson(f"JSON nested too deeply, more than {DEEPEST} levels; flatten it")
    return value


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    # Fewer fields than pairs: a name occurs twice, and the dict has its last value.
    if len(fields) < len(pairs):
        names = Counter(name for name, _ in pairs)
        duplicate = next(name for name, count in names.items() if count > 1)
        raise BadJson(f"names the field {quote_value(duplicate, 40)} twice; leave one of the two out")
    return fields


def _is_too_deep(value: Any) -> bool:
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
    return _limit_depth(read_value(text))


def _limit_depth(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _limit_depth(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_limit_depth(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not -_LARGEST < value < _LARGEST:
        raise BadJson("a number is out of range")
    return value


_Record = TypeVar("_Record")


def read_record(kind: type[_Record], value: object) -> _Record:
    """Returns parsed JSON as a record. Unknown keys are ignored: a later version may have written them.

    Args:
        kind: a dataclass, or a union or list of dataclasses.

    Raises:
        BadJson: a key is missing, or its value has another type.

    Example:
        >>> from preheat.core.plan import Parameters
        >>> read_record(Parameters, {"total": 8, "active": 8, "trained": 2}).trained
        2
    """
    from pydantic import ValidationError

    try:
        return _validate_record(kind, value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise BadJson(f"{place + ': ' if place else ''}{quote_value(first['input'], 40)}: {first['msg']}") from None


def read_intact(kind: type[_Record], values: Mapping[str, object]) -> tuple[_Record, list[str]]:
    """Returns a parsed JSON object as a record without its invalid keys, and these keys.

    Args:
        kind: a dataclass whose fields all have defaults, or a dict.

    Example:
        >>> from preheat.core.run_records import Environment
        >>> record, invalid = read_intact(Environment, {"device": "cpu", "threads": "x"})
        >>> record.device, record.threads, invalid
        ('cpu', None, ['threads'])
    """
    from pydantic import ValidationError

    try:
        return _validate_record(kind, values), []
    except ValidationError as error:
        places = {problem["loc"][0] for problem in error.errors(include_url=False, include_input=False)}
    invalid = [key for key in values if key in places]
    return _validate_record(kind, {key: value for key, value in values.items() if key not in places}), invalid


def _validate_record(kind: type[_Record], value: object) -> _Record:
    text = json.dumps(value, ensure_ascii=False)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # names of files may hold lone surrogates, which UTF-8 has not
        encoded = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
    return cast(_Record, _build_adapter(kind).validate_json(encoded, strict=True))  # type: ignore[arg-type]


def build_schema(kind: type) -> dict[str, Any]:
    """Returns the JSON schema of a record as `to_json` writes it, with the descriptions of its docstring.

    Example:
        >>> from preheat.core.plan import Parameters
        >>> build_schema(Parameters)["properties"]["trained"]["description"]
        'those that the optimizer updates.'
    """
    from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
    from pydantic_core import core_schema

    class WithComputed(GenerateJsonSchema):
        """Adds fields that `__init__` does not take, which pydantic leaves out, and descriptions."""

        def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
            values, record = super().dataclass_schema(schema), schema["cls"]
            hints = typing.get_type_hints(record)
            for field in dataclasses.fields(record):
                if not field.init:
                    values["properties"][field.name] = _build_adapter(hints[field.name]).json_schema()
            for name, text in _parse_descriptions(record).items():
                if name in values["properties"]:
                    values["properties"][name]["description"] = text
            values["required"] = [*values["properties"]]
            return values

    return _build_adapter(kind).json_schema(mode="serialization", schema_generator=WithComputed)


def _parse_descriptions(record: type) -> dict[str, str]:
    """Returns the descriptions in the section "Attributes" of a docstring."""
    _, _, section = (inspect.getdoc(record) or "").partition("Attributes:\n")
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", section.partition("\n\n")[0], re.M)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


@functools.cache
def _build_adapter(kind: Hashable) -> TypeAdapter[object]:
    import pydantic

    return pydantic.TypeAdapter(kind)  # type: ignore[arg-type]


_MOST = 1 << 28
"""Maximum size of a JSON file in bytes; runs write far smaller ones."""


def read_bytes(file: Path, largest: int | None = None) -> bytes:
    """Returns the bytes of a file.

    Args:
        largest: maximum number of bytes; None: `_MOST`.

    Raises:
        ValueError: the path is not a file, cannot be read, or is larger.
    """
    try:
        # A named pipe would block the read.
        if not file.is_file():
            raise ValueError("it is not a file")
        if file.stat().st_size > (_MOST if largest is None else largest):
            raise ValueError(f"it has {file.stat().st_size:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None


def compute_sha256(file: Path) -> str:
    """Returns the checksum of a file, in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def lock_file(file: IO[Any], *, wait: bool = False) -> None:
    """Locks an open file for this process; the system releases the lock with the file or the process, however it ends.

    Args:
        wait: waits for a process that holds the lock.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
        OSError: the file system has no locks.
    """
    if sys.platform == "win32":  # not yet run there
        import msvcrt

        while True:
            # A byte far behind the end: a locked one could not be read by others.
            file.seek(2**30)
            try:
                # LK_LOCK tries for ten seconds.
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if not wait:
                    raise BlockingIOError(error.errno, "another process holds the lock") from None
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_atomic(path: Path, text: str, *, sync: bool = True) -> None:
    """Writes a temporary file, syncs it unless told otherwise and renames it: readers never see half of the text."""
    # The name and this suffix must fit into the 255 bytes of a file name.
    temporary = path.with_name(f"{path.name[:200]}.{secrets.token_hex(4)}.writing")
    try:
        # x: another process that draws the same name gets an error, not this file.
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # On disk before the rename: after a power failure, the new name must not lead to an empty file.
            if sync:
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
        if header and header[2] and header[2] != _compute_digest(old[header.end() :]):
            raise RunError(f"{path}: was edited since preheat wrote it; name another file, or remove this one")
    return write_user_file(path, f"{shebang or ''}{mark} ({_compute_digest(body)})\n{body}")


def _compute_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def write_user_file(
    path: str | Path,
    text: str,
    *,
    marks: Sequence[str] = (),
    fix: str = "name a file in a folder that exists and may be written",
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
