"""Benchmark of collectives, run by every rank: warm-up, samples timed by the slowest rank, and their median.

A sample starts after a barrier and repeats the call for about two milliseconds. All ranks agree on the number of
samples from a first one, so that large sizes over slow links do not take minutes.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from preheat.core.nettest import CollectiveRow, Measurement, Pair, PairRow
from preheat.core.units import format_memory
from preheat.errors import RecipeError, RunError
from preheat.hardware.child_processes import connect_launched_store, create_local_store, is_single_host, local_group
from preheat.hardware.link_rates import LinkRate
from preheat.hardware.probe import probe

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, Work

__all__ = ["LISTENING", "Task", "Told", "measure"]

_Value = TypeVar("_Value")
Told = Callable[[str, float], None]
"""Called on rank 0 with the name of the next measurement and the progress (0 to 1)."""

LISTENING = "PREHEAT_LISTENING"
"""Environment variable of a single-host run: file descriptor of the socket of rank 0's store; empty on other ranks."""
_SAMPLE = 2e-3
"""Minimum seconds of a sample, because a call of microseconds is too short for the clock."""
_BUFFERS = 2  # send and receive buffer


@dataclass(frozen=True)
class Task:
    """Settings of a benchmark.

    Attributes:
        collectives: names of `link_rates.COLLECTIVES`.
        sizes: bytes, ascending.
        backend: gloo (between CPUs) or nccl.
        repeats: maximum number of samples.
        warmup: warm-up calls.
        budget: maximum seconds for the samples of one size; at least five are taken.
        timeout: seconds to wait for the other processes.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str
    repeats: int = 20
    warmup: int = 5
    budget: float = 1.0
    timeout: float = 60.0


@dataclass(frozen=True)
class _Topology:
    """Rank and hosts of the process group; `host` is the index of this process's host."""

    rank: int
    world: int
    local: int
    hosts: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def host(self) -> int:
        return self.hosts[self.rank]


def measure(task: Task, tell: Told | None = None) -> Measurement | None:
    """Runs the benchmark among the ranks of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (as set by torchrun).

    All ranks must call it.

    Returns:
        The measurements on rank 0; None on other ranks.

    Raises:
        RecipeError: sizes exceed memory, or there are fewer GPUs than processes.
        RunError: the other processes are unreachable, or one stopped responding.
    """
    import torch
    import torch.distributed as dist

    device = _choose_device(task)
    begun = time.perf_counter()
    try:
        _join(task, device)
        place = _gather_topology()
        _check_room(task, place, device)
        runs = _Timer(task, place, device)
        # For the progress, the pairs count as one more collective.
        total = len(task.collectives) * len(task.sizes) + len(task.sizes)
        rows: list[LinkRate] = []
        for name in task.collectives:
            for size in task.sizes:
                if tell is not None and place.rank == 0:
                    tell(f"{name.replace('_', ' ')}, {size:,} bytes", len(rows) / total)
                # Buffers live as long as the call's closure, so that those of two sizes never coexist (`_check_room`
                # counts on it).
                seconds = runs(_call(name, size, place, device))
                rows.append(
                    LinkRate(
                        name,
                        task.backend,
                        place.world,
                        len(set(place.hosts)),
                        _round_to_ranks(size, place),
                        *_compute_spread(seconds),
                    )
                )
        pairs = _measure_pairs(task, place, device, tell, len(rows) / total)
        name = probe("cuda" if task.backend == "nccl" else "cpu").name
        # Every rank has the same times (`gather_slowest`), so one report is enough.
        if place.rank != 0:
            return None
        return Measurement(
            hardware=name,
            torch=torch.__version__,
            backend=task.backend,
            devices=place.world,
            hosts=len(set(place.hosts)),
            names=tuple(dict.fromkeys(place.names)),
            rows=tuple(
                CollectiveRow(
                    **asdict(row), algorithm_bandwidth=row.algorithm_bandwidth, bus_bandwidth=row.bus_bandwidth
                )
                for row in rows
            ),
            pairs=tuple(pairs),
            seconds=time.perf_counter() - begun,
        )
    except dist.DistBackendError as error:
        raise RunError(f"a process stopped answering within {task.timeout:g} s: {_first_value(error)}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _choose_device(task: Task) -> torch.device:
    import torch

    if task.backend == "gloo":
        # Ranks on one host share its cores; more threads each would oversubscribe them.
        torch.set_num_threads(1)
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if wanted > torch.cuda.device_count():
        raise RecipeError(
            f"--backend nccl: {wanted} processes on a host with {torch.cuda.device_count()} GPUs; "
            "NCCL needs a GPU each: start fewer, or use --backend gloo"
        )
    # Collectives of Python objects use the current device, so each rank must set its own before joining.
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _join(task: Task, device: torch.device) -> None:
    """Initializes the process group; errors name the address and the timeout."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Without this, gloo listens on the interface of the host's name, which other hosts can reach.
    if is_single_host():
        os.environ.update(local_group())
    try:
        # `nettest` started this process and reserved the port; else torchrun or the user set the rendezvous.
        if (listening := os.environ.get(LISTENING)) is not None:
            store: Store = create_local_store(
                int(port), listening=int(listening) if listening else None, timeout=task.timeout
            )
        else:
            store = connect_launched_store(task.timeout)
        dist.init_process_group(
            task.backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=task.timeout),
            # With a device, NCCL connects here instead of in the first collective.
            device_id=device if device.type == "cuda" else None,
        )
        # An unreachable rank fails here, and the error is one of the rendezvous.
        dist.barrier()
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise RunError(
                f"rendezvous {address}:{port}: the port is in use; "
                "name another (--port, or MASTER_PORT where you set it)"
            ) from None
        raise RunError(
            f"rendezvous {address}:{port}: rank {rank} of {world} did not meet the others within {task.timeout:g} s "
            f"({_first_value(error)}); see that all are started and that the address is reached from every host"
        ) from None
    except (RuntimeError, ValueError) as error:  # raised by gloo and the store on timeouts
        raise RunError(
            f"rendezvous {address}:{port}: rank {rank} of {world} could not join within {task.timeout:g} s: "
            f"{_first_value(error)}"
        ) from None


def _first_value(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _gather_topology() -> _Topology:
    """Gathers ranks and hosts; hosts are identified by torchrun's GROUP_RANK, or by their names without torchrun."""
    import torch.distributed as dist

    name = socket.gethostname()
    # torchrun's GROUP_RANK separates containers that have the same host name.
    mine = (os.environ.get("GROUP_RANK", name), name, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    world = dist.get_world_size()
    gathered = _gather(mine, world)
    # Hosts in the order of their first rank.
    keys = list(dict.fromkeys(key for key, _, _ in gathered))
    # If hosts share a name, their keys are appended.
    names = {
        key: name if len({n for _, n, _ in gathered}) == len(keys) else f"{name} ({key})" for key, name, _ in gathered
    }
    return _Topology(
        dist.get_rank(),
        world,
        sum(key == mine[0] for key, _, _ in gathered),
        tuple(keys.index(key) for key, _, _ in gathered),
        tuple(names[key] for key, _, _ in gathered),
    )


def _gather(value: _Value, world: int) -> list[_Value]:
    """Returns the values of all ranks."""
    import torch.distributed as dist

    gathered = [value] * world
    dist.all_gather_object(gathered, value)
    return gathered


def _check_room(task: Task, place: _Topology, device: torch.device) -> None:
    """Rejects sizes that exceed memory, consistently on all ranks, before anything is allocated."""
    # Processes on one host share its memory; a GPU belongs to one process.
    sharing = place.local if device.type == "cpu" else 1
    # Hosts may differ: all ranks compare with the smallest memory, so that none waits for ranks that have stopped.
    has, sharing = min(_gather((probe(device.type).memory, sharing), place.world), key=lambda pair: pair[0] / pair[1])
    needs = _BUFFERS * max(task.sizes) * sharing
    if needs > 0.8 * has:
        most = int(0.8 * has / _BUFFERS / sharing)
        largest, needed, available = (format_memory(size / 2**30) for size in (max(task.sizes), needs, has))
        raise RecipeError(
            f"--sizes: {largest} takes {_BUFFERS} buffers on each of {sharing} processes, {needed} of {available}; "
            f"use at most {most // 2**20:,} MiB"
        )


def _round_to_ranks(size: int, place: _Topology) -> int:
    """Rounds a size down to fp32 elements that divide evenly across the ranks."""
    return max(1, size // (4 * place.world)) * 4 * place.world


def _call(name: str, size: int, place: _Topology, device: torch.device) -> Callable[[], Work | None]:
    """Returns a function that calls the collective once, on its own buffers."""
    import torch
    import torch.distributed as dist

    from preheat.torch_compat import all_gather_single, reduce_scatter_single

    # fp32 elements; each rank contributes or receives a share of the full buffer.
    count = _round_to_ranks(size, place) // 4
    share = count // place.world

    def allocate_buffer(elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=torch.float32, device=device)

    if name == "all_reduce":
        full = allocate_buffer(count)
        return lambda: dist.all_reduce(full)
    if name == "all_gather":
        full, part = allocate_buffer(count), allocate_buffer(share)
        return lambda: all_gather_single(full, part)
    if name == "reduce_scatter":
        full, part = allocate_buffer(count), allocate_buffer(share)
        return lambda: reduce_scatter_single(part, full)
    if name == "all_to_all":
        there, back = allocate_buffer(count), allocate_buffer(count)
        return lambda: dist.all_to_all_single(back, there)
    assert name == "send_recv", name
    outgoing, incoming = allocate_buffer(count), allocate_buffer(count)
    after, before = (place.rank + 1) % place.world, (place.rank - 1) % place.world

    def run_ring() -> None:
        # Posted together: blocking sends around a ring would wait for each other forever.
        both = [dist.P2POp(dist.isend, outgoing, after), dist.P2POp(dist.irecv, incoming, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return run_ring


class _Timer:
    """Times a collective call on all ranks: samples in seconds per call."""

    def __init__(self, task: Task, place: _Topology, device: torch.device):
        self.task, self.place, self.device = task, place, device

    def wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def time_once(self, call: Callable[[], object], times: int) -> float:
        import torch.distributed as dist

        # The barrier aligns the ranks, and waiting empties the GPU's queue before the clock starts.
        dist.barrier()
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        self.wait()
        return (time.perf_counter() - start) / times

    def __call__(self, call: Callable[[], object]) -> list[float]:
        # The first call sets up connections, so it only limits the warm-up to the budget.
        first = self.gather_slowest([self.time_once(call, 1)])[0]
        for _ in range(max(1, min(self.task.warmup, math.ceil(self.task.budget / first)) - 1)):
            call()
        # A quarter of a sample with warm connections estimates the time of a call.
        guess = self.gather_slowest([self.time_once(call, max(1, math.ceil(_SAMPLE / max(first, 1e-6) / 4)))])[0]
        # Calls per sample and samples within the budget; the slowest rank's time makes all ranks choose the same.
        times = max(1, math.ceil(_SAMPLE / max(guess, 1e-6)))
        samples = max(5, min(self.task.repeats, int(self.task.budget / (times * guess))))
        return self.gather_slowest([self.time_once(call, times) for _ in range(samples)])

    def gather_slowest(self, seconds: Sequence[float]) -> list[float]:
        """Returns the time of the slowest rank of each sample, identical on all ranks, so that they decide alike."""
        import torch
        import torch.distributed as dist

        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()


def _compute_spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, 10th and 90th percentile."""
    ordered = sorted(seconds)
    return statistics.median(ordered), ordered[int(0.1 * (len(ordered) - 1))], ordered[round(0.9 * (len(ordered) - 1))]


def _measure_pairs(task: Task, place: _Topology, device: torch.device, tell: Told | None, done: float) -> list[Pair]:
    """Measures point-to-point round trips: a pair in each host, then between hosts around a ring.

    Returns all pairs on rank 0, an empty list on other ranks. The pairs of a round have no device in common, so they
    run in parallel; in a ring each host is in at most one pair per round.
    """
    import torch.distributed as dist

    # Ranks of each host.
    members = [
        [rank for rank in range(place.world) if place.hosts[rank] == host] for host in range(len(set(place.hosts)))
    ]
    inside = [(ranks[0], ranks[1]) for ranks in members if len(ranks) > 1]
    # Pairs of the first ranks of neighbouring hosts, the last host with the first.
    around = [(a[0], b[0]) for a, b in zip(members, members[1:] + members[:1], strict=True)] if len(members) > 1 else []
    # A ring of two hosts has the same pair twice.
    around = around[:1] if len(members) == 2 else around
    # Even pairs, then odd ones; with an odd number of hosts the last pair meets both, so it has its own round.
    rounds = [
        inside,
        around[0 : len(around) - len(around) % 2 : 2],
        around[1::2],
        around[len(around) - len(around) % 2 :],
    ]
    measured: list[Pair] = []
    for n, round_ in enumerate(pairs for pairs in rounds if pairs):
        if tell is not None and place.rank == 0:
            tell("pairs", done + (1 - done) * n / 4)
        # Ranks without a pair in this round wait at the barrier and leave the network to the others.
        mine = next((pair for pair in round_ if place.rank in pair), None)
        own = [] if mine is None else _measure_round_trips(task, place, device, mine)
        dist.barrier()
        gathered = _gather(own, place.world)
        # Both ranks of a pair have times; those of the leading rank count.
        for a, b in round_:
            rows = gathered[a]
            measured.append(
                Pair(
                    kind="in a host" if place.hosts[a] == place.hosts[b] else "between hosts",
                    ranks=(a, b),
                    hosts=tuple(dict.fromkeys([place.names[a], place.names[b]])),
                    latency=rows[0].seconds,
                    bandwidth=rows[-1].bytes / rows[-1].seconds,
                    rows=tuple(rows),
                )
            )
    return measured if place.rank == 0 else []


def _measure_round_trips(task: Task, place: _Topology, device: torch.device, pair: tuple[int, int]) -> list[PairRow]:
    """Measures half the round-trip time by size; the first rank of the pair tells the other when to stop."""
    import torch
    import torch.distributed as dist

    rows = []
    # The leading rank decides when to stop, because the ranks' clocks would disagree about the budget.
    lead, other = pair[0] == place.rank, pair[1] if pair[0] == place.rank else pair[0]
    for size in task.sizes:
        message = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)
        # NCCL sends device memory only, so the flag is a tensor on the device.
        again = torch.ones(1, device=device)
        seconds: list[float] = []
        end = time.perf_counter() + task.budget
        while True:
            if lead:
                # At least 6 round trips, then until the samples are complete or the budget is spent.
                again.fill_(
                    float(len(seconds) < task.warmup + task.repeats and (len(seconds) < 6 or time.perf_counter() < end))
                )
                dist.send(again, other)
            else:
                dist.recv(again, other)
            if not again.item():
                break
            start = time.perf_counter()
            # The leading rank sends first, the other one receives first.
            for to in (lead, not lead):
                if to:
                    dist.send(message, other)
                else:
                    dist.recv(message, other)
            # With NCCL, send and recv return before the transfer ends.
            if device.type == "cuda":
                torch.cuda.synchronize()
            # Half the round trip, because the clocks of two hosts cannot be compared.
            seconds.append((time.perf_counter() - start) / 2)
        # At least three samples remain if the budget ended during the warm-up.
        timed = seconds[min(task.warmup, len(seconds) - 3) :]
        median, low, high = _compute_spread(timed)
        rows.append(PairRow(message.numel() * 4, median, low, high))
    return rows
