"""Utilization, memory and power of this process, its machine and its GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["SystemMeter", "open_nvml"]


@contextlib.contextmanager
def open_nvml() -> Iterator[ModuleType | None]:
    """Yields NVIDIA's management library, initialized; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    # Initializations are counted, so a shutdown does not disturb other users of the library in this process.
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


class SystemMeter:
    """Samples what this process and its machine use. Percentages are those since the previous sample.

    Args:
        folder: a folder on the disk whose free space counts.

    Example:
        >>> sorted(SystemMeter(Path()).sample())                        # doctest: +ELLIPSIS
        ['cpu_percent', 'disk_free_gib', 'machine_cpu_percent', 'machine_memory_percent', ...]
    """

    def __init__(self, folder: Path):
        self._folder, self._process = folder, psutil.Process()
        # The first call has nothing to compare with, and returns 0.
        self._process.cpu_percent()
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Returns the present figures; percentages of the process are of one core, those of the machine of all."""
        figures = {
            "cpu_percent": self._process.cpu_percent(),
            "machine_cpu_percent": psutil.cpu_percent(),
            "memory_gib": self._process.memory_info().rss / 2**30,
            "machine_memory_percent": psutil.virtual_memory().percent,
            "disk_free_gib": psutil.disk_usage(str(self._folder)).free / 2**30,
        }
        with open_nvml() as nvml:
            if nvml is None:
                return figures
            for index in range(nvml.nvmlDeviceGetCount()):
                figures |= {f"gpu_{index}/{name}": value for name, value in _read_gpu(nvml, index).items()}
        return figures


def _read_gpu(nvml: ModuleType, index: int) -> dict[str, float]:
    """Returns the figures of a GPU; a slice of one, or an old driver, reports some of them only."""
    handle, figures = nvml.nvmlDeviceGetHandleByIndex(index), {}
    for name, read in (
        ("utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        ("memory_gib", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30),
        ("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        ("temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    ):
        with contextlib.suppress(nvml.NVMLError):
            figures[name] = float(read())
    return figures
