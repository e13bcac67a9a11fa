"""Processes of a run before they begin: they call the roll past words of the dead, and say what differs."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch.distributed as dist

from preheat.errors import RecipeError, RunError
from preheat.technique import Device
from preheat.training.ranks import Ranks, _roll_call, meet

from ..conftest import tiny


def test_the_roll_is_called_past_words_that_dead_processes_left() -> None:
    store = dist.HashStore()
    for key, value in {
        "hello/0": "dead",
        "hello/1": "dead",
        "roll": '{"word": "old", "numbers": ["dead", "dead"]}',
        "old/begin": "",
    }.items():
        store.set(key, value)
    words: dict[int, Any] = {}
    both = [threading.Thread(target=lambda n=n: words.update({n: _roll_call(store, n, 2, 20.0)})) for n in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert words[0] == words[1] != "old"


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(RunError, match=r"rank 0: waited 0.2 s for the other processes; not there: rank 1, 2"):
        _roll_call(dist.HashStore(), 0, 3, 0.2)


def test_a_meeting_point_that_is_not_there_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for key, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(
            RunError, match=rf"rank 1: cannot meet the others at 127.0.0.1:{port} within 0.3 s \(Connection refused\)"
        ):
            meet(tiny(more="parallel: {timeout: 0.3}"))
    assert capfd.readouterr().err == ""  # no frames of C++


def test_a_process_that_differs_says_in_what() -> None:
    store = dist.HashStore()
    Ranks(0, 2, store=store).agree({"version of torch": "2.13.0", "data": "a"})
    Ranks(1, 2, store=store).agree({"version of torch": "2.13.0", "data": "a"})
    with pytest.raises(RunError, match=r"rank 1 on .*: its version of torch is 2.11.0, and that of rank 0 is 2.13.0"):
        Ranks(1, 2, store=store).agree({"version of torch": "2.11.0", "data": "a"})


def test_more_devices_than_rows_are_refused() -> None:
    from preheat.planning.observe import observe

    with pytest.raises(RecipeError, match=r"batch.size: 4 rows cannot be shared out among 8 devices; use 8 or more"):
        observe(tiny("{fsdp: {}}"), vocabulary=96, device=Device("cpu", "test", 8 << 30), world=8)
