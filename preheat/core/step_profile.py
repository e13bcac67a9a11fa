"""The profile of a training step: where its time goes, beside the plan. No torch.

`preheat train --profile` writes it as `profile/profile.json` in the run's folder.
"""

from __future__ import annotations

from dataclasses import dataclass

from preheat.core.device import MachineUse

__all__ = ["Finding", "OperatorTime", "Part", "PhasePeak", "StepProfile", "Transfer"]


@dataclass(frozen=True)
class Part:
    """A part of the step's time.

    Attributes:
        seconds: of a step, on average.
        share: of the measured step.
        planned: seconds by the plan; None: the plan does not know this part.
    """

    name: str
    seconds: float
    share: float
    planned: float | None = None


@dataclass(frozen=True)
class OperatorTime:
    """The time in an operator itself, without the operators that it calls; on a GPU that of its kernels.

    Attributes:
        kind: its `OperatorKind`; that of most of its time if it occurs as several.
        calls, seconds: of a step, on average.
        share: of the measured step.
    """

    name: str
    kind: str
    calls: float
    seconds: float
    share: float


@dataclass(frozen=True)
class Transfer:
    """Copies of a GPU, by direction: a step's, on average.

    Attributes:
        direction: as the driver names it, e.g. "HtoD": from the host to the device.
    """

    direction: str
    copies: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class PhasePeak:
    """The most memory of a GPU's tensors in a phase of the step.

    Attributes:
        planned_gib: peak of the plan's phases; None: the plan does not know this phase.
    """

    phase: str
    gib: float
    planned_gib: float | None


@dataclass(frozen=True)
class Finding:
    """Something that takes longer than planned, or that could be avoided.

    Attributes:
        part: name of the phase or of the kind of operator.
        seconds: of a step that are at stake: by which its share exceeds the planned share, or all that can be avoided.
        text: one sentence.
    """

    part: str
    seconds: float
    text: str


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a training step went.

    Attributes:
        rank, ranks: the rank that was profiled, of so many.
        device: name of the device that computed.
        first_step, steps: the first profiled step, and how many were.
        seconds: of a step while it was profiled, on average.
        seconds_unprofiled: median of the steps before, without the first; None: there was none.
        seconds_planned: of a step, by the plan.
        phases: data, forward, backward, optimizer and other, which add up to the step.
        gradients: forward and backward, which the plan knows together.
        kinds: kinds of operators, which add up to the step.
        operators: the costliest, the longest first.
        launch_bound: share of the step in which a GPU idles while the host launches; None on a CPU.
        waiting_for_data: share of the step in which nothing computes because the host reads data.
        transfers: copies by direction; empty on a CPU, whose copies are operators.
        stores_scores: True if attention stores the scores of all positions, instead of a fused kernel.
        machine: use of the machine meanwhile; None: unknown.
        findings: by the seconds at stake; the first is the answer.
        memory: peaks of the steps before the profiled ones, by phase; empty on a CPU.
        out_of_memory: the same until the step ran out of memory before; empty if it did not.
    """

    rank: int
    ranks: int
    device: str
    first_step: int
    steps: int
    seconds: float
    seconds_unprofiled: float | None
    seconds_planned: float
    phases: tuple[Part, ...]
    gradients: Part
    kinds: tuple[Part, ...]
    operators: tuple[OperatorTime, ...]
    launch_bound: float | None
    waiting_for_data: float
    transfers: tuple[Transfer, ...]
    stores_scores: bool
    machine: MachineUse | None
    findings: tuple[Finding, ...]
    memory: tuple[PhasePeak, ...] = ()
    out_of_memory: tuple[PhasePeak, ...] = ()
