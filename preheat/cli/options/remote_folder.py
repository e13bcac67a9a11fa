"""Folders that a command reads, on this machine or at a URL."""

from __future__ import annotations

from preheat.cli.views.output import say
from preheat.storage import is_url

__all__ = ["find_local_folder"]


def find_local_folder(path: str) -> str:
    """Returns the path, or of a URL the local folder after it was downloaded.

    Raises:
        RecipeError: the URL's backend is not installed.
        RunError: the URL holds no run and no export, or cannot be read.
    """
    if not is_url(path):
        return path
    from preheat.run.remote_copy import RemoteCopy

    return str(RemoteCopy(path).fetch(lambda message: say(message, error=True)))
