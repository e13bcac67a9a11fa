"""Results of `preheat nettest`: measured collectives and pairs of ranks, and the catalogue's figures. No torch.

`hardware.nettest` returns them; the command and its page read them. Their JSON is what `preheat nettest --json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CollectiveRow", "Expected", "Measurement", "NettestResult", "Pair", "PairRow"]


@dataclass(frozen=True)
class CollectiveRow:
    """Time and bandwidth of one collective of one size, as nccl-tests define them.

    Attributes:
        seconds: median over the samples of the slowest rank.
        low, high: 10th and 90th percentile.
        algorithm_bandwidth, bus_bandwidth: bytes/s, see `preheat.hardware.link_rates.LinkRate`.
    """

    collective: str
    backend: str
    devices: int
    hosts: int
    bytes: int
    seconds: float
    low: float
    high: float
    algorithm_bandwidth: float
    bus_bandwidth: float


@dataclass(frozen=True)
class PairRow:
    """Half the round-trip time of a message between two ranks: median, 10th and 90th percentile."""

    bytes: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """Point-to-point times of two ranks.

    Attributes:
        kind: "in a host" or "between hosts".
        hosts: names of their hosts.
        latency: seconds of the smallest message.
        bandwidth: bytes/s of the largest.
    """

    kind: str
    ranks: tuple[int, int]
    hosts: tuple[str, ...]
    latency: float
    bandwidth: float
    rows: tuple[PairRow, ...]


@dataclass(frozen=True)
class Expected:
    """Link bandwidths of the catalogue in bytes/s in one direction; None if it has no figure, as for CPUs.

    Attributes:
        share: {collective: fraction of the link's bandwidth that the best size reached}.
    """

    in_host: float | None
    between_hosts: float | None
    share: Mapping[str, float | None]


@dataclass(frozen=True)
class Measurement:
    """Measurements among the ranks of a process group.

    Attributes:
        devices: number of ranks.
        hosts: number of hosts.
        names: of the hosts.
        seconds: of the whole benchmark.
    """

    hardware: str
    torch: str
    backend: str
    devices: int
    hosts: int
    names: tuple[str, ...]
    rows: tuple[CollectiveRow, ...]
    pairs: tuple[Pair, ...]
    seconds: float


@dataclass(frozen=True)
class NettestResult(Measurement):
    """Measurements, compared with the catalogue.

    Attributes:
        stored: file with the measurements for planning; None if they are not stored.
    """

    expected: Expected
    stored: str | None

    @property
    def link_rate(self) -> float | None:
        """The catalogue's bandwidth of the link that was measured."""
        return self.expected.in_host if self.hosts == 1 else self.expected.between_hosts
