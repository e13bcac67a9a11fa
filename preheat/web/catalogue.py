"""Finds the run folders below the folders that the server was given."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from preheat.run.layout import MARK, PROFILE

if TYPE_CHECKING:
    from preheat.run.remote_runs import RemoteRuns

__all__ = ["Catalogue", "RunEntry", "is_in_place", "is_run", "list_folders"]

_DEPTH = 5
"""Folders between a given folder and a run: a study, an ablation and its arms need three."""
_MOST_FOLDERS = 20_000
"""Folders to look into; a home folder with more is cut off, and the page says so."""
_FRESH_S = 2.0
"""Seconds for which the list of folders is used again."""
_FRESH_TO_FIND_S = 0.25
"""The same, for a run that is not in it."""
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
        self._lock = threading.Lock()

    def list_runs(self, fresh_s: float = _FRESH_S) -> list[RunEntry]:
        """Returns all runs, sorted by name; the folders are read again if the last reading is older than `fresh_s`."""
        with self._lock:
            if time.monotonic() - self._listed >= fresh_s:
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
            # It may be newer than the list. Ids that do not exist cost a listing each, at most four a second.
            self.list_runs(_FRESH_TO_FIND_S)
            entry = self._entries.get(id)
        if entry is None or not is_run(entry.path) or not is_in_place(entry.path) or self._find_link(entry.path):
            raise HTTPException(404, "This run does not exist any more: its folder was deleted, moved or renamed.")
        return entry

    def _find(self) -> list[RunEntry]:
        entries: list[RunEntry] = []
        seen = 0
        linked: dict[str, str] = {}
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
                    if is_run(folder):
                        name = str(folder.relative_to(root)) if folder != root else root.name
                        if link := self._find_link(folder):
                            linked[name] = link
                            continue
                        id = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
                        remote = self._remotes.get(root)
                        entries.append(RunEntry(id, folder, name, remote.find_url(folder) if remote else ""))
                        continue
                    below += list_folders(folder)
                level = below
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
