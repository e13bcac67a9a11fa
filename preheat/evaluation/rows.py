"""Rows of a task: objects with fields, from JSONL, JSON, Parquet, CSV or a `datasets` name. Every error names the row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preheat.errors import DataError, nearest

__all__ = ["Row", "read_rows"]

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


class Row(NamedTuple):
    """One row and where it stands, for messages."""

    where: str
    values: Mapping[str, Any]


def read_rows(source: str, *, subset: str | None = None, split: str = "test", each: str | None = None) -> list[Row]:
    """All rows of a file, or of a `datasets` name.

    Args:
        source: a file (.jsonl, .json, .parquet, .csv) or a name such as `org/name`. A .json file holds a list of objects, or an
            object of objects, whose key then is the row's field `key`.
        subset, split: of a `datasets` name.
        each: a field that holds a list of objects; each of them is then a row, with the other fields of its owner.

    Raises:
        DataError: there is no such file, it is damaged, holds no row, or a row lacks `each`.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path}: tasks read rows from {', '.join(SUFFIXES)}; convert the file")
        read = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv}[path.suffix]
        try:
            rows = list(read(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: byte {error.start} is not text in UTF-8; convert the file") from None
    elif path.exists() or path.suffix in SUFFIXES or source.startswith((".", "/", "~")) or source.count("/") != 1:
        parent = path.parent if path.parent.is_dir() else Path()
        names = sorted(p.name for p in parent.iterdir())[:50] if not path.exists() else []
        raise DataError(
            f"{path}: is a folder; name a file of rows"
            if path.exists()
            else f"{path}: no such file" + (f"; {nearest(path.name, names)}" if names else "")
        )
    else:
        rows = list(_named(source, subset, split))
    if each is not None:
        rows = [part for row in rows for part in _parts(row, each)]
    if not rows:
        raise DataError(f"{source}: holds no row")
    return rows


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: is {type(value).__name__}, not an object with fields")
    return Row(where, {str(k): v for k, v in value.items()})


def _parts(row: Row, each: str) -> Iterator[Row]:
    if each not in row.values:
        raise DataError(f"{row.where}: no field '{each}' (the task's `each`); {nearest(each, list(row.values))}")
    parts = row.values[each]
    if not isinstance(parts, list):
        raise DataError(f"{row.where}: field '{each}' is {type(parts).__name__}, not a list")
    rest = {k: v for k, v in row.values.items() if k != each}
    for number, part in enumerate(parts, 1):
        where = f"{row.where}, {each} {number}"
        yield Row(where, {**rest, **_row(where, part).values})


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
            except RecursionError:
                raise DataError(f"{path}:{number}: JSON nested too deeply") from None
            yield _row(f"{path}:{number}", value)


def _json(path: Path) -> Iterator[Row]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig") or "[]")
    except json.JSONDecodeError as error:
        words = f"not JSON: {error.msg} at column {error.colno} (a file of one object a line is named .jsonl)"
        raise DataError(f"{path}:{error.lineno}: {words}") from None
    except RecursionError:
        raise DataError(f"{path}: JSON nested too deeply") from None
    if isinstance(found, dict):
        for number, (key, value) in enumerate(found.items(), 1):
            yield _row(f"{path}: row {number}", {"key": key, **value} if isinstance(value, dict) else value)
        return
    if not isinstance(found, list):
        raise DataError(
            f"{path}: holds {type(found).__name__}; a .json file of a task holds a list of objects or an object of them"
        )
    for number, value in enumerate(found, 1):
        yield _row(f"{path}: row {number}", value)


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for number, row in enumerate(reader, 1):
                if None in row or None in row.values():
                    words = "more" if None in row else "fewer"
                    raise DataError(f"{path}: row {number} has {words} fields than the header's {len(reader.fieldnames or [])}")
                yield _row(f"{path}: row {number}", row)
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield _row(f"{path}: row {number}", row)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None


def _named(name: str, subset: str | None, split: str) -> Iterator[Row]:
    import datasets

    from preheat.hardware.network import hub_reachable

    if not hub_reachable():
        raise DataError(
            f"{name}: no such file, and no network to look for a data set of that name; give the task a file: NAME=FILE"
        )
    try:
        found = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{name}: no such file, and `datasets` cannot load it: {words}") from None
    for number, row in enumerate(found, 1):
        yield _row(f"{name}, {split}: row {number}", row)
