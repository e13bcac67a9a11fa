"""Finds out whether a process of this machine writes a run, without touching the run's lock.

To lock the file, even for a moment, would refuse a training that starts in this moment.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

__all__ = ["LockTable"]

_FRESH_S = 0.5
_LIST = Path("/proc/locks")


class LockTable:
    """The files of this machine that are locked by a process."""

    def __init__(self) -> None:
        self._inodes: frozenset[int] = frozenset()
        self._read = -_FRESH_S
        self._lock = threading.Lock()

    def is_locked(self, file: Path, max_age: float = _FRESH_S) -> bool | None:
        """Returns True if a process of this machine holds the lock on a file; None if the system does not say.

        Processes in another container and on other machines are not seen.

        Args:
            max_age: seconds for which the system's list is used again: a table of 200 runs reads it once.
        """
        try:
            inode = file.stat().st_ino
        except OSError:
            return False
        if not _LIST.exists():
            return None
        with self._lock:
            if time.monotonic() - self._read >= max_age:
                self._inodes = _read_inodes()
                self._read = time.monotonic()
            return inode in self._inodes


def _read_inodes() -> frozenset[int]:
    """Returns the inodes of all files with an exclusive lock.

    Without their devices, whose numbers differ between `stat` and this list for some file systems.
    """
    inodes = set()
    for line in _LIST.read_text(encoding="ascii").splitlines():
        # 1: FLOCK  ADVISORY  WRITE 14284 fe:00:2288065 0 EOF
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[3] == "WRITE":
            inodes.add(int(fields[5].rpartition(":")[2]))
    return frozenset(inodes)
