"""Checks run in processes of their own: results, crashes, hangs and output of libraries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from preheat.core.finding import Finding, Fix, FixKind, Severity
from preheat.hardware.checks.probing import Probe, run_probes

HERE = "tests.unit.hardware.checks.test_probing"
ANSWER = [Finding("memory", Severity.SLOWS, "ä", "a lot", Fix(FixKind.SAFE, "true"), of_recipe=True)]


def answer(label: str) -> list[Finding]:
    print("a library prints when it is imported")
    assert label == "label"
    return ANSWER


def fail() -> list[Finding]:
    raise OSError("libcuda.so.1: not found")


def crash() -> list[Finding]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def hang(file: str) -> list[Finding]:
    """Waits for a process that it starts, as the check of a compiler does."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(str(child.pid))
    child.wait()
    return []


def is_alive(pid: int) -> bool:
    """Returns True if a process outlives the moment that a killed one takes to end."""
    status, end = Path(f"/proc/{pid}/status"), time.monotonic() + 5
    while time.monotonic() < end:
        if not status.exists() or "State:\tZ" in status.read_text():
            return False
        time.sleep(0.05)
    return True


def test_findings_keep_the_order_of_probes_and_failures_are_findings(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    probes = [
        Probe("hub", f"{HERE}:hang", (str(pid),), seconds=8),
        Probe("memory", f"{HERE}:answer", ("label",)),
        Probe("driver", f"{HERE}:fail", failure=Severity.STOPS),
        Probe("kernels", f"{HERE}:crash"),
    ]
    seen: list[tuple[str, int]] = []
    findings = run_probes(probes, lambda part, done: seen.append((part, done)))
    assert findings == [
        Finding("hub", Severity.RISKS, "the check failed: took longer than 8 s"),
        *ANSWER,
        Finding("driver", Severity.STOPS, "the check failed: OSError: libcuda.so.1: not found"),
        Finding("kernels", Severity.RISKS, "the check failed: its process was ended by SIGSEGV"),
    ]
    assert sorted(part for part, _ in seen) == ["driver", "hub", "kernels", "memory"]
    assert [done for _, done in seen] == [1, 2, 3, 4]
    assert not is_alive(int(pid.read_text())), "what a check started ends with it"


def test_an_interruption_ends_all_checks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    # A process in the background of a shell ignores the signal.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    pid = tmp_path / "pid"

    def interrupt() -> None:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_probes([Probe("hub", f"{HERE}:hang", (str(pid),), seconds=60)])
    thread.join()
    assert time.monotonic() - start < 30
    assert not is_alive(int(pid.read_text()))
