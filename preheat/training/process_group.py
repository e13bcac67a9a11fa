"""The processes of a run: ranks, the rendezvous store, and the check that all ranks agree before training.

torchrun, or `preheat train --nproc`, starts each process with RANK, WORLD_SIZE and the store's address. Rank 0 reads
the data and plans before the others join, so that slow or failing work happens once, outside any collective.
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
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError, RunError
from preheat.hardware.child_processes import connect_launched_store, is_single_host, local_group, store_address
from preheat.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["BACKEND", "Ranks", "join_process_group"]

BACKEND = "backend"
"""The store key under which rank 0 publishes the backend, if it is not gloo."""
_LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Tt]imed out|timeout|NCCL", re.ASCII)
"""Matches the error of a collective when a process is lost or does not answer."""
_POLL = 0.2
"""Seconds between two looks for a value of rank 0, which reads data and plans meanwhile; if it fails, the launcher ends
the others."""


@dataclass
class Ranks:
    """This process's ranks and the store; the default is a single process.

    Attributes:
        rank, world: global rank and number of processes.
        local, on_host: local rank and number of processes on this host.
        store: torch.distributed store shared by all processes of the run.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    on_host: int = 1
    store: Store | None = None

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def publish(self, key: str, value: object) -> None:
        """Publishes a value in the store, as JSON."""
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def fetch(self, key: str) -> Any:
        """Waits for a published value and returns it.

        Raises:
            RunError: the process that holds the store ended.
        """
        import torch.distributed as dist

        assert self.store is not None, "only several processes have a store"
        try:
            # Polled: while torch waits, no signal is handled, and the launcher would have to kill this process.
            while not self.store.check([key]):
                time.sleep(_POLL)
            return json.loads(self.store.get(key))
        except (dist.DistNetworkError, dist.DistStoreError):
            raise RunError(
                f"rank {self.rank}: rank 0 ended before the run began; see its output for the reason"
            ) from None

    def gather(self, key: str) -> None:
        """Waits until every process has called this with the same key, or the store is gone."""
        import torch.distributed as dist

        if self.store is not None:
            self.store.set(f"{key}/{self.rank}", "")
            # The store is gone if the process that holds it has passed and ended: every other rank has then been seen.
            with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
                self.store.wait([f"{key}/{rank}" for rank in range(self.world)])

    def require_equal(self, facts: dict[str, str]) -> None:
        """Checks that all ranks have the same facts.

        Raises:
            RunError: this process differs from rank 0; the message names the difference.
        """
        if self.world == 1:
            return
        # Rank 0 publishes and does not wait: a rank that differs ends by itself, and the launcher then ends all.
        if self.lead:
            self.publish("facts", facts)
            return
        first = self.fetch("facts")
        for key, value in facts.items():
            if value != first[key]:
                raise RunError(
                    f"rank {self.rank} on {os.uname().nodename}: its {key} is {value}, and that of rank 0 is "
                    f"{first[key]}; make them the same on all hosts"
                )

    def join(self, recipe: Recipe, kind: str) -> None:
        """Initializes torch.distributed's default process group.

        Args:
            kind: device type, cpu or cuda.
        """
        if self.world == 1:
            return
        assert self.store is not None, "several processes have a store"
        import torch
        import torch.distributed as dist

        if is_single_host():  # all processes are on this host: keep their traffic on the loopback interface
            os.environ.update(local_group())
        # The device is set before the group exists: NCCL communicators belong to the current device.
        device = torch.device("cuda", self._gpu()) if kind == "cuda" else None
        if device is not None:
            torch.cuda.set_device(device)
            if self.lead:
                # Read by the launcher, to explain an abort of torch's NCCL watchdog.
                self.publish(BACKEND, "nccl")
        dist.init_process_group(
            # Both on a GPU: objects and checkpoints travel as CPU tensors, through gloo.
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            # With a device_id NCCL connects at once: unresponsive GPUs fail here, and subgroups are split off.
            device_id=device,
            # A prefix of its own keeps torch's keys apart from those of this module.
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=recipe.parallel.timeout),
        )

    def _gpu(self) -> int:
        """Returns the index of this process's GPU among the visible ones.

        Raises:
            RunError: there is none for it.
        """
        import torch

        count = torch.cuda.device_count()
        if self.local < count:
            return self.local
        # With CUDA_VISIBLE_DEVICES the launcher gave each process a GPU of its own.
        if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
            return 0
        raise RunError(
            f"rank {self.rank}: is number {self.local} on its host, which has {count} "
            f"GPU{'' if count == 1 else 's'} for it; "
            f"start at most as many processes as there are GPUs"
        )

    def explained(self, error: BaseException, step: int) -> BaseException:
        """Converts the error of a collective to a RunError; returns any other error unchanged."""
        # Collectives raise plain RuntimeErrors, so the message is all that distinguishes a lost peer from a bug.
        message = str(error).splitlines()[0] if str(error) else ""
        if self.world == 1 or not isinstance(error, RuntimeError) or not _LOST.search(message):
            return error
        message = message.split(". This is typically")[0].split("] ", 1)[-1]  # without gloo's source file and advice
        return RunError(
            f"rank {self.rank}: lost the other processes in step {step + 1} ({message[-160:]}); start again with "
            "--resume, which continues from the last checkpoint"
        )

    def leave(self) -> None:
        """Destroys the process group."""
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def join_process_group(recipe: Recipe) -> Ranks:
    """Connects to the processes that a launcher started; returns a single process if there was no launcher.

    Raises:
        RecipeError: the recipe asks for another number of processes.
        RunError: the rendezvous store cannot be reached.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.parallel.devices not in (None, world):
        wanted = recipe.parallel.devices
        hint = (
            f"start it with --nproc {wanted}, or under torchrun"
            if world == 1
            else f"start {wanted}, or leave the key out"
        )
        raise RecipeError(
            f"parallel.devices: {wanted} processes are needed, and {world} {'was' if world == 1 else 'were'} started; "
            f"{hint}"
        )
    if world == 1:
        return Ranks()
    import torch.distributed as dist

    patience = recipe.parallel.timeout
    rank, port = (os.environ.get(key, "") for key in ("RANK", "MASTER_PORT"))
    address = store_address()
    # `{}` stays open in this text for the reason.
    lost = (
        f"rank {rank}: cannot meet the others at {address}:{port} within {patience:g} s ({{}}); is the first "
        "host up, and the port open?"
    )
    start = time.monotonic()
    # The store is held by torchrun's agent or by rank 0. Probe it first: torch reports an unreachable store with a long
    # C++ traceback.
    if (rank != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True") and address and port.isdecimal():
        why = _describe_unreachable(address, int(port), patience)
        if why:
            raise RunError(lost.format(why))
    try:
        # The probe above may have used most of the patience; the store gets the rest.
        store = connect_launched_store(max(1.0, patience - (time.monotonic() - start)))
        number = int(rank)
    except (dist.DistNetworkError, dist.DistStoreError, OSError, ValueError) as error:
        raise RunError(lost.format(str(error).splitlines()[0][:120])) from None
    store.set_timeout(timedelta(seconds=recipe.parallel.timeout))
    try:
        # All keys of this start get a prefix, so that none of an earlier start is mistaken for one of these.
        prefix = _agree_on_prefix(store, number, world, patience)
    except (dist.DistNetworkError, dist.DistStoreError) as error:  # the process that holds the store ended
        raise RunError(lost.format(str(error).splitlines()[0][:120])) from None
    store = dist.PrefixStore(prefix, store)
    local, on_host = (int(os.environ.get(key, "0") or 0) for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return Ranks(number, world, local, on_host or 1, store)


def _describe_unreachable(address: str, port: int, patience: float) -> str | None:
    """Returns the reason why nothing answers at the address within `patience` seconds, or None if something does."""
    end = time.monotonic() + patience
    while True:
        try:
            # Polls until something listens: the first host may start later than this one.
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, end - time.monotonic()))).close()
        except OSError as error:
            if time.monotonic() >= end:
                return error.strerror or str(error)
            time.sleep(0.1)
        else:
            return None


def _agree_on_prefix(store: Store, rank: int, world: int, patience: float) -> str:
    """Returns a store prefix unique to these processes: after a restart, the launcher's store still has old keys.

    Each rank publishes a unique ID. Rank 0 publishes the list of IDs and waits until all have confirmed it; the ID of a
    dead process is never confirmed, and its replacement publishes a new one, which starts another round.
    """
    # `word` names a round; `numbers` are the IDs of the processes that rank 0 saw in it, by rank.
    mine, answered, roll = uuid.uuid4().hex, "", {"word": "", "numbers": []}
    store.set(f"hello/{rank}", mine)
    hellos = [f"hello/{n}" for n in range(world)]
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if rank == 0 and store.check(hellos):
            numbers = [store.get(key).decode() for key in hellos]
            # Some process was replaced since the last round: a new word makes all confirm again.
            if numbers != roll["numbers"]:
                roll = {"word": uuid.uuid4().hex, "numbers": numbers}
                store.set("roll", json.dumps(roll))
            # Every ID of this round was confirmed by its own process, so all of them are alive.
            if store.check([f"{roll['word']}/{n}" for n in range(1, world)]):
                store.set(f"{roll['word']}/begin", "")
                return str(roll["word"])
        elif rank and store.check(["roll"]):
            roll = json.loads(store.get("roll"))
            # A list with another ID for this rank is of an earlier start: rank 0 will publish a new one.
            if roll["numbers"][rank] == mine and roll["word"] != answered:
                answered = str(roll["word"])
                store.set(f"{answered}/{rank}", "")
            if answered and store.check([f"{answered}/begin"]):
                return answered
        # Polling, because a blocking wait for one key could not react to a new round.
        time.sleep(0.02)
    # Ranks that never arrived, or that did not confirm the last round.
    missing = [
        str(n)
        for n in range(world)
        if not (store.check([f"hello/{n}"]) and (n == 0 or store.check([f"{roll['word']}/{n}"])))
    ]
    raise RunError(
        f"rank {rank}: waited {patience:g} s for the other processes; not there: rank {', '.join(missing[:8]) or 0}"
    )
