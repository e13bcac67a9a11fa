"""Results of `preheat train RECIPE --find-lr`: the loss at each learning rate, and the rates to read from it. No
torch."""

from __future__ import annotations

from dataclasses import dataclass

from preheat.core.json_types import Record

__all__ = ["LrPoint", "LrRange"]


@dataclass(frozen=True)
class LrPoint:
    """A step of the test.

    Attributes:
        lr: the peak rate; `optimizer.groups` and `optimizer.layer_decay` scale it for their weights.
        loss: before the update with this rate.
        smoothed: mean of the losses around it.
        gradient_norm: before clipping; None: it overflowed, as those of fp16 do until the loss scale has adapted.
    """

    lr: float
    loss: float
    smoothed: float
    gradient_norm: float | None


@dataclass(frozen=True, kw_only=True)
class LrRange(Record):
    """A learning-rate range test.

    Attributes:
        suggested: a tenth of `lowest`.
        lowest: the rate at which the smoothed loss is lowest.
        steepest: the rate at which it falls fastest.
        present: that of the recipe, resolved if it is auto.
        diverged_at: the rate at which the test stopped, because the loss had diverged; None: it reached the last rate.
        steps: planned number of steps; `points` has those that were taken.
    """

    suggested: float
    lowest: float
    steepest: float
    present: float
    diverged_at: float | None
    steps: int
    points: tuple[LrPoint, ...]
