"""Whether a measurement had the machine to itself, by known counters and beside a process that burns CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from preheat.core import MachineUse
from preheat.files import to_plain_data
from preheat.hardware import machine_use
from preheat.hardware.machine_use import Sample, UseMeter, join_uses, read_use, run_delays, take_sample, use_between
from preheat.hardware.stored_values import Damaged

LINUX = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="other processes are seen on Linux only")
BURN = "import os, sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: pass"


@pytest.mark.parametrize(
    ("own", "busy", "threads", "others", "alone"),
    [
        (20.0, (10.0, 10.0), 2, 0.0, True),
        (18.0, (10.0, 10.0), 2, 0.2, True),
        (16.0, (10.0, 10.0), 2, 0.4, False),
        (10.0, (10.0, 10.0), 1, 1.0, True),  # the other core was free for it
        (5.0, (10.0, 10.0), 1, 1.5, False),
        (15.0, (10.0, 10.0), 8, 0.5, False),  # more threads than CPUs
        (20.05, (10.0, 10.0), 2, 0.0, True),  # ticks
        (20.0, (0.0, 0.0), 2, None, None),  # a sandbox that counts nothing
        (20.0, (8.0, 8.0), 2, None, None),
        (20.0, None, 2, None, None),
    ],
)
def test_other_work_is_what_all_processes_used_less_our_own(
    own: float, busy: tuple[float, float] | None, threads: int, others: float | None, alone: bool | None
) -> None:
    before = None if busy is None else {3: 100.0, 5: 200.0}
    after = None if busy is None else {3: 100.0 + busy[0], 5: 200.0 + busy[1]}
    use = use_between(Sample(50.0, 7.0, before), Sample(60.0, 7.0 + own, after), threads)
    assert (use.seconds, use.threads) == (10.0, threads)
    assert use.own_cores == pytest.approx(own / 10)
    assert use.other_cores == (None if others is None else pytest.approx(others, abs=1e-9))
    assert use.alone is alone
    assert read_use(to_plain_data(use)) == use
    assert use.alone is alone


def test_cpus_that_changed_meanwhile_are_not_compared() -> None:
    use = use_between(Sample(0, 0, {0: 5.0, 1: 5.0}), Sample(10, 1, {0: 9.0}), 1)
    assert use.alone is None


def test_intervals_are_joined_by_their_lengths() -> None:
    use = join_uses([MachineUse(1.0, 2.0, 1.0, 2, 2), MachineUse(3.0, 1.0, 0.0, 2, 2)])
    assert use == MachineUse(4.0, 1.25, 0.25, 2, 2)
    assert join_uses([use, MachineUse(3.0, 1.0, None, 2, 2)]).alone is None


@pytest.mark.parametrize(
    "note", [None, 3, {}, {"alone": True}, to_plain_data(MachineUse(1.0, 1.0, 0.0, 2, 2)) | {"cpus": "2"}]
)
def test_a_damaged_note_is_refused(note: object) -> None:
    with pytest.raises(Damaged):
        read_use(note)


STAT = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {0}\ncpu1 {1}\nintr 5\n"


@pytest.mark.parametrize(
    ("stat", "mounts", "seconds"),
    [
        # user nice system idle iowait irq softirq steal guest guest_nice, in ticks of 10 ms
        (STAT.format("100 10 50 900 90 1 2 37 80 5", "0 0 0 0 0 0 0 0 0 0"), "", {0: 2.0, 1: 0.0}),
        ("cpu  1 1 1\ncpu0 100 10 50 900 90 1 2 37 0 0\n", "", None),  # not those of the affinity
        (STAT.format("100 10 50 900", "0 0 0 0"), "", None),
        (STAT.format(*["0 " * 10] * 2), "lxcfs /proc/stat fuse.lxcfs rw 0 0\n", None),  # a container's own processes
        (None, "", None),
    ],
)
def test_busy_time_is_read_by_cpu_and_unknown_if_it_is_not_ours(
    stat: str | None, mounts: str, seconds: dict[int, float] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mounts").write_text("proc /proc proc rw 0 0\n" + mounts)
    if stat is not None:
        (tmp_path / "stat").write_text(stat)
    monkeypatch.setattr(machine_use, "_PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    assert machine_use._read_busy_seconds() == seconds
    use = use_between(take_sample(), take_sample(), 2)
    assert (use.other_cores is None) == (seconds is None)


@contextlib.contextmanager
def burning(*, seconds: float) -> Iterator[None]:
    """Processes on all CPUs that are not below this one: their parent has ended, so nothing counts them as ours."""
    start = (
        "import subprocess, sys\nfor _ in range(int(sys.argv[2])): "
        "print(subprocess.Popen([sys.executable, '-c', sys.argv[3], sys.argv[1]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    )
    count = str(len(os.sched_getaffinity(0)))
    done = subprocess.run(
        [sys.executable, "-c", start, str(seconds), count, BURN], capture_output=True, text=True, check=True
    )
    pids = [int(line) for line in done.stdout.split()]
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


@LINUX
def test_work_of_other_processes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a meter, a part of a calibration, and a run."""
    import torch

    from preheat.hardware.benchmark_rates import _Parts
    from preheat.training.throughput import ThroughputMeter

    if take_sample().busy is None:
        pytest.skip("this container does not show what other processes use")
    cpus = len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: cpus)
    session: Any = SimpleNamespace(ranks=SimpleNamespace(world=1), device=SimpleNamespace(kind="cpu"))
    with burning(seconds=30):
        meter, run, parts = UseMeter(), ThroughputMeter(session), _Parts(cpus)
        parts.measure(lambda: time.sleep(1.5))
        uses = [meter.use(cpus), run.machine(), parts.most_disturbed]
    for use in uses:
        # All CPUs are taken, by these processes or by what else runs here.
        assert use is not None
        assert use.other_cores is not None
        assert use.other_cores > 0.6 * use.cpus
        assert use.own_cores < 0.3
        assert use.alone is False
    session.ranks.world = 2  # which share the machine with each other
    assert run.machine() is None


@LINUX
def test_waiting_for_a_cpu_is_seen() -> None:
    me = threading.get_native_id()

    def waited(do: Callable[[], object]) -> float:
        """Returns how long this thread waited for a CPU meanwhile."""
        before = run_delays()
        do()
        after = run_delays()
        assert before is not None
        assert after is not None
        return after[me] - before[me]

    def compute() -> None:
        end = time.perf_counter() + 1.0
        while time.perf_counter() < end:
            pass

    if run_delays() is None:
        pytest.skip("this kernel does not show how long a thread waited")
    with burning(seconds=30):
        assert waited(compute) > 0.2
    assert waited(lambda: time.sleep(0.5)) < 0.25, "a thread that sleeps does not wait for a CPU"


@LINUX
def test_work_of_children_is_our_own_while_they_run_and_afterwards() -> None:
    first = take_sample()
    command = [sys.executable, "-c", BURN, "30"]
    with subprocess.Popen(command) as child:
        end = time.monotonic() + 20
        while (own := take_sample().own - first.own) < 0.5 and time.monotonic() < end:
            time.sleep(0.1)
        child.kill()
    assert own >= 0.5
    assert take_sample().own - first.own >= own
