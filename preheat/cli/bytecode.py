"""Keeps compiled Python modules between commands if the environment tells Python not to."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from preheat.cache_folder import cache_folder, create_own_folder

__all__ = ["keep_bytecode"]


def keep_bytecode(package: str = "torch") -> None:
    """Keeps compiled modules in preheat's cache folder if `PYTHONDONTWRITEBYTECODE` is set, for child processes too.

    Many containers set it. Each command would compile torch and transformers again, which takes seconds. Changes
    nothing if Python was told where to keep them (`PYTHONPYCACHEPREFIX`), if others can write to the folder, or if it
    cannot be written.

    Args:
        package: changes nothing either if this package is compiled already, as some installers do it.
    """
    # The option -B is meant for this very command; the variable usually for an image.
    if not os.environ.get("PYTHONDONTWRITEBYTECODE") or not sys.dont_write_bytecode or sys.pycache_prefix is not None:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.cached is None or Path(spec.cached).is_file():
        return
    try:
        folder = cache_folder().absolute() / "pycache"
        if not create_own_folder(folder):
            return
    # As Python itself, which says nothing if it cannot write; RuntimeError: the user has no home.
    except (OSError, RuntimeError):
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    # Child processes read the variables.
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    del os.environ["PYTHONDONTWRITEBYTECODE"]
