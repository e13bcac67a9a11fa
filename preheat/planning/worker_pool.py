"""Processes that observe beside this one, so that a search takes more than one core. What they see reaches this one through the cache of observations."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from preheat.hardware.child_processes import end_with_parent
from preheat.hardware.interrupts import heeded

__all__ = ["is_serial", "worker_pool", "processes", "run_tasks"]

Task = dict[str, Any]
"""Arguments of `planning.observation_cache.observe_cached`."""

_log = logging.getLogger(__name__)
_MOST = 4  # each holds torch and transformers: 0.6 GiB


def processes() -> int:
    """How many a search takes: $PREHEAT_PROCESSES, or one a core and four at most; one where a process cannot be copied safely."""
    if not _copies_serve():
        return 1
    setting = os.environ.get("PREHEAT_PROCESSES", "")
    return max(int(setting), 1) if setting.isdigit() else min(len(os.sched_getaffinity(0)), _MOST)


def _copies_serve() -> bool:
    import torch

    return sys.platform == "linux" and not torch.cuda.is_initialized()  # CUDA's threads and locks are not copied


class _Worker:
    """A copy of this process, with the task that it has."""

    def __init__(self, do: Callable[[Task], None]) -> None:
        self.pipe, far = Pipe()
        self.task: Task | None = None
        parent = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            _serve(far, parent, do)
        far.close()

    def take(self, task: Task) -> None:
        self.task = task
        with suppress(OSError):  # it has ended, which is heard next
            self.pipe.send(task)

    def end(self) -> None:
        self.pipe.close()
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)  # it holds nothing that would be left half done
        os.waitpid(self.process, 0)


_helpers: list[_Worker] = []


@contextmanager
def worker_pool(do: Callable[[Task], None], size: int | None = None) -> Iterator[None]:
    """Within, `run_tasks` has as many processes as `size` says with this one; `processes()` when not given.

    Args:
        do: does one task in such a process, and leaves nothing of it in memory.

    They are copies of this process, which must have run no backward pass yet: torch's threads for those would be
        missing in them. Where
    CUDA is in use already there are none.
    """
    import transformers.modeling_utils  # noqa: F401  # both are needed by all: else each would import them

    gc.collect()
    gc.freeze()  # what the collector would touch would be copied
    _helpers.extend(_Worker(do) for _ in range((size or processes()) - 1 if _copies_serve() else 0))
    try:
        yield
    finally:
        gc.unfreeze()
        while _helpers:
            _helpers.pop().end()


def is_serial() -> bool:
    """Whether `run_tasks` has no process but this one."""
    return not _helpers


def run_tasks(tasks: Iterable[Task], do: Callable[[Task], None]) -> None:
    """Does all tasks, some of them in the crew's processes. What fails there is done again here, where it is told.

    Args:
        do: does one here.
    """
    left = deque(tasks)
    while left or any(helper.task for helper in _helpers):
        left.extend(_hear(0.0 if left else None))
        for helper in _helpers:
            if helper.task is None and left:
                helper.take(left.pop())
        if left:
            do(left.popleft())


def _hear(seconds: float | None) -> list[Task]:
    """Takes note of who is done. One that has ended or failed is no longer asked; gives what it has left undone."""
    undone = []
    for pipe in wait([helper.pipe for helper in _helpers], seconds):
        helper = next(h for h in _helpers if h.pipe is pipe)
        try:
            failure = helper.pipe.recv()
        except (EOFError, OSError):
            failure = "its process has ended"
        if failure:
            _log.debug("an observation in another process failed, and is made again: %s", failure)
            undone += [helper.task] if helper.task else []
            _helpers.remove(helper)
            helper.end()
        helper.task = None
    return undone


def _serve(pipe: Connection, parent: int, do: Callable[[Task], None]) -> NoReturn:
    for number in (*heeded(), signal.SIGUSR1):  # a terminal signals all its processes; whoever asked ends this one
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent)
    import torch

    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # what fails here is done again by whoever asked, and says so there
        os.dup2(null, standard)
    try:
        torch.set_num_threads(1)
        while True:
            do(pipe.recv())
            pipe.send("")
    finally:
        with suppress(OSError):  # whoever asked may have ended
            pipe.send(repr(sys.exception()))
        os._exit(0)
