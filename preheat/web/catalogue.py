"""Finds the run folders below the folders that the server was given."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from preheat.run.layout import MARK, PROFILE

if TYPE_CHECKING:
    from preheat.run.remote_runs import RemoteRuns

__all__ = ["Catalogue", "MOST_FOLDERS", "RunEntry", "is_in_place", "is_run", "walk_folders"]

_DEPTH = 5
"""Folders between a given folder and a run: a study, an ablation and its arms need three."""
MOST_FOLDERS = 20_000
"""Folders to look into; a home folder with more is cut off, and the page says so."""
_FRESH_S = 2.0
"""Seconds for which the list of folders is used again."""
_FRESH_TO_FIND_S = 0.25
"""Seconds between two readings for runs that are not in the list."""
_SKIPPED = frozenset({"checkpoints", "tokenizer", "profile", "tracking", "node_modules", "__pycache__"})
_UNREAD = frozenset({"checkpoints", "tokenizer", "tracking"})
"""Folders of a run that the server does not read: they may be links, as to a larger disk."""


@dataclass(frozen=True)
class RunEntry:
    """A run folder.

    Attributes:
        id: its name in URLs; a path in a URL could leave the folders.
        path: resolved path of the folder.
        name: path relative to the given folder, for people.
        url: where the run is, if `path` is only a copy of its files without checkpoints; "" otherwise.
    """

    id: str
    path: Path
    name: str
    url: str = ""


class Catalogue:
    """Lists the run folders below some folders. Links to folders are not followed.

    Args:
        remotes: runs in object storage.

    Attributes:
        is_cut_off: there are too many folders; some were not looked into.
        linked: name of a run that is left out -> its file that is a link out of the folders.
    """

    def __init__(self, folders: tuple[Path, ...], remotes: tuple[RemoteRuns, ...] = ()):
        self._remotes = {remote.folder.resolve(): remote for remote in remotes}
        self.folders = (*(folder.resolve() for folder in folders), *self._remotes)
        self.is_cut_off = False
        self.linked: dict[str, str] = {}
        self._entries: dict[str, RunEntry] = {}
        self._listed = -_FRESH_S
        self._searched = -_FRESH_TO_FIND_S
        self._lock = threading.Lock()

    def list_runs(self) -> list[RunEntry]:
        """Returns all runs, sorted by name; the folders are read again if the last reading is two seconds old."""
        with self._lock:
            if time.monotonic() - self._listed >= _FRESH_S:
                self._read_folders()
            return list(self._entries.values())

    def _read_folders(self) -> None:
        self._entries = {entry.id: entry for entry in self._find()}
        self._listed = time.monotonic()

    def update_for(self, id: str) -> None:
        """Reads the folders again if a run is not in the list: it may be newer.

        Ids that do not exist cost a reading each, at most four a second.
        """
        if id in self._entries:
            return
        with self._lock:
            if id not in self._entries and time.monotonic() - self._searched >= _FRESH_TO_FIND_S:
                self._read_folders()
                self._searched = time.monotonic()

    def find(self, id: str) -> RunEntry:
        """Returns a run by its id.

        Raises:
            HTTPException: 404, there is none; it may have been deleted.
        """
        self.update_for(id)
        entry = self._entries.get(id)
        if entry is None or not is_run(entry.path) or not is_in_place(entry.path) or self._find_link(entry.path):
            raise HTTPException(404, "This run does not exist any more: its folder was deleted, moved or renamed.")
        return entry

    def _find(self) -> list[RunEntry]:
        entries: list[RunEntry] = []
        linked: dict[str, str] = {}
        self.is_cut_off = False
        for seen, (root, folder, holds_run) in enumerate(walk_folders(self.folders, _DEPTH)):
            if seen >= MOST_FOLDERS:
                self.is_cut_off = True
                break
            if not holds_run:
                continue
            name = str(folder.relative_to(root)) if folder != root else root.name
            if link := self._find_link(folder):
                linked[name] = link
                continue
            id = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
            remote = self._remotes.get(root)
            entries.append(RunEntry(id, folder, name, remote.find_url(folder) if remote else ""))
        self.linked = linked
        unique = {entry.id: entry for entry in entries}  # given folders may overlap
        return sorted(unique.values(), key=lambda entry: entry.name)

    def _find_link(self, run: Path) -> str | None:
        """Returns a file of a run that is a link out of the folders: a run of others could show any file."""
        for folder in (run, run / PROFILE):
            try:
                with os.scandir(folder) as entries:
                    links = [entry for entry in entries if entry.is_symlink() and entry.name not in _UNREAD]
            except OSError:
                continue
            for link in links:
                target = Path(os.path.realpath(link.path))
                if not any(target.is_relative_to(root) for root in self.folders):
                    return os.path.relpath(link.path, run)
        return None


def is_run(folder: Path) -> bool:
    """Returns True for the folder of a run. Folders that cannot be read are none, without an error."""
    return os.path.isfile(folder / MARK) and os.path.isfile(folder / "recipe.yaml")


def is_in_place(path: Path) -> bool:
    """Returns False if a resolved path has a link by now, which may lead out of the folders."""
    return os.path.realpath(path) == str(path)


def walk_folders(roots: tuple[Path, ...], depth: int) -> Iterator[tuple[Path, Path, bool]]:
    """Yields folders level by level with their root, and True for a run, whose folders are left out.

    Args:
        depth: folders between a root and the deepest one.
    """
    for root in roots:
        level = [root]
        for _ in range(depth + 1):
            below: list[Path] = []
            for folder in level:
                holds_run = is_run(folder)
                yield root, folder, holds_run
                if not holds_run:
                    below += _list_folders(folder)
            level = below


def _list_folders(folder: Path) -> list[Path]:
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
