"""A folder that is whole or not there: written beside under a mark, synced, then renamed. No torch."""

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
from preheat.sanitize import shorten

__all__ = ["MARK", "NewFolder", "Unwritable", "home_of", "require_new", "why_unwritable"]

MARK = ".preheat-writing"
"""A file in a folder that is being written, locked by who writes it: what a killed process left is known by it, and nothing else is removed."""
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENAMETOOLONG)
_WORDS = "|".join(re.escape(os.strerror(number)) for number in _FULL)
_OWN = ("checkpoints", "tokenizer")


class Unwritable(RunError):
    """A folder cannot be written.

    Attributes:
        why: without the folder's name.
    """

    def __init__(self, out: Path, why: str):
        super().__init__(
            f"{out}: cannot be written ({why}); nothing of it was left; free some room or name another folder with --out"
        )
        self.why = why


class NewFolder:
    """Gives a folder to write into, NAME.writing, which becomes `out` only when all went well, and is removed otherwise.

    Raises:
        RunError: `out` cannot be begun (`require_new`), another process is writing it, or it cannot be written.

    Example:
        >>> with NewFolder("runs/x/export-hf") as folder:                    # doctest: +SKIP
        ...     model.save_pretrained(folder)
    """

    def __init__(self, out: str | Path):
        self.out = Path(out)
        self._place = Path(os.path.abspath(self.out))
        self._made = self._place.with_name(self._place.name + ".writing")
        self._parents: list[
            Path
        ] = []  # folders that were made for it, the innermost first; they go if nothing is written
        self._lock: TextIO | None = None

    def __enter__(self) -> Path:
        require_new(self.out)
        try:
            self._begin()
        except OSError as error:
            self._remove()
            raise Unwritable(self.out, error.strerror or str(error)) from None
        except RunError:
            self._remove()
            raise
        return self._made

    def _begin(self) -> None:
        parent = self._made.parent
        self._parents = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        mark = self._made / MARK
        if os.path.lexists(self._made) and not _is_ours(self._made, mark):
            raise RunError(
                f"{self.out}: is first written as {self._made}, which stands there and was not left by preheat; take that away, or name "
                "another folder with --out"
            )
        if not self._made.exists():
            self._made.mkdir()
            self._parents.insert(0, self._made)
        marked = mark.exists()
        lock = mark.open("a")
        try:
            if not _locked(lock):
                raise RunError(
                    f"{self.out}: another process is writing it; wait for it or end it, or name another folder with --out"
                )
        except OSError:  # a file system without locks
            if not marked:
                mark.unlink(missing_ok=True)
            raise
        else:
            self._lock = lock
        finally:
            if self._lock is None:
                lock.close()
        for left in self._made.iterdir():  # of a process that was killed
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
        self._remove()
        why = error.why if isinstance(error, Unwritable) else why_unwritable(error)
        if why:
            raise Unwritable(self.out, why) from None

    def _finish(self) -> None:
        for file in self._made.rglob("*"):  # a disk may say only now that it is full
            if file.is_file() and not file.is_symlink():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        self._made.rename(self._place)
        (self._place / MARK).unlink()
        self._parents = []

    def _remove(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            self._lock.close()
            self._lock = None
        for folder in self._parents:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _is_ours(folder: Path, mark: Path) -> bool:
    """Whether a folder may be written into: it is marked, or empty, as a process leaves it that is killed before it marks it."""
    return folder.is_dir() and not folder.is_symlink() and (mark.is_file() or not any(folder.iterdir()))


def _locked(file: TextIO) -> bool:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def why_unwritable(error: BaseException | None) -> str:
    """Why nothing could be written, where an error says that; '' where it is about something else.

    safetensors, tokenizers, torch and compilers have errors of their own for a full disk, some of them bare `Exception`s.
    """
    if isinstance(error, PreheatError) or not isinstance(error, Exception):
        return ""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in (*_FULL, *((errno.EACCES, errno.EPERM) if one is error else ())):
            return one.strerror or os.strerror(one.errno or 0)
        if found := re.search(rf"\(os error (\d+)\)|({_WORDS})", str(one)):
            return os.strerror(int(found[1])) if found[1] else found[2]
    said = str(error)
    # torch.save, and an array's tofile, which says how much it wrote.
    if (
        "PytorchStreamWriter failed" in said
        or "inline_container.cc" in said
        or re.fullmatch(r"\d+ requested and \d+ written", said)
    ):
        return "the disk is full, or the size of files has a limit"
    return ""


def home_of(source: str | Path) -> tuple[Path, str]:
    """The folder beside whose files what is made of a model goes when nobody says, and what its name has besides.

    A checkpoint is no place for anything else: what is made of it goes to its run.

    Example:
        >>> home_of("runs/x")
        (PosixPath('runs/x'), '')
    """
    path = Path(source)
    run = path.parent.parent
    if path.name.startswith("step-") and path.parent.name == "checkpoints" and (run / "recipe.yaml").is_file():
        return run, f"-{path.name}"
    return path, ""


def require_new(out: str | Path, source: str | Path | None = None) -> None:
    """Raises RunError where no new folder can be begun: before any work is done.

    Args:
        source: what it is made from, whose own files stay apart.
    """
    out = Path(out)
    place = Path(os.path.abspath(out))
    try:
        if place.is_symlink():
            raise RunError(f"{out}: is a link; name a folder of its own with --out")
        if place.exists() and not place.is_dir():
            raise RunError(f"{out}: is a file that stands there already; name another folder with --out")
        if place.is_dir() and any(place.iterdir()):
            raise RunError(f"{out}: stands there already; name another folder with --out")
        above = next(folder for folder in place.parents if folder.exists())
    except OSError as error:
        raise RunError(
            f"{shorten(str(out), 160)}: cannot be written ({error.strerror}); name another folder with --out"
        ) from None
    if not above.is_dir():
        raise RunError(f"{out}: cannot be written ({above} is a file); name another folder with --out")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunError(f"{out}: cannot be written ({above}: Permission denied); name another folder with --out")
    if source is None:
        return
    home = home_of(source)[0].resolve()
    if (home / "recipe.yaml").is_file() and any(place.resolve().is_relative_to(home / name) for name in _OWN):
        raise RunError(f"{out}: is inside of what the run {home.name} keeps for itself; name another folder with --out")
