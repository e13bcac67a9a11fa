"""A run that from a phase on gets little more memory than it has: `short_of_memory.py RECIPE OUT PHASE [SETTING ...]`.

On CUDA by a share of the card, on a CPU by the process's address space. Checkpoints are copied to the host: saving is short of the host's memory on both.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOM = 4 << 20  # bytes more than it has
HOST_ROOM = (
    48 << 20
)  # on the host, where the interpreter needs room too to choose a fallback; the cases need 64 and more
LIMITED = "short_of_memory: the limit is set"
FIRST = ("saving",)
"""Phases that are limited from their first time on: the second checkpoint is the last. The others are limited from their second time on, when the run has
what it keeps."""
SMALLEST = 1 << 20  # bytes: smaller holes are left
FILLING: list[Any] = []


def set_limit(phase: str) -> None:
    import torch

    print(LIMITED, file=sys.stderr)

    if torch.cuda.is_available() and phase != "saving":
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / whole)
        return
    from preheat.hardware.cpu_allocator import release_unused

    release_unused("cpu")
    status = Path("/proc/self/status").read_text()
    size = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    _fill_holes()
    resource.setrlimit(resource.RLIMIT_AS, (size + HOST_ROOM, resource.RLIM_INFINITY))


def _fill_holes() -> None:
    """Takes what the heap has free: address space that the limit counts already would come on top of the room."""
    import torch

    size = 1 << 30
    while size >= SMALLEST:
        try:
            FILLING.append(torch.empty(size, dtype=torch.uint8))
        except (RuntimeError, MemoryError):
            size //= 2


def limit_from_call(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """The function with a limit that is set before its first or its second call."""
    calls, limited = 0, 1 if phase in FIRST else 2

    @functools.wraps(function)
    def call_limited(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == limited:
            set_limit(phase)
        return function(*arguments, **named)

    return call_limited


def find_phase_functions() -> dict[str, tuple[Any, str]]:
    """The function of each phase, as its owner and its name."""
    import torch

    from preheat.engine import step
    from preheat.engine.async_checkpoint import Saving
    from preheat.evaluation.run_evaluator import RunEvaluator
    from preheat.training import loop

    return {
        "forward": (step, "forward"),
        "backward": (torch.Tensor, "backward"),
        "update": (loop, "update"),
        "evaluation": (RunEvaluator, "take"),
        "saving": (Saving, "save"),
    }


def main() -> int:
    import preheat
    from preheat.errors import PreheatError

    recipe, out, phase, *settings = sys.argv[1:]
    owner, name = find_phase_functions()[phase]
    setattr(owner, name, limit_from_call(getattr(owner, name), phase))
    try:
        preheat.train(preheat.load_recipe(recipe, settings), out=out)
    except PreheatError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
