"""Finds the data files, recipes and model folders below the folders that the server was given."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from starlette.exceptions import HTTPException

from preheat.run.layout import MARK
from preheat.web.catalogue import is_in_place

__all__ = ["FileKind", "UserFile", "UserFiles"]

FileKind = Literal["data", "recipe", "model"]

_DATA = frozenset({".csv", ".json", ".jsonl", ".parquet", ".txt"})
_RECIPES = frozenset({".yaml", ".yml"})
_DEPTH = 5
_MOST = 500
"""Files in a list to choose from."""
_MOST_FOLDERS = 20_000
_FRESH_S = 5.0
_SKIPPED = frozenset({"node_modules", "__pycache__"})
_MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class UserFile:
    """A file, or the folder of a model.

    Attributes:
        id: its name in URLs and forms; a path there could leave the folders.
        name: path relative to the given folder, for people.
    """

    id: str
    path: Path
    name: str
    kind: FileKind


class UserFiles:
    """Lists files below some folders; links are not followed, and the folders of runs are skipped."""

    def __init__(self, folders: tuple[Path, ...]):
        self._folders = tuple(folder.resolve() for folder in folders)
        self._files: dict[str, UserFile] = {}
        self._listed = -_FRESH_S
        self._lock = threading.Lock()

    def list_files(self, kind: FileKind) -> list[UserFile]:
        """Returns the files of a kind, sorted by name."""
        with self._lock:
            if time.monotonic() - self._listed >= _FRESH_S:
                self._files = {file.id: file for file in self._find()}
                self._listed = time.monotonic()
            files = [file for file in self._files.values() if file.kind == kind]
        return sorted(files, key=lambda file: file.name)[:_MOST]

    def find(self, id: str, kind: FileKind) -> UserFile:
        """Returns a file by its id.

        Raises:
            HTTPException: 404, there is none of this kind; it may have been deleted.
        """
        for file in self.list_files(kind):
            if file.id == id and os.path.exists(file.path) and is_in_place(file.path):
                return file
        raise HTTPException(404, f"This {kind} file does not exist any more; choose another one.")

    def _find(self) -> Iterator[UserFile]:
        seen = 0
        for root in self._folders:
            for place, folders, names in os.walk(root):
                folder = Path(place)
                seen += 1
                depth = len(folder.relative_to(root).parts)
                if seen > _MOST_FOLDERS:
                    return
                if MARK in names:  # a run, or another result of preheat
                    folders.clear()
                    continue
                if any(name in names for name in _MODEL_FILES):
                    folders.clear()
                    yield _describe(folder, root, "model")
                    continue
                folders[:] = (
                    sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
                    if depth < _DEPTH
                    else []
                )
                for name in names:
                    suffix = os.path.splitext(name)[1].lower()
                    file = folder / name
                    if name.startswith(".") or suffix not in _DATA | _RECIPES or os.path.islink(file):
                        continue
                    yield _describe(file, root, "data" if suffix in _DATA else "recipe")


def _describe(path: Path, root: Path, kind: FileKind) -> UserFile:
    id = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    return UserFile(id, path, str(path.relative_to(root)) if path != root else root.name, kind)
