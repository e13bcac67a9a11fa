"""Starts the ranks of a group on this host, and ends all of them with the block. No torch import."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Container, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from preheat.hardware.child_processes import LOOPBACK, last_error_line, local_group, tie_to_parent
from preheat.hardware.probe import count_cores

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["POLL_SECONDS", "RankProcesses"]

POLL_SECONDS = 0.05
_GRACE_SECONDS = 0.5


class RankProcesses:
    """The ranks of a group on this host; all are killed when the block ends, also by an error or Ctrl-C.

    Each rank has torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR), and gloo and NCCL
    use the loopback interface. The ranks split the cores by OMP_NUM_THREADS, unless that is set: otherwise each starts
    a thread for each core (a small step took 4.4 s instead of 0.16 s on two cores).

    Args:
        world: number of ranks.
        keep_errors: keep the ranks' standard error for `last_error_line`, instead of showing it.

    Example:
        with RankProcesses(2, keep_errors=True) as ranks:
            for _ in range(2):
                ranks.start([sys.executable, "-c", "print('hello')"])
            if (failed := ranks.wait()) is not None:
                raise RunError(ranks.last_error_line(failed))
    """

    def __init__(self, world: int, *, keep_errors: bool = False):
        self.world = world
        self.processes: list[subprocess.Popen[bytes]] = []
        self._keep_errors = keep_errors
        self._errors: list[IO[str]] = []

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for process in self.processes:
            if process.stdout is not None:
                process.stdout.close()
        for file in self._errors:
            file.close()

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        new_session: bool = False,
    ) -> None:
        """Starts the next rank.

        Args:
            environment: variables of this rank, in addition to those of this process and of the group.
            stdout: as of `subprocess.Popen`.
            pass_fds: file descriptors that the rank inherits.
            new_session: Ctrl-C in the terminal does not reach the rank.
        """
        rank = len(self.processes)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
        errors = None
        if self._keep_errors:
            # A file rather than a pipe: nobody reads while the ranks run, and a full pipe would block them.
            errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            self._errors.append(errors)
        variables = {"OMP_NUM_THREADS": str(max(1, count_cores() // self.world)), **os.environ, **local_group()}
        variables |= {key: str(number) for key, number in numbers.items()} | {"MASTER_ADDR": LOOPBACK}
        self.processes.append(
            subprocess.Popen(
                tie_to_parent(command),
                env={**variables, **(environment or {})},
                stdout=stdout,
                stderr=errors,
                pass_fds=pass_fds,
                start_new_session=new_session,
            )
        )

    def list_running(self) -> list[int]:
        """Returns the ranks that still run."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def find_failed(self, successes: Container[int] = (0,)) -> int | None:
        """Returns a rank that ended with another code than `successes`, preferably one that a signal ended.

        A rank that is killed makes the others fail.
        """
        codes = [
            (rank, code) for rank, process in enumerate(self.processes) if (code := process.returncode) is not None
        ]
        failed = [(rank, code) for rank, code in codes if code not in successes]
        return next((rank for rank, code in failed if code < 0), failed[0][0] if failed else None)

    def wait(self) -> int | None:
        """Waits until all ranks have ended or one has failed; returns the rank that failed first, or was killed.

        The others get half a second to end by themselves.
        """
        first, deadline = None, 0.0
        while self.list_running():
            if first is None and (first := self.find_failed()) is not None:
                deadline = time.monotonic() + _GRACE_SECONDS
            if first is not None and time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        # A rank that a signal ended is named before the one that failed first: it is the likelier cause.
        last = self.find_failed()
        return last if first is None or (last is not None and self.processes[last].returncode < 0) else first

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to the ranks that still run."""
        for rank in self.list_running():
            self.processes[rank].send_signal(number)

    def kill(self) -> None:
        """Kills the ranks that still run, and waits for their end."""
        for rank in self.list_running():
            self.processes[rank].kill()
        for process in self.processes:
            process.wait()

    def last_error_line(self, rank: int) -> str:
        """Returns the last line that a rank wrote to its standard error, or '' without one."""
        return last_error_line(self._errors[rank])
