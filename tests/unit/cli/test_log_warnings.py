"""Log records on standard error: each warning once, and the progress while the machine is measured."""

from __future__ import annotations

import logging

import pytest

from preheat.cli.views.log_warnings import show_warnings
from preheat.hardware.benchmark_rates import _log_progress


def test_warnings_are_shown_once_and_measuring_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("preheat.somewhere")
    with show_warnings():
        for _ in range(2):
            log.warning("two\nlines")
        _log_progress("matmuls in bf16", 0.34)
        _log_progress("done", 1.0)
        logging.getLogger("preheat.hardware.benchmark_rates").info("no progress")
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["warning: two lines", "measuring this machine: matmuls in bf16 (34 %)"]
    assert shown.out == ""
