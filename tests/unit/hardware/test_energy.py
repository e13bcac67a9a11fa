"""Energy by the counters of CPUs and GPUs, and by rated power without them. The folders and the driver are made up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.hardware import energy
from preheat.hardware.energy import count_cpu_energy, count_gpu_energy


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(energy, "time", made)
    return made


def write_zone(folder: Path, name: str, microjoules: int | None, *, limit: int = 1_000_000, watts: int = 100) -> Path:
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{limit}\n")
    (folder / "constraint_0_max_power_uw").write_text(f"{watts * 1_000_000}\n")
    if microjoules is not None:
        (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder


def test_rapl_counts_packages_and_memory_once_and_through_an_overflow(tmp_path: Path) -> None:
    package = write_zone(tmp_path / "intel-rapl:0", "package-0", 900_000)
    memory = write_zone(tmp_path / "intel-rapl:0:1", "dram", 0)
    # Both are in the packages' energy already.
    cores = write_zone(tmp_path / "intel-rapl:0:0", "core", 0)
    platform = write_zone(tmp_path / "intel-rapl:1", "psys", 0)
    counter = count_cpu_energy(tmp_path)
    assert counter is not None
    assert counter.source == "rapl"
    assert counter.read_joules() == 0
    (package / "energy_uj").write_text("950000\n")
    for zone, energy_now in ((memory, 20_000), (cores, 40_000), (platform, 90_000)):
        (zone / "energy_uj").write_text(f"{energy_now}\n")
    assert counter.read_joules() == pytest.approx(0.07)
    (package / "energy_uj").write_text("30000\n")  # 50,000 to the end of the range, and 30,000 after it
    assert counter.read_joules() == pytest.approx(0.15)
    (package / "energy_uj").unlink()
    assert counter.read_joules() is None


def test_cpus_without_a_readable_counter_are_taken_at_their_rated_power(tmp_path: Path, clock: Clock) -> None:
    for number in (0, 1):
        write_zone(tmp_path / f"intel-rapl:{number}", f"package-{number}", None, watts=150)
    counter = count_cpu_energy(tmp_path)
    assert counter is not None
    assert counter.source == "data sheet"
    clock.now = 10.0
    assert counter.read_joules() == pytest.approx(3000)
    assert count_cpu_energy(tmp_path / "none") is None


class Driver:
    """NVML with two GPUs; `missing` functions are not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self, *missing: str) -> None:
        self.missing, self.millijoules, self.milliwatts = (
            missing,
            {"GPU-a": 1e6, "GPU-b": 2e6},
            {"GPU-a": 3e5, "GPU-b": 1e5},
        )

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> float:
        return self._read("energy", self.millijoules[handle])

    def nvmlDeviceGetPowerUsage(self, handle: str) -> float:
        return self._read("power", self.milliwatts[handle])

    def _read(self, what: str, value: float) -> float:
        if what in self.missing:
            raise self.NVMLError
        return value

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        yield self


GPUS = ["GPU-a", "GPU-b"]


def test_gpus_count_the_energy_of_their_boards() -> None:
    driver = Driver("power")
    counter = count_gpu_energy(GPUS, 700.0, driver.open)
    assert counter is not None
    assert counter.source == "nvml"
    driver.millijoules = {"GPU-a": 1.5e6, "GPU-b": 2.25e6}
    assert counter.read_joules() == pytest.approx(750)
    driver.missing = ("energy",)
    assert counter.read_joules() is None


def test_gpus_without_a_counter_integrate_their_power(clock: Clock) -> None:
    driver = Driver("energy")
    counter = count_gpu_energy(GPUS, 700.0, driver.open)
    assert counter is not None
    assert counter.source == "nvml"
    clock.now, driver.milliwatts = 10.0, {"GPU-a": 4e5, "GPU-b": 2e5}  # 400 W, then 600 W
    assert counter.read_joules() == pytest.approx(5000)
    clock.now = 15.0
    assert counter.read_joules() == pytest.approx(8000)


def test_gpus_that_report_nothing_are_taken_at_the_power_of_the_data_sheet(clock: Clock) -> None:
    mute = Driver("energy", "power")
    for open_nvml in (mute.open, lambda: contextlib.nullcontext(None)):  # the second: no driver
        clock.now = 0.0
        counter = count_gpu_energy(GPUS, 700.0, open_nvml)
        assert counter is not None
        assert counter.source == "data sheet"
        clock.now = 10.0
        assert counter.read_joules() == pytest.approx(14_000)
        assert count_gpu_energy(GPUS, None, open_nvml) is None
