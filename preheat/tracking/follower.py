"""The processes that send a run to trackers while it trains, one for each tracker.

A process of its own rather than a thread: a tracker's imports take 60 to 170 MiB, which would count as memory of the
run, and one that hangs cannot hold the interpreter's lock. It ends when its standard input closes, so it also sends the
last lines of a run that was killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from preheat.errors import RecipeError
from preheat.sanitize import shorten
from preheat.tracking.progress import SentState
from preheat.tracking.tracker import Start, find, find_local_folder

if TYPE_CHECKING:
    from preheat.core.schema import Tracking
    from preheat.recipe import Recipe

__all__ = ["Followers", "check"]

# Of a process group: the process that sends is none of its ranks.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check(recipe: Recipe, folder: Path) -> None:
    """Checks before training what can be known without a network: that the trackers exist and can be written to.

    Args:
        folder: the run's folder.

    Raises:
        RecipeError: with the key, the tracker and the fix.
    """
    settings = recipe.tracking
    for name in settings.to:
        tracker = find(name)
        if SentState.read(folder, name) is not None:
            continue  # a resumed run continues where it was sent before
        local = find_local_folder(settings, name)
        start = Start("", folder, settings.project, settings.name or folder.absolute().name, settings.tags, {}, local)
        if problem := tracker.conflict(start):
            raise RecipeError(
                f"tracking.to: {name}: {problem}; set another tracking.name, tracking.project or tracking.folder"
            )


class Followers:
    """Processes that follow a run and send it to trackers.

    Args:
        run: the run folder.
        settings: the trackers, and how long the end of the run waits for them.
        notice: called with one line for the user, from a thread of its own.
    """

    def __init__(self, run: Path, settings: Tracking, notice: Callable[[str], None]):
        self._run, self._wait, self._notice = run, settings.wait, notice
        self._told: set[str] = set()  # trackers whose problem the user knows
        self._started: list[tuple[str, subprocess.Popen[str], threading.Thread]] = []
        for name in settings.to:
            self._start(name)

    def _start(self, name: str) -> None:
        log = self._run / "tracking" / f"{name}.log"
        try:
            log.parent.mkdir(exist_ok=True)
            errors: IO[bytes] = log.open("ab")
        except OSError as error:  # a full disk ends the run when it writes there itself
            self._notice(f"tracking: {name}: {log} cannot be written ({error.strerror}); the run is not sent there")
            return
        with errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "preheat", "track", str(self._run), "--to", name, "--follow"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={key: value for key, value in os.environ.items() if key not in _RANKS},
                # Ctrl-C ends the run, after which this process still sends its end.
                start_new_session=True,
            )
        reader = threading.Thread(target=self._read, args=(name, process, log), daemon=True)
        reader.start()
        self._started.append((name, process, reader))

    def _read(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        """Passes on what the process says, and its error if it fails; ends with it."""
        assert process.stdout is not None, "the process was started with a pipe"
        for line in process.stdout:
            self._notice(f"tracking: {name}: {shorten(line.strip(), 300)}")
        if process.wait() and name not in self._told:
            reason = _read_last_line(log) or f"exit code {process.returncode}"
            self._notice(
                f"tracking: {name} ended: {shorten(reason, 200)}; training is not affected; send the run later with: "
                f"preheat track {self._run} --to {name}"
            )

    def close(self) -> None:
        """Tells the processes that the session has ended, and waits a while for them to send the rest."""
        for _, process, _ in self._started:
            assert process.stdin is not None, "the process was started with a pipe"
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.close()
        deadline = time.monotonic() + self._wait
        for name, process, reader in self._started:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self._told.add(name)
                self._notice(
                    f"tracking: {name} is still sending, and goes on after this run; if it does not get all of it: "
                    f"preheat track {self._run} --to {name}"
                )
            else:
                reader.join()  # so that its last notice comes before the summary


def _read_last_line(log: Path) -> str:
    """Returns the last line of a log, which is the error of a traceback; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 8192, 0))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
