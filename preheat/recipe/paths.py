"""Makes the paths in a recipe absolute, so that a run can be opened from any working directory. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from preheat.core import Recipe

__all__ = ["anchor_paths", "list_possible_paths", "shorten_paths"]

_KEYS = {
    "model": ("path",),
    "data": ("source", "template", "tokenizer", "validation"),
    "evaluate": ("forgetting", "tasks"),
    "sample": ("draft_model",),
}
"""Settings that may hold a path or something else (a model on the hub, a fraction)."""
_NAMES = ("tasks", "template")
"""Those that may also hold built-in names: a value is a path only if it has a suffix."""
_BUILT_IN = ("stdlib", "docstrings")
"""Values of `data.source` that name no file, whatever the working directory holds."""
_OF_TECHNIQUES = ("cache", "model", "scores", "start", "teacher")
"""Settings of techniques that may hold a path."""


def anchor_paths(recipe: Recipe, home: Path | None = None) -> Recipe:
    """Returns the recipe with paths that exist in `home` (default: the working directory) made absolute.

    Example:
        >>> from preheat.recipe import Model, Stop
        >>> anchor_paths(Recipe(model=Model(path="gpt2"), stop=Stop(max_steps=1)), Path("/nowhere")).model.path
        'gpt2'
    """
    home = home or Path.cwd()
    return _change_paths(
        recipe,
        lambda value: _anchor_path(value, home),
        lambda name: _anchor_path(name, home) if Path(name).suffix else name,
    )


def shorten_paths(recipe: Recipe) -> Recipe:
    """Returns the recipe for publication: absolute paths cut to their last component, URLs without credentials.

    Example:
        >>> from preheat.recipe import Model, Stop
        >>> shorten_paths(Recipe(model=Model(path="/home/me/base"), stop=Stop(max_steps=1))).model.path
        'base'
    """
    # Not among `_KEYS`: trackers create this folder, so a path that does not exist yet is one, too.
    folder = recipe.tracking.folder
    recipe = replace(recipe, tracking=replace(recipe.tracking, folder=folder and _bare(folder)))
    return _change_paths(recipe, _bare, _bare)


def _bare(value: str) -> str:
    """Returns a path, name or URL as it can be published.

    Example:
        >>> _bare("/home/me/base"), _bare("https://me:secret@host/rows.jsonl?signature=1"), _bare("me/rows")
        ('base', 'https://host/rows.jsonl', 'me/rows')
    """
    scheme, separator, rest = value.partition("://")
    if not separator:
        return Path(value).name if Path(value).is_absolute() else value
    if scheme == "file":
        return Path(rest).name
    # A signed URL has its credentials in the query.
    address, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{address.rpartition('@')[2]}{slash}{path}"


def list_possible_paths(recipe: Recipe) -> list[str]:
    """Returns all settings of the recipe that are paths, or names of the hub, which nothing here tells from a path.

    Example:
        >>> from preheat.recipe import Model, Stop
        >>> list_possible_paths(Recipe(model=Model(path="gpt2"), stop=Stop(max_steps=1)))
        ['gpt2']
    """
    values: list[str] = []

    def note(value: str) -> str:
        values.append(value)
        return value

    _change_paths(recipe, note, lambda name: note(name) if Path(name).suffix else name)
    return values


def _change_paths(recipe: Recipe, of_path: Callable[[str], str], of_name: Callable[[str], str]) -> Recipe:
    """Returns the recipe with its paths changed by `of_path`, and those of `_NAMES` by `of_name`."""

    def change_value(value: object, change: Callable[[str], str]) -> object:
        if isinstance(value, tuple):
            return tuple(change_value(part, change) for part in value)
        # An item of a list of sources, with settings of its own.
        if isinstance(value, dict):
            return value | {"source": change_value(value.get("source"), change)}
        return change(value) if isinstance(value, str) and value and value not in _BUILT_IN else value

    changes: dict[str, Any] = {
        # Values stay of their type: `replace` copies the frozen sections.
        part: replace(
            section, **{key: change_value(getattr(section, key), of_name if key in _NAMES else of_path) for key in keys}
        )
        for part, keys in _KEYS.items()
        for section in [getattr(recipe, part)]
    }
    techniques = {}
    for name, technique in recipe.techniques.items():
        names = [field.name for field in dataclasses.fields(technique)]  # type: ignore[arg-type]
        # By the name of the setting, since the types of paths and of other text are the same.
        keys = [key for key in names if key in _OF_TECHNIQUES]
        moved = {key: change_value(getattr(technique, key), of_path) for key in keys}
        techniques[name] = replace(technique, **moved) if moved else technique  # type: ignore[type-var]
    return replace(recipe, techniques=techniques, **changes)


def _anchor_path(value: str, home: Path) -> str:
    try:
        path = Path(value).expanduser()
        # An absolute path replaces `home`; a relative one that does not exist may be a name of the hub.
        return str(home / path) if path.is_absolute() or (home / path).exists() else value
    except (OSError, RuntimeError, ValueError):  # too long for a path, `~` without a home, a null byte
        return value
