"""Signals go to the process that writes a run, and to no other."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from preheat.core.run_records import ProcessStatus
from preheat.errors import RunError
from preheat.files import to_json
from preheat.web import stop
from preheat.web.stop import explain_unreachable, send_request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/locks")

# Locks the run, and writes each signal that it handles to a file.
WRITER = """
import fcntl, signal, sys
from pathlib import Path
folder = Path(sys.argv[1])
lock = (folder / "lock").open("a")
fcntl.flock(lock, fcntl.LOCK_EX)
for name in sys.argv[2:]:
    signal.signal(signal.Signals[name], lambda number, _: (folder / signal.Signals(number).name).touch())
(folder / "ready").touch()
while True:
    signal.pause()
"""


class Writer:
    """A process that has the lock of a run folder."""

    def __init__(self, folder: Path, *signals: str):
        self.folder = folder
        folder.mkdir()
        (folder / "recipe.yaml").write_text("name: small\n")
        self.process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), *signals])
        wait_for(folder / "ready")
        self.status = ProcessStatus(
            time=time.time(),
            host=socket.gethostname(),
            pid=self.process.pid,
            started=psutil.Process(self.process.pid).create_time(),
        )
        self.publish()

    def publish(self, **changes: object) -> None:
        (self.folder / "status.json").write_text(to_json({**vars(self.status), **changes}))


def wait_for(file: Path) -> None:
    end = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < end, f"{file} was not written"
        time.sleep(0.01)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "run", "SIGTERM", "SIGUSR2")
    yield writer
    writer.process.kill()
    writer.process.wait()


def test_the_process_gets_one_sigterm_and_any_number_of_saves_before(writer: Writer) -> None:
    assert explain_unreachable(writer.folder) is None
    assert "saves a checkpoint" in send_request(writer.folder, "save")
    wait_for(writer.folder / "SIGUSR2")
    assert "finishes the step" in send_request(writer.folder, "stop")
    wait_for(writer.folder / "SIGTERM")
    for request in ("stop", "save"):
        with pytest.raises(RunError, match="already stopping"):
            send_request(writer.folder, request)


def test_a_run_that_says_it_is_stopping_gets_no_second_signal(writer: Writer) -> None:
    # As after Ctrl-C in its terminal, or a stop by a server that was restarted since.
    writer.publish(stopping="SIGTERM")
    with pytest.raises(RunError, match="already stopping"):
        send_request(writer.folder, "stop")
    assert not (writer.folder / "SIGTERM").exists()


def test_a_signal_that_would_end_the_process_is_not_sent(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    try:
        for request in ("save", "stop"):
            with pytest.raises(RunError, match="does not take steps now"):
                send_request(writer.folder, request)
        time.sleep(0.1)
        assert writer.process.poll() is None
    finally:
        writer.process.kill()
        writer.process.wait()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "elsewhere"}, "The run is on elsewhere"),
        ({"started": 1.0}, "is another one now"),
        ({"pid": 2**22 + 1}, "it has ended"),
        ({"pid": "x"}, "does not say which process"),
    ],
)
def test_another_process_is_refused(writer: Writer, changes: dict[str, object], reason: str) -> None:
    writer.publish(**changes)
    assert reason in (explain_unreachable(writer.folder) or "")
    with pytest.raises(RunError, match=reason):
        send_request(writer.folder, "stop")
    assert not (writer.folder / "SIGTERM").exists()


def test_a_process_without_the_lock_is_refused(writer: Writer) -> None:
    # This process is alive and handles SIGTERM or not, but another one writes the run.
    writer.publish(pid=os.getpid(), started=psutil.Process().create_time())
    with pytest.raises(RunError, match="does not write this run any more"):
        send_request(writer.folder, "stop")


def test_finding_the_process_does_not_lock_the_run(writer: Writer) -> None:
    writer.process.kill()
    writer.process.wait()
    with (writer.folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert stop.explain_unreachable(writer.folder) is not None
