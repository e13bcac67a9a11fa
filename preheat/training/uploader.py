"""Uploads a run to a remote folder while it trains.

The run is written to a local folder, and a process of its own sends what is new: a slow or failing link never stops or
slows training, and the memory and threads of the storage's package are not those of the run. The process ends when its
standard input closes, so it also sends the last files of a run that was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from preheat.core.run_records import Notice
from preheat.hardware.interrupts import Interrupted
from preheat.run.remote_copy import LostFolder, RemoteCopy
from preheat.run.writer import append_event
from preheat.sanitize import shorten
from preheat.storage import StorageError, is_url, require_scheme
from preheat.training.observer import Watch

__all__ = ["follow", "open_run_folder"]

_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
"""Seconds before another attempt after a failure; doubled each time."""
_GRACE = 60.0
"""Seconds for which the end of a run tries to reach the storage."""
_QUIET = 2.0
"""Seconds that the last upload takes without a line about it."""


@contextlib.contextmanager
def open_run_folder(out: str | Path, *, resume: bool, watch: Watch) -> Iterator[Path]:
    """Yields the local folder of a run. If `out` is a URL, the run is uploaded there until the block ends.

    Args:
        out: a folder or a URL. To resume from a URL, the run is downloaded if this machine does not have its newest
            state.

    Raises:
        RecipeError: the URL's scheme is unknown, or its backend is not installed.
        RunError: the remote folder cannot be written, or holds something else.
    """
    require_scheme("--out", str(out))
    if not is_url(out):
        yield Path(out)
        return
    copy = RemoteCopy(str(out))
    # Rank 0 writes the run; the others only need its folder.
    if os.environ.get("RANK", "0") != "0":
        yield copy.folder
        return
    with copy.session():
        with copy.sending(watch.notice):
            copy.claim(resume=resume, say=watch.notice)
        watch.notice(f"the run is written to {copy.folder}, and uploaded to {copy.url} after each checkpoint")
        uploader = _Uploader(copy, watch)
        try:
            yield copy.folder
        finally:
            uploader.close()


class _Uploader:
    """The process that uploads a run."""

    def __init__(self, copy: RemoteCopy, watch: Watch):
        self._copy, self._watch = copy, watch
        self._log = copy.folder.parent / "upload.log"
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "preheat", "upload", str(copy.folder), copy.url, "--follow"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C ends the run, after which this process still sends its end.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Passes on what the process says, and its error if it fails; ends with it."""
        assert self._process.stdout is not None, "the process was started with a pipe"
        with self._process.stdout as lines:
            for line in lines:
                message = shorten(line.strip(), 500)
                self._watch.notice(message)
                if (self._copy.folder / "recipe.yaml").exists():
                    # A full disk ends the run when it writes there itself.
                    with contextlib.suppress(OSError):
                        append_event(self._copy.folder, Notice(message=message))
        if self._process.wait() and (self._copy.folder / "recipe.yaml").exists():
            errors = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = errors[-1].removeprefix("error: ") if errors else f"exit code {self._process.returncode}"
            self._watch.alarm(
                f"not everything was uploaded ({shorten(reason, 300)}); send the rest with: preheat upload "
                f"{self._copy.folder} {self._copy.url}"
            )

    def close(self) -> None:
        """Waits until the rest is sent, or until the process gives up: see `_GRACE`."""
        assert self._process.stdin is not None, "the process was started with a pipe"
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.close()
        try:
            try:
                self._process.wait(_QUIET)
            except subprocess.TimeoutExpired:
                self._watch.notice(f"sending the rest to {self._copy.url}; Ctrl-C ends this")
                self._process.wait()
        except (Interrupted, KeyboardInterrupt):
            self._process.terminate()
            raise
        finally:
            self._reader.join()  # so that its last line comes before the summary


def follow(copy: RemoteCopy, stdin: TextIO, say: Callable[[str], None]) -> None:
    """Uploads a run until standard input closes, then the rest of it.

    Args:
        copy: a folder that this machine has claimed.

    Raises:
        StorageError: the storage cannot be reached at the end of the run.
    """
    failed, ended, pause = False, False, _FIRST_PAUSE
    deadline = 0.0
    while True:
        try:
            if ended and not copy.is_ready():
                copy.release()
            else:
                copy.send(active=not ended)
        except LostFolder as error:
            say(str(error))
            return
        except StorageError as error:
            if ended and time.monotonic() + pause > deadline:
                raise
            if not failed:
                say(f"{error}; training is not affected, and the upload is tried again")
            failed = True
        else:
            if failed:
                say(f"{copy.url}: reachable again; the run is uploaded")
            failed, pause = False, _FIRST_PAUSE
            if ended:
                return
        if ended:
            time.sleep(pause)
        elif ended := _wait_for_news(copy, stdin, pause if failed else copy.period, at_once=not failed):
            deadline, pause = time.monotonic() + _GRACE, _FIRST_PAUSE
            continue
        if failed:
            pause = min(2 * pause, _LONGEST_PAUSE)


def _wait_for_news(copy: RemoteCopy, stdin: TextIO, seconds: float, *, at_once: bool) -> bool:
    """Waits for so many seconds, or with `at_once` until there is a new checkpoint; True at the end of the run."""
    end, before = time.monotonic() + seconds, _list_checkpoints(copy.folder)
    while (left := end - time.monotonic()) > 0:
        if select.select([stdin], [], [], min(left, 1.0))[0]:
            return True
        if at_once and _list_checkpoints(copy.folder) != before:
            return False
    return False


def _list_checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("checkpoints/step-*/manifest.json"))
