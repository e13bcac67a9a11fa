"""Validated reading of stored measurements: a cache file may be truncated, edited, or written by something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from preheat.files import BadJson, read_record, read_value
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject


__all__ = ["Damaged", "read_json", "read_number", "read_numbers", "read_row"]

_Row = TypeVar("_Row")
# Plausible range of rates (units per second) and times (seconds).
_LEAST, _MOST = 1e-18, 1e24


class Damaged(ValueError):
    """A stored measurement is invalid."""


def read_json(path: Path) -> JsonObject | None:
    """Reads a JSON object from a file; returns None if the file does not exist.

    Raises:
        Damaged: the file cannot be read, or does not contain an object.
    """
    try:
        values = read_value(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from None
    except BadJson:
        raise Damaged("is not JSON") from None
    if not isinstance(values, dict):
        raise Damaged(f"holds {quote_value(values, 40)}")
    return values


def read_number(value: object, name: str, *, zero: bool = False) -> float:
    """Validates a measured number: finite and positive; `zero` allows 0 too."""
    if (
        not isinstance(value, int | float)
        # bool is a subclass of int; NaN fails every comparison.
        or isinstance(value, bool)
        or not (_LEAST < value < _MOST or (zero and value == 0))
    ):
        raise Damaged(f"{shorten(name, 40)} is {quote_value(value, 40)}")
    return float(value)


def read_numbers(value: object, name: str) -> dict[str, float]:
    """Validates an object of measured numbers."""
    if not isinstance(value, dict):
        raise Damaged(f"{name} is {quote_value(value, 40)}")
    return {key: read_number(number, f"{name}.{key}") for key, number in value.items()}


def read_row(cls: type[_Row], values: object, zero: Collection[str] = ()) -> _Row:
    """Builds a flat dataclass of numbers and names from an object with exactly its fields.

    Args:
        zero: fields that may be 0.

    Raises:
        Damaged: fields or values are invalid.
    """
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    # Exactly the fields: an unknown one means that the file has another format.
    if not isinstance(values, dict) or values.keys() != set(names):
        raise Damaged(f"a row is {quote_value(values, 40)}")
    try:
        row = read_record(cls, values)
    except BadJson as error:
        raise Damaged(error.message) from None
    for name in names:
        if isinstance(value := getattr(row, name), int | float):
            read_number(value, name, zero=name in zero)
    return row
