"""Content-addressed cache of folders. Entries are written to a temporary folder and renamed; damaged ones are rebuilt.

<root>/<kind>-<key>/entry.json   {"files": {name: blake2b}, "values": {...}, "seal": blake2b of both}
<root>/<kind>-<key>/...          the files
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

from preheat.cache_folder import make_private
from preheat.errors import DataError
from preheat.files import to_json

__all__ = ["Entry", "open_entry", "read_entry"]

Values = TypeVar("Values")
STALE = 24 * 3600
"""Age in seconds above which a partial folder is removed, as left by a killed process."""


def _compute_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class Entry(TypedDict, Generic[Values]):
    """The content of entry.json: checksums of the files, and what the builder returned."""

    files: dict[str, str]
    values: Values
    seal: str


def read_entry(folder: Path) -> Entry[Any] | None:
    """Returns an entry's {"files", "values"}, or None if the entry is absent or any byte of it has changed."""
    try:
        content: Entry[Any] = json.loads((folder / "entry.json").read_bytes())
        intact = content["seal"] == _compute_seal(content["files"], content["values"])
        return (
            content
            if intact and all(_compute_checksum(folder / name) == mark for name, mark in content["files"].items())
            else None
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # missing, truncated or not written by us


def _compute_seal(files: dict[str, str], values: object) -> str:
    return hashlib.blake2b(json.dumps([files, values], sort_keys=True).encode(), digest_size=16).hexdigest()


def open_entry(root: Path, name: str, build: Callable[[Path], Values]) -> tuple[Path, Entry[Values]]:
    """Returns the folder of an entry and its content; on a miss, `build(folder)` writes the files and returns the
    values.

    Raises:
        DataError: the cache cannot be written. Exceptions of `build` pass through and leave nothing behind.
    """
    folder = root / name
    # A hit costs reading all files for their checksums, far less than building them.
    if (content := read_entry(folder)) is not None:
        return folder, content
    try:
        make_private(root)  # readable by the user alone: it holds their data
        # A younger one may belong to a process that runs, or be resumed by the next start.
        for left in root.glob(".partial-*"):
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left, ignore_errors=True)
        # Inside the root, since a rename works only within one file system.
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=root, ignore_cleanup_errors=True) as temporary:
            new = Path(temporary) / "entry"
            new.mkdir(mode=0o700)
            values = json.loads(json.dumps(build(new)))  # in the form in which a later hit reads them
            files = {p.relative_to(new).as_posix(): _compute_checksum(p) for p in sorted(new.rglob("*")) if p.is_file()}
            (new / "entry.json").write_text(
                to_json({"files": files, "values": values, "seal": _compute_seal(files, values)}), encoding="utf-8"
            )
            with contextlib.suppress(OSError):  # removes a damaged entry; usually there is none
                folder.rename(Path(temporary) / "damaged")
            with contextlib.suppress(OSError):  # another process was first, with the same content
                new.rename(folder)
    except OSError as error:
        raise DataError(
            f"cache {root}: cannot be written ({error.strerror or error}); set PREHEAT_CACHE to a folder with room"
        ) from None
    # Read what was written: a faulty disk must fail here and not as wrong tokens in training.
    content = read_entry(folder)
    if content is None:
        raise DataError(
            f"cache {folder}: does not hold what was written to it; set PREHEAT_CACHE to a folder on a sound disk"
        )
    return folder, content
