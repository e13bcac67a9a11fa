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
from preheat.files import compute_sha256, lock_file
from preheat.run.layout import LABELS, PROFILE
from preheat.run.remote_copy import MANIFEST, Manifest, download_file, period_of, read_manifest
from preheat.storage import Missing, RemoteFolder, StorageError, Unreachable, digest_url

__all__ = ["RemoteRuns"]

_DEPTH = 5
"""Folders between the URL and a run."""
_MOST_FOLDERS = 5_000
"""Folders to list in an update: each is a request."""
_ENDED_PERIODS = 15
"""Periods after which a run whose session has ended is looked at again: it may have been resumed."""
_PROFILE_FILE = f"{PROFILE}/profile.json"


@dataclass
class _CopiedRun:
    """A run that was copied.

    Attributes:
        tag: of its manifest, which each upload replaces; "" if it could not be copied.
        is_run: it is a run, not an export.
        is_active: the session that writes it has not ended.
        next_look: monotonic seconds.
    """

    tag: str
    is_run: bool
    is_active: bool
    next_look: float


class RemoteRuns:
    """The runs below a URL, or the one at it, in a folder of the cache.

    Args:
        url: such as s3://bucket/runs.

    Attributes:
        folder: holds a folder for each run, with the files at its top and its profile. Its labels are first the
            uploaded ones, and then those that are given on this machine.
        period: seconds between two updates.
        problem: why the last update failed, as a sentence; "" if it did not.

    Example:
        runs = RemoteRuns("s3://bucket/runs")
        runs.update()  # copies what is new
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        # Resolved, as the catalogue's paths are: the cache may be a link.
        self.folder = (cache_folder() / "remote-runs" / digest_url(self.url)).resolve()
        self.period = period_of(self.url)
        self.problem = ""
        self._remote: RemoteFolder | None = None
        self._known: dict[str, _CopiedRun] = {}

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
            # Another server may follow the same URL.
            with self.folder.with_suffix(".lock").open("a") as lock:
                lock_file(lock, wait=True)
                problems = self._copy_new(self._remote, say)
        except OSError as error:
            raise RunError(
                f"{self.folder}: cannot be written ({error.strerror}); free disk space, or set PREHEAT_CACHE to "
                "another folder"
            ) from None
        more = f", and {len(problems) - 1} more runs" if len(problems) > 1 else ""
        self.problem = f"{problems[0]}{more}" if problems else ""
        return sum(known.is_run for known in self._known.values())

    def _copy_new(self, top: RemoteFolder, say: Callable[[str], None]) -> list[str]:
        """Brings the copies up to date, and returns a sentence for each run of which that is not possible now."""
        names: set[str] = set()
        problems = []
        last_line = time.monotonic()
        for name, remote, tag in self._find_runs(top):
            names.add(name)
            if problem := self._update_run(name, remote, tag):
                problems.append(problem)
            if time.monotonic() - last_line > 5:
                say(f"{self.url}: {len(names)} runs so far")
                last_line = time.monotonic()
        for name in self._list_copies() - {self._name_copy(name) for name in names}:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._known = {name: known for name, known in self._known.items() if name in names}
        return problems

    def watch(self, wait: Callable[[float], bool]) -> None:
        """Updates again and again, until `wait`, which gets the seconds until the next update, returns True.

        A fault becomes `problem`: the link may come back.
        """
        while not wait(self.period):
            try:
                self.update()
            except RunError as error:
                self.problem = str(error)
            except Exception as error:  # noqa: BLE001 - a backend's: the thread must go on, and the page says it
                self.problem = f"{self.url}: {type(error).__name__}: {error}"

    def _name_copy(self, name: str) -> str:
        """Returns the folder of a run in `folder`; the one at the URL itself has no name below it."""
        return name or PurePosixPath(self.url).name

    def _list_copies(self) -> set[str]:
        folders = (Path(folder) for folder, _, files in os.walk(self.folder) if files)
        return {folder.relative_to(self.folder).as_posix() for folder in folders if folder.name != PROFILE}

    def _find_runs(self, remote: RemoteFolder) -> Iterator[tuple[str, RemoteFolder, str]]:
        """Yields the name, folder and manifest's tag of each run; what is known to be a run is not always listed."""
        level, listed = [""], 0
        for _ in range(_DEPTH + 1):
            below: list[str] = []
            for name in level:
                folder = remote.open_folder(name) if name else remote
                known = self._known.get(name)
                if known is not None and time.monotonic() < known.next_look:
                    yield name, folder, known.tag
                    continue
                listed += 1
                if listed > _MOST_FOLDERS:
                    raise StorageError(f"{self.url}: holds more than {_MOST_FOLDERS:,} folders; name one of them")
                try:
                    folders, files = folder.list_folder()
                except Missing:
                    if not name:
                        raise
                    continue  # removed since its parent was listed
                if MANIFEST in files:
                    yield name, folder, files[MANIFEST]
                else:
                    below += [f"{name}/{folder}".lstrip("/") for folder in folders]
            level = below

    def _update_run(self, name: str, remote: RemoteFolder, tag: str) -> str:
        """Copies the files of a run that changed; returns a sentence if that is not possible now."""
        known = self._known.get(name)
        if known is None or known.tag != tag:
            try:
                manifest = read_manifest(remote)
                if manifest is not None and manifest.kind == "run":
                    _download(remote, manifest, self.folder / self._name_copy(name))
            except Unreachable:
                raise
            except (RunError, ValueError) as error:  # ValueError: a name that no file can have
                # While a run is written, an upload may remove an object before it is read here: the next update finds
                # its successor.
                self._known[name] = _CopiedRun("", is_run=True, is_active=True, next_look=0.0)
                return "" if known is not None and known.tag else str(error)
            is_run = manifest is not None and manifest.kind == "run"
            known = _CopiedRun(tag, is_run, manifest is not None and manifest.active, 0.0)
            self._known[name] = known
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
            download_file(remote, path, file, partial)
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
