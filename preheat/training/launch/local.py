"""Launches one process per device on this host, forwards signals to them, and restarts them after a failure.

torchrun's agent does the same for several hosts. On one host, its store would listen on all interfaces and a killed
agent would leave its processes running; here the store listens on the loopback interface only, and the processes end
with this one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from preheat.errors import RunError
from preheat.files import parse_json
from preheat.hardware.child_processes import (
    LOOPBACK,
    catches_signal,
    create_local_store,
    describe_exit,
    listen,
    local_group,
    tie_to_parent,
)
from preheat.hardware.interrupts import Interrupted
from preheat.hardware.probe import count_cores
from preheat.training.process_group import BACKEND
from preheat.training.signals import SAVE, Signals

if TYPE_CHECKING:
    from torch.distributed import Store

    from preheat.core.json_types import JsonObject
    from preheat.training.hang_watchdog import RankStatus

__all__ = ["LAUNCHED", "LaunchResult", "explain_abort", "start"]

LAUNCHED = "PREHEAT_LAUNCHED"
"""Set in the processes: this launcher recognizes the exit code of a signal and does not restart after it."""
_POLL = 0.05  # seconds


@dataclass
class LaunchResult:
    """How the processes ended.

    Attributes:
        code: 0, or the exit code of the process that failed first.
        result: the JSON object that rank 0 printed, with `--json`.
        signal: the signal that ended them after they saved.
    """

    code: int
    result: JsonObject | None = None
    signal: signal.Signals | None = None


def start(
    command: Sequence[str],
    *,
    processes: int,
    restarts: int = 0,
    again: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
) -> LaunchResult:
    """Runs `preheat COMMAND` as a group of processes and waits for them.

    If one of them dies, the others are terminated, and all are restarted while `restarts` are left. A signal is
    forwarded to them, and they save and end; the same signal again ends all at once.

    Args:
        command: arguments of preheat.
        processes: number of processes; on CPUs they split the cores.
        restarts: how often all are restarted.
        again: called after a failure; True restarts all with `--auto-resume` in any case. It must not do so forever.
        say: called with a line about each restart.

    Raises:
        RunError: a process was killed.
    """
    left = restarts
    # One context for all starts: a signal between two of them must not be lost.
    with Signals() as signals:
        while True:
            try:
                ended = _Launched(command, processes, signals).run()
            except RunError as error:
                if not (left or again()):
                    raise
                say(f"{error}; all are started again")
            else:
                # Done, or stopped on purpose: an exit code of a signal means that the run was saved and wants to end.
                over = not ended.code or ended.signal is not None or signals.received is not None
                if over or not (left or again()):
                    return ended
            if left:
                left -= 1
            else:
                # `again` starts a new budget: from here on the run resumes from its folder, as the out-of-memory
                # records need.
                command = [*(part for part in command if part not in ("--resume", "--auto-resume")), "--auto-resume"]
                left = restarts


class _Launched:
    """The processes of one start."""

    def __init__(self, command: Sequence[str], processes: int, signals: Signals):
        self.command, self.world, self.signals = command, processes, signals
        self.patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))  # as of torchrun
        self.started: list[subprocess.Popen[bytes]] = []
        self.printed: list[IO[bytes]] = []
        self.waited_for: list[int] = []  # processes that were still running when one failed

    def run(self) -> LaunchResult:
        # Without a limit each process would use all cores: a small step took 4.4 s instead of 0.16 s on two cores.
        threads = str(max(1, count_cores() // self.world))
        with ExitStack() as stack:
            # The socket is opened here and handed to the store, so that no other program takes the port in between.
            listening = stack.enter_context(listen())
            port = listening.getsockname()[1]
            shared = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), **local_group()}
            shared |= {
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port),
                # The processes connect to this process's store: none of them must try to serve one.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                LAUNCHED: "1",
            }
            # Registered before the first start, so that an error halfway leaves no process behind.
            stack.callback(self._kill)
            for rank in range(self.world):
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
                # A file rather than a pipe: nobody reads while the processes run, and a full pipe would block them.
                printed = stack.enter_context(tempfile.TemporaryFile()) if "--json" in self.command else None
                self.printed += [printed] if printed else []
                self.started.append(
                    subprocess.Popen(
                        tie_to_parent([sys.executable, "-m", "preheat", *self.command]),
                        env=shared | {key: str(value) for key, value in ranks.items()},
                        stdout=printed,
                        start_new_session=True,  # so that Ctrl-C reaches only this process, which forwards it once
                    )
                )
            store = create_local_store(
                port, listening=listening.detach()
            )  # started last: the processes import torch meanwhile
            first = self._wait()
            # Read before the store is gone: it holds the last status of each rank.
            aborted = first is not None and self.started[first].returncode == -signal.SIGABRT
            why = explain_abort(store, self.world, self.waited_for) if aborted else ""
            del store
            return self._describe_end(first, why)

    def _wait(self) -> int | None:
        """Waits until all have ended; returns the rank that failed first."""
        forwarded, failed, deadline = False, None, 0.0
        while alive := [process for process in self.started if process.poll() is None]:
            if self.signals.received is not None and not forwarded:
                forwarded = True
                for process in alive:
                    process.send_signal(signal.Signals[self.signals.received])
            # To rank 0, which tells the others, once its handler is there: the signal would end a process without one.
            if self.signals.save_requested and catches_signal(self.started[0].pid, signal.Signals[SAVE]) is not False:
                self.signals.save_requested = False
                self.started[0].send_signal(signal.Signals[SAVE])
            if failed is None and (failed := self._find_failed_rank()) is not None:
                deadline = time.monotonic() + self.patience
                # Recorded before they are terminated: these are the ranks that the failed one may have waited for.
                self.waited_for = [rank for rank, process in enumerate(self.started) if process.poll() is None]
                for process in alive:
                    process.terminate()
            # A process that is stuck in a collective does not react to SIGTERM.
            if failed is not None and time.monotonic() > deadline:
                self._kill()
            time.sleep(_POLL)
        return failed if failed is not None else self._find_failed_rank()

    def _find_failed_rank(self) -> int | None:
        """Returns the rank that failed; among several, a killed one, because the others' errors follow from it."""
        codes = {rank: process.returncode for rank, process in enumerate(self.started) if process.returncode}
        return next(
            (rank for rank, code in codes.items() if code < 0),
            next((r for r, c in codes.items() if not _is_stopped(c)), None),
        )

    def _describe_end(self, failed: int | None, why: str = "") -> LaunchResult:
        codes = [process.returncode for process in self.started]
        # Rank 0 prints the result; the files of the others are empty.
        result = next((printed for file in self.printed if (printed := _parse_object(file))), None)
        if failed is not None and codes[failed] < 0:
            if self.signals.received is not None:
                raise Interrupted(signal.Signals[self.signals.received])
            raise RunError(f"rank {failed} {describe_exit(codes[failed])}{why}")
        if failed is not None:
            return LaunchResult(codes[failed], result)
        stopped = next((code for code in codes if _is_stopped(code)), 0)
        return LaunchResult(stopped, result, signal.Signals(stopped - 128) if stopped else None)

    def _kill(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
        for process in self.started:
            process.wait()


def explain_abort(store: Store, world: int, running: Sequence[int]) -> str:
    """Explains from the ranks' status in the store why a process aborted; the text follows the process's name.

    torch's watchdog aborts a process if an NCCL collective loses another process or exceeds `parallel.timeout`; faults
    in libraries abort it, too.

    Args:
        world: number of processes.
        running: ranks that were still running.
    """
    # The keys of `_agree_on_prefix`, `Ranks.join` and the watchdog, seen from outside their prefix.
    prefix = parse_json(store.get("roll"))["word"] if store.check(["roll"]) else ""
    if not store.check([f"{prefix}/{BACKEND}"]):
        return "; the last lines above are those of the library that aborted it"
    waiting = []
    for rank in running:
        key = f"{prefix}/stands/{rank}"
        status: RankStatus | None = parse_json(store.get(key)) if store.check([key]) else None
        at = f" in step {status['step']} ({status['phase']}), at {status['line']}" if status else ""
        waiting.append(f"rank {rank}{at}")
    others = ", ".join(waiting[:4]) + (f" and {len(waiting) - 4} more" if len(waiting) > 4 else "")
    lost = (
        f"it waited for {others}"
        if waiting and len(running) < world
        else "a process on another host is lost, or all waited"
    )
    return (
        ", as torch's watchdog does if an NCCL collective loses a process or exceeds parallel.timeout: "
        f"{lost}; start again with --resume"
    )


def _is_stopped(code: int) -> bool:
    """Returns True if a run exits with this code after it saved on a signal."""
    return code in {128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


def _parse_object(file: IO[bytes]) -> JsonObject | None:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    try:
        value = parse_json(lines[-1]) if lines else None
    except ValueError:  # a process that was killed may have printed half of the line
        return None
    return value if isinstance(value, dict) else None
