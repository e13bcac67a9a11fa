"""Documents from files: text, JSONL, JSON and Parquet, read lazily. Every error names the file and the line or row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from preheat.data.examples import Document
from preheat.errors import DataError, nearest

__all__ = ["ROWS", "TEXT", "Fields", "find_files", "missing", "read_file"]

TEXT = (".txt", ".md", ".py")
ROWS = (".jsonl", ".json", ".parquet")

CUT_ABOVE = 64 * 1024
"""A larger .txt file (bytes) is not one document: as one it could be neither split into train and validation nor shuffled."""
CUT_AT = 4 * 1024
"""It is cut at the first blank line after so many characters ..."""
CUT_AT_ANY_LINE = 4 * CUT_AT
"""... at the first line end after so many, and within a line of more."""


@dataclass(frozen=True)
class Fields:
    """Which fields of a row are read."""

    text: str = "text"
    prompt: str | None = None
    completion: str | None = None

    @property
    def paired(self) -> bool:
        return self.completion is not None

    def names(self) -> list[str]:
        return [self.prompt, self.completion] if self.prompt and self.completion else [self.text]

    def knob(self, name: str) -> str:
        return "data.text" if not self.paired else "data.prompt" if name == self.prompt else "data.completion"

    def require(self, known: list[str], where: str) -> None:
        """Raises DataError when a field is not among `known`."""
        for name in self.names():
            if name not in known:
                raise DataError(
                    f"{where}: no field '{name}', only {', '.join(map(repr, known)) or 'none'}; set {self.knob(name)}: {nearest(name, known)}"
                )

    def document(self, row: Any, where: str) -> Document:
        """The document of one row; `where` stands in errors."""
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: is {_kind(row)}, not an object with fields")
        self.require([str(k) for k in row], where)
        values = [row[name] for name in self.names()]
        for name, value in zip(self.names(), values, strict=True):
            if not isinstance(value, str):
                raise DataError(
                    f"{where}: field '{name}' is {_kind(value)}, not text; mend the row or set {self.knob(name)} to another field"
                )
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{where}: field '{name}' holds half a surrogate pair at character {error.start}, which is not text"
                ) from None
        return Document.of(values[-1], values[0] if self.paired else None, where)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number", str: "text"}.get(
        type(value), type(value).__name__
    )


def missing(knob: str, path: Path) -> DataError:
    """The error for a path that does not exist, with the nearest name that does."""
    parent, wanted = path.parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, wanted = parent.parent, parent.name
    names = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))
    known = nearest(wanted, names[:50]) if names else "it is empty"
    return DataError(f"{knob} {path}: does not exist; looking for '{wanted}' in {parent}: {known}")


def find_files(knob: str, path: Path) -> tuple[list[Path], str]:
    """The files that `path`, a file or a folder, stands for, in a fixed order, and what they are in words.

    Data files beside their own metadata (a README, a dataset_infos.json) are the usual case, so in a folder the rows
    go first: .jsonl and .parquet, else .json, else text files.
    """
    if path.is_file():
        if path.suffix not in TEXT + ROWS:
            raise DataError(f"{knob} {path}: preheat reads {', '.join(TEXT + ROWS)}; rename or convert the file")
        if path.stat().st_size == 0:
            raise DataError(f"{knob} {path}: the file is empty")
        return [path], str(path)
    every = sorted(
        p for p in path.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
    )
    for suffixes in ((".jsonl", ".parquet"), (".json",), TEXT):
        chosen = [p for p in every if p.suffix in suffixes]
        if chosen:
            kinds = ", ".join(sorted({p.suffix for p in chosen}))
            others = len(every) - len(chosen)
            return chosen, f"{path}: {len(chosen)} files ({kinds})" + (f"; {others} other files left out" if others else "")
    raise DataError(f"{knob} {path}: the folder has no file that preheat reads ({', '.join(TEXT + ROWS)})")


def read_file(path: Path, fields: Fields) -> Iterator[Document]:
    """The documents of one file, lazily."""
    if path.suffix in TEXT and fields.paired:
        raise DataError(
            f"{path}: a text file has no field '{fields.prompt}'; data.prompt and data.completion need {', '.join(ROWS)}"
        )
    try:
        if path.suffix == ".txt" and path.stat().st_size > CUT_ABOVE:
            yield from _cut(_lines(path))
        elif path.suffix in TEXT:
            yield Document.of("".join(line for _, line in _lines(path)), where=str(path))
        elif path.suffix == ".jsonl":
            yield from _jsonl(path, fields)
        elif path.suffix == ".json":
            yield from _json(path, fields)
        else:
            yield from _parquet(path, fields)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines with their ends, decoded from UTF-8."""
    file: IO[bytes]
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if b"\0" in raw:
                raise DataError(f"{path}:{number}: byte {offset + raw.index(0)} is 0: a binary file, not text")
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = raw[error.start]
                raise DataError(
                    f"{path}:{number}: byte {offset + error.start} (0x{bad:02x}) is not text in UTF-8; convert the file or leave it out"
                ) from None
            offset += len(raw)
            yield number, line.removeprefix("\ufeff") if number == 1 else line


def _cut(lines: Iterator[tuple[int, str]]) -> Iterator[Document]:
    """One long text as documents of a few KB whose concatenation is the text."""
    held: list[str] = []
    size = 0
    for _, line in lines:
        for start in range(0, len(line), CUT_AT_ANY_LINE):
            piece = line[start : start + CUT_AT_ANY_LINE]
            held.append(piece)
            size += len(piece)
            if size >= CUT_AT_ANY_LINE or (size >= CUT_AT and not line.strip()):
                yield Document.of("".join(held))
                held, size = [], 0
    if held:
        yield Document.of("".join(held))


def _jsonl(path: Path, fields: Fields) -> Iterator[Document]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
        except RecursionError:
            raise DataError(f"{path}:{number}: JSON nested too deeply") from None
        yield fields.document(row, f"{path}:{number}")


def _json(path: Path, fields: Fields) -> Iterator[Document]:
    text = "".join(line for _, line in _lines(path))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno} (a file of one object a line is named .jsonl)"
        ) from None
    except RecursionError:
        raise DataError(f"{path}: JSON nested too deeply") from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds {_kind(rows)}; a .json file must hold a list of objects")
    for number, row in enumerate(rows, 1):
        yield fields.document(row, f"{path}: row {number}")


def _parquet(path: Path, fields: Fields) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            fields.require(file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=1024, columns=fields.names()):
                for row in batch.to_pylist():
                    number += 1
                    yield fields.document(row, f"{path}: row {number}")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        where = f"{path}: row {number + 1}" if number else str(path)
        raise DataError(f"{where}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
