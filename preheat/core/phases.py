"""The phases of a run, by which memory is planned and measured. No torch."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["STEP", "Phase"]


class Phase(StrEnum):
    """The current activity of a run.

    The dry run records allocations by phase; the loop reports its phase to the hang watchdog and to the recovery from
    out-of-memory errors. The loop reports `GRADIENTS` for what a dry run splits into `FORWARD`, `HEAD_AND_LOSS` and
    `BACKWARD`.
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
    """The checkpoint of the last step: the run is lost without it, so it is never skipped."""
    FALLBACK = "choosing a fallback"

    @classmethod
    def of(cls, name: str) -> Phase | None:
        """The phase of a name in a run's files, those of earlier versions included; None if there is none.

        >>> Phase.of("making gradients"), Phase.of("update"), Phase.of("lunch")
        (<Phase.GRADIENTS: 'gradients'>, <Phase.UPDATE: 'update'>, None)
        """
        # Files of earlier versions hold the names of `_EARLIER`.
        return cls(name) if name in set(cls) else _EARLIER.get(name)


_EARLIER = {
    "reading rows": Phase.DATA,
    "making gradients": Phase.GRADIENTS,
    "updating weights": Phase.UPDATE,
    "sharing its numbers": Phase.STEP_STATS,
    "evaluating": Phase.EVALUATION,
    "saving the last step": Phase.LAST_SAVING,
    "choosing a rung": Phase.FALLBACK,
    "beginning": Phase.STARTING,
}

STEP: tuple[Phase, ...] = (Phase.FORWARD, Phase.HEAD_AND_LOSS, Phase.BACKWARD, Phase.UPDATE)
"""The phases of one optimizer step in a dry run, in order."""
