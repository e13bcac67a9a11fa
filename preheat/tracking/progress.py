"""The part of a run that a tracker has: `tracking/NAME.json` in the run's folder, written by the process that sends."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from preheat.errors import RunError
from preheat.files import lock_file, parse_json, read_bytes, read_record, to_json, write_atomic

__all__ = ["SentState"]


@dataclass
class SentState:
    """The part of a run that a tracker has.

    Attributes:
        tracker: its name.
        project, name: as they were when the run was first sent.
        known: the tracker's own name of the run; None before its start.
        url: where to see it.
        offsets: file of the run -> bytes of it that were sent.
        step: last step whose metrics were sent.
        evaluated: last step whose evaluation was sent; -1: none.
    """

    tracker: str
    project: str
    name: str
    known: str | None = None
    url: str | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    step: int = 0
    evaluated: int = -1

    @staticmethod
    def file(run: Path, tracker: str) -> Path:
        return run / "tracking" / f"{tracker}.json"

    @classmethod
    def read(cls, run: Path, tracker: str) -> SentState | None:
        """Returns what was recorded, or None if the run was never sent.

        Raises:
            RunError: the file is damaged.
        """
        file = cls.file(run, tracker)
        if not file.exists():
            return None
        try:
            return read_record(cls, parse_json(read_bytes(file)))
        except ValueError as error:
            raise RunError(
                f"{file}: is damaged ({error}); remove it, and preheat track sends the run again as another one"
            ) from None

    @classmethod
    def lock(cls, run: Path, tracker: str) -> TextIO:
        """Waits until no other process sends this run to the tracker, and returns the open file that holds the lock."""
        file = cls.file(run, tracker).with_suffix(".lock")
        file.parent.mkdir(exist_ok=True)
        lock = file.open("a")
        # The previous session's process may still be sending.
        lock_file(lock, wait=True)
        return lock

    def write(self, run: Path) -> None:
        """Records the progress.

        Raises:
            OSError: it cannot be written.
        """
        file = self.file(run, self.tracker)
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, to_json(asdict(self), indent=1) + "\n")
