"""Edits another trainer's file: finds the keys for a change of the recipe, and writes the text with them. No torch."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

from preheat.errors import RecipeError
from preheat.interop.reading import ForeignFile
from preheat.interop.script import ARGUMENT_CALLS
from preheat.interop.shell import is_shell
from preheat.interop.trl import TRL
from preheat.interop.writing import Write
from preheat.recipe import Recipe
from preheat.recipe.differences import flatten_leaves

__all__ = ["PACKING", "Path", "edit_text", "find_changed_keys", "find_writer"]

_FIRST_LIST = re.compile(
    r"^( *)[^\s#-][^\n#:]*:[ \t]*(?:[&!][^\s#]+[ \t]*)?(?:#[^\n]*)?\n(?:[ \t]*(?:#[^\n]*)?\n)*( *)- ", re.MULTILINE
)
"""A key of a list, with its anchor and comments, up to the first item: the indents are the groups."""

Path = tuple[str, ...]
"""The steps to a key."""

PACKING: Mapping[str, Mapping[Path, object]] = {
    "axolotl": {("sample_packing",): True},
    "llamafactory": {("packing",): True, ("neat_packing",): True},
    "trl": {("packing",): True},
}
"""Format -> the keys that pack the rows of the data, which a recipe always does."""


def find_writer(file: ForeignFile) -> Write | None:
    """Returns what writes a recipe in the keys of a file; None if nothing does."""
    if is_shell(file.path.name):
        return None  # its flags depend on the rest of the script
    # The files of transformers' Trainer and of TRL spell the arguments that both have alike.
    return file.format.write or (TRL.write if file.format.name == "transformers" else None)


def find_changed_keys(file: ForeignFile, before: Recipe, after: Recipe) -> dict[Path, object] | None:
    """Returns the keys of a file that a change of its recipe changes, with their new values.

    Args:
        before: the recipe as it was read.

    Returns:
        None if the format has no writer, or the file cannot say the change.
    """
    write = find_writer(file)
    if write is None:
        return None
    try:
        was, written = write(before), write(after)
    except RecipeError:  # the recipe has no such form at all
        return None
    old, new = flatten_leaves(dict(was.values)), flatten_leaves(dict(written.values))
    call = next((name for name in file.values if name.partition("#")[0] in ARGUMENT_CALLS), None)
    keys: dict[Path, object] = {}
    for name in {**old, **new}:
        path = (*(() if call is None else (call,)), *name.split("."))
        present = _look_up(file.values, path)
        if name not in old and present is None and name in written.defaults:
            continue  # the trainer does it without the key
        # A key that is gone switches something on that is the trainer's default otherwise.
        if name not in old or name not in new or old[name] != new[name]:
            keys[path] = _join(present, new.get(name))
    return keys or None


def _look_up(values: object, path: Path) -> object:
    for step in path:
        values = values.get(step) if isinstance(values, Mapping) else None
    return values


def _join(present: object, new: object) -> object:
    """Returns a list with the items of the file's own list first, such as its plugins; other values as they are."""
    if not isinstance(present, list) or not isinstance(new, list):
        return new
    return [*present, *(item for item in new if item not in present)]


def edit_text(file: ForeignFile, changes: Mapping[Path, object]) -> str:
    """Returns the text of a file with other values of some keys; comments, anchors and order are kept.

    Args:
        changes: path of a key -> its value; None removes the key.

    Raises:
        RecipeError: the file is a script, or a key of it cannot be changed.
    """
    if file.is_script:
        raise RecipeError(f"{file.path}: is a script, which is not rewritten")
    if file.text.lstrip().startswith("{") and file.path.suffix == ".json":
        values = json.loads(file.text)
        _change(values, changes)
        return json.dumps(values, indent=_find_indent(file.text), ensure_ascii=False) + "\n"
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10_000  # long lines stay whole
    # ruamel writes all lists alike: as the file's first one is.
    first = _FIRST_LIST.search(file.text)
    offset = len(first[2]) - len(first[1]) if first else 0
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    document = yaml.load(file.text)
    _change(document, changes)
    stream = io.StringIO()
    yaml.dump(document, stream)
    return stream.getvalue()


def _change(values: Any, changes: Mapping[Path, object]) -> None:
    for (*sections, last), value in changes.items():
        at = values
        for section in sections:
            at = at.setdefault(section, {})
        present = at.get(last)
        if value is None:
            at.pop(last, None)
        elif isinstance(present, list) and isinstance(value, list) and value[: len(present)] == present:
            present.extend(value[len(present) :])  # the list keeps its form
        else:
            at[last] = value


def _find_indent(text: str) -> int:
    indented = re.search(r"\n( +)\"", text)
    return len(indented[1]) if indented else 2
