"""Learning rate schedules, as a fraction of the peak learning rate."""

from __future__ import annotations

import math

from preheat.recipe import Schedule

__all__ = ["compute_lr_factor"]


def compute_lr_factor(schedule: Schedule, step: int, total: int | None) -> float:
    """Returns the fraction of the peak learning rate after `step` updates of `total` steps (None: no known end).

    A step that is skipped because fp16 gradients overflow does not count: it is no update.

    Warmup is linear, and the first step's rate is above 0. cosine: Loshchilov and Hutter 2017 (arXiv:1608.03983);
    wsd: Hu et al. 2024 (arXiv:2404.06395), linear decay.

    >>> schedule = Schedule(kind="wsd", warmup_ratio=0.2, decay_ratio=0.2, min_lr_ratio=0)
    >>> [round(compute_lr_factor(schedule, s, 10), 2) for s in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    """
    if total is None:
        assert schedule.kind == "constant", "the recipe refuses a schedule without an end"
        return 1.0
    warmup = round(schedule.warmup_ratio * total)
    if step < warmup:
        # 1 / warmup, ..., 1: a first step at rate 0 would waste a batch.
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "cosine":
        # min + (1 - min) (1 + cos(pi t)) / 2, with t from 0 after warmup to 1 at the end.
        progress = (step - warmup) / max(total - warmup, 1)
        return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    decay = max(round(schedule.decay_ratio * total), 1)
    # wsd: constant until the last `decay` steps. The last step still has a rate above the minimum (left = 1 / decay).
    left = (total - step) / decay
    return 1.0 if left >= 1 else schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left
