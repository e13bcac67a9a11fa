"""What collectives were measured to take between devices: `preheat nettest` writes it, `Rates.links` has it for planning. No torch.

Sizes and bandwidths are counted as nccl-tests do (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the algorithm bandwidth is size over
time, and the bus bandwidth is that times a factor by which it can be held against the link, whatever the number of devices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat.errors import RunError
from preheat.hardware.stored_values import Damaged, read_json, read_row
from preheat.run_dir import to_json

__all__ = [
    "COLLECTIVES",
    "LinkRate",
    "bus_factor",
    "cache_folder",
    "links_at",
    "load_links",
    "make_private",
    "seconds_of",
    "store_json",
    "store_links",
]

COLLECTIVES: dict[str, str] = {
    "all_reduce": "the buffer that every device has and gets summed",
    "all_gather": "what every device has in the end, all shares together",
    "reduce_scatter": "what every device has at the beginning, all shares together",
    "all_to_all": "what every device sends, its own share included",
    "send_recv": "what every device sends to the next one of a ring, while it receives as much",
}
"""What is measured, and what its size counts."""

_FORMAT = 1
_log = logging.getLogger(__name__)


def bus_factor(collective: str, devices: int) -> float:
    """Bus bandwidth over algorithm bandwidth.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("send_recv", 4)
    (1.5, 0.75, 1.0)
    """
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
    """The median of one collective of one size among some devices.

    Attributes:
        collective: one of `COLLECTIVES`.
        backend: gloo or nccl.
        devices, hosts: among which it was measured.
        bytes: its size.
        seconds: median.
        low, high: of which a tenth of the repeats lay below and above.
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
        """Bytes a second."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second."""
        return self.algorithm_bandwidth * bus_factor(self.collective, self.devices)


def seconds_of(
    links: Iterable[LinkRate], collective: str, backend: str, bytes: int, devices: int, hosts: int = 1
) -> float | None:
    """Seconds of a collective between the measured sizes: a line between neighbours, the latency below them, the bandwidth beyond them.

    What was measured among the nearest number of hosts and then of devices stands for others, at equal bus bandwidth. None: nothing was.

    Example:
        >>> rows = [LinkRate("send_recv", "gloo", 2, 1, size, seconds, 0, 0) for size, seconds in ((1000, 1e-4), (1_000_000, 1e-3))]
        >>> [round(seconds_of(rows, "send_recv", "gloo", size, 2) * 1e6) for size in (10, 500_500, 2_000_000)]
        [100, 550, 2000]
    """
    rows = [row for row in links if (row.collective, row.backend) == (collective, backend)]
    if not rows:
        return None

    def away(row: LinkRate) -> tuple[bool, float, float]:
        apart = (row.hosts > 1) != (hosts > 1)
        return apart, abs(math.log(row.hosts / hosts)), abs(math.log(row.devices / devices))

    nearest = min(map(away, rows))
    chosen = sorted((row for row in rows if away(row) == nearest), key=lambda row: (row.bytes, row.devices))
    measured = chosen[0].devices
    chosen = [row for row in chosen if row.devices == measured]
    scaled = bytes * bus_factor(collective, devices) / bus_factor(collective, measured)
    if scaled <= chosen[0].bytes:
        return chosen[0].seconds
    if scaled >= chosen[-1].bytes:
        return chosen[-1].seconds * scaled / chosen[-1].bytes
    after = next(n for n, row in enumerate(chosen) if row.bytes >= scaled)
    a, b = chosen[after - 1], chosen[after]
    return a.seconds + (b.seconds - a.seconds) * (scaled - a.bytes) / (b.bytes - a.bytes)


def cache_folder() -> Path:
    """$PREHEAT_CACHE, or ~/.cache/preheat."""
    folder = os.environ.get("PREHEAT_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "preheat"


def make_private(folder: Path) -> None:
    """Makes a folder, and the folders above it that are missing, for this user alone; those that exist keep their mode."""
    for missing in (*reversed(folder.parents), folder):
        if not missing.is_dir():
            missing.mkdir(mode=0o700, exist_ok=True)  # of its parents mkdir makes with the mode of the umask


def store_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a file of measurements whole or not at all.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        make_private(path.parent)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.stem, delete=False, encoding="utf-8"
        ) as partial:
            partial.write(to_json(values, indent=1) + "\n")
        os.replace(partial.name, path)  # beside has a name of its own, since two processes may measure at once
    except OSError as error:
        raise RunError(
            f"{path.parent}: cannot store the calibration there ({error.strerror}); set PREHEAT_CACHE to a folder that can be written"
        ) from None


def links_at(hardware: str, torch: str) -> Path:
    """Where the links between devices of this kind stand."""
    key = hashlib.sha256(json.dumps([hardware, torch]).encode()).hexdigest()[:12]
    return cache_folder() / f"links-{key}.json"


def store_links(hardware: str, torch: str, links: Iterable[LinkRate]) -> Path:
    """Adds measured links to those that are stored; what was measured among as many devices and hosts before is replaced.

    Raises:
        RunError: the folder cannot be written.
    """
    new = tuple(links)
    again = {(row.collective, row.backend, row.devices, row.hosts) for row in new}
    others = [r for r in load_links(hardware, torch) if (r.collective, r.backend, r.devices, r.hosts) not in again]
    path = links_at(hardware, torch)
    rows = [dataclasses.asdict(row) for row in (*others, *new)]
    store_json(path, {"format": _FORMAT, "hardware": hardware, "torch": torch, "links": rows})
    return path


def load_links(hardware: str, torch: str) -> tuple[LinkRate, ...]:
    """What was stored; nothing where there is no file, or one of an older form, or a damaged one, which a warning tells: it is a cache."""
    path = links_at(hardware, torch)
    expected = {"format": _FORMAT, "hardware": hardware, "torch": torch}
    try:
        values = read_json(path)
        if values is None or {key: values.get(key) for key in expected} != expected:
            return ()
        if not isinstance(values.get("links"), list):
            raise Damaged("links is no list")
        return tuple(read_row(LinkRate, row, zero=("low", "high")) for row in values["links"])
    except Damaged as error:
        _log.warning("%s: is damaged (%s) and not used; measure the links anew: preheat nettest", path, error)
        return ()
