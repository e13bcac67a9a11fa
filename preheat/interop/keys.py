"""The keys of a foreign configuration with their lines and types, and the handlers of a trainer's table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from preheat.errors import RecipeError
from preheat.interop.settings import Settings
from preheat.sanitize import quote_value, shorten

__all__ = [
    "Assumed",
    "Computed",
    "Entry",
    "Handler",
    "Ignore",
    "NoEffect",
    "Outcome",
    "Reference",
    "Takes",
    "assume",
    "ignore",
    "iterate_entries",
    "refuse",
    "replace_value",
    "switch",
    "take",
]

# A template of Jinja, a reference of OmegaConf, or a variable of the shell.
_TEMPLATE = re.compile(r"\{\{|\{%|\$\{|\$\(|^\$\w+")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")  # the last two by YAML 1.1, which other trainers read
_OFF: tuple[object, ...] = (False, None, "", [], {}, 0, "none", "None")


class Computed(str):
    """The source text of a value that a script computes, which is not known without running it."""

    __slots__ = ()


class Reference(Computed):
    """The name of a call that is read by itself."""

    __slots__ = ()


@dataclass(frozen=True)
class Entry:
    """A key of the file that has a scalar, a list of scalars, or an empty mapping as its value.

    Attributes:
        path: of the key; items of a list by their number.
        where: name of the file.
    """

    path: tuple[str, ...]
    value: Any
    where: str
    line: int

    @property
    def name(self) -> str:
        """The dotted key."""
        return ".".join(self.path)

    @property
    def shown(self) -> str:
        """The value as text."""
        text = self.value if isinstance(self.value, str) and self.value else json.dumps(self.value, ensure_ascii=False)
        return shorten(text, 80)

    @property
    def index(self) -> int:
        """The number of the list's item that the key is in; 0 if it is in none."""
        return next((int(step) for step in self.path if step.isdigit()), 0)

    @property
    def is_off(self) -> bool:
        """Returns True if the value switches the key off."""
        return self.value in _OFF

    def error(self, text: str) -> RecipeError:
        """Returns an error with file, line and key."""
        return RecipeError(f"{self.where}:{self.line}: {shorten(self.name)}: {text}")

    def text(self) -> str:
        """Returns the value as text.

        Raises:
            RecipeError: it is none, or a template of another tool.
        """
        if isinstance(self.value, str):
            if _TEMPLATE.search(self.value):
                raise self.error(
                    f"{quote_value(self.value)} is a template or a variable, which is not filled in; write its value"
                )
            return self.value
        raise self.error(f"must be text, got {quote_value(self.value)}")

    def truth(self) -> bool:
        """Returns the value as true or false.

        Raises:
            RecipeError: it is neither.
        """
        if isinstance(self.value, bool):
            return self.value
        if isinstance(self.value, str) and self.text().lower() in (*_TRUE, *_FALSE):
            return self.value.lower() in _TRUE
        raise self.error(f"must be true or false, got {quote_value(self.value)}")

    def number(self) -> float:
        """Returns the value as a number, also if it is text (YAML 1.1 reads 2e-5 as text).

        Raises:
            RecipeError: it is none.
        """
        if isinstance(self.value, int | float) and not isinstance(self.value, bool):
            return float(self.value)
        if isinstance(self.value, str):
            text = self.text()
            with suppress(ValueError):
                if math.isfinite(number := float(text)):
                    return number
        raise self.error(f"must be a number, got {quote_value(self.value)}")

    def whole(self) -> int:
        """Returns the value as a whole number above 0.

        Raises:
            RecipeError: it is none.
        """
        number = self.number()
        if number != int(number) or number < 1:
            raise self.error(f"must be a whole number above 0, got {quote_value(self.value)}")
        return int(number)

    def fraction(self) -> float:
        """Returns the value as a number of at least 0 and below 1.

        Raises:
            RecipeError: it is none.
        """
        if not 0 <= (number := self.number()) < 1:
            raise self.error(f"must be at least 0 and below 1, got {quote_value(self.value)}")
        return number

    def texts(self) -> list[str]:
        """Returns a list of text, or text separated by commas.

        Raises:
            RecipeError: it is neither.
        """
        if isinstance(self.value, str):
            return [part.strip() for part in self.text().split(",") if part.strip()]
        if isinstance(self.value, list) and all(isinstance(part, str) for part in self.value):
            return list(self.value)
        raise self.error(f"must be a list of text, got {quote_value(self.value)}")

    def choice(self, *known: str) -> str:
        """Returns the value if it is one of those known.

        Raises:
            RecipeError: it is another.
        """
        if (text := self.text()) not in known:
            raise self.error(f"must be {', '.join(known[:-1])} or {known[-1]}, got {quote_value(text)}")
        return text


@dataclass(frozen=True)
class Takes:
    """The key is taken over: the recipe has these fields of `Settings` too.

    Attributes:
        note: how the recipe differs; empty if it does not.
    """

    fields: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class NoEffect:
    """The key changes neither memory, speed nor loss; `why` says what it is for."""

    why: str


@dataclass(frozen=True)
class Assumed:
    """The key is not understood; `text` says what the plan assumes instead."""

    text: str


Outcome = Takes | NoEffect | Assumed
Handler = Callable[[Settings, Entry], Outcome]


def take(name: str, read: Callable[[Entry], object], note: str = "") -> Handler:
    """Returns a handler that sets a field of `Settings` to the key's value as `read` gives it."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        setattr(settings, name, read(entry))
        return Takes((name,), note)

    return handle


def switch(name: str, value: object = True) -> Handler:
    """Returns a handler that sets a field of `Settings` to a value if the key is true, else to its opposite."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        if isinstance(value, bool):
            setattr(settings, name, value if entry.truth() else not value)
        elif entry.truth():
            setattr(settings, name, value)
        return Takes((name,))

    return handle


@dataclass(frozen=True)
class Ignore:
    """A handler of a key without effect.

    Attributes:
        why: what the key is for.
        constant: handles the key if its value is no object of a script; None: it has no effect either way.
    """

    why: str
    constant: Handler | None = None

    def __call__(self, settings: Settings, entry: Entry) -> Outcome:
        """Returns why the key has no effect."""
        if self.constant is None or isinstance(entry.value, Computed):
            return NoEffect(self.why)
        return self.constant(settings, entry)


def ignore(why: str) -> Handler:
    """Returns a handler of a key without effect."""
    return Ignore(why)


def assume(text: str) -> Handler:
    """Returns a handler of a key that no recipe can express; switched off, it has no effect."""
    return lambda settings, entry: NoEffect("switched off") if entry.is_off else Assumed(text)


def refuse(text: str) -> Handler:
    """Returns a handler of a key of a feature that cannot be planned; switched off, it has no effect."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        if entry.is_off:
            return NoEffect("switched off")
        raise entry.error(f"{quote_value(entry.value, 40)}: {text}")

    return handle


def iterate_entries(values: Mapping[str, Any], lines: Mapping[tuple[str, ...], int], where: str) -> Iterator[Entry]:
    """Yields the keys with a value of their own, in the order of the file."""

    def walk(value: object, path: tuple[str, ...]) -> Iterator[Entry]:
        items: Sequence[tuple[str, object]] = ()
        if isinstance(value, Mapping):
            items = [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
            items = [(str(number), inner) for number, inner in enumerate(value)]
        if not items:
            yield Entry(path, value, where, lines.get(path, 1))
        for key, inner in items:
            yield from walk(inner, (*path, key))

    for key, value in values.items():
        yield from walk(value, (str(key),))


def replace_value(values: Mapping[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """Returns a copy of nested values with another value at a path; mappings that are missing on the way are added.

    Example:
        >>> replace_value({"a": [{"b": 1}], "c": 2}, ("a", "0", "b"), 3)
        {'a': [{'b': 3}], 'c': 2}
    """
    first, rest = path[0], path[1:]
    if not rest:
        return {**values, first: value}
    inner = values.get(first)
    if not isinstance(inner, list):
        return {**values, first: replace_value(inner if isinstance(inner, Mapping) else {}, rest, value)}
    items = {str(number): item for number, item in enumerate(inner)}
    return {**values, first: list(replace_value(items, rest, value).values())}
