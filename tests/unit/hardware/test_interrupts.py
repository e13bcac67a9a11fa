"""Signals as exceptions, and processes that end with the one that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from preheat.cli import main
from preheat.cli.train import build_resume_command
from preheat.hardware.child_processes import describe_exit, listen, tie_to_parent
from preheat.hardware.interrupts import (
    Interrupted,
    check,
    handled_signals,
    ignore_keyboard_interrupt,
    raise_keyboard_interrupt,
    raise_on_signal,
)
from preheat.training.signals import Signals


class Thing:
    pass


def test_a_signal_raises_once_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught, raise_on_signal():
        signal.raise_signal(signal.SIGTERM)
    assert (caught.value.exit_code, str(caught.value)) == (143, "interrupted by SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == before
    check()  # what is over is not raised again


def test_ctrl_c_within_an_answer_ends_the_answer_and_later_the_command() -> None:
    with raise_on_signal():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), raise_keyboard_interrupt():
                signal.raise_signal(signal.SIGINT)
        with ignore_keyboard_interrupt():
            signal.raise_signal(signal.SIGINT)
        check()
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_python_drops_in_a_callback_is_raised_after_it() -> None:
    def lose() -> None:
        thing = Thing()
        held = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        time.sleep(5)
        assert held is None, "the signal was lost"

    with pytest.raises(Interrupted), raise_on_signal():
        lose()


def test_a_signal_that_a_library_swallows_is_raised_at_the_next_check() -> None:
    def swallow() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        check()

    with pytest.raises(Interrupted), raise_on_signal():
        swallow()


def test_sighup_is_left_ignored() -> None:
    assert signal.SIGHUP in handled_signals()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in handled_signals()
        with raise_on_signal(), Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_a_run_a_signal_is_remembered_and_raised_only_where_work_may_be_broken_off() -> None:
    with raise_on_signal(), Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.received == "SIGHUP"
        with pytest.raises(Interrupted), signals.raised():
            pytest.fail("it began all the same")
    with Signals() as signals, pytest.raises(Interrupted), signals.raised():
        signal.raise_signal(signal.SIGINT)


def test_torchrun_passes_on_what_the_job_sent_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with Signals() as signals:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
    assert signals.received == "SIGTERM"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_command_that_is_interrupted_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr("preheat.recipe.named_recipes", lambda: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        main(["recipes", "show", "demo"])
    assert ended.value.code == code
    assert capsys.readouterr().err == f"interrupted by {number.name}\n"


def test_the_command_that_goes_on_is_what_was_typed_quoted() -> None:
    typed = [
        "--debug",
        "train",
        "a b.yaml",
        "--set",
        "x=[1, 2]",
        "--out=runs/x",
        "--profile",
        "5",
        "--auto-resume",
        "--nproc",
        "2",
        "--out",
        "y",
    ]
    assert build_resume_command(typed, "runs/it's") == (
        "preheat --debug train 'a b.yaml' --set 'x=[1, 2]' --nproc 2 --out 'runs/it'\"'\"'s' --resume"
    )


PARENT = """
import subprocess, sys
from preheat.hardware.child_processes import tie_to_parent
child = subprocess.Popen(tie_to_parent(["sleep", "60"]))
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="by the death signal of Linux")
def test_a_process_ends_with_the_one_that_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    end = time.monotonic() + 10
    while not Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep") and time.monotonic() < end:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split(") ")[1][0] not in "ZX":
        assert time.monotonic() < end, "it goes on without a parent"
        time.sleep(0.02)
    orphan = subprocess.run(
        [part if part != str(os.getpid()) else "1" for part in tie_to_parent(["true"])], check=False
    )
    assert orphan.returncode == 1, "its parent had ended before it began"
    assert subprocess.run(tie_to_parent(["false"]), check=False).returncode == 1
    assert subprocess.run(tie_to_parent(["true"]), check=False).returncode == 0
    missing = subprocess.run(tie_to_parent(["/no/such"]), check=False, capture_output=True, text=True)
    assert missing.stderr == "/no/such: No such file or directory\n"


def test_how_a_process_ended_is_said() -> None:
    assert describe_exit(-9) == "was ended by SIGKILL (perhaps by the kernel, out of memory)"
    assert describe_exit(-99) == "was ended by signal 99"


def test_a_port_is_taken_on_loopback_alone_from_the_first() -> None:
    with listen() as listening:
        address, port = listening.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen(port)
