"""preheat's cache: $PREHEAT_CACHE or ~/.cache/preheat, with private folders and atomic writes. No torch."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from preheat.errors import RunError
from preheat.files import to_json

__all__ = ["cache_folder", "is_private", "make_private", "create_own_folder", "require_storable", "store_json"]


def cache_folder() -> Path:
    """Returns $PREHEAT_CACHE, or ~/.cache/preheat."""
    folder = os.environ.get("PREHEAT_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "preheat"


def make_private(folder: Path) -> None:
    """Creates a folder and its missing parents with mode 0700; existing folders keep their mode."""
    for missing in (*reversed(folder.parents), folder):
        if not missing.is_dir():
            # One by one, because mkdir(parents=True) applies the mode to the last folder only.
            missing.mkdir(mode=0o700, exist_ok=True)


def create_own_folder(folder: Path) -> bool:
    """Creates a folder whose files are executed; returns True if only this user can write to it.

    Raises:
        OSError: the folder cannot be created.
    """
    make_private(folder)
    # lstat, so that a link to a folder of somebody else is rejected instead of followed.
    facts = folder.lstat()
    if (
        sys.platform != "win32"
        and facts.st_uid == os.getuid()
        and stat.S_ISDIR(facts.st_mode)
        and facts.st_mode & 0o077
    ):
        folder.chmod(0o700)
        # Read again, because some file systems ignore a change of mode.
        facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and is_private(facts)


def is_private(facts: os.stat_result) -> bool:
    """True if only this user, or root, can write to a file or folder; False on Windows, where the mode does not say."""
    if sys.platform == "win32":
        return False
    return facts.st_uid in (0, os.getuid()) and not facts.st_mode & 0o022


def store_json(path: Path, values: Mapping[str, object]) -> None:
    """Writes a file of measurements atomically.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        make_private(path.parent)
        # In the same folder, because a replacement is atomic only within one file system. Its name is unique, because
        # two processes may measure at once. Not `write_atomic`: a search stores many observations, and none needs a
        # sync.
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.stem, delete=False, encoding="utf-8"
        ) as partial:
            try:
                partial.write(to_json(values, indent=1) + "\n")
                partial.close()
                os.replace(partial.name, path)
            except BaseException:
                os.unlink(partial.name)
                raise
    except OSError as error:
        raise _describe_store_error(path, error) from None


def require_storable(path: Path) -> None:
    """Checks that `store_json` can write the file, before anything is measured.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        make_private(path.parent)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _describe_store_error(path, error) from None


def _describe_store_error(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path.parent}: cannot store the calibration there ({error.strerror}); "
        "set PREHEAT_CACHE to a folder that can be written"
    )
