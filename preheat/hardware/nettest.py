"""`preheat nettest`: benchmarks collectives on this host or under torchrun, and compares them with the catalogue."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from preheat.core.nettest import Expected, Measurement, NettestResult
from preheat.errors import RecipeError, RunError
from preheat.files import read_record, to_json
from preheat.hardware.catalogue import find_accelerator
from preheat.hardware.child_processes import describe_exit, listen
from preheat.hardware.collective_bench import LISTENING, Task, Told, measure
from preheat.hardware.link_rates import COLLECTIVES, LinkRate, store_links
from preheat.hardware.probe import parse_memory
from preheat.hardware.rank_processes import RankProcesses

if TYPE_CHECKING:
    from typing import IO

__all__ = ["COLLECTIVES", "Task", "find_expected_links", "run_nettest", "parse_sizes", "is_under_torchrun"]


def is_under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses a list of sizes, or a range in steps of 4x.

    >>> parse_sizes("1KiB-64KiB"), parse_sizes("1MiB,4KiB")
    ((1024, 4096, 16384, 65536), (4096, 1048576))

    Raises:
        RecipeError: an entry is not a size, or the range is descending.
    """
    try:
        if "-" not in text:
            return tuple(sorted({parse_memory(part) for part in text.split(",")}))
        low, high = (parse_memory(part) for part in text.split("-", 1))
    except RecipeError:
        raise RecipeError(f"--sizes: '{text}' is not a list of sizes; write it like 1KiB-64MiB or 4KiB,1MiB") from None
    if low > high:
        raise RecipeError(f"--sizes: '{text}' falls; write the smaller size first")
    # Steps of 4x, then the upper end even if no step reaches it.
    sizes = [low]
    while sizes[-1] * 4 < high:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes if sizes[-1] == high else [*sizes, high])


def run_nettest(
    task: Task, *, processes: int | None, port: int | None, tell: Told | None = None, store: bool = True
) -> NettestResult | None:
    """Measures collectives between processes.

    Args:
        processes: number of processes to start on this host; None if torchrun started this one.
        port: port of the rendezvous; a free one if None.
        tell: progress callback.
        store: store the measurements for planning.

    Returns:
        The measurements, compared with the catalogue; None on ranks other than 0.

    Raises:
        RecipeError, RunError: only one process, sizes beyond memory, a port in use, or an unreachable rendezvous.
    """
    if processes is None:
        if int(os.environ["WORLD_SIZE"]) < 2:
            raise RecipeError("WORLD_SIZE: torchrun started 1 process, which has no other to send to; start 2 or more")
        measured = measure(task, tell)
    else:
        if processes < 2:
            raise RecipeError(
                f"--nproc: {processes} process has no other to send to; use --nproc 2 or more, or start it with "
                "torchrun on each host"
            )
        measured = _run_processes(task, processes, port, tell)
    if measured is None:
        return None
    # Rows also have the derived bandwidths, which are not stored.
    fields = [field.name for field in dataclasses.fields(LinkRate)]
    rows = [LinkRate(**{name: getattr(row, name) for name in fields}) for row in measured.rows]
    stored = str(store_links(measured.hardware, measured.torch, rows)) if store else None
    return NettestResult(**vars(measured), expected=find_expected_links(measured), stored=stored)


def find_expected_links(measured: Measurement) -> Expected:
    """Returns the catalogue's link bandwidths in bytes/s in one direction, and the fraction of them that was measured.

    Bus bandwidth within a host is compared with the link between devices, across hosts with the network bandwidth per
    device.
    """
    # The best size of each collective: small ones are limited by latency, not by the link.
    best: dict[str, float] = {}
    for row in measured.rows:
        best[row.collective] = max(row.bus_bandwidth, best.get(row.collective, 0.0))
    link = network = None
    if measured.backend == "nccl":
        try:
            known = find_accelerator(measured.hardware)
            link, network = known.link, known.network
            if link is not None and known.link_each:
                link *= measured.devices - 1  # each device has a link to every other
        except RecipeError:
            pass  # GPUs that are not in the catalogue have no expected figures
    reference = link if measured.hosts == 1 else network
    return Expected(link, network, {name: value / reference if reference else None for name, value in best.items()})


def _run_processes(task: Task, processes: int, port: int | None, tell: Told | None) -> Measurement:
    """Starts the processes, forwards the progress of rank 0, and kills all if one fails."""
    with _open_rendezvous_socket(port) as listening, tempfile.TemporaryDirectory(prefix="preheat-nettest-") as folder:
        # The parent opens the socket and rank 0 inherits it, so no other process can take the port in between.
        port = listening.getsockname()[1]
        result = Path(folder) / "result.json"
        command = [sys.executable, "-c", "from preheat.hardware.nettest import _run_child; _run_child()"]
        command += [json.dumps(dataclasses.asdict(task)), str(result)]
        with RankProcesses(processes, keep_errors=True) as ranks:
            for rank in range(processes):
                inherited = (listening.fileno(),) if rank == 0 else ()
                ranks.start(
                    command,
                    # Set on all ranks, so that none falls back to torch's rendezvous; only rank 0 serves the store.
                    environment={"MASTER_PORT": str(port), LISTENING: "".join(map(str, inherited))},
                    stdout=subprocess.PIPE if rank == 0 else None,
                    pass_fds=inherited,
                )
            listening.close()  # rank 0 inherited it
            first = ranks.processes[0].stdout
            assert first is not None
            # In a thread, because reading blocks while a silent rank 0 waits for one that has failed.
            progress = threading.Thread(target=_forward_progress, args=(first, tell), daemon=True)
            progress.start()
            failed = ranks.wait()
            ranks.kill()
            # The pipe ends with rank 0, so the thread has little left to read.
            progress.join(timeout=5)
            if failed is not None:
                _raise_error_of(failed, ranks.processes[failed].returncode, ranks.last_error_line(failed))
            return read_record(Measurement, json.loads(result.read_text(encoding="utf-8")))


def _open_rendezvous_socket(port: int | None) -> socket.socket:
    """Opens the socket of the rendezvous, on which rank 0 serves the store; this reserves the port."""
    try:
        return listen(port or 0)
    except OSError as error:
        raise RunError(
            f"--port {port}: cannot be used ({error.strerror}); name another, or leave it out and a free one is taken"
        ) from None


def _forward_progress(lines: IO[bytes], tell: Told | None) -> None:
    for line in lines:
        if tell is not None:
            what, done = json.loads(line)
            tell(what, done)


def _raise_error_of(rank: int, code: int, last: str) -> NoReturn:
    last = last or f"exit {code}"
    # `_run_child` wrote the class and the message; the user gets the error as if it was raised here.
    for kind in (RecipeError, RunError):
        if last.startswith(f"{kind.__name__}: "):
            raise kind(last.partition(": ")[2])
    raise RunError(f"rank {rank} failed (exit {code}): {last}" if code > 0 else f"rank {rank} {describe_exit(code)}")


def _run_child() -> None:
    task = read_record(Task, json.loads(sys.argv[1]))

    def tell(what: str, done: float) -> None:
        sys.stdout.write(json.dumps([what, done]) + "\n")
        sys.stdout.flush()

    try:
        result = measure(task, tell)
    except (RecipeError, RunError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1)
    if result:
        Path(sys.argv[2]).write_text(to_json(result), encoding="utf-8")
