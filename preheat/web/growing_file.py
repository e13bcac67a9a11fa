"""Reads the new lines of a file that grows, and notices when it was replaced or truncated."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from preheat.sanitize import shorten

__all__ = ["GrowingFile", "Position"]

_Record = TypeVar("_Record")

_LONGEST = 1 << 20
"""Maximum bytes of a line: a step's takes hundreds, and parsed JSON takes many times its length in memory."""
_PROBE = 4096
"""Bytes at the beginning, and before the position, whose hash tells whether it is the same file."""


@dataclass(frozen=True)
class Position:
    """The lines of a file that were read.

    Attributes:
        offset: bytes that were read.
        line: lines that were read.
        size, changed, inode: of the file when it was last read; `changed` in nanoseconds.
        head, tail: hashes of the first bytes, and of those before `offset`.
        is_skipping: `offset` is within a line that is too long.
        damaged: lines that were left out.
        first_damage: the first of them, and its fault.
    """

    offset: int = 0
    line: int = 0
    size: int = 0
    changed: int = 0
    inode: int = 0
    head: str = ""
    tail: str = ""
    is_skipping: bool = False
    damaged: int = 0
    first_damage: str = ""


class GrowingFile:
    """Follows a JSONL file from a position on.

    Args:
        position: where an earlier process ended.
    """

    def __init__(self, path: Path, position: Position):
        self.path = path
        self._offset, self._line = position.offset, position.line
        self._size, self._changed, self._inode = position.size, position.changed, position.inode
        self._head, self._tail = position.head, position.tail
        self._is_skipping = position.is_skipping
        self._damaged, self._first_damage = position.damaged, position.first_damage

    @property
    def position(self) -> Position:
        return Position(
            self._offset,
            self._line,
            self._size,
            self._changed,
            self._inode,
            self._head,
            self._tail,
            self._is_skipping,
            self._damaged,
            self._first_damage,
        )

    def count_unread(self) -> int:
        """Returns the bytes that are not read yet: all of them if the file shrank."""
        size = _read_size(self.path)
        return size - self._offset if size >= self._offset else size

    def is_same(self) -> bool:
        """Returns False if what was read is no longer the content of the file, so that it must be read from its start.

        A file that grew and begins and continues as before is the same one, also as a new copy of another machine's.
        """
        if not self._size:
            return True
        try:
            facts = self.path.stat()
            if (facts.st_size, facts.st_mtime_ns, facts.st_ino) == (self._size, self._changed, self._inode):
                return True
            # An edit in place leaves the size, or makes it smaller; a run only appends.
            if facts.st_size <= self._size and facts.st_mtime_ns != self._changed:
                return False
            with self.path.open("rb") as file:
                return self._head == _hash_range(file, 0, min(_PROBE, self._offset)) and self._tail == _hash_range(
                    file, max(0, self._offset - _PROBE), self._offset
                )
        except OSError:
            return False

    def read_records(self, read: Callable[[bytes], _Record], limit: int) -> Iterator[_Record]:
        """Yields the records of the next complete lines; damaged lines are counted and left out.

        Args:
            read: reads a line; raises ValueError if it is damaged.
            limit: bytes after which it stops.
        """
        # A named pipe would block the read.
        if not self.path.is_file() or not self.count_unread():
            return
        end = self._offset + limit
        with self.path.open("rb") as file:
            facts = os.fstat(file.fileno())
            file.seek(self._offset)
            while self._offset < end:
                line = file.readline(_LONGEST)
                is_whole = line.endswith(b"\n")
                if not line or (not is_whole and len(line) < _LONGEST and not self._is_skipping):
                    break  # the writer is in the middle of the line
                self._offset += len(line)
                if self._is_skipping or not is_whole:
                    if not self._is_skipping:
                        self._note_damage(f"longer than {_LONGEST >> 20} MiB")
                    self._is_skipping = not is_whole
                    self._line += is_whole
                    continue
                self._line += 1
                if line.isspace():
                    continue
                try:
                    record = read(line)
                except ValueError as error:
                    self._note_damage(str(error), self._line)
                    continue
                yield record
            self._size, self._changed, self._inode = facts.st_size, facts.st_mtime_ns, facts.st_ino
            self._head = _hash_range(file, 0, min(_PROBE, self._offset))
            self._tail = _hash_range(file, max(0, self._offset - _PROBE), self._offset)

    def describe_damage(self) -> str | None:
        """Returns a sentence on the lines that were left out."""
        if not self._damaged:
            return None
        others = f" and {self._damaged - 1:,} more" if self._damaged > 1 else ""
        return f"{self.path.name}: {self._first_damage}{others} left out."

    def _note_damage(self, fault: str, line: int = 0) -> None:
        self._damaged += 1
        self._first_damage = self._first_damage or shorten(f"line {line or self._line + 1:,} ({fault})", 200)


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _hash_range(file: BinaryIO, start: int, end: int) -> str:
    file.seek(start)
    return hashlib.blake2b(file.read(end - start), digest_size=8).hexdigest()
