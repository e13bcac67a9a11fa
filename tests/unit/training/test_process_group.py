"""Processes of a run before they begin: they call the roll past words of the dead, and say what differs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from preheat import recipe as recipes
from preheat.core import Device
from preheat.errors import RecipeError, RunError
from preheat.hardware.child_processes import is_single_host, store_address
from preheat.hardware.interrupts import Interrupted, raise_on_signal
from preheat.planning.request import Request
from preheat.training.launch.local import start
from preheat.training.process_group import Ranks, _agree_on_prefix, join_process_group

from ...conftest import tiny, within
from ...fork_server import Fork


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
    both = [
        threading.Thread(target=lambda n=n: words.update({n: _agree_on_prefix(store, n, 2, 20.0)})) for n in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert words[0] == words[1] != "old"


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(RunError, match=r"rank 0: waited 0.2 s for the other processes; not there: rank 1, 2"):
        _agree_on_prefix(dist.HashStore(), 0, 3, 0.2)


def test_a_meeting_point_that_is_not_there_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for key, value in {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(
            RunError, match=rf"rank 1: cannot meet the others at 127.0.0.1:{port} within 0.3 s \(Connection refused\)"
        ):
            join_process_group(tiny(more="parallel: {timeout: 0.3}"))
    assert capfd.readouterr().err == ""  # no frames of C++


def member() -> None:
    """Adds up with the others; prints the sum and the addresses on which this process listens."""
    recipe = tiny(more="parallel: {timeout: 60}")
    ranks = join_process_group(recipe)
    ranks.join(recipe, "cpu")
    total = torch.tensor([float(ranks.rank + 1)])
    dist.all_reduce(total)
    files = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()}
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    listening = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files]
    dist.barrier()
    print(total.item(), *listening)
    ranks.leave()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "stated", [{"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": socket.gethostname(), "LOCAL_WORLD_SIZE": "2"}]
)
def test_processes_started_by_hand_on_one_host_listen_to_nobody_else(stated: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    outer = {k: v for k, v in os.environ.items() if not k.endswith(("_SOCKET_IFNAME", "WORLD_SIZE"))}
    shared = outer | {"MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **stated}
    members = [Fork([], function=f"{__name__}:member", environment={**shared, "RANK": rank}) for rank in ("0", "1")]
    loopback = {"0100007F", "0" * 24 + "01000000"}
    for member in members:
        total, *listening = member.communicate(timeout=100)[0].split()
        assert (member.returncode, total) == (0, "3.0")
        assert listening, "gloo listens, at the least"
        assert set(listening) <= loopback


def test_the_store_is_served_to_other_hosts_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(**stated: str) -> tuple[bool, str]:
        for key in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(key, raising=False)
        for key, value in stated.items():
            monkeypatch.setenv(key, value)
        return is_single_host(), store_address()

    here = socket.gethostname()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert state(MASTER_ADDR=here, LOCAL_WORLD_SIZE="4") == (True, "127.0.0.1")
    assert state(MASTER_ADDR=here, LOCAL_WORLD_SIZE="2") == (False, here)
    assert state(MASTER_ADDR=here) == (False, here)  # others may have been started elsewhere
    assert state(MASTER_ADDR="192.0.2.1", LOCAL_WORLD_SIZE="4") == (False, "192.0.2.1")
    assert state(MASTER_ADDR="localhost") == (True, "127.0.0.1")
    assert state(MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE="2") == (False, "127.0.0.1")
    assert state(MASTER_ADDR=here, LOCAL_WORLD_SIZE="4", TORCHELASTIC_USE_AGENT_STORE="True") == (True, here)


def test_a_process_that_differs_says_in_what() -> None:
    store = dist.HashStore()
    Ranks(0, 2, store=store).require_equal({"version of torch": "2.13.0", "data": "a"})
    Ranks(1, 2, store=store).require_equal({"version of torch": "2.13.0", "data": "a"})
    with pytest.raises(RunError, match=r"rank 1 on .*: its version of torch is 2.11.0, and that of rank 0 is 2.13.0"):
        Ranks(1, 2, store=store).require_equal({"version of torch": "2.11.0", "data": "a"})


def test_a_rank_that_waits_for_the_first_heeds_a_signal() -> None:
    def wait() -> None:
        threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM]).start()
        Ranks(1, 2, store=dist.HashStore()).fetch("never")

    with within(20), pytest.raises(Interrupted), raise_on_signal():
        wait()


def test_more_devices_than_rows_are_refused() -> None:
    from preheat.planning.dry_run import observe

    with pytest.raises(RecipeError, match=r"batch.size: 4 sequences cannot be split across 8 devices; use 8 or more"):
        observe(Request(tiny("{fsdp: {}}"), Device("cpu", "test", 8 << 30), vocabulary=96, world=8))


ABORTS = """
import os, sys, time
if "RANK" in os.environ:
    import json
    import torch.distributed as dist
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "1":
        place = {"step": 31, "phase": "data", "since": 0, "now": 0, "line": "preheat/data/loader.py:7"}
        store.set("word/stands/1", json.dumps(place))
        store.set("ready", "")
        time.sleep(60)
    store.wait(["ready"])
    store.set("roll", json.dumps({"word": "word", "numbers": []}))
    if os.environ.get("OVER") == "nccl":
        store.set("word/backend", json.dumps("nccl"))
    os.abort()  # as torch's watchdog does
"""


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (
            "nccl",
            "rank 0 was ended by SIGABRT, as torch's watchdog does if an NCCL collective loses a process or exceeds parallel.timeout: "
            "it waited for rank 1 in step 31 (data), at preheat/data/loader.py:7; start again with --resume",
        ),
        ("gloo", "rank 0 was ended by SIGABRT; the last lines above are those of the library that aborted it"),
    ],
)
def test_a_process_that_the_watchdog_aborts_is_explained(
    over: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABORTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OVER", over)
    with pytest.raises(RunError) as raised:
        start(["train", "demo"], processes=2)
    assert str(raised.value) == words


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: dict[str, Any] = {}
    told: list[str] = []
    monkeypatch.setattr("preheat.training.process_group.is_single_host", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(str(device)))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **how: joined.update(how, backend=backend)
    )
    store = torch.distributed.HashStore()
    recipe = recipes.parse("stop: {max_steps: 1}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Ranks(1, 2, 1, 2, store).join(recipe, "cuda")
    assert joined["device_id"] == torch.device("cuda", 1)
    assert told == ["cuda:1"]
    with pytest.raises(RunError, match="rank 2: is number 2 on its host, which has 2 GPUs for it"):
        Ranks(2, 4, 2, 4, store).join(recipe, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    Ranks(2, 4, 2, 4, store).join(recipe, "cuda")
    assert joined["device_id"] == torch.device("cuda", 0)
    Ranks(0, 2, 0, 2, store).join(recipe, "cpu")
    assert joined["device_id"] is None
