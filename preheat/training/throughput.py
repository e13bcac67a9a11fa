"""What a session measures of its speed and memory, in the terms of its plan."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from preheat.core import Slot
from preheat.hardware.gpu_memory import memory_peak
from preheat.hardware.probe import resident_bytes
from preheat.hardware.rates import note_run
from preheat.training.session import Session

__all__ = ["ThroughputMeter"]

_TOLD = 20.0
"""Seconds of steps, at least, of a run that says something of the next: short ones are as quick as the machine was just then."""


class ThroughputMeter:
    """Begins anew where another build stands: what is measured is what was planned."""

    def __init__(self, session: Session):
        self.session, self.speeds = session, list[float]()

    def memory(self) -> int:
        """Bytes in use now: resident less what the imports took on a CPU, tensors on a GPU."""
        cuda = self.session.device.kind == "cuda"
        return torch.cuda.memory_allocated() if cuda else max(resident_bytes() - self.session.imports, 0)

    def mfu(self, speed: float) -> float:
        """Of the measured matrix rate, at so many tokens a second."""
        plan = self.session.plan
        return float(plan["model_flops_per_step"] / plan["tokens_per_step"] * speed / plan["matrix_rate"])

    def measured(self) -> dict[str, Any]:
        """The figures that stand beside the predicted ones."""
        found: dict[str, Any] = memory_peak(self.session.device.kind, self.session.imports).figures()
        if self.speeds:
            speed = median(self.speeds[1:] or self.speeds)  # the first step also warms up
            found |= {
                "tokens_per_second": speed,
                "seconds_per_step": self.session.plan["tokens_per_step"] / speed,
                "mfu": self.mfu(speed),
                "spread": [sorted(self.speeds)[int(q * (len(self.speeds) - 1))] for q in (0.1, 0.9)],
            }
        return found

    def teach(self) -> None:
        """Leaves for later plans how long the steps of this run took, where there were enough of them to tell, all of one shape, in one process."""
        plan, speeds = self.session.plan, self.speeds[1:]
        seconds = sum(plan["tokens_per_step"] / speed for speed in speeds)
        if seconds < _TOLD or self.session.build.owner(Slot.BATCH_SHAPE) != "plain" or self.session.ranks.world > 1:
            return
        ratio = plan["tokens_per_second"] * plan["pace"] / median(speeds)
        note_run(plan["device"]["name"], torch.__version__, torch.get_num_threads(), ratio)
