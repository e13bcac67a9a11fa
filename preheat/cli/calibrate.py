"""The `preheat calibrate` command: benchmarks this machine for the predictions of `plan` and `train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.hardware.link_rates import LinkRate
    from preheat.hardware.rates import Rates

__all__ = ["calibrate"]


def calibrate(
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="What to measure; auto: cuda if available.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure this machine's matrix rates, memory bandwidth and operators, and store them for `plan` and `train`.

    Takes about a minute, and several on a slow machine. Run it while nothing else runs: otherwise rates may be too low,
    and some sizes are interpolated.

    Example: preheat calibrate --threads 2
    """
    import dataclasses

    import torch

    from preheat.cli.views.output import build_console, say
    from preheat.files import to_json
    from preheat.hardware.benchmark_rates import calibrate as measure
    from preheat.hardware.cpu_allocator import install_heap
    from preheat.hardware.link_rates import load_links
    from preheat.hardware.plausibility import doubt_of
    from preheat.hardware.probe import probe

    here = probe(device)
    if here.kind == "cpu":
        install_heap()  # as training does: with glibc malloc, each large result costs a page fault per 4 KiB
    with build_console(error=True, quiet=as_json).status("measuring") as status:
        rates = measure(
            here, threads or torch.get_num_threads(), lambda what, done: status.update(f"measuring {what} ({done:.0%})")
        )
    stored = rates.store()
    rates = dataclasses.replace(rates, links=load_links(rates.hardware, rates.torch))  # measured by nettest
    if as_json:
        say(to_json({**dataclasses.asdict(rates), "stored": str(stored)}))
        return
    screen = build_console()
    screen.print(_build_table(rates))
    screen.print(f"stored in {stored}", soft_wrap=True)
    if doubt := doubt_of(rates):
        screen.print(doubt, style="yellow", soft_wrap=True)
    if rates.contended:
        screen.print(
            "Other processes kept the cores busy, so these rates may be too low by a third; the next plan on a quiet "
            "machine measures again.",
            style="yellow",
        )


def _build_table(rates: Rates) -> Table:
    from rich.table import Table

    from preheat.core.units import format_gflops

    table = Table(
        title=f"{rates.hardware}, {rates.threads} threads, torch {rates.torch}, measured in {rates.seconds:.0f} s"
    )
    table.add_column("what")
    table.add_column("rate", justify="right")
    for dtype, rate in rates.peak_matrix_rate.items():
        table.add_row(f"matrix product, {dtype}", f"{format_gflops(rate)} GFLOP/s")
    # Measured at several lengths, on which the rate of attention depends.
    for row in rates.attention:
        table.add_row(
            f"attention, {row.dtype}, {row.direction}, length {row.length}", f"{format_gflops(row.flops)} GFLOP/s"
        )
    table.add_row("memory, read and write", f"{rates.bandwidth / 1e9:,.1f} GB/s")
    for way, speed in (("to", rates.to_host), ("from", rates.to_device)):
        if speed is not None:
            table.add_row(f"copies {way} the host", f"{speed / 1e9:,.1f} GB/s")
    for operator in ("mul", "silu", "log_softmax"):
        for dtype in rates.adamw:  # excludes TF32, which applies to matmuls only
            table.add_row(
                f"{operator}, {dtype}, 8 MB", f"{rates.moved_rate(operator, dtype, 8_000_000) / 1e9:,.1f} GB/s"
            )
    for dtype, seconds in rates.adamw.items():
        table.add_row(f"AdamW, {dtype} parameters", f"{1 / seconds / 1e6:,.0f} M parameters/s")
    table.add_row("launch of an operator", f"{rates.launch * 1e6:,.1f} µs")
    for what, each in (("an operator", rates.host_operator), ("a custom operator", rates.host_custom)):
        if each is not None:
            table.add_row(f"host, {what} of a training step", f"{each * 1e6:,.1f} µs")
    # Of each collective the fastest size: small messages measure latency.
    best: dict[str, LinkRate] = {}
    for link in rates.links:
        key = (
            f"{link.collective.replace('_', '-')}, {link.backend}, {link.devices} devices on {link.hosts} "
            f"host{'s' if link.hosts > 1 else ''}"
        )
        if key not in best or link.bus_bandwidth > best[key].bus_bandwidth:
            best[key] = link
    for key, link in best.items():
        table.add_row(f"{key} (nettest)", f"{link.bus_bandwidth / 1e9:,.3g} GB/s")
    return table
