"""Signals to a training process, as the process handles them."""

from __future__ import annotations

import signal

from preheat.training.signals import Signals


def test_a_request_to_save_is_noted_and_a_late_one_does_not_end_the_process() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGUSR2)
        assert signals.save_requested
        assert signals.received is None
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)
