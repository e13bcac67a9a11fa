"""Removes a run: the files that preheat wrote into its folder, and nothing else. No torch."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from preheat.errors import RunError
from preheat.files import lock_file, parse_json, read_bytes
from preheat.run.layout import LABELS, MARK, PROFILE, Mark, read_mark

__all__ = ["Removal", "remove_run"]

_FILES = (
    "plan.json",
    "environment.json",
    "changes.json",
    "data.json",
    "metrics.jsonl",
    "system.jsonl",
    "before.json",
    "evaluation.json",
    "events.jsonl",
    "samples.json",
    "report.html",
    "report.json",
    "status.json",
    LABELS,
)
"""Files of a run, apart from those that make it one (`_LAST`)."""
_LAST = ("recipe.yaml", MARK)
"""Removed last, so that a removal that was interrupted can be repeated."""
_PROFILE = ("profile.json", "trace.json.gz", "profile.html", "memory.pickle", "out-of-memory.pickle")
_PARTIAL = re.compile(rf"(?:{'|'.join(map(re.escape, (*_FILES, *_LAST)))})\.[0-9a-f]{{8}}\.writing")
_CHECKPOINT = re.compile(r"step-\d+(?:\.aside-\d+)?")
_TRACKING = re.compile(r"[a-z]+\.(?:json|log|lock)|report\.html")


@dataclass(frozen=True)
class Removal:
    """A removed run.

    Attributes:
        files: number of the files that were removed.
        foreign: paths, relative to the folder, of files that preheat did not write; they stay.
    """

    files: int
    foreign: tuple[str, ...]


def remove_run(folder: Path) -> Removal:
    """Removes the files of a run, and its folder if it is then empty. Links are neither followed nor removed.

    Raises:
        RunError: the folder is no run by its mark, a process writes it, or a file cannot be removed.
    """
    mark = read_mark(folder)
    if mark is None or mark.kind != "run":
        raise RunError(f"{folder}: is not a run (no {MARK} says so); nothing was removed")
    blocked = [place for place in (folder, folder / "checkpoints") if place.is_dir() and not os.access(place, os.W_OK)]
    if blocked:
        raise RunError(f"{blocked[0]}: cannot be written; change its permissions. Nothing was removed")
    removed = 0
    try:
        with open(folder / "lock", "a", opener=_open_no_link) as lock:
            try:
                lock_file(lock)
            except BlockingIOError:
                raise RunError(f"{folder}: another process is writing this run; stop it first") from None
            for file in [*_list_files(folder, mark)]:
                removed += _unlink(folder, file)
            for place in _list_folders(folder):
                with contextlib.suppress(OSError):  # it holds foreign files
                    place.rmdir()
            # Its process cannot resume a run without recipe, so the lock may go before it is released.
            (folder / "lock").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"{error.filename or folder}: cannot be removed ({error.strerror}); {removed} files of the run were "
            "removed before it: change its permissions and delete the run again"
        ) from None
    foreign = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not _is_folder(path))
    if not foreign:
        with contextlib.suppress(OSError):  # the folder above is not writable, or the folder is in use as a mount
            folder.rmdir()
    return Removal(removed, tuple(foreign))


def _open_no_link(path: str, flags: int) -> int:
    """Opens a file; a link at its name is an error: another user of a shared folder may have put it there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _unlink(folder: Path, file: Path) -> bool:
    """Removes a file below a folder; returns False if there is none, or a link is on the way.

    Each part of the path is opened from the one before it, so that a folder which becomes a link while the run is
    removed is not followed.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    *places, name = file.relative_to(folder).parts
    opened = -1
    try:
        opened = os.open(folder, flags)
        for place in places:
            above, opened = opened, os.open(place, flags, dir_fd=opened)
            os.close(above)
        if not stat.S_ISREG(os.lstat(name, dir_fd=opened).st_mode):
            return False
        os.unlink(name, dir_fd=opened)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        if opened >= 0:
            os.close(opened)
    return True


def _list_files(folder: Path, mark: Mark) -> Iterator[Path]:
    """Yields the files that preheat writes into a run's folder; some may not exist."""
    checkpoints = folder / "checkpoints"
    if _is_folder(checkpoints):
        for path in sorted(checkpoints.iterdir()):
            if _CHECKPOINT.fullmatch(path.name) and _is_folder(path):
                yield from _list_checkpoint(path)
        yield checkpoints / "best"
    if _is_folder(folder / "tokenizer"):
        for name in mark.files:
            place = folder / name
            # Somebody may have edited the mark: only files inside tokenizer/ are removed on its word.
            if place.is_relative_to(folder / "tokenizer") and ".." not in place.parts and _is_below(place, folder):
                yield place
    if _is_folder(folder / PROFILE):
        yield from (folder / PROFILE / name for name in _PROFILE)
    if _is_folder(folder / "tracking"):
        yield from (path for path in (folder / "tracking").iterdir() if _TRACKING.fullmatch(path.name))
        events = folder / "tracking" / "tensorboard"
        if _is_folder(events):
            yield from (path for path in events.iterdir() if path.name.startswith("events.out.tfevents."))
    yield from (path for path in folder.iterdir() if _PARTIAL.fullmatch(path.name))
    yield from (folder / name for name in (*_FILES, *_LAST))


def _list_checkpoint(path: Path) -> Iterator[Path]:
    """Yields the files that the manifest of a checkpoint names; none without one, as the checkpoint may be foreign."""
    try:
        manifest = parse_json(read_bytes(path / "manifest.json"))
    except ValueError:
        return
    if not isinstance(manifest, dict):
        return
    yield from (
        path / name for name in manifest if name not in ("", ".", "..") and "/" not in name and "\0" not in name
    )
    yield path / "manifest.json"


def _list_folders(folder: Path) -> list[Path]:
    """Returns the folders of a run's folder that a run writes, the deepest first."""
    names = ("tokenizer", "checkpoints", PROFILE, "tracking")
    folders = [folder / name for name in names if _is_folder(folder / name)]
    below = [path for place in folders for path in place.rglob("*") if _is_folder(path)]
    return sorted([*folders, *below], key=lambda path: -len(path.parts))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_below(place: Path, folder: Path) -> bool:
    """Returns False if a link is on the way to the file."""
    return not any(path.is_symlink() for path in place.parents if path.is_relative_to(folder) and path != folder)
