"""The device that a run is planned for, and how much the use of a machine disturbed a measurement. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["TOLERATED", "Device", "MachineUse"]

TOLERATED = 0.25
"""Cores of background work that do not count as other work: an eighth of two cores, less than repeated measurements
differ."""


@dataclass(frozen=True)
class Device:
    """Properties of the device that are known without using it."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory: int  # bytes that a run may use
    capability: tuple[int, int] | None = None  # CUDA's
    at_hand: bool = True  # False: a remote device that is only planned for; its packages need not be installed here
    expandable: bool = False  # torch's allocator uses one growing segment per stream instead of many of fixed sizes
    notice: str = ""  # a notice to the user about the device
    driver: str = ""  # version of a GPU's driver


@dataclass(frozen=True)
class MachineUse:
    """CPU use of an interval, which tells if a measurement had the machine to itself.

    Attributes:
        seconds: of the wall clock.
        own_cores: cores used by this process and its children, on average.
        other_cores: cores used by all other processes, on the CPUs that this one may run on; None: unknown.
        cpus: number of these CPUs.
        threads: threads that were measured.
        alone: False if other processes used more cores than the measured threads left them; None if that is unknown.

    Example:
        >>> MachineUse(10, own_cores=1.9, other_cores=0.1, cpus=2, threads=2).alone
        True
        >>> MachineUse(10, own_cores=1.2, other_cores=0.8, cpus=2, threads=2).alone
        False
    """

    seconds: float
    own_cores: float
    other_cores: float | None
    cpus: int
    threads: int
    alone: bool | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        alone = None
        if self.other_cores is not None:
            # A single core that others share is enough: threads wait for the slowest of them.
            alone = self.other_cores <= max(self.cpus - self.threads, 0) + TOLERATED
        object.__setattr__(self, "alone", alone)
