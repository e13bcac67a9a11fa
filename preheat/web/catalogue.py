"""Finds the run folders below the folders that the server was given."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException

from preheat.run.layout import MARK

__all__ = ["Catalogue", "RunEntry", "list_folders"]

_DEPTH = 5
"""Folders between a given folder and a run: a study, an ablation and its arms need three."""
_MOST_FOLDERS = 20_000
"""Folders to look into; a home folder with more is cut off, and the page says so."""
_FRESH_S = 2.0
"""Seconds for which the list of folders is used again."""
_SKIPPED = frozenset({"checkpoints", "tokenizer", "profile", "tracking", "node_modules", "__pycache__"})


@dataclass(frozen=True)
class RunEntry:
    """A run folder.

    Attributes:
        id: its name in URLs; a path in a URL could leave the folders.
        path: resolved path of the folder.
        name: path relative to the given folder, for people.
    """

    id: str
    path: Path
    name: str


class Catalogue:
    """Lists the run folders below some folders; links that lead out of them are not followed."""

    def __init__(self, folders: tuple[Path, ...]):
        self.folders = tuple(folder.resolve() for folder in folders)
        self.is_cut_off = False
        self._entries: dict[str, RunEntry] = {}
        self._listed = -_FRESH_S
        self._lock = threading.Lock()

    def list_runs(self) -> list[RunEntry]:
        """Returns all runs, sorted by name; the folders are read again if the last reading is older than 2 s."""
        with self._lock:
            if time.monotonic() - self._listed >= _FRESH_S:
                self._entries = {entry.id: entry for entry in self._find()}
                self._listed = time.monotonic()
            return list(self._entries.values())

    def find(self, id: str) -> RunEntry:
        """Returns a run by its id.

        Raises:
            HTTPException: 404, there is none; it may have been deleted.
        """
        entry = self._entries.get(id)
        if entry is None:
            self.list_runs()
            entry = self._entries.get(id)
        if entry is None or not (entry.path / MARK).exists():
            raise HTTPException(404, "This run does not exist any more: its folder was deleted, moved or renamed.")
        return entry

    def _find(self) -> list[RunEntry]:
        entries: list[RunEntry] = []
        seen = 0
        self.is_cut_off = False
        for root in self.folders:
            level = [root]
            for _ in range(_DEPTH + 1):
                below: list[Path] = []
                for folder in level:
                    seen += 1
                    if seen > _MOST_FOLDERS:
                        self.is_cut_off = True
                        break
                    if (folder / MARK).is_file() and (folder / "recipe.yaml").is_file():
                        name = str(folder.relative_to(root)) if folder != root else root.name
                        id = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
                        entries.append(RunEntry(id, folder, name))
                        continue
                    below += list_folders(folder)
                level = below
        unique = {entry.id: entry for entry in entries}  # given folders may overlap
        return sorted(unique.values(), key=lambda entry: entry.name)


def list_folders(folder: Path) -> list[Path]:
    """Returns the folders in a folder that may hold runs; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name not in _SKIPPED
            )
    except OSError:
        return []
