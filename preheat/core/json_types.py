"""Types of data whose shape this package does not know, and marks for the fields of records. No torch."""

from __future__ import annotations

import functools
import typing
from dataclasses import fields
from typing import Annotated, Any, TypeAlias, TypeVar

__all__ = ["INLINE", "OMITTED", "JsonObject", "Omitted", "Record", "StateDict"]

JsonObject: TypeAlias = dict[str, Any]
"""Data of unknown shape that is read from or written to JSON: a configuration, its keyword arguments, a record. Data
whose keys are known has a dataclass or a `TypedDict` of its own."""

StateDict: TypeAlias = dict[str, Any]
"""A state as `state_dict` returns it and `load_state_dict` takes it: tensors and numbers by name, possibly nested."""

_T = TypeVar("_T")

OMITTED = "left out if None"
INLINE = "its entries are keys of the record"
"""Mark of a mapping in a `Record`: `files.to_plain_data` writes its entries beside the other fields."""

Omitted: TypeAlias = Annotated[_T | None, OMITTED]
"""Type of a field in a `Record` that `files.to_plain_data` leaves out if it is None; other fields become null."""


class Record:
    """A dataclass with fields that `files.to_plain_data` writes in another way: `Omitted` or `INLINE`."""

    __slots__ = ()

    @classmethod
    @functools.cache
    def marks(cls) -> dict[str, tuple[object, ...]]:
        """Returns field -> its marks, in the order of the fields."""
        hints = typing.get_type_hints(cls, include_extras=True)
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return {name: getattr(hints[name], "__metadata__", ()) for name in names}
