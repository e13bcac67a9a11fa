"""Atomic output folders: written under a temporary name, fsynced, then renamed. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

from preheat.errors import PreheatError, RunError
from preheat.files import lock_file
from preheat.sanitize import shorten

__all__ = ["MARK", "NewFolder", "Unwritable", "choose_home", "require_new", "describe_write_error"]

MARK = ".preheat-writing"
"""Lock file in a folder that is being written. It marks leftovers of a killed process; nothing else is ever removed."""
# Errors of the disk, not of the program: full, over a limit, read-only, broken, or a name that is too long.
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENAMETOOLONG)
_MESSAGES = "|".join(re.escape(os.strerror(number)) for number in _FULL)
# Folders inside a run that belong to the run.
_OWN = ("checkpoints", "tokenizer")


class Unwritable(RunError):
    """A folder cannot be written.

    Attributes:
        reason: the reason, without the folder's name.
    """

    def __init__(self, out: Path, why: str):
        super().__init__(
            f"{out}: cannot be written ({why}); nothing was left behind; free disk space or name another folder with "
            "--out"
        )
        self.reason = why


class NewFolder:
    """Context manager that yields NAME.writing and renames it to `out` on success; on an error the folder is removed.

    Raises:
        RunError: `require_new` refuses `out`, another process is writing it, or it cannot be written.

    Example:
        >>> with NewFolder("runs/x/export-hf") as folder:  # doctest: +SKIP
        ...     model.save_pretrained(folder)
    """

    def __init__(self, out: str | Path):
        self.out = Path(out)
        # abspath keeps links, which resolve() would follow; the current folder may change before the rename.
        self._target = Path(os.path.abspath(self.out))
        # In the same parent folder, because a rename is atomic only within one file system.
        self._temporary = self._target.with_name(self._target.name + ".writing")
        # Folders created for it, innermost first; removed again if nothing is written.
        self._parents: list[Path] = []
        self._lock: TextIO | None = None

    def __enter__(self) -> Path:
        require_new(self.out)
        try:
            self._open_folder()
        except OSError as error:
            self._remove()
            raise Unwritable(self.out, error.strerror or str(error)) from None
        except RunError:
            self._remove()
            raise
        return self._temporary

    def _open_folder(self) -> None:
        parent = self._temporary.parent
        # Recorded before mkdir, so that a failure removes exactly the folders that did not exist.
        self._parents = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        mark = self._temporary / MARK
        # lexists also sees a broken link, through which nothing may be written.
        if os.path.lexists(self._temporary) and not _is_ours(self._temporary, mark):
            raise RunError(
                f"{self.out}: is first written as {self._temporary}, which exists and is not from preheat; remove it, "
                "or name another folder with --out"
            )
        if not self._temporary.exists():
            self._temporary.mkdir()
            self._parents.insert(0, self._temporary)
        # Before opening creates it.
        marked = mark.exists()
        lock = mark.open("a")
        # The kernel releases the lock of a killed process, so a stale mark never blocks; a mark alone could.
        try:
            if not _is_locked(lock):
                raise RunError(
                    f"{self.out}: another process is writing it; wait for it or end it, or name another "
                    "folder with --out"
                )
        except OSError:  # a file system without flock
            if not marked:
                mark.unlink(missing_ok=True)
            raise
        else:
            self._lock = lock
        finally:
            if self._lock is None:
                lock.close()
        for left in self._temporary.iterdir():  # leftovers of a killed process
            if left.name != MARK:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except OSError as failure:
            error = failure
        # After a success the temporary folder is gone, so this only closes the lock.
        self._remove()
        # Errors of other kinds propagate unchanged.
        why = error.reason if isinstance(error, Unwritable) else describe_write_error(error)
        if why:
            raise Unwritable(self.out, why) from None

    def _finish(self) -> None:
        for file in self._temporary.rglob("*"):  # some file systems report a full disk only on fsync
            if file.is_file() and not file.is_symlink():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        # Everything is on disk before the name appears.
        self._temporary.rename(self._target)
        # The mark moves along and is removed last: between the two calls the folder is already complete.
        (self._target / MARK).unlink()
        self._parents = []

    def _remove(self) -> None:
        if self._lock is not None:
            # Only with the lock: without it, the folder belongs to another process.
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._lock.close()
            self._lock = None
        for folder in self._parents:
            with contextlib.suppress(OSError):
                # rmdir fails on a folder that something else has been written to, which then stays.
                folder.rmdir()


def _is_ours(folder: Path, mark: Path) -> bool:
    """Returns True if a folder may be written into: it has our mark, or it is empty.

    A process that is killed before it writes the mark leaves an empty folder.
    """
    return folder.is_dir() and not folder.is_symlink() and (mark.is_file() or not any(folder.iterdir()))


def _is_locked(file: TextIO) -> bool:
    try:
        lock_file(file)
    # Another process has the lock; other errors mean that there are no locks here.
    except BlockingIOError:
        return False
    return True


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # As Python prints a chain: `from None` hides the context.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def describe_write_error(error: BaseException | None) -> str:
    """Returns why writing failed, or '' if the error is about something else.

    safetensors, tokenizers, torch and compilers raise errors of their own for a full disk, some of them bare
    `Exception`s.
    """
    if isinstance(error, PreheatError) or not isinstance(error, Exception):
        return ""
    for cause in _iterate_causes(error):
        # Missing permissions count only for the error itself; deeper in the chain libraries handle them.
        if isinstance(cause, OSError) and cause.errno in (
            *_FULL,
            *((errno.EACCES, errno.EPERM) if cause is error else ()),
        ):
            return cause.strerror or os.strerror(cause.errno or 0)
        # Rust libraries write "(os error 28)", others the message of the C library.
        if match := re.search(rf"\(os error (\d+)\)|({_MESSAGES})", str(cause)):
            return os.strerror(int(match[1])) if match[1] else match[2]
    message = str(error)
    # Messages of torch.save and of numpy's tofile.
    if (
        "PytorchStreamWriter failed" in message
        or "inline_container.cc" in message
        or re.fullmatch(r"\d+ requested and \d+ written", message)
    ):
        return "the disk is full, or the size of files has a limit"
    return ""


def choose_home(source: str | Path) -> tuple[Path, str]:
    """Returns the default parent folder for output made from a model, and a suffix for its name.

    Output of a checkpoint goes into its run, not into the checkpoint's own folder.

    Example:
        >>> choose_home("runs/x")
        (PosixPath('runs/x'), '')
    """
    path = Path(source)
    run = path.parent.parent
    if path.name.startswith("step-") and path.parent.name == "checkpoints" and (run / "recipe.yaml").is_file():
        return run, f"-{path.name}"
    return path, ""


def require_new(out: str | Path, source: str | Path | None = None) -> None:
    """Raises RunError if `out` cannot be created as a new folder; called before any work is done.

    Args:
        source: the model that the output is made from; `out` must not be inside the folders that a run keeps for
            itself.
    """
    out = Path(out)
    target = Path(os.path.abspath(out))
    try:
        # Rejected, because the rename would replace the link and not its target.
        if target.is_symlink():
            raise RunError(f"{out}: is a link; name a folder of its own with --out")
        if target.exists() and not target.is_dir():
            raise RunError(f"{out}: is an existing file; name another folder with --out")
        if target.is_dir() and any(target.iterdir()):
            raise RunError(f"{out}: already exists; name another folder with --out")
        # The nearest folder that exists decides if the others can be created.
        ancestor = next(folder for folder in target.parents if folder.exists())
    except OSError as error:
        raise RunError(
            f"{shorten(str(out), 160)}: cannot be written ({error.strerror}); name another folder with --out"
        ) from None
    if not ancestor.is_dir():
        raise RunError(f"{out}: cannot be written ({ancestor} is a file); name another folder with --out")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise RunError(f"{out}: cannot be written ({ancestor}: Permission denied); name another folder with --out")
    if source is None:
        return
    home = choose_home(source)[0].resolve()
    if (home / "recipe.yaml").is_file() and any(target.resolve().is_relative_to(home / name) for name in _OWN):
        raise RunError(f"{out}: is inside a folder of the run {home.name} itself; name another folder with --out")
