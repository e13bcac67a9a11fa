"""Measured speed, MFU and memory of a session, with the keys of its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import torch

from preheat.core import MachineUse, Slot
from preheat.core.run_records import MachineLoad, Measured
from preheat.hardware.gpu_memory import read_memory_peak
from preheat.hardware.machine_use import UseMeter
from preheat.hardware.probe import resident_bytes
from preheat.hardware.rates import note_run
from preheat.training.session import Session

if TYPE_CHECKING:
    from preheat.core.plan import Plan
    from preheat.hardware.gpu_memory import MemoryPeak

__all__ = ["ThroughputMeter", "build_measured", "compute_mfu"]

_MIN_SECONDS = 20.0
"""Minimum training time for a run to correct later predictions: shorter runs mostly measure fluctuations."""


def compute_mfu(plan: Plan, speed: float) -> float:
    """Returns the model FLOP utilization at `speed` tokens/s, relative to the matmul rate of the plan."""
    # MFU = FLOPs per token * tokens/s / peak FLOP/s; recomputed FLOPs do not count (PaLM, arXiv:2204.02311, appendix
    # B).
    return float(plan.model_flops_per_step / plan.tokens_per_step * speed / plan.matrix_rate)


def build_measured(
    plan: Plan,
    peak: MemoryPeak,
    speeds: Sequence[float],
    machine: MachineUse | None,
    counters: Mapping[str, int] | None = None,
) -> Measured:
    """Returns the measured figures to compare with those of a plan.

    Args:
        speeds: tokens/s of each step; without any, the memory is all that is known.
        machine: use of the machine meanwhile; None: unknown.
        counters: of techniques.
    """
    memory = peak.figures()
    figures = Measured(
        peak_gib=memory["peak_gib"],
        allocated_gib=memory.get("allocated_gib"),
        reserved_gib=memory.get("reserved_gib"),
        context_gib=memory.get("context_gib"),
        counters=counters or {},
    )
    if not speeds:
        return figures
    # The median, because single steps wait for checkpoints, data or other processes of the machine.
    speed = median(speeds[1:] or speeds)  # the first step also warms up
    low, high = (sorted(speeds)[int(q * (len(speeds) - 1))] for q in (0.1, 0.9))
    return replace(
        figures,
        tokens_per_second=speed,
        seconds_per_step=plan.tokens_per_step / speed,
        mfu=compute_mfu(plan, speed),
        spread=(low, high),
        machine=MachineLoad.of(machine) if machine else None,
    )


class ThroughputMeter:
    """Throughput and memory of one build; a new build gets a new meter, so that measurements match the plan."""

    def __init__(self, session: Session):
        self.session, self.speeds = session, list[float]()
        self._use = UseMeter()

    def machine(self) -> MachineUse | None:
        """Returns the use of the machine so far; None with several processes, which share it."""
        if self.session.ranks.world > 1:
            return None
        # A GPU is driven by one thread of the host.
        return self._use.use(1 if self.session.device.kind == "cuda" else torch.get_num_threads())

    def memory(self) -> int:
        """Returns the bytes in use: allocated tensors on a GPU, resident memory minus that of the imports on a CPU."""
        cuda = self.session.device.kind == "cuda"
        return torch.cuda.memory_allocated() if cuda else max(resident_bytes() - self.session.imports, 0)

    def mfu(self, speed: float) -> float:
        """Returns the model FLOP utilization at `speed` tokens/s, relative to the measured matmul rate."""
        return compute_mfu(self.session.plan, speed)

    def measured(self, counters: Mapping[str, int]) -> Measured:
        """Returns the measured figures to compare with the predicted ones.

        Args:
            counters: of techniques.
        """
        peak = read_memory_peak(self.session.device.kind, self.session.imports)
        return build_measured(self.session.plan, peak, self.speeds, self.machine(), counters)

    def store_speed_correction(self) -> None:
        """Stores the ratio of measured to predicted step time, which corrects later plans.

        Skips runs that are too short, have several batch shapes, use several processes, or shared the machine with
        other work.
        """
        # The first step warms up: compilation, allocator and caches.
        plan, speeds = self.session.plan, self.speeds[1:]
        seconds = sum(plan.tokens_per_step / speed for speed in speeds)
        if (
            seconds < _MIN_SECONDS
            or self.session.build.owner(Slot.BATCH_SHAPE) != "plain"
            or self.session.ranks.world > 1
        ):
            return
        # The plan already contains the pace of earlier runs: dividing it out keeps corrections from accumulating.
        ratio = plan.tokens_per_second * plan.pace / median(speeds)
        note_run(plan.device.name, torch.__version__, torch.get_num_threads(), ratio, self.machine())
