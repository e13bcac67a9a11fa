"""The phases of a run, in which memory is planned, measured and run out of. No torch."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["STEP", "Phase"]


class Phase(StrEnum):
    """What a run does at a moment.

    The dry run records allocations by phase; the loop reports its phase to the hang watchdog and to the recovery from
    out-of-memory errors. The loop sees `GRADIENTS` where a dry run sees `FORWARD`, `HEAD_AND_LOSS` and `BACKWARD`
    apart.
    """

    STARTING = "starting"
    BUILDING = "building"
    LOAD = "load"
    DATA = "data"
    GRADIENTS = "gradients"
    FORWARD = "forward"
    HEAD_AND_LOSS = "head and loss"
    BACKWARD = "backward"
    UPDATE = "update"
    STEP_STATS = "step statistics"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVING = "saving"
    LAST_SAVING = "last saving"
    """The checkpoint of the last step: a run without it is worth nothing, so it is never skipped."""
    FALLBACK = "choosing a fallback"


STEP: tuple[Phase, ...] = (Phase.FORWARD, Phase.HEAD_AND_LOSS, Phase.BACKWARD, Phase.UPDATE)
"""The phases of one optimizer step in a dry run, in order."""
