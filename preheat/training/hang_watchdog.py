"""Hang watchdog: each rank publishes its progress to the store; on a timeout, print where every rank is stuck."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypedDict

from preheat.core import Phase
from preheat.core.run_records import RankState
from preheat.training.process_group import Ranks

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["HangWatchdog", "RankStatus"]


class RankStatus(TypedDict):
    """A rank's status in the store, as JSON.

    Attributes:
        step: the step in progress, from 1.
        since: time at which its phase began.
        now: time of this status: if it is old, the process is stopped or its host is gone.
        line: file and line of preheat that the main thread is in.
    """

    step: int
    phase: str
    since: float
    now: float
    line: str


class HangWatchdog:
    """A thread that publishes this rank's step and phase every few seconds, and reports all ranks after a timeout.

    Args:
        patience: seconds without progress after which the lowest rank that still answers prints the report, once.
        say: called with each line of the report.
    """

    def __init__(self, ranks: Ranks, patience: float, say: Callable[[str], None]):
        self.ranks, self.patience, self.say = ranks, patience, say
        # Short enough that several statuses fall into the patience, however short that is.
        self.interval = min(5.0, patience / 8)
        self.main = threading.get_ident()
        # One tuple, replaced as a whole: the thread never reads the step of one phase with the time of another.
        self._progress: tuple[int, Phase, float] = (0, Phase.STARTING, time.time())
        self._over = threading.Event()
        self._reported = False
        self._states: tuple[RankState, ...] = ()
        self._thread: threading.Thread | None = None
        if ranks.world > 1:
            assert ranks.store is not None, "several processes have a store"
            # A connection of its own: the main thread may be waiting on the other.
            self.store: Store = ranks.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
            # A daemon thread cannot keep a process alive whose main thread hangs or has failed.
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def set_phase(self, step: int, phase: Phase) -> None:
        """Records that this process has begun a phase of a step (counted from 1)."""
        self._progress = (step, phase, time.time())

    @property
    def phase(self) -> Phase:
        """The phase recorded last."""
        return self._progress[1]

    def list_states(self) -> tuple[RankState, ...]:
        """Returns what each rank does; on rank 0, as last published."""
        if self.ranks.world > 1:
            return self._states
        step, phase, since = self._progress
        return (RankState(rank=0, step=step, phase=phase, since=since, time=time.time()),)

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            try:
                step, phase, since = self._progress
                status: RankStatus = {
                    "step": step,
                    "phase": phase,
                    "since": since,
                    "now": time.time(),
                    "line": self._find_line(),
                }
                self.store.set(f"stands/{self.ranks.rank}", json.dumps(status))
                if self.ranks.lead:
                    self._states = tuple(
                        RankState(
                            rank=rank,
                            step=status["step"],
                            phase=status["phase"],
                            since=status["since"],
                            time=status["now"],
                            line=status["line"],
                        )
                        for rank, status in enumerate(self._read_statuses())
                        if status is not None
                    )
                # Publishes first: the report below reads this rank's own status from the store, too.
                if time.time() - since > self.patience and not self._reported:
                    self._reported = True
                    self._report()
            except RuntimeError:  # the store is gone: the run has ended
                return
            over = self._over.wait(self.interval)

    def _find_line(self) -> str:
        """Returns the innermost line of preheat's own source in the main thread's stack."""
        # Works even while the main thread is blocked in a collective: its Python frames do not change meanwhile.
        frame: FrameType | None = sys._current_frames().get(self.main)
        package = Path(__file__).parents[1]
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if package in file.parents:
                return f"{file.relative_to(package.parent)}:{frame.f_lineno}"
            frame = frame.f_back
        return "outside preheat"

    def _read_statuses(self) -> list[RankStatus | None]:
        """Returns the last status of each rank; None: it has published none yet."""
        keys = [f"stands/{rank}" for rank in range(self.ranks.world)]
        # At once, if all are there: thousands of ranks would take as many round trips.
        if self.store.check(keys):
            return [json.loads(status) for status in self.store.multi_get(keys)]
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def _report(self) -> None:
        """Prints the last status of every rank, if this is the lowest rank that still answers."""
        statuses = self._read_statuses()
        now = time.time()
        # Three intervals without a status: one may be late on a busy host. Clocks of hosts are assumed to agree.
        alive = [status is not None and now - status["now"] < 3 * self.interval for status in statuses]
        # Every rank gets here after its own timeout; one report is enough. This rank has just published, so one is
        # alive.
        if self.ranks.rank != alive.index(True):
            return
        self.say(f"no progress for {self.patience:.0f} s; state of each process:")
        for rank, (status, answers) in enumerate(zip(statuses, alive, strict=True)):
            if status is None:
                self.say(f"  rank {rank}: never answered")
                continue
            silent = "" if answers else f", silent for {now - status['now']:.0f} s: stopped, or its host is gone"
            self.say(
                f"  rank {rank}: step {status['step']}, {status['phase']} for {now - status['since']:.0f} s, at "
                f"{status['line']}{silent}"
            )
