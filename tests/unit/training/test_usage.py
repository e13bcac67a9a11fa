"""What a run used: hours, energy and cost over its sessions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from preheat.core.plan import Price
from preheat.core.run_records import Usage
from preheat.files import to_plain_data
from preheat.hardware.energy import EnergySource
from preheat.training.usage import UsageMeter


@dataclass
class Counter:
    joules: float | None = 0.0
    source: EnergySource = "nvml"
    measured: bool = True

    def read_joules(self) -> float | None:
        return self.joules


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sessions_sum_up_each_at_its_price() -> None:
    clock, counter = Clock(), Counter()
    meter = UsageMeter(None, devices=8, counter=counter, on_host=4, price=Price(2.0, "USD"), clock=clock)
    clock.now, counter.joules = 1800.0, 3.6e6
    first = meter.close()
    # Half of the devices were measured: the other host is taken to draw as much.
    expected = {"device_hours": 4.0, "energy_kwh": 2.0, "energy_sources": ["nvml of 4 of 8 devices"]}
    assert to_plain_data(first) == {**expected, "cost": 8.0, "currency": "USD", "price_per_hour": 2.0}
    clock.now, counter.joules = 3600.0, 7.2e6
    assert meter.read() is first
    sheet = Counter(7.2e6, "data sheet", measured=False)
    meter = UsageMeter(first, devices=2, counter=sheet, on_host=2, price=Price(3.0, "USD"), clock=clock)
    clock.now += 7200.0
    expected = {"device_hours": 8.0, "energy_kwh": 4.0, "energy_sources": ["nvml of 4 of 8 devices", "data sheet"]}
    assert to_plain_data(meter.read()) == {**expected, "cost": 20.0, "currency": "USD", "price_per_hour": 3.0}


def test_an_energy_that_is_unknown_for_a_part_of_the_run_is_unknown() -> None:
    clock, counter = Clock(), Counter(3.6e6)
    # By an earlier session that had none, and by a counter that fails for a while.
    meter = UsageMeter(Usage(device_hours=1.0), devices=1, counter=counter, clock=clock)
    assert meter.read() == Usage(device_hours=1.0)
    meter = UsageMeter(Usage(device_hours=1.0, energy_kwh=1.0, energy_sources=("nvml",)), devices=1, counter=counter)
    assert meter.read().energy_kwh == pytest.approx(2.0)
    counter.joules = None
    assert meter.read().energy_kwh is None
    counter.joules = 3.6e6
    assert meter.read().energy_sources is None


def test_a_price_counts_for_earlier_sessions_that_had_none() -> None:
    clock = Clock()
    meter = UsageMeter(Usage(device_hours=3.0), devices=1, counter=None, price=Price(2.0, "EUR"), clock=clock)
    clock.now = 3600.0
    assert meter.read().cost == pytest.approx(8.0)
