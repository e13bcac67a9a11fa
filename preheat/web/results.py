"""Finds the results of other commands below the folders: benchmarks, compressions, learning rate tests, profiles."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from starlette.exceptions import HTTPException

from preheat.report.page import GENERATOR
from preheat.run.layout import PROFILE
from preheat.web.catalogue import MOST_FOLDERS, is_in_place, walk_folders

__all__ = ["KINDS", "ResultEntry", "ResultFinder", "read_page"]

KINDS = {
    "bench.json": ("Benchmark", "preheat bench"),
    "inference.json": ("Inference benchmark", "preheat bench --inference"),
    "compress.json": ("Compression", "preheat compress"),
    "lr-range.json": ("Learning rate test", "preheat train --find-lr"),
    "profile.json": ("Profile", "preheat train --profile"),
}
"""File of figures -> the kind of result, and the command that writes it. Its page has the same name in .html."""

_DEPTH = 6
_FRESH_S = 2.0
_LARGEST_PAGE = 64 << 20
"""Bytes of a page; those of preheat have a few megabytes at most."""


@dataclass(frozen=True)
class ResultEntry:
    """A result.

    Attributes:
        id: its name in URLs.
        name: folder relative to the given folder, for people.
        figures: file with the figures.
        changed: seconds since 1970.
        parts: other pages that its page leads to, such as the profiles of a benchmark: link -> file.
    """

    id: str
    name: str
    figures: Path
    changed: float
    parts: dict[str, Path] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return KINDS[self.figures.name][0]

    @property
    def command(self) -> str:
        return KINDS[self.figures.name][1]

    @property
    def page(self) -> Path:
        return self.figures.with_suffix(".html")


class ResultFinder:
    """Lists the results below some folders; links that lead out of them are not followed."""

    def __init__(self, folders: tuple[Path, ...]):
        self._folders = tuple(folder.resolve() for folder in folders)
        self._entries: dict[str, ResultEntry] = {}
        self._listed = -_FRESH_S
        self._lock = threading.Lock()

    def list_results(self) -> list[ResultEntry]:
        """Returns all results, the newest first."""
        with self._lock:
            if time.monotonic() - self._listed >= _FRESH_S:
                self._entries = {entry.id: entry for entry in self._find()}
                self._listed = time.monotonic()
            return sorted(self._entries.values(), key=lambda entry: -entry.changed)

    def find(self, id: str) -> ResultEntry:
        """Returns a result by its id.

        Raises:
            HTTPException: 404, there is none; it may have been deleted.
        """
        entry = self._entries.get(id)
        if entry is None:
            self.list_results()
            entry = self._entries.get(id)
        if entry is None or not os.path.exists(entry.figures) or not is_in_place(entry.figures):
            raise HTTPException(404, "This result does not exist any more: its folder was deleted, moved or renamed.")
        return entry

    def _find(self) -> list[ResultEntry]:
        entries: list[ResultEntry] = []
        for root, folder, holds_run in islice(walk_folders(self._folders, _DEPTH), MOST_FOLDERS):
            # The other folders of a run hold no results, and checkpoints may have thousands of files.
            entries += _find_in(folder / PROFILE if holds_run else folder, root)
        return [*{entry.id: entry for entry in entries}.values()]


def _find_in(folder: Path, root: Path) -> list[ResultEntry]:
    if os.path.islink(folder):
        return []
    entries = []
    for name in KINDS:
        file = folder / name
        try:
            changed = file.stat().st_mtime
        except OSError:
            continue
        if not os.path.isfile(file) or os.path.islink(file):
            continue
        shown = str(folder.relative_to(root)) if folder != root else root.name
        id = hashlib.blake2b(os.fsencode(file), digest_size=8).hexdigest()
        entries.append(ResultEntry(id, shown, file, changed, _find_parts(folder) if name == "bench.json" else {}))
    return entries


def _find_parts(folder: Path) -> dict[str, Path]:
    """Returns the profiles of a benchmark's contenders, by the link that its page has."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.glob("profiles/*/profile.html"))
        if not path.is_symlink() and not path.parent.is_symlink()
    }


def read_page(file: Path) -> str:
    """Returns the text of a page that preheat wrote.

    Raises:
        HTTPException: 404, there is no such page, or preheat did not write it.
    """
    try:
        if not file.is_file() or not is_in_place(file):
            raise HTTPException(
                404, f"{file.name} does not exist, or is a link, which is not followed; run the command again."
            )
        if file.stat().st_size > _LARGEST_PAGE:
            raise HTTPException(404, f"{file.name} has more than {_LARGEST_PAGE >> 20} MiB; preheat did not write it.")
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise HTTPException(404, f"{file.name} cannot be read ({error.strerror}).") from None
    if GENERATOR not in text[:4096]:
        raise HTTPException(404, f"{file.name} was not written by preheat, and is not shown.")
    return text
