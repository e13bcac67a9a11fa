"""Starts the processes of a test: forks of one fresh process, so that everything is imported once, and not by each."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import torch

from preheat.hardware.child_processes import local_group

Work = Callable[[int, Path], None]
"""(rank, folder) -> None, a function of a module: what one process does."""

ALL = os.environ.get("PREHEAT_SCALE") == "all"
"""Whether every case is wanted (`make test-scale`), or those without which a change could break what no other shows."""

EVERYWHERE = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "preheat.engine.builder",
)
"""Imported before the processes part: most are imported late otherwise, by each of them."""


@contextmanager
def processes(work: Work, world: int, folder: Path, timeout: float = 240) -> Iterator[None]:
    """Runs `work` on `world` processes beside the block and waits for them at its end; the first that fails ends all.

    Raises:
        AssertionError: one failed; with the end of what they wrote to stderr.
    """
    code = "import sys; from tests.distributed.processes import _main; _main(*sys.argv[1:])"
    path = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        **local_group(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    command = [sys.executable, "-c", code, work.__module__, work.__name__, str(world), str(folder)]
    with (folder / "stderr").open("w") as said:
        parent = subprocess.Popen(command, env=environment, stderr=said, start_new_session=True)
    try:
        yield
        assert parent.wait(timeout) == 0, (folder / "stderr").read_text()[-4000:]
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, 9)
            parent.wait()


def _main(module: str, name: str, world: str, folder: str) -> None:
    torch.set_num_threads(1)
    for needed in EVERYWHERE:
        importlib.import_module(needed)
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
