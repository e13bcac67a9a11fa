"""`preheat.train` in a process of its own whose address space is capped from a moment on: what it asks for beyond that fails, truly.

    python capped.py RECIPE OUT MOMENT MIB [KEY=VALUE ...]

MOMENT is a stage (`training`) or `step N`; from its first time on the process may take MIB more than it has then.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat import load_recipe, train
from preheat.training.observer import Watch


class Cap(Watch):
    def __init__(self, moment: str, mib: int):
        self.moment, self.mib = moment, mib

    def _at(self, moment: str) -> None:
        if moment == self.moment:
            self.moment = ""
            size = next(
                line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")
            )
            limit = (int(size.split()[1]) << 10) + (self.mib << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def stage(self, words: str) -> None:
        self._at(words)

    def step(self, metrics: Mapping[str, Any], total: int | None) -> None:
        self._at(f"step {metrics['step']}")

    def notice(self, words: str) -> None:
        print(f"note: {words}", file=sys.stderr)

    def alarm(self, words: str) -> None:
        print(words, file=sys.stderr)


if __name__ == "__main__":
    recipe, out, moment, mib, *settings = sys.argv[1:]
    train(load_recipe(recipe, settings), out=out, watch=Cap(moment, int(mib)))
