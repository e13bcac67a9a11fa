"""A local copy of the runs below a URL, for programs that only read: without checkpoints, and brought up to date."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from preheat.cache_folder import cache_folder, make_private
from preheat.errors import RunError
from preheat.files import compute_sha256
from preheat.run.layout import LABELS, PROFILE
from preheat.run.remote_copy import MANIFEST, Manifest, period_of, read_manifest
from preheat.storage import RemoteFolder, StorageError, Unreachable, digest_url

__all__ = ["RemoteRuns"]

_DEPTH = 5
"""Folders between the URL and a run."""
_MOST_RUNS = 2_000
_ENDED_PERIODS = 15
"""Periods after which a run whose session has ended is looked at again: it may have been resumed."""
_PROFILE_FILE = f"{PROFILE}/profile.json"


@dataclass
class _Known:
    """A run that was copied.

    Attributes:
        tag: of its manifest, which each upload replaces; "" if it could not be copied.
        is_active: the session that writes it has not ended.
        next_look: monotonic seconds.
    """

    tag: str
    is_active: bool
    next_look: float


class RemoteRuns:
    """The runs below a URL, or the one at it, in a folder of the cache.

    Args:
        url: such as s3://bucket/runs.

    Attributes:
        folder: holds a folder for each run, with the files at its top and its profile. Its labels are first the
            uploaded ones, and then those that are given on this machine.
        period: seconds between two updates that cost the storage little.
        problem: why the last update failed, as a sentence; "" if it did not.

    Example:
        runs = RemoteRuns("s3://bucket/runs")
        runs.update()  # copies what is new
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.folder = cache_folder() / "remote-runs" / digest_url(self.url)
        self.period = period_of(self.url)
        self.problem = ""
        self._remote: RemoteFolder | None = None
        self._known: dict[str, _Known] = {}

    def find_url(self, run: Path) -> str:
        """Returns the URL of a run in `folder`."""
        return self.url if "" in self._known else f"{self.url}/{run.relative_to(self.folder).as_posix()}"

    def update(self, say: Callable[[str], None] = lambda line: None) -> int:
        """Copies what is new, removes the runs that are gone, and returns the number of runs.

        Raises:
            RecipeError: the URL names no folder, or its backend is not installed.
            StorageError: there is no such folder, no access or no link. The runs stay as they were.
            RunError: the cache cannot be written.
        """
        if self._remote is None:
            self._remote = RemoteFolder(self.url)
        try:
            make_private(self.folder)
            found, problems, told = set(), [], time.monotonic()
            for name, remote, tag in self._find_runs(self._remote):
                found.add(name)
                if problem := self._update_run(name, remote, tag):
                    problems.append(problem)
                if time.monotonic() - told > 5:
                    say(f"{self.url}: {len(found)} runs so far")
                    told = time.monotonic()
            for name in self._list_copies() - {self._place(name) for name in found}:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        except OSError as error:
            raise RunError(
                f"{self.folder}: cannot be written ({error.strerror}); free disk space, or set PREHEAT_CACHE to "
                "another folder"
            ) from None
        self._known = {name: known for name, known in self._known.items() if name in found}
        more = f", and {len(problems) - 1} more runs" if len(problems) > 1 else ""
        self.problem = f"{problems[0]}{more}" if problems else ""
        return len(found)

    def watch(self, wait: Callable[[float], bool]) -> None:
        """Updates again and again, until `wait`, which gets the seconds until the next update, returns True.

        A fault becomes `problem`: the link may come back.
        """
        while not wait(self.period):
            try:
                self.update()
            except RunError as error:
                self.problem = str(error)

    def _place(self, name: str) -> str:
        """Returns the folder of a run in `folder`; the one at the URL itself has no name below it."""
        return name or PurePosixPath(self.url).name

    def _list_copies(self) -> set[str]:
        folders = (Path(folder) for folder, _, files in os.walk(self.folder) if files)
        return {folder.relative_to(self.folder).as_posix() for folder in folders if folder.name != PROFILE}

    def _find_runs(self, remote: RemoteFolder) -> Iterator[tuple[str, RemoteFolder, str]]:
        """Yields the name, folder and manifest's tag of each run; what is known to be a run is not always listed."""
        level, count = [""], 0
        for _ in range(_DEPTH + 1):
            below: list[str] = []
            for name in level:
                folder = remote.open_folder(name) if name else remote
                known = self._known.get(name)
                if known is not None and time.monotonic() < known.next_look:
                    yield name, folder, known.tag
                    continue
                folders, files = folder.list_folder()
                if MANIFEST not in files:
                    below += [f"{name}/{folder}".lstrip("/") for folder in folders]
                    continue
                count += 1
                if count > _MOST_RUNS:
                    raise StorageError(f"{self.url}: holds more than {_MOST_RUNS:,} runs; name a folder below it")
                yield name, folder, files[MANIFEST]
            level = below

    def _update_run(self, name: str, remote: RemoteFolder, tag: str) -> str:
        """Copies the files of a run that changed; returns a sentence if that is not possible now."""
        known = self._known.get(name)
        if known is None or known.tag != tag:
            try:
                manifest = read_manifest(remote)
                if manifest is not None and manifest.kind == "run":
                    _download(remote, manifest, self.folder / self._place(name))
            except Unreachable:
                raise
            except RunError as error:
                # While a run is written, an upload may remove an object before it is read here: the next update finds
                # its successor.
                self._known[name] = _Known("", is_active=True, next_look=0.0)
                return "" if known is not None and known.tag else str(error)
            known = self._known[name] = _Known(tag, manifest is not None and manifest.active, 0.0)
        if not known.is_active and time.monotonic() >= known.next_look:
            known.next_look = time.monotonic() + self.period * _ENDED_PERIODS
        return ""


def _download(remote: RemoteFolder, manifest: Manifest, folder: Path) -> None:
    """Replaces the files of a run that have other content in its manifest, and removes those that it lost."""
    wanted = {path: file for path, file in manifest.files.items() if _is_wanted(path)}
    # The state of a run is judged by the times of its files.
    written = remote.read_modified(f"{remote.root}/{MANIFEST}").timestamp()
    for path, file in wanted.items():
        target = folder / path
        if path == LABELS and target.exists():
            continue  # changed here
        if target.is_file() and target.stat().st_size == file.bytes and compute_sha256(target) == file.sha256:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".writing")
        os.close(handle)
        partial = Path(name)
        try:
            remote.download(file.object, partial)
            if compute_sha256(partial) != file.sha256:
                raise StorageError(f"{remote.url}/{path}: its checksum differs from the one that was uploaded")
            os.utime(partial, (written, written))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    for place in (folder, folder / PROFILE):
        for file_here in place.iterdir() if place.is_dir() else ():
            path = file_here.relative_to(folder).as_posix()
            if file_here.is_file() and path not in (*wanted, LABELS):
                file_here.unlink(missing_ok=True)


def _is_wanted(path: str) -> bool:
    """Returns True for the files that a page of a run is made from."""
    return path == _PROFILE_FILE or ("/" not in path and path != "report.html")
