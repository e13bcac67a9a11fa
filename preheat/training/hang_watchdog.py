"""Where each process of a run stands: left in the common store while it goes on, and told when one waits too long for the others."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from preheat.core import Phase
from preheat.training.process_group import Ranks

__all__ = ["HangWatchdog"]


class HangWatchdog:
    """A thread that tells the others every few seconds what this process does, and compares when nothing goes on.

    Args:
        patience: seconds in one place after which all places are told, once, by the first process that still answers.
        say: told them, a line each.
    """

    def __init__(self, ranks: Ranks, patience: float, say: Callable[[str], None]):
        self.ranks, self.patience, self.say = ranks, patience, say
        self.interval = min(5.0, patience / 8)
        self.main = threading.get_ident()
        self._place: tuple[int, Phase, float] = (0, Phase.STARTING, time.time())
        self._over = threading.Event()
        self._told = False
        self._thread: threading.Thread | None = None
        if ranks.world > 1:
            self.store = ranks.store.clone()  # a connection of its own: the main thread may be waiting on the other
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def at(self, step: int, phase: Phase) -> None:
        """Reports that this process has begun a phase of a step (counted from 1)."""
        self._place = (step, phase, time.time())

    @property
    def phase(self) -> Phase:
        """The phase reported last."""
        return self._place[1]

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            try:
                step, phase, since = self._place
                mine = {"step": step, "phase": phase, "since": since, "now": time.time(), "line": self._line()}
                self.store.set(f"stands/{self.ranks.rank}", json.dumps(mine))
                if time.time() - since > self.patience and not self._told:
                    self._told = True
                    self._compare()
            except RuntimeError:  # the store is gone, and with it the run
                return
            over = self._over.wait(self.interval)

    def _line(self) -> str:
        """The innermost line of preheat's own source that the main thread is in."""
        frame: FrameType | None = sys._current_frames().get(self.main)
        house = Path(__file__).parents[1]
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if house in file.parents:
                return f"{file.relative_to(house.parent)}:{frame.f_lineno}"
            frame = frame.f_back
        return "outside preheat"

    def _compare(self) -> None:
        keys = [f"stands/{rank}" for rank in range(self.ranks.world)]
        all_places: list[dict[str, Any] | None] = [
            json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys
        ]
        now = time.time()
        alive = [place is not None and now - place["now"] < 3 * self.interval for place in all_places]
        if self.ranks.rank != alive.index(True):
            return
        self.say(f"nothing went on for {self.patience:.0f} s; this is where each process stands:")
        for rank, (place, answers) in enumerate(zip(all_places, alive, strict=True)):
            if place is None:
                self.say(f"  rank {rank}: never answered")
                continue
            silent = "" if answers else f", silent for {now - place['now']:.0f} s: stopped, or its host is gone"
            self.say(
                f"  rank {rank}: step {place['step']}, {place['phase']} for {now - place['since']:.0f} s, at "
                f"{place['line']}{silent}"
            )
