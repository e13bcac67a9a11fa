"""Counts what a run uses over all its sessions: hours of its devices, their energy and their cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.core.run_records import Usage
from preheat.hardware.energy import EnergyCounter, count_cpu_energy, count_gpu_energy
from preheat.run.reader import Reader

if TYPE_CHECKING:
    from preheat.core.plan import Price
    from preheat.training.session import Session

__all__ = ["UsageMeter", "open_usage_meter"]

_JOULES = 3.6e6  # in a kWh


class UsageMeter:
    """Counts from its construction on, and adds the earlier sessions.

    Args:
        before: the usage of the earlier sessions; None: this is the first.
        devices: devices of this session.
        counter: of the energy of the devices on this host; None: unknown.
        on_host: devices of this session on this host. Those of other hosts are taken to draw as much.
        price: of a device-hour; it also counts for earlier sessions without a price.
        clock: returns seconds.
    """

    def __init__(
        self,
        before: Usage | None,
        *,
        devices: int,
        counter: EnergyCounter | None,
        on_host: int = 1,
        price: Price | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._before = before or Usage(device_hours=0.0)
        self._devices, self._on_host, self._price = devices, on_host, price
        self._counter, self._clock, self._start = counter, clock, clock()
        # An energy that is unknown for a part of the run is unknown for the run.
        self._energy_known = counter is not None and (before is None or before.energy_kwh is not None)
        self._lock = threading.Lock()
        self._last: Usage | None = None  # of a closed meter

    def read(self) -> Usage:
        """Returns the usage of the run so far."""
        with self._lock:  # counters add up differences between readings
            return self._last or self._measure()

    def close(self) -> Usage:
        """Ends the session's usage and returns that of the run; later readings return the same."""
        with self._lock:
            self._last = self._last or self._measure()
            return self._last

    def _measure(self) -> Usage:
        before, price = self._before, self._price
        hours = (self._clock() - self._start) / 3600 * self._devices
        energy, sources = self._read_energy()
        usage = Usage(device_hours=before.device_hours + hours, energy_kwh=energy, energy_sources=sources)
        if price is None:
            return usage
        paid = before.device_hours * price.per_hour if before.cost is None else before.cost
        return replace(
            usage,
            cost=paid + hours * price.per_hour,
            currency=price.currency,
            price_per_hour=price.per_hour,
        )

    def _read_energy(self) -> tuple[float | None, tuple[str, ...] | None]:
        """Returns the kWh of the run so far and their sources; None if they are unknown."""
        joules = self._counter.read_joules() if self._counter is not None and self._energy_known else None
        if self._counter is None or joules is None:
            self._energy_known = False
            return None, None
        source: str = self._counter.source
        if self._counter.measured and self._on_host < self._devices:
            source += f" of {self._on_host} of {self._devices} devices"
        sources = dict.fromkeys((*(self._before.energy_sources or ()), source))
        kwh = joules / _JOULES * self._devices / self._on_host
        return (self._before.energy_kwh or 0.0) + kwh, tuple(sources)


def open_usage_meter(session: Session) -> UsageMeter:
    """Starts to count a session's usage; on rank 0."""
    ranks = session.ranks
    return UsageMeter(
        Reader(session.writer.path).usage(),
        devices=ranks.world,
        counter=_open_counter(session),
        on_host=ranks.on_host if ranks.world > 1 else 1,
        price=session.price,
    )


def _open_counter(session: Session) -> EnergyCounter | None:
    if session.device.kind == "cpu":
        return count_cpu_energy()
    import torch

    from preheat.hardware.gpu_memory import read_uuid

    ranks = session.ranks
    # The processes of a host have a GPU each, by their local ranks.
    gpus = range(ranks.on_host) if ranks.world > 1 else [torch.cuda.current_device()]
    return count_gpu_energy([read_uuid(gpu) for gpu in gpus], session.plan.watts)
