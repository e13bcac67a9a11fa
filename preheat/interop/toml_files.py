"""TOML as plain values, with the line of each key. No torch."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from preheat.errors import RecipeError
from preheat.sanitize import shorten

__all__ = ["read_toml"]

_HEADER = re.compile(r"\s*\[(\[)?\s*([^\[\]#]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([\w\-.\"' \t]+?)\s*=")


def read_toml(text: str, where: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Returns the values of a TOML file, and the line of each key.

    Args:
        where: name of the file in errors.

    Raises:
        RecipeError: the text is not TOML.

    Example:
        >>> read_toml("[training]\\nsteps = 10", "f.toml")
        ({'training': {'steps': 10}}, {('training',): 1, ('training', 'steps'): 2})
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # names the line by itself
        raise RecipeError(f"{where}: not TOML: {shorten(str(error))}") from None
    except RecursionError:
        raise RecipeError(f"{where}: not TOML that can be read: it is nested too deep") from None
    lines = _find_lines(text, values)
    _fill_lines(values, (), 1, lines)
    return _simplify(values), lines


def _simplify(value: Any) -> Any:
    """Returns a value with text in place of what YAML lacks: dates, and numbers that are not finite or too large."""
    if isinstance(value, dict):
        return {key: _simplify(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_simplify(inner) for inner in value]
    if isinstance(value, bool | str):
        return value
    plain = -(2**63) <= value < 2**63 if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)
    return value if plain else str(value)


def _find_lines(text: str, values: Mapping[str, Any]) -> dict[tuple[str, ...], int]:
    """Returns the lines of headers and keys; those within values over several lines are not in the file's mapping."""
    lines: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            path = _split(header[2])
            if header[1]:
                lines.setdefault(path, number)
                counts[path] = counts.get(path, -1) + 1
                path = (*path, str(counts[path]))
            if _holds(values, path):
                section = path
                lines.setdefault(path, number)
        elif (key := _KEY.match(line)) and _holds(values, path := (*section, *_split(key[1]))):
            lines.setdefault(path, number)
    return lines


def _split(key: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in key.split("."))


def _holds(values: Any, path: tuple[str, ...]) -> bool:
    for step in path:
        if isinstance(values, list) and step.isdigit() and int(step) < len(values):
            values = values[int(step)]
        elif isinstance(values, dict) and step in values:
            values = values[step]
        else:
            return False
    return True


def _fill_lines(value: Any, path: tuple[str, ...], line: int, lines: dict[tuple[str, ...], int]) -> None:
    """Notes the line of the section for keys that have none of their own, as in inline tables."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        here = (*path, str(key))
        own = lines.get(here, line)
        if isinstance(inner, dict | list) or isinstance(value, dict):
            lines[here] = own
        _fill_lines(inner, here, own, lines)
