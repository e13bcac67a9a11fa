"""Layouts of rows with their fields, and classes from the values of a label field."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from preheat.errors import DataError
from preheat.sanitize import shorten

__all__ = ["LAYOUTS", "Fields", "class_name", "class_names", "advise_columns"]

LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "prompt": (("prompt", "completion"), ("system",)),
    "alpaca": (("instruction", "output"), ("input", "system", "history")),
    "sharegpt": (("conversations",), ("system", "tools", "images")),
    "messages": (("messages",), ("system", "tools", "images")),
    "preference": (("chosen", "rejected"), ("prompt", "conversations", "messages", "system", "tools")),
    "kto": (("completion", "label"), ("prompt", "conversations", "messages", "system", "tools")),
    "classes": (("text", "label"), ()),
}
"""Layout -> (required fields, optional fields)."""

Fields: TypeAlias = Mapping[str, object]
"""A row of the user's data: its values by field, unchecked."""


def class_name(value: object) -> str:
    """Returns the name of the class that a label field names by text, a number, or true or false."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def advise_columns(known: Sequence[str]) -> str:
    """Returns advice for unknown fields: the setting for one that resembles a layout's field, else an example.

    Example:
        >>> advise_columns(["mesages"])
        'set data.columns={messages: mesages}'
    """
    roles, known = (
        sorted({role for needs, _ in LAYOUTS.values() for role in needs}),
        [shorten(name, 40) for name in known[:100]],
    )
    for name in known:
        # A high cutoff: a wrong suggestion would train on the wrong field.
        if near := difflib.get_close_matches(name.lower(), roles, n=1, cutoff=0.8):
            return f"set data.text: {name}" if near[0] == "text" else f"set data.columns={{{near[0]}: {name}}}"
    if len(known) == 1:
        return f"set data.text: {known[0]}"
    pair = f"data.columns={{prompt: {known[0]}, completion: {known[1]}}}"
    return f"set {pair} if one is the prompt and the other the answer, or data.text: {known[0]} for plain text"


def class_names(values: Iterable[object], where: str) -> tuple[str, ...]:
    """Returns the distinct values of a label field as class names, in numeric or alphabetic order.

    Raises:
        DataError: there are fewer than two, or too many to be classes.
    """
    distinct = {v for v in values if isinstance(v, str | int) and (not isinstance(v, str) or v.strip())}
    if not 2 <= len(distinct) <= 10_000:
        amount = (
            "has one value"
            if len(distinct) == 1
            else "has no value"
            if not distinct
            else f"has {len(distinct):,} different values"
        )
        raise DataError(
            f"{where}: the field of the label {amount} in all rows; classes are 2 or more, name their field "
            "by data.columns.label"
        )
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in distinct)
    # Numbers by value, so that 2 precedes 10.
    if numbers:
        return tuple(map(str, sorted(distinct)))  # type: ignore[type-var]
    return tuple(sorted(map(class_name, distinct)))
