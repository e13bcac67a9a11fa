"""Loads the recipe that a command names, or another trainer's configuration; explains how to write one of a model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.cli.options.foreign_options import RECOGNIZED, ForeignOptions

if TYPE_CHECKING:
    from preheat.interop.reading import ForeignConfig
    from preheat.recipe import Recipe

__all__ = ["load_recipe", "read_foreign_config", "refuse_model"]


def load_recipe(
    what: str,
    command: str,
    overrides: Sequence[str] | None = None,
    *,
    foreign: ForeignOptions = RECOGNIZED,
    devices: int | None = None,
    warn: bool = True,
) -> Recipe:
    """Returns the recipe of a file, or a built-in one by its name; also of another trainer's configuration.

    Args:
        what: as the user typed it.
        command: name of the command, for the message.
        overrides: `key=value` each.
        foreign: how another trainer's file is read.
        devices: number of devices, for another trainer's configuration, which does not state it.
        warn: as for `preheat.recipe.load`.

    Raises:
        RecipeError: there is no such recipe, it is a model, or the recipe is wrong.
    """
    from preheat import recipe as recipes
    from preheat.errors import RecipeError
    from preheat.sanitize import shorten

    refuse_model(what, command)
    if config := read_foreign_config(what, overrides or [], foreign=foreign, devices=devices, warn=warn):
        if not config.names_data:
            raise RecipeError(f"{shorten(what, 200)}: names no data to train on; add --set data.source=PATH")
        return config.recipe
    return recipes.load(what, overrides or [], warn=warn)


def read_foreign_config(
    what: str,
    overrides: Sequence[str] = (),
    *,
    foreign: ForeignOptions = RECOGNIZED,
    devices: int | None = None,
    warn: bool = True,
) -> ForeignConfig | None:
    """Reads another trainer's configuration, recognized by its keys; arguments as for `load_recipe`.

    Returns:
        None if it is a recipe.

    Raises:
        RecipeError: no such file or trainer, or the configuration is wrong.
    """
    from preheat import recipe as recipes
    from preheat.errors import RecipeError, suggest_nearest
    from preheat.interop.formats import FORMATS
    from preheat.interop.reading import find_format, read_config
    from preheat.interop.stand_in import drop_missing_kernels, shorten_assumed_length
    from preheat.interop.torchtitan_registry import split_name
    from preheat.sanitize import shorten

    name = foreign.format
    if name is not None and name not in FORMATS:
        raise RecipeError(f"--from: {shorten(name)}: not a known format; {suggest_nearest(name, list(FORMATS))}")
    text, where = _read_script(what) or recipes.read_file(what)
    format = find_format(text, where, FORMATS, name)
    if format is None:
        foreign.require_none(what)
        return None
    config = read_config(
        text,
        Path(split_name(what)[0]),
        format,
        where=where,
        overrides=overrides,
        changes=foreign.changes,
        devices=devices,
        deepspeed=foreign.deepspeed,
        accelerate=foreign.accelerate,
        warn=warn,
    )
    return shorten_assumed_length(drop_missing_kernels(config))


def _read_script(what: str) -> tuple[str, str] | None:
    """Returns the text of a script or notebook, and its name in errors; None if `what` is none.

    The name has `::FUNCTION` if the user chooses one of several configurations of a script.
    """
    from preheat.interop.shell import is_shell
    from preheat.interop.torchtitan_registry import split_name
    from preheat.recipe.yaml_io import LARGEST_FILE, read_text
    from preheat.sanitize import shorten

    file = Path(split_name(what)[0])
    if not (file.suffix in (".py", ".ipynb") or is_shell(file.name)) or not file.is_file():
        return None
    where = shorten(what, 200)
    # Notebooks carry the output of their cells, with pictures.
    largest = 64 * LARGEST_FILE if file.suffix == ".ipynb" else LARGEST_FILE
    return read_text(file, where, largest), where


def refuse_model(what: str, command: str) -> None:
    """Raises RecipeError if `what` is a model instead of a recipe; the message has the commands that make a recipe.

    Models are what `preheat plan` takes as such: a known name, a folder or its config.json, a size, a name on the hub.
    """
    from preheat import recipe as recipes
    from preheat.errors import RecipeError
    from preheat.models.hub_config import is_hub_name
    from preheat.sanitize import shorten

    # A named recipe takes precedence: only `preheat plan` takes models.
    if what in recipes.named_recipes() or not _may_be_model(what):
        return
    shown = shlex.quote(shorten(what, 200))
    if _is_model(what):
        raise RecipeError(
            f"{shorten(what, 200)}: is a model, not a recipe; preheat plan {shown} --out r.yaml writes one, then: "
            f"preheat {command} r.yaml"
        )
    # Anything else is reported by loading it as a recipe; of this it would only say that there is no such file.
    if is_hub_name(what) and not Path(what).exists() and Path(what).name != "config.json":
        raise RecipeError(
            f"{shown}: no such recipe file, and no model of that name on the hub (without a network: in its cache); "
            "preheat plan OWNER/NAME --out r.yaml writes a recipe for a model of the hub"
        )


def _may_be_model(what: str) -> bool:
    """Returns False for the name of a recipe file: a config.json is a model's, every other file a recipe's."""
    from preheat.interop.torchtitan_registry import split_name

    name, configuration = split_name(what)  # of a Python file that has several
    if configuration is not None:
        return False
    file = Path(name)
    try:
        if file.is_file():
            return file.name == "config.json"
        return file.suffix not in (".yaml", ".yml")
    except (OSError, ValueError):  # too long, or holds NUL: loading it says so
        return False


def _is_model(what: str) -> bool:
    from preheat.errors import RecipeError
    from preheat.models import presets
    from preheat.models.hub_config import find_hub_folder

    file = Path(what)
    if file.name == "config.json" or file.is_dir():
        return file.is_file() or (file / "config.json").is_file()
    if re.fullmatch(r"\d+(\.\d+)?[KMB]", what):
        return True
    try:
        presets.resolve_hub_name(what)
    except RecipeError:
        return find_hub_folder(what) is not None
    return True
