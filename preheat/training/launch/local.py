"""Launches one process per device on this host, forwards signals to them, and restarts them after a failure.

torchrun's agent does the same for several hosts. On one host, its store would listen on all interfaces and a killed
agent would leave its processes running; here the store listens on the loopback interface only, and the processes end
with this one.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from preheat.errors import RunError
from preheat.files import parse_json
from preheat.hardware.child_processes import catches_signal, create_local_store, describe_exit, listen
from preheat.hardware.interrupts import Interrupted
from preheat.hardware.rank_processes import POLL_SECONDS, RankProcesses
from preheat.training.process_group import BACKEND
from preheat.training.signals import SAVE, Signals

if TYPE_CHECKING:
    from torch.distributed import Store

    from preheat.core.json_types import JsonObject
    from preheat.training.hang_watchdog import RankStatus

__all__ = ["LAUNCHED", "LaunchResult", "explain_abort", "start"]

LAUNCHED = "PREHEAT_LAUNCHED"
"""Set in the processes: this launcher recognizes the exit code of a signal and does not restart after it."""
_STOPPED = {128 + n: n for n in signal.Signals if n.name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1")}
"""Exit codes of a run that saved on a signal, and the signals (Windows lacks two)."""
_SUCCESSES = {0, *_STOPPED}


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
        self.ranks = RankProcesses(processes)
        self.printed: list[IO[bytes]] = []
        self.waited_for: list[int] = []  # ranks that were still running when one failed

    def run(self) -> LaunchResult:
        with ExitStack() as stack:
            # The socket is opened here and handed to the store, so that no other program takes the port in between.
            listening = stack.enter_context(listen())
            port = listening.getsockname()[1]
            environment = {
                "MASTER_PORT": str(port),
                # The processes connect to this process's store: none of them must try to serve one.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                LAUNCHED: "1",
            }
            # Entered before the first start, so that an error halfway leaves no process behind.
            stack.enter_context(self.ranks)
            for _ in range(self.world):
                # A file rather than a pipe: nobody reads while the processes run, and a full pipe would block them.
                printed = stack.enter_context(tempfile.TemporaryFile()) if "--json" in self.command else None
                self.printed += [printed] if printed else []
                command = [sys.executable, "-m", "preheat", *self.command]
                # A session of its own, so that Ctrl-C reaches only this process, which forwards it once.
                self.ranks.start(command, environment=environment, stdout=printed, new_session=True)
            store = create_local_store(
                port, listening=listening.detach()
            )  # started last: the processes import torch meanwhile
            first = self._wait()
            # Read before the store is gone: it holds the last status of each rank.
            aborted = first is not None and self.ranks.processes[first].returncode == -signal.SIGABRT
            why = explain_abort(store, self.world, self.waited_for) if aborted else ""
            del store
            return self._describe_end(first, why)

    def _wait(self) -> int | None:
        """Waits until all have ended; returns the rank that failed first."""
        forwarded, failed, deadline = False, None, 0.0
        leader = self.ranks.processes[0]
        while running := self.ranks.list_running():
            if self.signals.received is not None and not forwarded:
                forwarded = True
                self.ranks.terminate(signal.Signals[self.signals.received])
            # To rank 0, which tells the others, once its handler is there: the signal would end a process without one.
            if self.signals.save_requested and catches_signal(leader.pid, signal.Signals[SAVE]) is not False:
                self.signals.save_requested = False
                leader.send_signal(signal.Signals[SAVE])
            if failed is None and (failed := self.ranks.find_failed(_SUCCESSES)) is not None:
                deadline = time.monotonic() + self.patience
                # Recorded before they are terminated: these are the ranks that the failed one may have waited for.
                self.waited_for = running
                self.ranks.terminate()
            # A process that is stuck in a collective does not react to SIGTERM.
            if failed is not None and time.monotonic() > deadline:
                self.ranks.kill()
            time.sleep(POLL_SECONDS)
        return failed if failed is not None else self.ranks.find_failed(_SUCCESSES)

    def _describe_end(self, failed: int | None, why: str = "") -> LaunchResult:
        codes = [process.returncode for process in self.ranks.processes]
        # Rank 0 prints the result; the files of the others are empty.
        result = next((printed for file in self.printed if (printed := _parse_object(file))), None)
        if failed is not None and codes[failed] < 0:
            if self.signals.received is not None:
                raise Interrupted(signal.Signals[self.signals.received])
            raise RunError(f"rank {failed} {describe_exit(codes[failed])}{why}")
        if failed is not None:
            return LaunchResult(codes[failed], result)
        stopped = next((code for code in codes if code in _STOPPED), 0)
        return LaunchResult(stopped, result, _STOPPED.get(stopped))


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


def _parse_object(file: IO[bytes]) -> JsonObject | None:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    try:
        value = parse_json(lines[-1]) if lines else None
    except ValueError:  # a process that was killed may have printed half of the line
        return None
    return value if isinstance(value, dict) else None
