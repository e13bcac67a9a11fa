"""The energy of this machine's processors: counted by the hardware if that is readable, else by their rated power.

GPUs count the energy of their boards (NVML), CPUs that of their packages and memory (RAPL, which most kernels let only
root read). Both count all processes of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from preheat.hardware.system_metrics import open_nvml

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["EnergyCounter", "EnergySource", "count_cpu_energy", "count_gpu_energy"]

EnergySource: TypeAlias = Literal["nvml", "rapl", "data sheet"]
_POWERCAP = Path("/sys/class/powercap")


class EnergyCounter(Protocol):
    """Counts the energy of processors from its construction on.

    Attributes:
        measured: False: an upper bound by rated power.
    """

    source: EnergySource
    measured: bool

    def read_joules(self) -> float | None:
        """Returns the joules since the construction; None if they are not readable."""


class _RatedPower:
    """Processors that draw their rated power all the time: an upper bound."""

    source: EnergySource = "data sheet"
    measured = False

    def __init__(self, watts: float):
        self._watts, self._start = watts, time.monotonic()

    def read_joules(self) -> float:
        return self._watts * (time.monotonic() - self._start)


class _Rapl:
    """The counters of RAPL zones, which restart at 0 after minutes to hours: read them more often than that.

    Raises:
        OSError: one of them is not readable.
    """

    source: EnergySource = "rapl"
    measured = True

    def __init__(self, zones: Sequence[Path]):
        self._ranges = {zone: _read_integer(zone / "max_energy_range_uj") for zone in zones}
        self._last = {zone: _read_integer(zone / "energy_uj") for zone in zones}
        self._microjoules = 0

    def read_joules(self) -> float | None:
        try:
            for zone, last in self._last.items():
                self._last[zone] = now = _read_integer(zone / "energy_uj")
                self._microjoules += (now - last) % self._ranges[zone]
        except OSError:
            return None
        return self._microjoules / 1e6


def count_cpu_energy(powercap: Path = _POWERCAP) -> EnergyCounter | None:
    """Returns a counter of the CPUs' energy: by RAPL, else by the power that they are rated for; None without both.

    Args:
        powercap: the kernel's folder of power zones.
    """
    zones = {zone: name for zone in sorted(powercap.glob("intel-rapl:*")) if (name := _read_name(zone))}
    packages = [zone for zone, name in zones.items() if name.startswith("package")]
    # Memory is a zone below its package that the package does not count. Cores are counted by the package, and psys
    # counts the packages again.
    memory = [zone for zone, name in zones.items() if name == "dram"]
    if not packages:
        return None
    try:
        return _Rapl([*packages, *memory])
    except OSError:
        pass
    try:
        # Thermal design power, which the kernel lets everyone read.
        rated = sum(_read_integer(zone / "constraint_0_max_power_uw") for zone in packages)
    except OSError:
        return None
    return _RatedPower(rated / 1e6) if rated else None


def _read_name(zone: Path) -> str:
    try:
        return (zone / "name").read_text().strip()
    except OSError:
        return ""


def _read_integer(file: Path) -> int:
    return int(file.read_text())


_OpenNvml: TypeAlias = Callable[[], AbstractContextManager["ModuleType | None"]]


class _Boards:
    """GPUs by UUID, because NVML ignores CUDA_VISIBLE_DEVICES and numbers all GPUs."""

    source: EnergySource = "nvml"
    measured = True

    def __init__(self, uuids: Sequence[str], open_nvml: _OpenNvml):
        self._uuids, self._open_nvml = uuids, open_nvml

    def _sum(self, function: Literal["nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"]) -> float | None:
        """Returns the sum of a function of NVML over the boards; None if one of them does not report it."""
        with self._open_nvml() as nvml:
            if nvml is None:
                return None
            try:
                handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in self._uuids]
                return float(sum(getattr(nvml, function)(handle) for handle in handles))
            except nvml.NVMLError:
                return None


class _BoardEnergy(_Boards):
    """The energy counters of GPUs, which those since Volta have."""

    def __init__(self, uuids: Sequence[str], open_nvml: _OpenNvml):
        super().__init__(uuids, open_nvml)
        self._start = self._sum("nvmlDeviceGetTotalEnergyConsumption")

    def read_joules(self) -> float | None:
        millijoules = self._sum("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None or self._start is None else (millijoules - self._start) / 1e3


class _BoardPower(_Boards):
    """The integral of the GPUs' power between the readings, by the trapezoidal rule."""

    def __init__(self, uuids: Sequence[str], open_nvml: _OpenNvml):
        super().__init__(uuids, open_nvml)
        self._time, self._milliwatts, self._joules = time.monotonic(), self._sum("nvmlDeviceGetPowerUsage"), 0.0

    def read_joules(self) -> float | None:
        now, milliwatts = time.monotonic(), self._sum("nvmlDeviceGetPowerUsage")
        if milliwatts is None or self._milliwatts is None:
            return None
        self._joules += (self._milliwatts + milliwatts) / 2e3 * (now - self._time)
        self._time, self._milliwatts = now, milliwatts
        return self._joules


def count_gpu_energy(
    uuids: Sequence[str], watts: float | None, open_nvml: _OpenNvml = open_nvml
) -> EnergyCounter | None:
    """Returns a counter of the GPUs' energy: by NVML, else by the data sheet's power; None without both.

    Args:
        uuids: of the GPUs, as NVML writes them.
        watts: of one board at most, by its data sheet; None: unknown.
        open_nvml: opens NVML.
    """
    for kind in (_BoardEnergy, _BoardPower):
        counter: EnergyCounter = kind(uuids, open_nvml)
        if counter.read_joules() is not None:
            return counter
    return None if watts is None else _RatedPower(watts * len(uuids))
