"""`preheat nettest` on processes of this machine over gloo, and what it says when they cannot meet."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from preheat.core.nettest import CollectiveRow, Expected, Measurement
from preheat.errors import RecipeError, RunError
from preheat.hardware import collective_bench
from preheat.hardware.link_rates import LinkRate, bus_factor, load_links, seconds_of, store_links
from preheat.hardware.nettest import find_expected_links, parse_sizes
from preheat.hardware.rates import load

from ..fork_server import Fork
from ..unit.hardware.test_hardware import made_up

SIZES = ["--sizes", "1KiB,256KiB,4MiB", "--budget", "0.1", "--repeats", "5"]


def start(*arguments: str, **environment: str) -> Fork:
    return Fork(["nettest", *arguments], environment={**os.environ, "OMP_NUM_THREADS": "1"} | environment)


def start_alone(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """No fork: what torch logs is decided when it is imported."""
    known = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "preheat", "nettest", *arguments]
    return subprocess.Popen(command, env=known | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: Fork | subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=150)
    return process.wait(), out, error


def test_all_ranks_compare_sizes_with_the_smallest_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(gathered: list[tuple[int, int]], mine: tuple[int, int]) -> None:
        gathered[:] = [mine, (1 << 20, 1)]  # this host, and one with a MiB

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    place = collective_bench._Topology(0, 2, 1, (0, 1), ("a", "b"))
    task = collective_bench.Task(("all_reduce",), (1 << 20,), "gloo")
    with pytest.raises(RecipeError, match=r"--sizes: .* of 1\.00 MiB"):
        collective_bench._check_room(task, place, torch.device("cpu"))


def test_processes_of_two_hosts_are_measured_told_apart_and_kept_for_plans(tmp_path: Path) -> None:
    """Three ranks as torchrun would start them: two on the first host, one on the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    page = tmp_path / "net.html"
    cache = {"PREHEAT_CACHE": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    ranks = [
        start(*SIZES, "--json", "--html", str(page), **cache, RANK=str(n), GROUP_RANK=str(n // 2), LOCAL_WORLD_SIZE=str(2 - n // 2))
        for n in range(3)
    ]  # fmt: skip
    ended = [end(rank) for rank in ranks]
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert [out for _, out, _ in ended[1:]] == ["", ""]
    assert [error for _, _, error in ended] == ["", "", ""]
    made = json.loads(ended[0][1])
    assert (made["devices"], made["hosts"], made["backend"]) == (3, 2, "gloo")

    rows = made["rows"]
    assert [row["collective"] for row in rows[::3]] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send_recv",
    ]
    for row in rows:
        assert 0 < row["low"] <= row["seconds"] <= row["high"]
        assert row["bytes"] % (4 * 3) == 0  # sharded evenly
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
    # nccl-tests' factors for 3 devices
    factors = {row["collective"]: row["bus_bandwidth"] / row["algorithm_bandwidth"] for row in rows}
    thirds = {"all_reduce": 4, "all_gather": 2, "reduce_scatter": 2, "all_to_all": 2, "send_recv": 3}
    assert factors == pytest.approx({name: n / 3 for name, n in thirds.items()})
    assert sum(rows[n + 2]["low"] > rows[n]["low"] for n in range(0, 15, 3)) >= 4, "4 MiB takes longer than 1 KiB"

    pairs = [(pair["kind"], pair["ranks"]) for pair in made["pairs"]]
    assert pairs == [("in a host", [0, 1]), ("between hosts", [0, 2])]
    assert all(pair["latency"] > 0 and pair["bandwidth"] > 1e6 for pair in made["pairs"])

    assert "<svg" in page.read_text()
    assert "between hosts" in page.read_text()
    stored = json.loads(Path(made["stored"]).read_text())["links"]
    assert [(row["collective"], row["seconds"]) for row in stored] == [
        (row["collective"], row["seconds"]) for row in rows
    ]


def test_what_it_refuses_is_one_line(tmp_path: Path) -> None:
    nobody = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "PREHEAT_CACHE": str(tmp_path)}
    with socket.socket() as taken, socket.socket() as closed:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        closed.bind(("127.0.0.1", 0))  # bound but not listening: nobody answers
        port = str(taken.getsockname()[1])
        cases = [
            (start("--nproc", "1"), 2, "use --nproc 2 or more"),
            (start("--nproc", "2", "--port", port), 1, f"--port {port}: cannot be used (Address already in use)"),
            (
                start("--nproc", "2", "--sizes", "1KiB-1TiB"),
                2,
                "--sizes: 1,024 GiB takes 2 buffers on each of 2 processes",
            ),
            (
                start_alone("--timeout", "2", **nobody, MASTER_PORT=port, RANK="0"),
                1,
                f"rendezvous 127.0.0.1:{port}: the port is in use",
            ),
            (
                start_alone("--timeout", "2", **nobody, MASTER_PORT=str(closed.getsockname()[1]), RANK="1"),
                1,
                f"rendezvous 127.0.0.1:{closed.getsockname()[1]}: rank 1 of 2 did not meet the others within 2 s",
            ),
        ]
        for process, code, words in cases:
            found, out, error = end(process)
            assert (found, out) == (code, ""), error
            assert words in error
            assert error.count("\n") == 1, error


def test_a_process_that_fails_ends_the_others_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.hardware import nettest

    monkeypatch.setattr(nettest.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match=r"rank 0 failed \(exit 1\)"):
        nettest.run_nettest(nettest.Task(("all_reduce",), (1024,), "gloo"), processes=2, port=None)


def test_seconds_of_a_collective_follow_from_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))

    def rows(devices: int, hosts: int, slow: float) -> list[LinkRate]:
        return [
            LinkRate("all_reduce", "gloo", devices, hosts, size, slow * (1e-4 + size * bus_factor("all_reduce", devices) / 1e9), 0, 1)
            for size in (1 << 10, 1 << 16, 1 << 22)
        ]  # fmt: skip

    store_links("cpu", "2", rows(2, 1, 5.0))
    store_links("cpu", "2", rows(2, 1, 1.0))  # measured again: replaced
    store_links("cpu", "2", rows(4, 2, 10.0))
    links = load_links("cpu", "2")
    assert len(links) == 6
    assert load_links("cpu", "3") == ()
    assert seconds_of(links, "all_reduce", "gloo", 1 << 20, 2) == pytest.approx(
        1e-4 + (1 << 20) / 1e9
    )  # between two sizes
    assert seconds_of(links, "all_reduce", "gloo", 4, 2) == pytest.approx(1e-4, rel=0.02)  # latency
    assert seconds_of(links, "all_reduce", "gloo", 1 << 30, 2) == pytest.approx((1 << 30) / 1e9, rel=0.03)  # bandwidth
    # 8 devices on one host: at the bus bandwidth of 2 there, not at that of two hosts.
    assert seconds_of(links, "all_reduce", "gloo", 1 << 30, 8) == pytest.approx((1 << 30) * 1.75 / 1e9, rel=0.03)
    assert seconds_of(links, "all_reduce", "gloo", 1 << 30, 16, 4) == pytest.approx(
        (1 << 30) * 10 * 1.875 / 1e9, rel=0.03
    )
    assert seconds_of(links, "all_reduce", "nccl", 1 << 20, 2) is None

    # They are the calibration's too, which may be taken anew without them.
    plain = replace(made_up(), hardware="cpu", torch="2", threads=1)
    plain.store()
    rates = load("cpu", "2", 1)
    assert rates is not None
    assert rates == replace(plain, links=links)
    assert rates.collective_seconds("all_reduce", "gloo", 4, 2) == pytest.approx(1e-4, rel=0.02)
    with pytest.raises(RunError, match="run: preheat nettest"):
        rates.collective_seconds("all_gather", "gloo", 4, 2)


def test_what_is_measured_is_held_against_the_catalogue() -> None:
    rows = tuple(CollectiveRow("all_reduce", "nccl", 8, 1, 4, 1.0, 1.0, 1.0, 1.0, bus) for bus in (300e9, 360e9))
    here = Measurement("NVIDIA H100 80GB HBM3", "2", "nccl", 8, 1, ("h",), rows, (), 1.0)
    assert find_expected_links(here) == Expected(450e9, 50e9, {"all_reduce": 0.8})
    assert find_expected_links(replace(here, hosts=2)).share["all_reduce"] == pytest.approx(7.2)
    assert find_expected_links(replace(here, backend="gloo")).share == {"all_reduce": None}
    assert find_expected_links(replace(here, hardware="a GPU that nobody knows")).in_host is None


def test_sizes() -> None:
    from preheat.errors import RecipeError

    assert parse_sizes("1KiB-8KiB") == (1024, 4096, 8192)
    for text in ("8KiB-1KiB", "1", "-", "1KiB,"):
        with pytest.raises(RecipeError, match="--sizes"):
            parse_sizes(text)
