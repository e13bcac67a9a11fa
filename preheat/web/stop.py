"""Stops a run, or makes it save a checkpoint, by a signal to the process that writes it.

The signal goes only to a process of this machine that is the one in `status.json` (pid and start time), has the run's
lock, and handles the signal.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from preheat.core.run_records import ProcessStatus
from preheat.errors import RunError
from preheat.hardware.child_processes import catches_signal
from preheat.run.reader import Reader
from preheat.web.limits import LARGEST_FILE

__all__ = ["Request", "explain_unreachable", "send_request"]

Request: TypeAlias = Literal["stop", "save"]

_SIGNALS = {"stop": "SIGTERM", "save": "SIGUSR2"}
"""Request -> signal, see `preheat.training.signals`."""
_CLOCK_S = 2.0
"""Seconds by which two readings of a process's start time differ at most: the system computes it from the boot time."""

_stopped: set[tuple[int, float]] = set()
"""Processes (pid, start) that this server has stopped: a second SIGTERM would end them without saving."""
_lock = threading.Lock()


def explain_unreachable(folder: Path) -> str | None:
    """Returns the reason why a run cannot be stopped from here; None: it can."""
    try:
        _find_process(folder)
    except RunError as error:
        return str(error)
    return None


def send_request(folder: Path, request: Request) -> str:
    """Signals the process that writes a run, and returns a sentence on what it does next.

    Raises:
        RunError: there is no such process on this machine, or it cannot do that now.
    """
    status, process = _find_process(folder)
    number = signal.Signals[_SIGNALS[request]]
    key = (status.pid, status.started)
    # One request at a time: two tabs may send theirs in the same moment.
    with _lock:
        if status.stopping is not None or key in _stopped:
            raise RunError(
                "The run is already stopping: it finishes its step and saves. A second signal would end it unsaved."
            )
        if catches_signal(status.pid, number) is False:
            raise RunError("The run does not take steps now: it is starting or ending. Try again once it trains.")
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            raise RunError(_ENDED) from None
        except psutil.AccessDenied:
            raise RunError(
                f"The run belongs to another user ({process.username()}); only that user can stop it."
            ) from None
        if request == "stop":
            _stopped.add(key)
    if request == "save":
        return "The run saves a checkpoint after the step in progress, and continues."
    return "The run finishes the step in progress, saves and ends. Its page shows the command that resumes it."


_ENDED = "No process writes this run: it has ended."


def _find_process(folder: Path) -> tuple[ProcessStatus, psutil.Process]:
    """Returns the process that writes a run.

    Raises:
        RunError: it is not known, on another machine, or not the one that the run names.
    """
    status, holders = Reader(folder, largest=LARGEST_FILE).status(), _find_lock_holders(folder / "lock")
    if status is None and holders == set():
        raise RunError(_ENDED)
    if status is None:
        raise RunError(
            "The run does not say which process writes it: it is still starting or ending, or another trainer or an "
            "earlier version of preheat runs it. Try again soon, or stop it in its terminal with Ctrl-C."
        )
    if status.host != socket.gethostname():
        raise RunError(
            f"The run is on {status.host}, and this server on {socket.gethostname()}: stop it there, with "
            f"kill {status.pid}."
        )
    try:
        process = psutil.Process(status.pid)
        is_same = abs(process.create_time() - status.started) < _CLOCK_S
        command = process.cmdline()
    except psutil.NoSuchProcess:
        raise RunError(_ENDED) from None
    except psutil.AccessDenied:
        raise RunError(f"Process {status.pid} belongs to another user; only that user can stop it.") from None
    if not is_same:
        raise RunError(f"{_ENDED} Process {status.pid} is another one now.")
    if holders is not None and status.pid not in holders:
        raise RunError(f"Process {status.pid} does not write this run any more.")
    # The lock proves it. Without a list of locks, the command must be ours; a program that calls preheat.train is not.
    if holders is None and not _is_command(command):
        raise RunError(f"Process {status.pid} is no command of preheat; stop it in its terminal with Ctrl-C.")
    return status, process


def _is_command(command: list[str]) -> bool:
    """Returns True for the command line of preheat, as a script or a module."""
    return any(Path(part).name == "preheat" for part in command[:4])


def _find_lock_holders(file: Path) -> set[int] | None:
    """Returns the processes that have a file's lock; None if the system does not list them.

    To try the lock would refuse a training that starts in this moment.
    """
    if sys.platform != "linux":
        return None
    holders = set()
    with contextlib.suppress(OSError):
        inode = file.stat().st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # 1: FLOCK  ADVISORY  WRITE 14315 fe:00:2320447 0 EOF
            fields = line.split()
            if len(fields) >= 6 and fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == inode:
                holders.add(int(fields[4]))
    return holders
