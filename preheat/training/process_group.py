"""The processes of a run: who this one is, what the first finds out for all, and that all are of one mind before they begin.

torchrun, or `preheat train --nproc`, starts each with RANK, WORLD_SIZE and where to meet. The first process reads the data and plans
before the others join it, so that what takes long or goes wrong does so once, outside any collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from preheat.errors import RecipeError, RunError
from preheat.hardware.child_processes import all_here, launched_store, local_group, store_address
from preheat.recipe import Recipe

__all__ = ["BACKEND", "Ranks", "meet"]

BACKEND = "backend"
"""The key under which the first process leaves by what the devices reach each other, if it is not gloo."""
_LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Tt]imed out|timeout|NCCL", re.ASCII)
"""In what a collective says when a process is gone or does not answer."""
_PATIENCE = timedelta(days=7)
"""How long the others wait while the first reads data and plans; if it fails, the launcher ends them."""


@dataclass
class Ranks:
    """The default is one process, alone.

    Attributes:
        rank, world: this process's number, and how many there are.
        local, on_host: its number on this host, and how many there are.
        store: where they leave each other words.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    on_host: int = 1
    store: Any = None

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def tell(self, key: str, value: Any) -> None:
        """Leaves something for the others, as JSON."""
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def hear(self, key: str) -> Any:
        """What another has left, or will leave.

        Raises:
            RunError: the process that holds the store ended.
        """
        import torch.distributed as dist

        try:
            self.store.wait([key], _PATIENCE)
            return json.loads(self.store.get(key))
        except (dist.DistNetworkError, dist.DistStoreError):
            raise RunError(f"rank {self.rank}: rank 0 ended before the run began; its own words say why") from None

    def gather(self, key: str) -> None:
        """Waits until every process has called this with the same key, or ended."""
        import torch.distributed as dist

        if self.store is not None:
            self.store.set(f"{key}/{self.rank}", "")
            with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
                self.store.wait([f"{key}/{rank}" for rank in range(self.world)])

    def agree(self, facts: dict[str, str]) -> None:
        """Compares what must be equal everywhere.

        Raises:
            RunError: this process differs from the first; the words say in what.
        """
        if self.world == 1:
            return
        if self.lead:
            self.tell("facts", facts)
            return
        first = self.hear("facts")
        for key, value in facts.items():
            if value != first[key]:
                raise RunError(
                    f"rank {self.rank} on {os.uname().nodename}: its {key} is {value}, and that of rank 0 is "
                    f"{first[key]}; make them the same on all hosts"
                )

    def join(self, recipe: Recipe, kind: str) -> None:
        """Forms torch.distributed's default group.

        Args:
            kind: of device: cpu or cuda.
        """
        if self.world == 1:
            return
        import torch
        import torch.distributed as dist

        if all_here():  # no other host needs to reach them, whoever started them
            os.environ.update(local_group())
        device = torch.device("cuda", self._gpu()) if kind == "cuda" else None
        if device is not None:
            torch.cuda.set_device(device)
            if self.lead:
                self.tell(BACKEND, "nccl")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            device_id=device,  # NCCL connects here, where a GPU that does not answer is told, and subgroups split off from this group
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=recipe.parallel.timeout),
        )

    def _gpu(self) -> int:
        """The number of this process's GPU, among those that it sees.

        Raises:
            RunError: there is none for it.
        """
        import torch

        seen = torch.cuda.device_count()
        if self.local < seen:
            return self.local
        if seen == 1 and os.environ.get(
            "CUDA_VISIBLE_DEVICES"
        ):  # whoever started it gave each process a GPU of its own
            return 0
        raise RunError(
            f"rank {self.rank}: is number {self.local} on its host, which has {seen} "
            f"GPU{'' if seen == 1 else 's'} for it; "
            f"start at most as many processes as there are GPUs"
        )

    def explained(self, error: BaseException, step: int) -> BaseException:
        """An error of a collective in words; any other error as it is."""
        words = str(error).splitlines()[0] if str(error) else ""
        if self.world == 1 or not isinstance(error, RuntimeError) or not _LOST.search(words):
            return error
        words = words.split(". This is typically")[0].split("] ", 1)[-1]  # what went wrong, less gloo's file and advice
        return RunError(
            f"rank {self.rank}: lost the other processes in step {step + 1} ({words[-160:]}); start again with "
            "--resume, which goes on from the last checkpoint"
        )

    def leave(self) -> None:
        """Ends the group."""
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def meet(recipe: Recipe) -> Ranks:
    """This process among those that a launcher started; alone where none did.

    Raises:
        RecipeError: the recipe wants another number of processes.
        RunError: the others' meeting point cannot be reached.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.parallel.devices not in (None, world):
        wanted = recipe.parallel.devices
        how = (
            f"start it with --nproc {wanted}, or under torchrun"
            if world == 1
            else f"start {wanted}, or leave the key out"
        )
        raise RecipeError(
            f"parallel.devices: {wanted} processes are wanted, and {world} {'was' if world == 1 else 'were'} "
            f"started; {how}"
        )
    if world == 1:
        return Ranks()
    import torch.distributed as dist

    patience = recipe.parallel.timeout
    rank, port = (os.environ.get(key, "") for key in ("RANK", "MASTER_PORT"))
    address = store_address()
    lost = (
        f"rank {rank}: cannot meet the others at {address}:{port} within {patience:g} s ({{}}); is the first "
        "host up, and the port open?"
    )
    begun = time.monotonic()
    # The store stands with torchrun's agent, or with the first process. torch tells of a store that is not there with all its C++ frames.
    if (rank != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True") and address and port.isdecimal():
        why = _unreachable(address, int(port), patience)
        if why:
            raise RunError(lost.format(why))
    try:
        store = launched_store(max(1.0, patience - (time.monotonic() - begun)))
        number = int(rank)
    except (dist.DistNetworkError, dist.DistStoreError, OSError, ValueError) as error:
        raise RunError(lost.format(str(error).splitlines()[0][:120])) from None
    store.set_timeout(timedelta(seconds=recipe.parallel.timeout))
    try:
        word = _roll_call(store, number, world, patience)
    except (dist.DistNetworkError, dist.DistStoreError) as error:  # whoever holds the store ended
        raise RunError(lost.format(str(error).splitlines()[0][:120])) from None
    store = dist.PrefixStore(word, store)
    local, on_host = (int(os.environ.get(key, "0") or 0) for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return Ranks(number, world, local, on_host or 1, store)


def _unreachable(address: str, port: int, patience: float) -> str | None:
    """Why nothing answers there, after having tried for so many seconds; None: something does."""
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, end - time.monotonic()))).close()
        except OSError as error:
            if time.monotonic() >= end:
                return error.strerror or str(error)
            time.sleep(0.1)
        else:
            return None


def _roll_call(store: Any, rank: int, world: int, patience: float) -> str:
    """A word that only these very processes share: after a restart the launcher's store still holds what those before left there.

    Each says hello by a number of its own. The first calls the roll and waits until all have answered it; a number that a dead process
    left is never answered for, and the one who takes its place is called anew.
    """
    mine, answered, roll = uuid.uuid4().hex, "", {"word": "", "numbers": []}
    store.set(f"hello/{rank}", mine)
    hellos = [f"hello/{n}" for n in range(world)]
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if rank == 0 and store.check(hellos):
            numbers = [store.get(key).decode() for key in hellos]
            if numbers != roll["numbers"]:
                roll = {"word": uuid.uuid4().hex, "numbers": numbers}
                store.set("roll", json.dumps(roll))
            if store.check([f"{roll['word']}/{n}" for n in range(1, world)]):
                store.set(f"{roll['word']}/begin", "")
                return str(roll["word"])
        elif rank and store.check(["roll"]):
            roll = json.loads(store.get("roll"))
            if roll["numbers"][rank] == mine and roll["word"] != answered:
                answered = str(roll["word"])
                store.set(f"{answered}/{rank}", "")
            if answered and store.check([f"{answered}/begin"]):
                return answered
        time.sleep(0.02)
    missing = [
        str(n)
        for n in range(world)
        if not (store.check([f"hello/{n}"]) and (n == 0 or store.check([f"{roll['word']}/{n}"])))
    ]
    raise RunError(
        f"rank {rank}: waited {patience:g} s for the other processes; not there: rank {', '.join(missing[:8]) or 0}"
    )
