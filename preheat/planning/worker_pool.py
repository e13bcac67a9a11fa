"""Worker processes for dry runs, which return their observations through the cache on disk."""

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
from preheat.hardware.interrupts import handled_signals
from preheat.hardware.probe import count_cores

__all__ = ["freeze_garbage", "is_serial", "start_worker_pool", "count_processes", "run_tasks"]

Task = dict[str, Any]
"""Arguments of `planning.observation_cache.observe_cached`."""

_log = logging.getLogger(__name__)
_MOST = 4  # each process holds torch and transformers: 0.6 GiB


def count_processes() -> int:
    """Returns the number of processes of a search: $PREHEAT_PROCESSES, or one per core up to 4; 1 without fork."""
    if not _can_fork():
        return 1
    setting = os.environ.get("PREHEAT_PROCESSES", "")
    return max(int(setting), 1) if setting.isdigit() else min(count_cores(), _MOST)


def _can_fork() -> bool:
    import torch

    return sys.platform == "linux" and not torch.cuda.is_initialized()  # CUDA does not survive a fork


class _Worker:
    """A fork of this process and its current task."""

    def __init__(self, do: Callable[[Task], None]) -> None:
        # Forked rather than spawned: a fresh process would take seconds to import torch and transformers.
        self.pipe, far = Pipe()
        self.task: Task | None = None
        parent = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            _serve(far, parent, do)
        # Otherwise the pipe would not report the end of the worker, because this process holds its other end, too.
        far.close()

    def take(self, task: Task) -> None:
        self.task = task
        with suppress(OSError):  # the worker has ended, which `_collect` handles next
            self.pipe.send(task)

    def end(self) -> None:
        self.pipe.close()
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)  # workers hold no state that a kill could corrupt
        os.waitpid(self.process, 0)


_helpers: list[_Worker] = []
_frozen = False  # by `freeze_garbage`


@contextmanager
def start_worker_pool(do: Callable[[Task], None], size: int | None = None) -> Iterator[None]:
    """Context manager that gives `run_tasks` `size` processes including this one, by default `count_processes()`.

    The workers are forks of this process, which must not have run a backward pass yet: autograd's threads do not
    survive a fork. There are no workers if CUDA is initialized already.

    Args:
        do: runs one task in a worker and leaves nothing of it in memory.
    """
    import transformers.modeling_utils  # noqa: F401  # imported before the fork, so that the workers share it

    # Garbage collection would touch, and so copy, shared pages.
    with freeze_garbage():
        _helpers.extend(_Worker(do) for _ in range((size or count_processes()) - 1 if _can_fork() else 0))
        try:
            yield
        finally:
            while _helpers:
                _helpers.pop().end()


@contextmanager
def freeze_garbage() -> Iterator[None]:
    """Context manager that hides all objects that exist now from garbage collection, which would scan all of torch
    repeatedly; nested uses, and those in a run that has frozen its objects already, do nothing.
    """
    global _frozen
    # The count walks over all frozen objects, 40 ms each time: only the outermost use asks.
    if _frozen or gc.get_freeze_count():
        yield
        return
    # Not collected first: that takes a fifth of a second, for little garbage.
    gc.freeze()
    _frozen = True
    try:
        yield
    finally:
        _frozen = False
        gc.unfreeze()


def is_serial() -> bool:
    """True if `run_tasks` has no workers."""
    return not _helpers


def run_tasks(tasks: Iterable[Task], do: Callable[[Task], None]) -> None:
    """Runs all tasks, some of them in the workers; tasks that fail there are repeated here, so that errors surface.

    Args:
        do: runs one task in this process.
    """
    left = deque(tasks)
    while left or any(worker.task for worker in _helpers):
        # With tasks left, look without waiting; without any, wait for the workers.
        left.extend(_collect(0.0 if left else None))
        for worker in _helpers:
            if worker.task is None and left:
                worker.take(left.pop())
        if left:
            do(left.popleft())


def _collect(seconds: float | None) -> list[Task]:
    """Receives the results of finished workers; removes failed ones and returns their unfinished tasks."""
    undone = []
    for pipe in wait([worker.pipe for worker in _helpers], seconds):
        worker = next(h for h in _helpers if h.pipe is pipe)
        try:
            failure = worker.pipe.recv()
        except (EOFError, OSError):
            failure = "its process has ended"
        # A worker ends with its first failure.
        if failure:
            _log.debug("an observation in another process failed and is repeated: %s", failure)
            undone += [worker.task] if worker.task else []
            _helpers.remove(worker)
            worker.end()
        worker.task = None
    return undone


def _serve(pipe: Connection, parent: int, do: Callable[[Task], None]) -> NoReturn:
    # A terminal signals the whole process group; the parent ends its workers itself.
    for number in (
        *handled_signals(),
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_IGN)
    # Signals are ignored, so a killed parent must take its workers with it.
    end_with_parent(parent)
    import torch

    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # failed tasks are repeated by the parent, which reports the error
        os.dup2(null, standard)
    try:
        # One thread each: the processes already fill the cores.
        torch.set_num_threads(1)
        while True:
            do(pipe.recv())
            pipe.send("")
    finally:
        with suppress(OSError):  # the parent may have ended
            pipe.send(repr(sys.exception()))
        # Without the cleanup of the forked interpreter, whose files and locks belong to the parent.
        os._exit(0)
