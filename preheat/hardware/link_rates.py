"""Measured times of collectives: written by `preheat nettest`, read by planning as `Rates.links`. No torch import.

Sizes and bandwidths are those of nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the algorithm
bandwidth is size over time; the bus bandwidth multiplies it by a factor that makes it comparable to the link for any
number of devices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from preheat.cache_folder import cache_folder, store_json
from preheat.hardware.stored_values import Damaged, read_json, read_row

__all__ = [
    "COLLECTIVES",
    "LinkRate",
    "bus_factor",
    "link_rates_path",
    "load_links",
    "seconds_of",
    "store_links",
]

COLLECTIVES: dict[str, str] = {
    "all_reduce": "the buffer that every device has and gets summed",
    "all_gather": "what every device has in the end, all shares together",
    "reduce_scatter": "what every device has at the beginning, all shares together",
    "all_to_all": "what every device sends, its own share included",
    "send_recv": "what every device sends to the next one of a ring, while it receives as much",
}
"""Measured collectives, with the meaning of their size."""

_FORMAT = 1
_log = logging.getLogger(__name__)


def bus_factor(collective: str, devices: int) -> float:
    """Returns bus bandwidth over algorithm bandwidth.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("send_recv", 4)
    (1.5, 0.75, 1.0)
    """
    # With n devices each sends (n - 1) / n of the buffer; an all-reduce does it twice: reduce-scatter, then
    # all-gather.
    share = (devices - 1) / devices
    return {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,
        "send_recv": 1.0,
    }[collective]


@dataclass(frozen=True)
class LinkRate:
    """Median time of one collective of one size.

    Attributes:
        collective: one of `COLLECTIVES`.
        backend: gloo or nccl.
        devices, hosts: number of devices and hosts.
        bytes: size.
        seconds: median.
        low, high: 10th and 90th percentile.
    """

    collective: str
    backend: str
    devices: int
    hosts: int
    bytes: int
    seconds: float
    low: float
    high: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Size over time, in bytes/s."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bandwidth to compare with that of the link, in bytes/s."""
        return self.algorithm_bandwidth * bus_factor(self.collective, self.devices)


def seconds_of(
    links: Iterable[LinkRate], collective: str, backend: str, bytes: int, devices: int, hosts: int = 1
) -> float | None:
    """Interpolates the seconds of a collective: linear between sizes, constant below, constant bandwidth above.

    Uses the measurement with the nearest number of hosts, then of devices, at equal bus bandwidth. None if there is
    none.

    Example:
        >>> times = {1000: 1e-4, 1_000_000: 1e-3}
        >>> rows = [LinkRate("send_recv", "gloo", 2, 1, size, seconds, 0, 0) for size, seconds in times.items()]
        >>> [round(seconds_of(rows, "send_recv", "gloo", size, 2) * 1e6) for size in (10, 500_500, 2_000_000)]
        [100, 550, 2000]
    """
    rows = [row for row in links if (row.collective, row.backend) == (collective, backend)]
    if not rows:
        return None

    def locate_ranks(row: LinkRate) -> tuple[bool, float, float]:
        # Crossing hosts or not decides the link, so it has precedence over the numbers of hosts and devices.
        apart = (row.hosts > 1) != (hosts > 1)
        return apart, abs(math.log(row.hosts / hosts)), abs(math.log(row.devices / devices))

    nearest = min(map(locate_ranks, rows))
    # 2 and 8 devices are equally far from 4: one of them is used, because their times do not mix.
    chosen = sorted((row for row in rows if locate_ranks(row) == nearest), key=lambda row: (row.bytes, row.devices))
    measured = chosen[0].devices
    chosen = [row for row in chosen if row.devices == measured]
    # Equal bus bandwidth: size times bus factor over time is the same for both numbers of devices.
    scaled = bytes * bus_factor(collective, devices) / bus_factor(collective, measured)
    # Latency dominates below the smallest measured size, bandwidth above the largest.
    if scaled <= chosen[0].bytes:
        return chosen[0].seconds
    if scaled >= chosen[-1].bytes:
        return chosen[-1].seconds * scaled / chosen[-1].bytes
    after = next(n for n, row in enumerate(chosen) if row.bytes >= scaled)
    a, b = chosen[after - 1], chosen[after]
    return a.seconds + (b.seconds - a.seconds) * (scaled - a.bytes) / (b.bytes - a.bytes)


def link_rates_path(hardware: str, torch: str) -> Path:
    """Returns the path of the measured links between devices of this kind."""
    key = hashlib.sha256(json.dumps([hardware, torch]).encode()).hexdigest()[:12]
    return cache_folder() / f"links-{key}.json"


def store_links(hardware: str, torch: str, links: Iterable[LinkRate]) -> Path:
    """Adds measured links to the stored ones; replaces those of the same collective, backend, devices and hosts.

    Raises:
        RunError: the folder cannot be written.
    """
    new = tuple(links)
    again = {(row.collective, row.backend, row.devices, row.hosts) for row in new}
    # Measurements of other backends and numbers of devices stay valid.
    others = [r for r in load_links(hardware, torch) if (r.collective, r.backend, r.devices, r.hosts) not in again]
    path = link_rates_path(hardware, torch)
    rows = [dataclasses.asdict(row) for row in (*others, *new)]
    store_json(path, {"format": _FORMAT, "hardware": hardware, "torch": torch, "links": rows})
    return path


def load_links(hardware: str, torch: str) -> tuple[LinkRate, ...]:
    """Loads the stored links; empty if the file is missing, of an older format, or damaged (with a warning)."""
    path = link_rates_path(hardware, torch)
    expected = {"format": _FORMAT, "hardware": hardware, "torch": torch}
    try:
        values = read_json(path)
        if values is None or {key: values.get(key) for key in expected} != expected:
            return ()
        if not isinstance(values.get("links"), list):
            raise Damaged("links is not a list")
        return tuple(read_row(LinkRate, row, zero=("low", "high")) for row in values["links"])
    except Damaged as error:
        _log.warning("%s: is damaged (%s) and not used; measure the links again: preheat nettest", path, error)
        return ()
