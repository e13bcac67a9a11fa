"""Modules with techniques and trackers that are not installed as packages: `preheat --plugin my_module train ...`.

Processes that a command starts inherit them by the variable `PREHEAT_PLUGINS`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from preheat.errors import RecipeError
from preheat.sanitize import quote_value, shorten

__all__ = ["IMPORT_ERRORS", "add", "load"]

_VARIABLE = "PREHEAT_PLUGINS"

IMPORT_ERRORS = (ImportError, SyntaxError, LookupError, AttributeError, NameError, RuntimeError, TypeError, ValueError)
"""Errors that importing a third-party module may raise, its own mistakes included."""


def add(modules: Sequence[str]) -> None:
    """Adds modules for this process and those that it starts."""
    listed = [name for name in os.environ.get(_VARIABLE, "").split(",") if name]
    os.environ[_VARIABLE] = ",".join(dict.fromkeys([*listed, *modules]))


def load() -> None:
    """Imports all plugins; one that is imported already costs nothing.

    Raises:
        RecipeError: a module does not exist or cannot be imported.
    """
    names = [name for name in os.environ.get(_VARIABLE, "").split(",") if name]
    # A module beside the recipe: an installed command does not look in the working directory.
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except IMPORT_ERRORS as error:
            raise RecipeError(
                f"--plugin {quote_value(name)}: cannot be imported ({type(error).__name__}: "
                f"{shorten(str(error), 200)}); "
                "name a module of this folder or an installed one, such as my_plugin for my_plugin.py"
            ) from error
