"""A run that from the second time of a phase on gets little more memory than it has: `short_of_memory.py RECIPE OUT PHASE`.

On CUDA by a share of the card, on a CPU by the process's address space.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOM = 4 << 20  # bytes more than it has
HOST_ROOM = 48 << 20  # on a CPU, where the interpreter needs room too to choose a fallback; the run's logits take 64
LIMITED = "short_of_memory: the limit is set"


def limit() -> None:
    import torch

    print(LIMITED, file=sys.stderr)

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / whole)
        return
    from preheat.hardware.cpu_allocator import release_unused

    release_unused("cpu")
    size = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, ((int(size.split()[1]) << 10) + HOST_ROOM, resource.RLIM_INFINITY))


def from_the_second(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def short(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            limit()
        return function(*arguments, **named)

    return short


def places() -> dict[str, tuple[Any, str]]:
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

    recipe, out, phase = sys.argv[1:]
    owner, name = places()[phase]
    setattr(owner, name, from_the_second(getattr(owner, name)))
    try:
        preheat.train(preheat.load_recipe(recipe), out=out)
    except PreheatError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
