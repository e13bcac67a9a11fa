"""Training across two hosts, and what takes one away: all start again from the last checkpoint and end as a run without faults. On demand: PREHEAT_SCALE=all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from preheat.core.run_records import Resumed
from preheat.run.reader import Reader

from ..e2e.conftest import RECIPE
from .hosts import Host, lacks, two_hosts, until

pytestmark = pytest.mark.skipif(os.environ.get("PREHEAT_SCALE") != "all", reason="takes minutes: make test-scale")

STEPS, EVERY, CUT = 160, 10, 20.0
TIMEOUT = 15.0  # shorter than the cut

Hosts = tuple[Host, Host]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    why = lacks()
    if why:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "text").mkdir()
    for n in range(40):
        (folder / "text" / f"{n:02}.txt").write_text(
            "\n".join(f"{word} {n} {i}." for i, word in enumerate(RECIPE.split() * 8))
        )
    settings = {
        "steps: 12": f"steps: {STEPS}",
        "every: 5": f"every: {EVERY}",
        "{mixed_precision: {mode: bf16_weights}, ": "{",
    }
    recipe = RECIPE
    for old, new in settings.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    recipe = recipe.replace("techniques: {", "techniques: {fsdp: {}, ") + f"parallel: {{timeout: {TIMEOUT:g}}}\n"
    (folder / "r.yaml").write_text(recipe)
    with two_hosts(folder, {**os.environ, "PREHEAT_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}) as both:
        yield both


def finish(hosts: Hosts, run: Path) -> list[float]:
    """Waits for both agents; the run has each step once, taken again only from a checkpoint on."""
    for host in hosts:
        assert host.agent is not None
        until(lambda agent=host.agent: agent.poll() is not None, "end", *hosts, seconds=240)
        assert host.agent.returncode == 0, "\n".join(h.said() for h in hosts)
    at, saved = 0, 0
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in told:
        if event["kind"] == "checkpoint":
            saved = event["step"]
        if event["kind"] == "resumed":
            assert event["step"] == saved, told
    assert [e["kind"] for e in told if e["kind"] in ("started", "finished")] == ["started", "finished"]
    for line in (json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()):
        assert line.get("loss") is None or at - 2 * EVERY < line["step"] <= at + 1  # that saving may have been cut, too
        at = line["step"]
    found = [line.loss for line in Reader(run).metrics()]
    assert len(found) == STEPS
    return found


@pytest.fixture(scope="module")
def whole(pair: Hosts) -> list[float]:
    for host in pair:
        host.start("r.yaml", "whole", identity="whole")
    try:
        return finish(pair, pair[0].folder / "whole")
    finally:
        for host in pair:
            host.forget()


@pytest.fixture
def hosts(pair: Hosts, whole: list[float]) -> Iterator[Hosts]:
    """At rest, before and after."""
    yield pair
    for host in pair:
        host.forget()


def test_two_hosts_give_the_losses_of_one_process(hosts: Hosts, whole: list[float]) -> None:
    command = [
        sys.executable,
        "-m",
        "preheat",
        "train",
        "r.yaml",
        "--set",
        "techniques={chunked_loss: {rows: 64}}",
        "--out",
        "one",
    ]
    subprocess.run(command, cwd=hosts[0].folder, env={**hosts[0].environment, "OMP_NUM_THREADS": "1"}, check=True)
    one = [line.loss for line in Reader(hosts[0].folder / "one").metrics()]
    assert whole[:5] == pytest.approx(one[:5], abs=1e-5)  # later the rounding of sums has grown


def worker(hosts: Hosts) -> None:
    os.kill(hosts[1].worker(), signal.SIGKILL)


def second_host(hosts: Hosts) -> None:
    hosts[1].die()
    time.sleep(1)
    hosts[1].start("r.yaml", "second_host", identity="second_host")


def first_host(hosts: Hosts) -> None:
    """Which holds the rendezvous: the other's agent ends too, and the cluster starts both again."""
    hosts[0].die()
    agent = hosts[1].agent
    assert agent is not None
    until(lambda: agent.poll() is not None, "end of the other agent", *hosts)
    assert agent.returncode != 0
    for host in hosts:
        host.start("r.yaml", "first_host", identity="first_host-again")


def link(hosts: Hosts) -> None:
    hosts[1].link(False)
    time.sleep(CUT)
    hosts[1].link(True)


@pytest.mark.parametrize("fault", [worker, second_host, first_host, link], ids=lambda f: f.__name__)
def test_what_is_lost_is_started_again_and_ends_the_same(
    hosts: Hosts, whole: list[float], fault: Callable[[Hosts], None], capsys: pytest.CaptureFixture[str]
) -> None:
    name = fault.__name__
    run = hosts[0].folder / name
    for host in hosts:
        host.start("r.yaml", name, identity=name)

    def steps() -> int:
        try:
            return (run / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    until(lambda: steps() >= 3 * EVERY + 3, "steps", *hosts)
    begun, at = time.monotonic(), steps()
    fault(hosts)
    until(lambda: len(Reader(run).events(Resumed)) == 1, "restart", *hosts)
    resumed = Reader(run).events(Resumed)[0].step
    again = time.monotonic() - begun
    found = finish(hosts, run)
    worst = max(abs(a - b) for a, b in zip(found, whole, strict=True))
    with capsys.disabled():
        print(
            f"\n{name}: fault at step {at}, gone on from {resumed} after {again:.1f} s (since the fault began), "
            f"final loss {found[-1]:.8f} against {whole[-1]:.8f}, worst of {STEPS} steps off by {worst:.1e}"
        )
    assert abs(found[-1] - whole[-1]) <= 1e-6
    assert worst <= 1e-6
