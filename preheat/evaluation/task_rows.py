"""Reads the rows of a task from JSONL, JSON, Parquet, CSV or a `datasets` name. Every error names the row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preheat.data.rows.file_readers import (
    closest,
    display_path,
    expanded,
    kind_of,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
)
from preheat.errors import DataError
from preheat.sanitize import shorten

__all__ = ["Row", "read_rows"]

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


class Row(NamedTuple):
    """One row and its location, for messages."""

    where: str
    values: Mapping[str, Any]


def read_rows(source: str, *, subset: str | None = None, split: str = "test", each: str | None = None) -> list[Row]:
    """Reads all rows of a file, or of a `datasets` name.

    Args:
        source: a file (.jsonl, .json, .parquet, .csv) or a name such as `org/name`. A .json file holds a list of
            objects, or an object of objects whose keys become the field `key` of the rows.
        subset, split: configuration and split of a `datasets` name.
        each: a field that holds a list of objects; each of them becomes a row, with the other fields of its parent.

    Raises:
        DataError: there is no such file, it is damaged, holds no row, or a row lacks `each`.
    """
    path = expanded("rows", source)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{display_path(path)}: tasks read rows from {', '.join(SUFFIXES)}; convert the file")
        try:
            rows = list(_read(path))
        except OSError as error:
            raise DataError(f"{display_path(path)}: cannot be read ({error.strerror or error})") from None
    elif path.exists() or path.suffix in SUFFIXES or source.startswith((".", "/", "~")) or source.count("/") != 1:
        parent = path.parent if path.parent.is_dir() else Path()
        names = sorted(p.name for p in parent.iterdir())[:50] if not path.exists() else []
        raise DataError(
            f"{display_path(path)}: is no file; name a file of rows"
            if path.exists()
            else f"{display_path(path)}: no such file" + (f"; {closest(path.name, names)}" if names else "")
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
        raise DataError(f"{where}: is {kind_of(value)}, not an object with fields")
    return Row(where, {str(k): v for k, v in value.items()})


def _parts(row: Row, each: str) -> Iterator[Row]:
    if each not in row.values:
        raise DataError(f"{row.where}: no field '{each}' (the task's `each`); {closest(each, list(row.values))}")
    parts = row.values[each]
    if not isinstance(parts, list):
        raise DataError(f"{row.where}: field '{each}' is {kind_of(parts)}, not a list")
    rest = {k: v for k, v in row.values.items() if k != each}
    for number, part in enumerate(parts, 1):
        where = f"{row.where}, {each} {number}"
        yield Row(where, {**rest, **_row(where, part).values})


def _read(path: Path) -> Iterator[Row]:
    if path.suffix == ".json":
        yield from _json(path)
        return
    if path.suffix == ".csv":
        for number, (_, names, values) in enumerate(read_csv(path), 1):
            if len(values) != len(names):
                comparison = "more" if len(values) > len(names) else "fewer"
                raise DataError(
                    f"{display_path(path)}: row {number} has {comparison} fields than the header's {len(names)}"
                )
            yield Row(f"{display_path(path)}: row {number}", dict(zip(names, values, strict=True)))
        return
    for where, value in read_jsonl(path) if path.suffix == ".jsonl" else read_parquet(path):
        yield _row(where, value)


def _json(path: Path) -> Iterator[Row]:
    content = read_json(path)
    if isinstance(content, dict):
        for number, (key, value) in enumerate(content.items(), 1):
            yield _row(
                f"{display_path(path)}: row {number}", {"key": key, **value} if isinstance(value, dict) else value
            )
        return
    if not isinstance(content, list):
        raise DataError(
            f"{display_path(path)}: holds {kind_of(content)}; a .json file of a task holds a list of objects "
            "or an object of them"
        )
    for number, value in enumerate(content, 1):
        yield _row(f"{display_path(path)}: row {number}", value)


def _named(name: str, subset: str | None, split: str) -> Iterator[Row]:
    import datasets

    from preheat.hardware.connectivity import hub_reachable

    if not hub_reachable():
        raise DataError(
            f"{name}: no such file, and no network to look for a data set of that name; give the task a file: NAME=FILE"
        )
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        message = shorten((str(error).strip() or type(error).__name__).splitlines()[0], 200)
        raise DataError(f"{name}: no such file, and `datasets` cannot load it: {message}") from None
    for number, row in enumerate(rows, 1):
        yield _row(f"{name}, {split}: row {number}", row)
