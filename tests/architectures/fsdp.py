"""FSDP on two processes over gloo against one process: the same losses and gradient norms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from preheat import recipe as recipes

from ..distributed.exactness import ROWS, Case, run, verdict
from .columns import Subject

__all__ = ["compare"]


@dataclass(frozen=True)
class Sharded(Case):
    """The model of a folder on two processes.

    Attributes:
        model: the folder.
    """

    model: str = ""

    def recipe(self, *, alone: bool) -> recipes.Recipe:
        techniques = ", ".join(["efficient_attention: {}", *filter(None, [self.rest, "" if alone else self.scale])])
        return recipes.parse(
            f"model: {{path: {self.model}}}\nbatch: {{size: {ROWS}, seq_len: 32}}\noptimizer: {{lr: 0.001}}\n"
            f"stop: {{max_steps: 5}}\ntechniques: {{{techniques}}}\n"
        )


def compare(subjects: list[Subject], folder: Path) -> dict[str, tuple[bool, str]]:
    """Trains all models in one start of two processes.

    Returns:
        Name -> True if it is as it should be, and the reason of a refusal or of the fault; "" if it works.
    """
    # Adam's first steps divide by gradients that are hardly there: losses and norms are what is compared. Through them
    # the losses of Gemma 4 differ by 1.4e-5 with AVX2.
    cases = [
        Sharded(s.name, "fsdp: {}", loss=3e-5, norm=1e-3, weights=1.0, model=str(s.folder / "model")) for s in subjects
    ]
    results = run(cases, 2, folder, timeout=1800)
    cells = {}
    for case, found in zip(cases, results, strict=True):
        refusals = [result["refused"] for result in found if "refused" in result]
        cells[case.family] = (True, refusals[0]) if refusals else (not verdict(case, found), verdict(case, found))
    return cells
