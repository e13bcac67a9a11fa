"""What a run tells whoever watches it. The command line draws it; from Python the default is silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Watch"]


class Watch:
    """Override what you want to see."""

    def stage(self, words: str) -> None:
        """A new part of the work begins."""

    def progress(self, what: str, done: float, total: float | None) -> None:
        """Part of the present stage is done."""

    def planned(self, plan: Mapping[str, Any]) -> None:
        """The prediction, before training."""

    def step(self, metrics: Mapping[str, Any], total: int | None) -> None:
        """A step was committed."""

    def evaluated(self, step: int, loss: float, scores: Mapping[str, float] | None = None) -> None:
        """The validation rows were read; `scores` are the objective's, accuracy for one."""

    def notice(self, words: str) -> None:
        """Something that the user should know."""

    def alarm(self, words: str) -> None:
        """Something that must be seen, whichever process says it."""
