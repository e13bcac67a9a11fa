"""Recipes: the model, the data and the techniques of a run, read from and written to YAML. No torch.

>>> recipe = parse("model: {size: 15M}\\ndata: {source: stdlib}\\nstop: {max_steps: 10}")
>>> recipe.model.size, recipe.batch.size
('15M', 32)
>>> parse("modle: {}")
Traceback (most recent call last):
...
preheat.errors.RecipeError: recipe:1: unknown key 'modle'; did you mean 'model'?
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core import Recipe
from preheat.core.field_types import Bound, Count, Fraction, Long, NonNegative, NonNegativeInt, Positive, Seed
from preheat.core.schema import (
    Batch,
    Checkpoint,
    Data,
    Evaluate,
    Hardware,
    Model,
    Optimizer,
    Parallel,
    Sample,
    Schedule,
    Stop,
    Tracking,
    field_docs,
)
from preheat.errors import RecipeError, suggest_nearest
from preheat.recipe.consistency import check
from preheat.recipe.named import NamedRecipe, built_in, named_recipes
from preheat.recipe.unused_keys import find_unused_keys
from preheat.recipe.validate import RecipeReader, build_json_schema
from preheat.recipe.yaml_io import compose, read_text, write
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = [
    "Batch",
    "Bound",
    "Checkpoint",
    "Count",
    "Data",
    "Evaluate",
    "Hardware",
    "Long",
    "Model",
    "NamedRecipe",
    "NonNegative",
    "Optimizer",
    "Parallel",
    "Positive",
    "Recipe",
    "Sample",
    "Schedule",
    "Seed",
    "Fraction",
    "Stop",
    "Tracking",
    "NonNegativeInt",
    "to_values",
    "built_in",
    "check",
    "dump",
    "field_docs",
    "build_json_schema",
    "load",
    "named_recipes",
    "override",
    "parse",
    "read_file",
    "read_values",
    "has_key",
]


_log = logging.getLogger("preheat.recipe")  # shown by the command line; programs configure it themselves


def parse(text: str, *, where: str = "recipe", overrides: Sequence[str] = (), warn: bool = False) -> Recipe:
    """Parses a recipe from YAML text.

    Args:
        text: the YAML.
        where: name of the text in errors, usually the file's.
        overrides: settings of the form `a.b=c`, as after `--set`; values are parsed as YAML.
        warn: log keys that have no effect (`preheat.recipe.unused_keys`).

    Raises:
        RecipeError: all problems, one per line: file, line, key, value and the closest known name.
    """
    values, lines = compose(text, where)
    return _read(values, where, lines, {}, overrides, warn=warn)


def read_values(
    values: object,
    *,
    where: str,
    sources: Mapping[tuple[str, ...], str],
    overrides: Sequence[str] = (),
    warn: bool = False,
) -> Recipe:
    """Returns the recipe of plain values that were made from something else, such as another trainer's file.

    Args:
        values: as in the YAML of a recipe.
        where: name in errors of what no source is known of.
        sources: key -> what its value was made from, to begin an error's line with.
        overrides, warn: as for `parse`.

    Raises:
        RecipeError: all problems, one per line.
    """
    return _read(values, where, {}, dict(sources), overrides, warn=warn)


def _read(
    values: object,
    where: str,
    lines: dict[tuple[str, ...], int],
    assigned: dict[tuple[str, ...], str],
    overrides: Sequence[str],
    *,
    warn: bool,
) -> Recipe:
    """Returns the recipe of plain values with overrides applied.

    Args:
        lines: line of each key in `where`.
        assigned: what errors name in place of file and line.
    """
    # The values before any override and after each one, to find the override that a problem came with.
    steps = [values]  # after each override
    for item in overrides:
        values = _assign(values, item)
        steps.append(values)
        key = tuple(item.split("=", 1)[0].strip().split("."))
        # An override replaces all keys inside its own, so errors there no longer belong to an earlier line or override.
        for at in [a for a in assigned if a[: len(key)] == key]:
            del assigned[at]
        for at in [a for a in lines if a[: len(key)] == key]:
            del lines[at]
        assigned[key] = f"--set {shorten(item)}"
    reader = RecipeReader(where, lines, assigned)
    try:
        recipe = reader.recipe(values)
    except RecipeError:
        for at, message in reader.found:
            # A key of the file may be invalid only in combination with an override: blame the override then.
            if at not in assigned and (n := _find_first_wrong(at, message, steps)):
                assigned[at] = f"--set {shorten(overrides[n - 1])}"
        reader.refuse()
        raise
    # Only for a recipe without errors, which would hide among warnings.
    for name, message in find_unused_keys(recipe) if warn else ():
        _log.warning("%s: %s: %s", reader.location(tuple(name.split("."))), name, message)
    return recipe


def _find_first_wrong(at: tuple[str, ...], message: str, steps: Sequence[object]) -> int:
    """Returns the index of the first values in which the key has this problem; 0 if all have it."""
    for n, values in enumerate(steps):
        reader = RecipeReader("", {})
        with suppress(RecipeError):
            reader.recipe(values)
        if (at, message) in reader.found:
            return n
    return 0


def _assign(values: object, item: str) -> object:
    key, equals, raw = item.partition("=")
    if not equals or not all(step.strip() for step in key.split(".")):
        raise RecipeError(f"--set {shorten(item)}: write it as key=value, e.g. --set batch.size=64")
    value, _ = compose(raw, f"--set {shorten(item)}", numbered=False)
    # `key=` sets null, but `compose` reads empty text as an empty mapping.
    value = None if raw.strip() == "" else value
    path = tuple(key.strip().split("."))
    if not isinstance(values, Mapping):
        return values  # RecipeReader rejects these
    # Copies along the path: the caller's values, one of `steps`, must not change.
    values = dict(values)
    at = values
    for step in path[:-1]:
        inner = at.get(step)
        if step in at and inner is not None and not isinstance(inner, Mapping):
            raise RecipeError(
                f"--set {shorten(item)}: '{shorten(step)}' is {quote_value(inner)}, which has no settings inside"
            )
        # A section that is absent or null begins empty.
        at[step] = dict(inner or {})
        at = at[step]
    at[path[-1]] = value
    return values


def load(path: str | Path, overrides: Sequence[str] = (), *, warn: bool = True) -> Recipe:
    """Loads a recipe from a YAML file, or by the name of a built-in or installed one.

    Args:
        overrides: settings that replace keys of the recipe, such as `batch.size=8`.
        warn: log keys that the recipe states and nothing reads.

    Raises:
        RecipeError: no such file or recipe, or it is wrong; the message has the line, the key and the fix.

    Example:
        >>> load("demo", ["batch.size=8"]).batch.size
        8
    """
    text, where = read_file(path)
    return parse(text, where=where, overrides=overrides, warn=warn)


def has_key(path: str | Path, key: str, overrides: Sequence[str] = ()) -> bool:
    """Returns True if a recipe or an override states a key, even with its default.

    Example:
        >>> has_key("demo", "data.source"), has_key("demo", "data.text"), has_key("demo", "data.text", ["data.text=a"])
        (True, False, True)
    """
    text, where = read_file(path)
    values: object = compose(text, where)[0]
    for item in overrides:
        values = _assign(values, item)
    for step in key.split("."):
        if not isinstance(values, Mapping) or step not in values:
            return False
        values = values[step]
    return True


def read_file(path: str | Path) -> tuple[str, str]:
    """Returns the text of a recipe by its file or name, and its name in errors."""
    # A file takes precedence over a recipe of that name.
    file = Path(path)
    where = shorten(str(path), 200)
    if not _is_there(file):  # a folder of the same name does not hide a named recipe
        known = named_recipes()
        if str(path) not in known and _is_there(file, folder=True):
            raise RecipeError(f"{where}: is a folder; name a recipe file")
        if str(path) not in known:
            raise RecipeError(
                f"{where}: no such file, and no recipe of that name; {suggest_nearest(str(path), list(known))}"
            )
        file = known[str(path)].path
    elif file.suffix.lower() in _DATA:
        raise RecipeError(
            f"{where}: is data, not a recipe; name it in one: preheat init fine-tune, then data.source: {where}"
        )
    return read_text(file, where), where


_DATA = (".jsonl", ".parquet", ".csv", ".txt", ".md", ".py")
"""Suffixes of data files, which a user may pass in place of a recipe. JSON is missing: it is YAML too."""


def _is_there(file: Path, *, folder: bool = False) -> bool:
    try:
        return file.exists() and file.is_dir() == folder
    except (OSError, ValueError):  # a name that is too long, or holds NUL, names no file
        return False


def override(recipe: Recipe, *items: str, where: str | None = None) -> Recipe:
    """Returns the recipe with `a.b=c` settings replaced.

    Args:
        where: prefix of messages; by default the recipe's name.
    """
    # Through plain values and back, so that an override is validated like a file.
    values: object = to_values(recipe)
    for item in items:
        values = _assign(values, item)
    return RecipeReader(recipe.name if where is None else where, {}).recipe(values)


def to_values(recipe: Recipe) -> JsonObject:
    """Returns the recipe as plain values, all defaults written out."""
    values = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    return {
        key: {name: dataclasses.asdict(t) for name, t in value.items()}
        if key == "techniques"
        else (
            {k: dict(v) if isinstance(v, Mapping) else v for k, v in dataclasses.asdict(value).items()}
            if dataclasses.is_dataclass(value) and not isinstance(value, type)
            else value
        )
        for key, value in values.items()
    }


def dump(recipe: Recipe) -> str:
    """Returns the recipe as YAML with every default written out; `parse` reads the same recipe from it."""
    return write(to_values(recipe))
