"""Recipes that have a name: the built-in ones, and those of installed packages. No torch.

A package names the folder of its recipes, a subpackage with YAML files, in the entry-point group `preheat.recipes`:

    [project.entry-points."preheat.recipes"]
    my_package = "my_package.recipes"

The name of a recipe is that of its file. Files in the subfolder `chains` are chains of `preheat compress`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from preheat import plugins
from preheat.errors import RecipeError
from preheat.recipe.yaml_io import read_text
from preheat.sanitize import quote_value, shorten

__all__ = ["GROUP", "NamedRecipe", "built_in", "named_recipes"]

GROUP = "preheat.recipes"
"""The entry-point group of packages with recipes."""
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
"""Names of recipes; `15M` would be the size of a model."""


@dataclass(frozen=True)
class NamedRecipe:
    """A recipe's file.

    Attributes:
        package: the distribution that it comes from; None if it is built in.
    """

    path: Path
    package: str | None = None

    @property
    def is_chain(self) -> bool:
        return self.path.parent.name == "chains"

    def read_summary(self) -> str:
        """Returns the comment in the first line, which describes the recipe; empty if there is none."""
        first = read_text(self.path, shorten(str(self.path), 200)).partition("\n")[0]
        return shorten(first.lstrip("# "), 200) if first.startswith("#") else ""


def built_in() -> dict[str, Path]:
    """Returns the files of the built-in recipes by name, including chains (`preheat compress RUN --recipe NAME`)."""
    return {file.stem: file for file in _list_files(Path(__file__).parents[1] / "recipes")}


@functools.cache
def named_recipes() -> Mapping[str, NamedRecipe]:
    """Returns all recipes that have a name, in alphabetical order.

    Raises:
        RecipeError: a package has no folder of recipes where its entry point says, or a recipe has an invalid name or
            that of another recipe.

    Example:
        >>> named_recipes()["demo"].package is None, named_recipes()["edge"].is_chain
        (True, True)
    """
    recipes = {name: NamedRecipe(path) for name, path in built_in().items()}
    # A distribution may be found twice, as an editable one is; its entry points are then equal.
    for point in sorted(set(entry_points(group=GROUP)), key=lambda point: (point.value, point.name)):
        package = shorten(point.dist.name if point.dist is not None else point.value, 80)
        for path in _list_files(_find_folder(point, package)):
            name = path.stem
            fix = f"rename {shorten(str(path), 200)}, or uninstall {package}"
            if not _NAME.fullmatch(name):
                raise RecipeError(
                    f"{package}: recipe {quote_value(name)}: a name has letters, digits, '-', '_' and '.', and begins "
                    f"with a letter; {fix}"
                )
            if (other := recipes.get(name)) is not None:
                owner = f"{other.package} has" if other.package else "preheat has"
                raise RecipeError(f"{package}: recipe {name}: {owner} a recipe of this name already; {fix}")
            recipes[name] = NamedRecipe(path, package)
    return dict(sorted(recipes.items()))


def _list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.yaml"), key=lambda file: (file.stem, str(file)))


def _find_folder(point: EntryPoint, package: str) -> Path:
    """Returns the folder of a package's recipes.

    Raises:
        RecipeError: the entry point names no folder with YAML files.
    """
    try:
        spec = importlib.util.find_spec(point.value)
    except plugins.IMPORT_ERRORS as error:  # of the package above, which this imports
        reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
        raise RecipeError(
            f"{package}: entry point {GROUP}: {quote_value(point.value)} cannot be imported ({reason}); repair or "
            f"uninstall {package}"
        ) from error
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if _list_files(Path(place)):
            return Path(place)
    raise RecipeError(
        f"{package}: entry point {GROUP}: {quote_value(point.value)} is no folder with .yaml files; name a subpackage "
        f"that holds them (and add them to its package data), or uninstall {package}"
    )
