"""Starts the processes of a test: forks of one fresh process, so that everything is imported once, and not by each."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import torch

from preheat.hardware.child_processes import local_group

from ..fork_server import Fork

Work = Callable[[int, Path], None]
"""(rank, folder) -> None, a function of a module: what one process does."""

ALL = os.environ.get("PREHEAT_SCALE") == "all"
"""Whether every case is wanted (`make test-scale`), or those without which a change could break what no other shows."""


@contextmanager
def processes(work: Work, world: int, folder: Path, timeout: float = 240) -> Iterator[None]:
    """Runs `work` on `world` processes beside the block and waits for them at its end; the first that fails ends all.

    Raises:
        AssertionError: one failed; with the end of what they wrote to stderr.
    """
    parent = Fork(
        [work.__module__, work.__name__, str(world), str(folder)],
        function=f"{__name__}:_main",
        environment={**os.environ, **local_group(), "OMP_NUM_THREADS": "1"},
        errors=folder / "stderr",
        session=True,
    )
    try:
        yield
        assert parent.wait(timeout) == 0, (folder / "stderr").read_text()[-4000:]
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, 9)
            parent.wait()


def _main(module: str, name: str, world: str, folder: str) -> None:
    torch.set_num_threads(1)
    work: Work = getattr(importlib.import_module(module), name)
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_one, args=(work, rank, Path(folder)), daemon=True) for rank in range(int(world))]
    for process in started:
        process.start()
    left = list(started)
    while left:
        wait([process.sentinel for process in left])
        if ended := {rank: process.exitcode for rank, process in enumerate(started) if process.exitcode}:
            print(f"exit codes of ranks (below zero: the signal): {ended}", file=sys.stderr)
            sys.exit(1)  # which ends the others: they are daemons
        left = [process for process in left if process.exitcode is None]


def _one(work: Work, rank: int, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # as a launcher would say it
    work(rank, folder)
