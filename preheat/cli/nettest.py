"""The `preheat nettest` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from preheat.cli.views.console import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from preheat.core.nettest import NettestResult

__all__ = ["nettest"]


def nettest(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", help="Processes to start on this host. Under torchrun, its processes are used."),
    ] = None,
    backend: Annotated[
        Literal["auto", "gloo", "nccl"],
        typer.Option("--backend", help="auto: nccl if every process has a GPU, otherwise gloo."),
    ] = "auto",
    collectives: Annotated[
        list[str] | None,
        typer.Option(
            "--collective",
            help="all_reduce, all_gather, reduce_scatter, all_to_all or send_recv; default: all of them. Repeatable.",
        ),
    ] = None,
    sizes: Annotated[str, typer.Option("--sizes", help="A range in steps of 4x, or a list: 1KiB,1MiB.")] = "1KiB-64MiB",
    repeats: Annotated[int, typer.Option("--repeats", min=5, help="Maximum number of samples per size.")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Calls before the first sample.")] = 5,
    budget: Annotated[
        float, typer.Option("--budget", min=0.01, help="Seconds for the samples of one size; at least five are taken.")
    ] = 1.0,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the other processes.")] = 60.0,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port of the rendezvous with --nproc; default: a free one."),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write the figures as a page with plots.")] = None,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Store the figures with the calibration, for plans.")
    ] = True,
    json: Json = False,
) -> None:
    """Measure latency and bus bandwidth of collectives between processes and hosts, as defined by nccl-tests.

    Example: `preheat nettest --nproc 2 --html net.html`, and on every host `torchrun --nnodes 2 --nproc-per-node 8
    --rdzv-endpoint HOST:29400 --rdzv-backend c10d -m preheat nettest`
    """
    import os

    from preheat.cli.views.console import build_console, emit
    from preheat.errors import RecipeError, suggest_nearest
    from preheat.files import to_plain_data
    from preheat.hardware import nettest as net

    unknown = [name for name in collectives or () if name not in net.COLLECTIVES]
    if unknown:
        raise RecipeError(f"--collective: no '{unknown[0]}'; {suggest_nearest(unknown[0], list(net.COLLECTIVES))}")
    under = net.is_under_torchrun()
    if under and nproc is not None:
        raise RecipeError(f"--nproc: {nproc}, and torchrun has started processes already; leave --nproc out")
    if not under and nproc is None:
        raise RecipeError(
            "--nproc: one process has no other to send to; use --nproc 2 or more, or start it with torchrun on "
            "each host"
        )
    # Before minutes of measuring, not after them.
    if html is not None and not (html.parent.is_dir() and os.access(html.parent, os.W_OK)):
        raise RecipeError(f"--html {html}: cannot be written; name a file in a folder that exists and may be written")
    # Silences torch's C++ stack trace for a failed rendezvous; preheat prints the cause in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    task = net.Task(
        collectives=tuple(collectives or net.COLLECTIVES),
        sizes=net.parse_sizes(sizes),
        backend=_choose_backend(nproc) if backend == "auto" else backend,
        repeats=repeats,
        warmup=warmup,
        budget=budget,
        timeout=timeout,
    )
    with build_console(error=True, quiet=json).status("starting") as status:
        result = net.run_nettest(
            task,
            processes=nproc,
            port=port,
            store=store,
            tell=lambda what, done: status.update(f"measuring {what} ({done:.0%})"),
        )
    if result is None:
        return  # another rank prints the result
    page = None
    if html is not None:
        from preheat.report.nettest_page import write_net

        page = str(write_net(result, html))
    if json:
        emit({**to_plain_data(result), **({"html": page} if page else {})})
        return
    screen = build_console()
    for part in _build_renderables(result):
        screen.print(part)
    for label, path in (("stored in", result.stored), ("page:", page)):
        if path:
            screen.print(f"{label} {path}", soft_wrap=True, style="dim")


def _choose_backend(nproc: int | None) -> str:
    import os

    import torch

    # Under torchrun, the processes of this host.
    wanted = nproc or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return "nccl" if torch.cuda.device_count() >= wanted else "gloo"


def _build_renderables(result: NettestResult) -> list[RenderableType]:
    from rich.table import Table

    from preheat.core.units import format_bytes, format_duration
    from preheat.report.nettest_page import compare_with_expected

    hosts = f"{result.hosts} hosts" if result.hosts > 1 else "one host"
    table = Table(
        title=f"{result.devices} processes on {hosts}, {result.backend}, {result.hardware}",
        title_justify="left",
    )
    for name, side in (
        ("collective", "left"),
        ("size", "right"),
        ("time", "right"),
        ("10 to 90 %", "right"),
        ("GB/s", "right"),
        ("bus GB/s", "right"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    shown = ""
    for row in result.rows:
        # The name of a collective appears in the first of its rows only.
        name = "" if row.collective == shown else row.collective.replace("_", "-")
        if name and shown:
            table.add_section()
        shown = row.collective
        between = f"{format_duration(row.low)} to {format_duration(row.high)}"
        rates = [f"{rate / 1e9:.3g}" for rate in (row.algorithm_bandwidth, row.bus_bandwidth)]
        table.add_row(name, format_bytes(row.bytes), format_duration(row.seconds), between, *rates)
    parts: list[RenderableType] = [table]
    if result.pairs:
        pairs = Table(title="point to point, half of there and back", title_justify="left")
        for name, side in (
            ("pair", "left"),
            ("ranks", "left"),
            ("hosts", "left"),
            ("latency", "right"),
            ("GB/s", "right"),
        ):
            pairs.add_column(name, justify=side)  # type: ignore[arg-type]
        for pair in result.pairs:
            ranks = " and ".join(map(str, pair.ranks))
            rate = f"{pair.bandwidth / 1e9:.3g}"
            pairs.add_row(pair.kind, ranks, ", ".join(pair.hosts), format_duration(pair.latency), rate)
        parts.append(pairs)
    # An upper end beyond twice the median points to other work on the machine.
    busy = sum(row.high > 2 * row.seconds for row in result.rows)
    if busy:
        parts.append(
            f"note: {busy} of {len(result.rows)} rows have times beyond twice their median: other processes used "
            "the cores or the network; measure again when these are idle"
        )
    return [*parts, compare_with_expected(result)]
