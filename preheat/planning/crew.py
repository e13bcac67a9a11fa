"""Processes that observe beside this one, so that a search takes more than one core. What they see reaches this one through the cache of observations."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["crew", "processes", "share"]

Task = dict[str, Any]
"""Arguments of `planning.recall.recall`."""

_MOST = 4  # each holds torch and transformers: 0.6 GiB


def processes() -> int:
    """How many a search takes: $PREHEAT_PROCESSES, or one a core and four at most."""
    stated = os.environ.get("PREHEAT_PROCESSES", "")
    return int(stated) if stated.isdigit() and int(stated) else min(len(os.sched_getaffinity(0)), _MOST)


class _Helper:
    """A process of the crew: `ready` once it has imported what it needs and after each task, `busy` while it has one."""

    def __init__(self) -> None:
        self.pipe, far = Pipe()
        self.ready = self.busy = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "preheat.planning.crew", str(far.fileno())],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what fails there is done again here, and says so then
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        far.close()

    def take(self, task: Task) -> None:
        self.ready, self.busy = False, True
        with suppress(OSError):  # it has ended, which is heard next
            self.pipe.send(task)

    def end(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.wait()


_helpers: list[_Helper] = []


@contextmanager
def crew(size: int | None = None) -> Iterator[None]:
    """Within, `share` has as many processes as `size` says with this one; `processes()` when not given."""
    _helpers.extend(_Helper() for _ in range((size or processes()) - 1))
    try:
        yield
    finally:
        while _helpers:
            _helpers.pop().end()


def share(tasks: Iterable[Task], do: Callable[[Task], None]) -> None:
    """Does all tasks, some of them in the crew's processes. What fails there is left to whoever needs it.

    Args:
        do: does one here.
    """
    left = deque(tasks)
    while left or any(helper.busy for helper in _helpers):
        _hear(0.0 if left else None)
        for helper in _helpers:
            if helper.ready and left:
                helper.take(left.pop())
        if left:
            do(left.popleft())


def _hear(seconds: float | None) -> None:
    """Takes note of who is done; one that has ended is no longer asked."""
    for pipe in wait([helper.pipe for helper in _helpers], seconds):
        helper = next(h for h in _helpers if h.pipe is pipe)
        helper.busy = False
        try:
            helper.pipe.recv()
            helper.ready = True
        except (EOFError, OSError):
            _helpers.remove(helper)
            helper.end()


def _serve(pipe: Connection) -> None:
    from preheat.planning import recall  # takes seconds
    from preheat.planning.observe import observe
    from preheat.recipe import parse
    from preheat.technique import Device

    tiny = parse("model: {layers: 1, width: 16, heads: 2, vocabulary: 64}\nbatch: {size: 1, length: 8}\nstop: {steps: 1}")
    observe(tiny, vocabulary=None, device=Device("cpu", "", 1), world=1)  # so does the first
    gc.freeze()
    with suppress(EOFError, OSError):
        while True:
            pipe.send("ready")
            task = pipe.recv()
            with suppress(Exception):  # whoever asked tries it again and finds the same
                recall.recall(**task)
            recall.forget()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
