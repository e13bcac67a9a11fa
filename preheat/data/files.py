"""Rows and texts from files: text, JSONL, JSON, CSV and Parquet, read lazily. Every error names the file and the line or row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from preheat.data.conversations import kind_of
from preheat.errors import DataError, nearest

__all__ = ["ROWS", "TEXT", "columns_of", "find_files", "missing", "read_file"]

TEXT = (".txt", ".md", ".py")
ROWS = (".jsonl", ".json", ".parquet", ".csv")

CUT_ABOVE = 64 * 1024
"""A larger .txt file (bytes) is not one document: as one it could be neither split into train and validation nor shuffled."""
CUT_AT = 4 * 1024
"""It is cut at the first blank line after so many characters ..."""
CUT_AT_ANY_LINE = 4 * CUT_AT
"""... at the first line end after so many, and within a line of more."""


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
    go first: .jsonl, .parquet and .csv, else .json, else text files.
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
    for suffixes in ((".jsonl", ".parquet", ".csv"), (".json",), TEXT):
        chosen = [p for p in every if p.suffix in suffixes]
        if chosen:
            kinds = ", ".join(sorted({p.suffix for p in chosen}))
            others = len(every) - len(chosen)
            return chosen, f"{path}: {len(chosen)} files ({kinds})" + (f"; {others} other files left out" if others else "")
    raise DataError(f"{knob} {path}: the folder has no file that preheat reads ({', '.join(TEXT + ROWS)})")


def columns_of(path: Path) -> list[str] | None:
    """The fields of all rows of a file, where it states them before any row (Parquet, CSV)."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return list(pyarrow.parquet.read_schema(path).names)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    return next(_csv(path), (0, [], []))[1] if path.suffix == ".csv" else None


def read_file(path: Path, columns: Sequence[str] | None = None, *, whole: bool = False) -> Iterator[tuple[str, Any]]:
    """(where, row) of each row of a file, lazily: an object with fields, or the text of a file without rows.

    Args:
        columns: read no others, where the format lets them be left out.
        whole: a long .txt file is one document, and not cut.
    """
    try:
        if path.suffix == ".txt" and not whole and path.stat().st_size > CUT_ABOVE:
            yield from _cut(path)
        elif path.suffix in TEXT:
            yield str(path), "".join(line for _, line in _lines(path))
        elif path.suffix == ".jsonl":
            yield from _jsonl(path)
        elif path.suffix == ".json":
            yield from _json(path)
        elif path.suffix == ".csv":
            for number, names, values in _csv(path):
                if len(values) != len(names):
                    raise DataError(
                        f"{path}:{number}: has {len(values)} fields where the first line names {len(names)}; quote commas and line ends"
                    )
                yield f"{path}:{number}", dict(zip(names, values, strict=True))
        else:
            yield from _parquet(path, columns)
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


def _cut(path: Path) -> Iterator[tuple[str, str]]:
    """One long text as documents of a few KB whose concatenation is the text."""
    held: list[str] = []
    size, first = 0, 1
    for number, line in _lines(path):
        for start in range(0, len(line), CUT_AT_ANY_LINE):
            piece = line[start : start + CUT_AT_ANY_LINE]
            held.append(piece)
            size += len(piece)
            if size >= CUT_AT_ANY_LINE or (size >= CUT_AT and not line.strip()):
                yield f"{path}:{first}", "".join(held)
                held, size, first = [], 0, number + 1
    if held:
        yield f"{path}:{first}", "".join(held)


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
        except RecursionError:
            raise DataError(f"{path}:{number}: JSON nested too deeply") from None
        yield f"{path}:{number}", row


def _json(path: Path) -> Iterator[tuple[str, Any]]:
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
        raise DataError(f"{path}: holds {kind_of(rows)}; a .json file must hold a list of objects")
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def _csv(path: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """(line, names, values) of each row; a quoted value may go over several lines."""
    import csv

    csv.field_size_limit(2**31 - 1)  # of the process; the default, 128 KiB, is less than a long document
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    names: list[str] = []
    try:
        for values in reader:
            if not values:
                continue
            if not names:
                names = values
                if len(set(names)) < len(names) or not all(name.strip() for name in names):
                    raise DataError(f"{path}:1: the first line must name each field once, has {', '.join(map(repr, names))}")
                continue
            yield reader.line_num, names, values
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from None


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            known = [name for name in file.schema_arrow.names if columns is None or name in columns]
            for batch in file.iter_batches(batch_size=1024, columns=known):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        where = f"{path}: row {number + 1}" if number else str(path)
        raise DataError(f"{where}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
