"""Writes a run folder.

A new run needs a folder that is new, empty, or holds only the files of a run that was interrupted before it began.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from preheat.core.run_records import EvaluationMetrics, Event, ProcessStatus, StepMetrics, SystemMetrics, Usage
from preheat.errors import RunError
from preheat.files import lock_file, to_json, write_atomic
from preheat.run.layout import MARK, STATUS, Mark, abbreviate, read_mark
from preheat.run.reader import Reader

__all__ = ["Silent", "Writer", "append_event", "check_folder"]

_BEGINNING = ("plan.json", "changes.json", "data.json", "environment.json", "events.jsonl", "lock", MARK)
"""Files that a run writes before recipe.yaml, in addition to tokenizer/ and an empty checkpoints/."""


_PARTIAL = re.compile(
    rf"(?:{'|'.join(map(re.escape, (*_BEGINNING, 'recipe.yaml')))})\.[0-9a-f]{{8}}\.writing|tokenizer\.writing"
)


def _find_run_files(folder: Path, mark: Mark | None) -> tuple[list[Path], list[Path]]:
    """Returns the existing (files, folders) that a run wrote into its folder before its recipe.yaml."""

    def is_own(place: Path) -> bool:
        """Returns False if the path goes through a symbolic link: preheat makes none, and it may lead elsewhere."""
        return not any(p.is_symlink() for p in (place, *place.parents) if p != folder and p.is_relative_to(folder))

    files = [folder / name for name in _BEGINNING if (folder / name).is_file()]
    files += [path for path in folder.iterdir() if path.is_file() and _PARTIAL.fullmatch(path.name)]
    folders = [folder / name for name in ("checkpoints", "tokenizer") if (folder / name).is_dir()]
    for name in mark.files if mark else ():
        place = folder / name
        # Whoever gave the folder away may have edited the mark: only files inside tokenizer/ are removed on its word.
        if place.is_relative_to(folder / "tokenizer") and ".." not in place.parts and place.is_file():
            files.append(place)
            folders += [above for above in place.parents if above.is_relative_to(folder / "tokenizer")]
    unfinished = folder / "tokenizer.writing"
    if mark and unfinished.is_dir() and is_own(unfinished):  # ours: the folder was empty when it was marked
        folders.append(unfinished)
        for place in unfinished.rglob("*"):
            (folders if place.is_dir() and not place.is_symlink() else files).append(place)
    # The deepest folders first: rmdir needs them empty.
    return [*filter(is_own, files)], sorted(filter(is_own, set(folders)), key=lambda path: -len(path.parts))


def _find_foreign_names(folder: Path) -> list[str]:
    """Returns the names in a folder that are not left from an interrupted start, and so rule out a new run there.

    Raises:
        RunError: the mark of the folder is damaged.
    """
    names = sorted(os.listdir(folder))
    mark = read_mark(folder)
    if mark is None:  # the process may have ended between its first two files
        begun = [n for n in names if (n == "lock" or _PARTIAL.fullmatch(n)) and (folder / n).is_file()]
        # preheat's lock is always empty: one with content is foreign.
        return [
            n
            for n in names
            if n not in begun or (folder / n).is_symlink() or (n == "lock" and (folder / n).stat().st_size)
        ]
    # A result of another command: all of it is foreign to a run.
    if mark.kind != "run":
        return names
    files, folders = _find_run_files(folder, mark)
    known = {*files, *folders}
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*") if path not in known})


def check_folder(path: Path, *, resume: bool) -> None:
    """Checks that a run can start or resume in a folder, without writing anything.

    Raises:
        RunError: the folder holds a run or foreign files, or no run to resume, or is not writable.
    """
    try:
        # The nearest folder that exists: this is the one that must be writable.
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise _describe_unwritable(path, "Not a directory")
        if not os.access(existing, os.W_OK | os.X_OK | os.R_OK):
            raise _describe_unwritable(path, "Permission denied")
        has_recipe = (path / "recipe.yaml").exists()
        if resume:
            if not has_recipe:
                raise RunError(f"{path}: holds no run to resume; run it without --resume first")
            _ = Reader(path).id  # raises if the mark is missing or damaged
            return
        # A recipe.yaml without a mark is somebody's own file, which the next check reports.
        if has_recipe and read_mark(path) is not None:
            raise RunError(
                f"{path}: holds a run already; add --resume to continue it, or name another folder with --out"
            )
        if existing == path and (names := _find_foreign_names(path)):
            raise RunError(
                f"{path}: holds files of something else ({abbreviate(names)}), which a run could overwrite; "
                "name an empty or new folder with --out"
            )
    except OSError as error:
        raise _describe_unwritable(path, error.strerror) from None


def _describe_unwritable(path: Path, why: str | None) -> RunError:
    return RunError(f"{path}: cannot write there ({why}); name another folder with --out")


class Writer:
    """Writes a run. A lock admits one writer per folder.

    Args:
        path: the folder; new or empty for a new run.
        resume: continue the run that the folder holds.

    Attributes:
        id: the run's identity, which its checkpoints carry.

    Raises:
        RunError: the folder holds a run or foreign files, cannot be written, or is locked by another process.
    """

    def __init__(self, path: str | Path, *, resume: bool = False):
        self.path = Path(path)
        # Before anything is created, so that a refused start leaves no folder behind.
        check_folder(self.path, resume=resume)
        # Only a folder of this writer's own is removed with a run that never started.
        self._own_folder = not self.path.exists()
        self._files: dict[str, TextIO] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._open_locked()
            try:
                check_folder(self.path, resume=resume)  # again under the lock: another process may have started a run
                if resume:
                    self.id = Reader(self.path).id
                    self._mark = read_mark(self.path) or Mark("run", self.id)
                else:
                    # Leftovers of a start that was interrupted before its recipe.yaml.
                    self._remove()
                    self._mark = Mark.create_mark("run")
                    self.id = self._mark.id
                    self._mark.write(self.path)
                (self.path / "checkpoints").mkdir(exist_ok=True)
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise _describe_unwritable(self.path, error.strerror) from None

    def _open_locked(self) -> TextIO:
        """Returns the locked file, which keeps other writers away; the system releases it when this process ends."""
        file = self.path / "lock"
        while True:
            lock = file.open("a")
            try:
                lock_file(lock)
                # The lock must be on the file that has this name now.
                if file.exists() and os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                    return lock
            except BlockingIOError:
                lock.close()
                raise RunError(
                    f"{self.path}: another process is writing this run; wait for it or end it, or name "
                    "another folder with --out"
                ) from None
            except OSError:
                lock.close()
                raise
            lock.close()  # its former holder deleted the file, so a third process could create and lock another: retry

    def _remove(self) -> None:
        """Removes the files that a run writes before its recipe.yaml and nothing else; the lock stays."""
        files, folders = _find_run_files(self.path, read_mark(self.path))
        for file in files:
            if file.name != "lock" or file.parent != self.path:
                file.unlink(missing_ok=True)
        for folder in folders:
            with contextlib.suppress(OSError):  # the folder holds foreign files
                folder.rmdir()

    def remove_unstarted(self) -> None:
        """Removes a run that never started training, and its folder if this writer created it."""
        self._close_files()
        # With a recipe.yaml the run has started, and its files stay.
        if (self.path / "recipe.yaml").exists() or not (self.path / MARK).exists():
            self._lock.close()
            return
        self._remove()
        (self.path / "lock").unlink(missing_ok=True)
        self._lock.close()  # last, so that no other process starts a run here earlier
        if self._own_folder:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def write_text(self, name: str, text: str) -> None:
        try:
            write_atomic(self.path / name, text)
        except OSError as error:
            raise RunError(f"{self.path / name}: cannot be written ({error.strerror})") from None

    def write_json(self, name: str, value: object) -> None:
        self.write_text(name, to_json(value, indent=1) + "\n")

    def write_folder(self, name: str, write: Callable[[Path], Any]) -> None:
        """Writes a folder of the run, filled by `write`, and lists its files in the mark for `remove_unstarted`."""
        temporary = self.path / f"{name}.writing"
        try:
            temporary.mkdir()
            write(temporary)
            files = sorted(p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
            # The mark first: if the process ends before the rename, the next start recognizes these files.
            listed = sorted({*self._mark.files, *(f"{name}/{file}" for file in files)})
            self._mark = replace(self._mark, files=tuple(listed))
            self._mark.write(self.path)
            temporary.rename(self.path / name)
        except OSError as error:
            raise RunError(f"{self.path / name}: cannot be written ({error.strerror or error})") from None

    def _append(self, name: str, record: Event | StepMetrics | EvaluationMetrics | SystemMetrics) -> None:
        try:
            file = self._files.get(name)
            if file is None:
                path = self.path / name
                # Checked once per file, when it is opened.
                file = self._files[name] = path.open("a", encoding="utf-8")
                if not _ends_with_line_break(path):  # a killed writer left half a line: end it
                    file.write("\n")
            file.write(to_json(record) + "\n")
            # Each line is visible to readers at once, and survives the end of this process.
            file.flush()
        except OSError as error:
            raise RunError(
                f"{self.path / name}: cannot be written ({error.strerror}); free disk space and continue with --resume"
            ) from None

    def write_metric(self, line: StepMetrics | EvaluationMetrics) -> None:
        self._append("metrics.jsonl", line)

    def write_system(self, step: int, figures: Mapping[str, float], usage: Usage) -> None:
        """Writes what the machine uses at present, and what the run has used so far."""
        self._append("system.jsonl", SystemMetrics(time=time.time(), step=step, usage=usage, figures=figures))

    def write_status(self, status: ProcessStatus) -> None:
        """Writes what the processes of the run do at present.

        Raises:
            OSError: it cannot be written.
        """
        # Not synced: after a power failure nobody needs it, and the disk is busy with checkpoints.
        write_atomic(self.path / STATUS, to_json(status, indent=1) + "\n", sync=False)

    def remove_status(self) -> None:
        """Removes the status: no process writes the run any more."""
        with contextlib.suppress(OSError):
            (self.path / STATUS).unlink()

    def write_event(self, event: Event) -> None:
        """Writes an event with the present time."""
        self._append("events.jsonl", replace(event, time=time.time()))

    def close(self) -> None:
        self._close_files()
        self._lock.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


def append_event(folder: Path, event: Event) -> None:
    """Writes an event with the present time into a run that another thread or process writes.

    Raises:
        OSError: it cannot be written.
    """
    line = to_json(replace(event, time=time.time())) + "\n"
    # One system call at the end of the file: the lines of two writers do not mix.
    file = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def _ends_with_line_break(path: Path) -> bool:
    """Returns True if the last byte of a file is a line break, or if the file is empty."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


class Silent(Writer):
    """Writes nothing; for the ranks whose run is recorded by rank 0."""

    def __init__(self, path: str | Path):
        # Without the constructor of `Writer`: no lock, no folder.
        self.path, self.id = Path(path), ""

    def write_text(self, name: str, text: str) -> None:
        pass

    def write_folder(self, name: str, write: Callable[[Path], Any]) -> None:
        pass

    def _append(self, name: str, record: Event | StepMetrics | EvaluationMetrics | SystemMetrics) -> None:
        pass

    def remove_unstarted(self) -> None:
        pass

    def close(self) -> None:
        pass
