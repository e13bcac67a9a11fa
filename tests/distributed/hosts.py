"""Two hosts as network namespaces of this machine, joined by a link that can be cut; torchrun runs on each as `preheat launch` writes it. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from preheat.recipe import Recipe, Stop
from preheat.training.launch import Job

__all__ = ["Host", "lacks", "two_hosts", "until"]

PORT = 29400


def lacks() -> str | None:
    """Why there can be no two hosts here, or None."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2 (the command ip)"
    name = f"preheat-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces need root ({tried.stderr.strip()[:80]})"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass
class Host:
    """One of the two.

    Attributes:
        number: from 0; the first holds the rendezvous.
        space: its network namespace.
        address: of its one interface, link0.
        words: what its processes say.
    """

    number: int
    space: str
    address: str
    first: str
    folder: Path
    environment: dict[str, str]
    agent: subprocess.Popen[str] | None = None
    """torchrun."""
    words: list[IO[str]] = field(default_factory=list)

    def start(self, recipe: str, run: str, *, restarts: int = 3, identity: str = "job") -> None:
        """torchrun with one process, with the arguments of a generated job; host names do not resolve here, so the address is told."""
        job = Job(recipe=Recipe(stop=Stop(max_steps=1)), nodes=2, processes_per_node=1, interface="link0")
        is_host = int(self.number == 0)
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.first}:{PORT}", "--rdzv-id", identity),
            *("--rdzv-conf", f"is_host={is_host},join_timeout=900,read_timeout=300"),
            *("--local-addr", self.address, "--monitor-interval", "0.2"),
            *("-m", "preheat", "train", recipe, "--out", run, "--auto-resume"),
        ]
        self.words.append((self.folder / f"host-{self.number}-{run}-{len(self.words)}.log").open("w+"))
        self.agent = subprocess.Popen(
            ["ip", "netns", "exec", self.space, *command],
            cwd=self.folder,
            env={**self.environment, **job.environment(), "OMP_NUM_THREADS": "1"},
            stdout=self.words[-1],
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def worker(self) -> int:
        """Number of the process that trains."""
        assert self.agent is not None
        return next(pid for pid in self.processes() if pid != self.agent.pid)

    def die(self) -> None:
        """As when the power fails: all its processes at once."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()

    def forget(self) -> None:
        """Ends what still runs, for the next test."""
        self.die()
        self.link(True)
        self.agent = None
        while self.words:
            self.words.pop().close()

    def link(self, up: bool) -> None:
        ip("-n", self.space, "link", "set", "link0", "up" if up else "down")

    def said(self) -> str:
        parts = []
        for file in self.words:
            file.seek(0)
            parts.append(file.read())
        return f"host {self.number}:\n" + "\n--- started again ---\n".join(parts)


@contextmanager
def two_hosts(folder: Path, environment: dict[str, str]) -> Iterator[tuple[Host, Host]]:
    """Two hosts that see the same folder, as over a network file system."""
    names = [f"preheat-{os.getpid()}-{n}" for n in range(2)]
    hosts = [Host(n, name, f"10.77.0.{n + 1}", "10.77.0.1", folder, environment) for n, name in enumerate(names)]
    try:
        for host in hosts:
            ip("netns", "add", host.space)
            ip("-n", host.space, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", names[1])
        for host in hosts:
            ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", "link0")
            host.link(True)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.die()
            for file in host.words:
                file.close()
            subprocess.run(["ip", "netns", "del", host.space], check=False, capture_output=True)


def until(done: Callable[[], bool], what: str, *hosts: Host, seconds: float = 120) -> float:
    """Waits, and returns how long; fails with all that the hosts said."""
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < seconds, f"no {what} within {seconds:.0f} s\n" + "\n".join(
            h.said() for h in hosts
        )
        time.sleep(0.02)
    return time.monotonic() - begun
