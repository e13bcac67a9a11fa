"""Training sessions: how a process is prepared for a run."""

from __future__ import annotations

import gc
import weakref

from preheat.training.session import reset_memory_baseline

from ...conftest import DEVICE


def test_steps_do_not_scan_what_existed_before_the_run() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    before = Cycle()
    gone = weakref.ref(before)
    reset_memory_baseline(DEVICE)
    assert gc.get_freeze_count() > 10_000  # the modules of torch
    during = Cycle()
    of_the_run = weakref.ref(during)
    del before, during
    gc.collect()
    assert of_the_run() is None, "what a run leaves behind is collected"
    assert gone() is not None, "what existed before is not scanned"
    reset_memory_baseline(DEVICE)
    assert gone() is None, "but by the next run"
