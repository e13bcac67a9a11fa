"""Progress callbacks of a run: the command line draws them, and the Python API logs them as `preheat.run`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from preheat.core.plan import Plan

__all__ = ["Logged", "Watch"]

_log = logging.getLogger("preheat.run")
_EVERY = 5.0  # seconds between logged steps


class Watch:
    """Callbacks that do nothing; override the ones you need."""

    def stage(self, words: str) -> None:
        """Called when a new part of the work begins."""

    def progress(self, what: str, done: float, total: float | None) -> None:
        """Called when part of the current stage is done."""

    def planned(self, plan: Plan) -> None:
        """Called with the predicted memory and speed, before training."""

    def step(self, metrics: Mapping[str, Any], total: int | None) -> None:
        """Called after each committed step."""

    def evaluated(self, step: int, loss: float, scores: Mapping[str, float] | None = None) -> None:
        """Called after an evaluation; `scores` are the objective's metrics, e.g. accuracy."""

    def notice(self, words: str) -> None:
        """Called with information for the user."""

    def alarm(self, words: str) -> None:
        """Called with warnings that every rank shows, not only rank 0."""


class Logged(Watch):
    """Logs stages, the plan, steps and evaluations as `preheat.run`; to standard error if it has no handler."""

    def __init__(self) -> None:
        self._last = 0.0
        # An application that has configured logging keeps its handlers and levels.
        if not _log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(message)s"))
            _log.addHandler(handler)
        if _log.level == logging.NOTSET:
            _log.setLevel(logging.INFO)

    def stage(self, words: str) -> None:
        _log.info("%s", words)

    def planned(self, plan: Plan) -> None:
        _log.info(
            "planned: %.2f of %.2f GiB, %s tokens/s",
            plan.peak_gib,
            plan.available_gib,
            f"{plan.tokens_per_second:,.0f}",
        )

    def step(self, metrics: Mapping[str, Any], total: int | None) -> None:
        step = metrics["step"]
        # The first and the last step are always logged, however fast the steps are.
        if step in (1, total) or time.monotonic() - self._last > _EVERY:
            self._last = time.monotonic()
            of = f" of {total:,}" if total else ""
            _log.info(
                "step %s%s: loss %.4f, %s tokens/s",
                f"{step:,}",
                of,
                metrics["loss"],
                f"{metrics['tokens_per_second']:,.0f}",
            )

    def evaluated(self, step: int, loss: float, scores: Mapping[str, float] | None = None) -> None:
        more = "".join(f", {name} {value:.4g}" for name, value in (scores or {}).items())
        _log.info("step %s: validation loss %.4f%s", f"{step:,}", loss, more)

    def notice(self, words: str) -> None:
        _log.info("note: %s", words)

    def alarm(self, words: str) -> None:
        _log.warning("%s", words)
