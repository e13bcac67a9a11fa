"""Several processes on this host, one a device, started and watched by torchrun's own agent."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Sequence

from preheat.errors import RunError

__all__ = ["start"]


def start(command: Sequence[str], *, processes: int, restarts: int = 0, again: Callable[[], bool] = lambda: False) -> int:
    """Runs `preheat COMMAND` in several processes that know of each other, and waits for them.

    When one of them dies the agent ends the others; while `restarts` are left it starts all again.

    Args:
        command: arguments of preheat.
        processes: how many; on CPUs each gets its share of the cores.
        restarts: how often all are started again.
        again: asked when they failed: whether all are to go on in any case, by `--auto-resume`; it must not say so for ever.

    Returns:
        The exit code: 0, or that of the process that failed first.

    Raises:
        RunError: stopped by a signal; the processes were given time to save.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what failed is said by the process that failed
    while (code := _launched(command, processes, restarts)) and again():
        command = [*(part for part in command if part not in ("--resume", "--auto-resume")), "--auto-resume"]
    return code


def _launched(command: Sequence[str], processes: int, restarts: int) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=restarts,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "preheat", *command)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        raise RunError(f"ended by {error.sigval.name}; the processes were told to save") from None
    return 0
