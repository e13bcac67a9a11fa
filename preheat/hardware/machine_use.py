"""CPU use of an interval: of this process with its children, and of all processes on the CPUs that it may run on.

Measurements beside other processes on the same CPUs are not reliable, so calibrations and runs are stored with a
`MachineUse`. Other processes are seen on Linux only, through /proc/stat. Does not import torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from preheat.core import MachineUse
from preheat.files import BadJson, read_record
from preheat.hardware.stored_values import Damaged, read_number

__all__ = ["Sample", "UseMeter", "join_uses", "read_use", "run_delays", "take_sample", "use_between"]

_PROC = Path("/proc")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a line of /proc/stat: user, nice, system, irq, softirq, and steal, which other virtual machines take.

Not idle and iowait, and not guest and guest_nice, which user and nice include.
"""


@dataclass(frozen=True)
class Sample:
    """The counters at one moment.

    Attributes:
        at: seconds of a monotonic clock.
        own: CPU seconds of this process and its children so far.
        busy: CPU seconds of all processes so far, by CPU that this process may run on; None: unknown.
    """

    at: float
    own: float
    busy: Mapping[int, float] | None


class UseMeter:
    """Measures the use of the machine from now on."""

    def __init__(self) -> None:
        self.first = take_sample()

    def use(self, threads: int) -> MachineUse:
        """Returns the use so far.

        Args:
            threads: threads whose speed was measured meanwhile.
        """
        return use_between(self.first, take_sample(), threads)


def read_use(values: object) -> MachineUse:
    """Reads the stored use of a machine.

    Raises:
        Damaged: the values are something else, or no measurement.
    """
    try:
        use = read_record(MachineUse, values)
    except BadJson as error:
        raise Damaged(f"machine is not a record of the machine's use ({error.message})") from None
    for name, value in vars(use).items():
        if name != "alone" and value is not None:
            read_number(value, f"machine.{name}", zero=True)
    return use


def use_between(first: Sample, last: Sample, threads: int) -> MachineUse:
    """Returns the use of the machine between two samples.

    Example:
        >>> use_between(Sample(0, 0, {0: 5.0, 1: 5.0}), Sample(10, 12, {0: 14.0, 1: 13.0}), threads=2)
        MachineUse(seconds=10, own_cores=1.2, other_cores=0.5, cpus=2, threads=2)
    """
    seconds, own = max(last.at - first.at, 1e-9), max(last.own - first.own, 0.0)
    others: float | None = None
    cpus = len(last.busy or {}) or os.cpu_count() or 1
    # Other CPUs than before, after a change of the affinity, cannot be compared.
    if first.busy and last.busy and first.busy.keys() == last.busy.keys():
        busy = sum(last.busy[cpu] - first.busy[cpu] for cpu in last.busy)
        # Less than this process used alone: the file does not count what runs here, as in some sandboxes. The tolerance
        # is for ticks, in which the kernel counts.
        if busy >= 0.9 * own - 0.1:
            others = max(busy - own, 0.0) / seconds
    return MachineUse(seconds, own / seconds, others, cpus, threads)


def join_uses(uses: Sequence[MachineUse]) -> MachineUse:
    """Returns the use of the machine over several intervals."""
    seconds = sum(use.seconds for use in uses)
    others = [use.seconds * use.other_cores for use in uses if use.other_cores is not None]
    return MachineUse(
        seconds,
        sum(use.seconds * use.own_cores for use in uses) / seconds,
        sum(others) / seconds if len(others) == len(uses) else None,
        uses[0].cpus,
        uses[0].threads,
    )


def take_sample() -> Sample:
    """Reads the counters now."""
    times = os.times()
    own = time.process_time() + times.children_user + times.children_system + _read_children_seconds()
    return Sample(time.perf_counter(), own, _read_busy_seconds())


def _read_children_seconds() -> float:
    """Returns the CPU seconds of the processes below this one, with those of their own children that have ended."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for folder in _PROC.glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        # The name, in parentheses, may hold spaces; state, parent, ... follow it (proc(5)).
        fields = text.rpartition(")")[2].split()
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    below, children = set[int](), {os.getpid()}
    while children:
        children = {process for process, parent in parents.items() if parent in children}
        below |= children
    return sum(seconds[process] for process in below)


def run_delays() -> dict[int, float] | None:
    """Returns the seconds for which each thread of this process was ready and waited for a CPU; None if unknown.

    CPU time cannot tell: a thread spins at a barrier while it waits for another one.
    """
    delays, slices = dict[int, float](), 0
    try:
        for task in (_PROC / "self/task").iterdir():
            # Nanoseconds on a CPU, nanoseconds in its queue, and the number of time slices.
            _, delay, count = (task / "schedstat").read_text(encoding="ascii").split()
            delays[int(task.name)], slices = int(delay) / 1e9, slices + int(count)
    except (OSError, ValueError):  # not Linux, a thread that has just ended, or a sandbox
        return None
    # A kernel that does not count them shows zeros.
    return delays if slices else None


def _read_busy_seconds() -> dict[int, float] | None:
    """Returns the busy seconds of each CPU that this process may run on; None if they are not to be trusted."""
    try:
        text = (_PROC / "stat").read_text(encoding="ascii")
        mounts = (_PROC / "self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # A file system of a container in its place (lxcfs) shows the container's own processes alone.
    if " /proc/stat " in mounts:
        return None
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("cpu")}
    cpus = {cpu: lines.get(f"cpu{cpu}", []) for cpu in os.sched_getaffinity(0)}
    # The file may be the host's or the container's: without a line for each CPU it belongs to neither.
    if any(len(columns) <= max(_BUSY) for columns in cpus.values()):
        return None
    return {cpu: sum(int(columns[n]) for n in _BUSY) / os.sysconf("SC_CLK_TCK") for cpu, columns in cpus.items()}
