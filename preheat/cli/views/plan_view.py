"""Rich renderables of `preheat plan` beside its answer (`plan_answer`): details, serving, FLOPs budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from preheat.core.json_types import JsonObject
from preheat.core.plan import Plan, Rejection, Verdict
from preheat.core.units import format_bytes, format_memory, format_rate, format_three_digits

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["build_budget", "build_details", "build_serving"]


def build_details(plan: Plan) -> Group:
    """Returns what the answer leaves out: memory by phase, overhead, all alternatives and rejections."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if plan.searched.candidates:
        s = plan.searched
        sure = ", the best with all its layers" if s.confirmed else ""
        parts.append(Text(f"{s.candidates:,} candidates, {s.dry_runs} dry-run{sure}", style="dim"))
    parts += [Text("memory by phase", style="bold"), _build_phase_table(plan)]
    parts += [Text("overhead at the peak", style="bold"), *_describe_overhead(plan)]
    if settled := plan.settled:
        parts += [
            Text("settings that were auto", style="bold"),
            *(Text(f"  {key}: {value}") for key, value in settled.items()),
        ]
    if plan.alternatives:
        unfit = plan.verdict in (Verdict.UNSAFE, Verdict.NO)
        parts += [Text("what would fit" if unfit else "alternatives", style="bold"), _build_alternatives(plan)]
    if plan.rejected:
        parts += [Text("why not", style="bold"), *_describe_reasons(plan.rejected)]
    return Group(*parts)


def _describe_overhead(plan: Plan) -> list[Text]:
    from rich.text import Text

    return [
        Text(f"  {what}: {format_memory(gib)}: {plan.overhead_sources[what]}", style="dim")
        for what, gib in plan.overhead.items()
    ]


_HEADS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "temporary": "temp",
    "gathered weights": "gathered",
    "communication buffers": "buffers",
}
"""Category of memory -> head of its column."""


def _build_phase_table(plan: Plan) -> Table:
    """Returns a table of memory with a row per phase and a column per category; the peak phase is bold."""
    from rich.table import Table

    # One unit for the whole table, so that its columns can be compared.
    unit, scale = ("GiB", 1) if plan.peak_gib >= 1 else ("MiB", 1024)

    def format_size(gib: float) -> str:
        text = f"{gib * scale:,.2f}" if scale == 1 else f"{gib * scale:,.0f}"
        # A dash for sizes that round to zero.
        return text if float(text.replace(",", "")) else "-"

    heads = [_HEADS.get(category, category) for category in plan.memory]
    # More columns than those of one device leave less space between them on 80 columns.
    space = 1 if len(heads) > 6 else 2
    table = Table(f"  {unit} in", *heads, "all", box=None, pad_edge=False, padding=(0, space, 0, 0), header_style="")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase, categories in plan.phase_memory.items():
        style = "bold" if phase == plan.peak_phase else None
        table.add_row(
            f"  {phase}", *map(format_size, categories.values()), format_size(plan.phases[phase]), style=style
        )
    # A command of its own after the run: not part of the peak.
    if plan.export:
        table.add_row(
            "  export, later",
            *map(format_size, plan.export.values()),
            format_size(sum(plan.export.values())),
            style="dim",
        )
    return table


def _build_alternatives(plan: Plan) -> Table:
    from rich.table import Table

    # Numbers come first and are never wrapped; the techniques get the rest of the line.
    table = Table(box=None, pad_edge=False)
    for title in ("memory", "tokens/s", *([f"{plan.currency} / M tokens"] if plan.cost else [])):
        table.add_column(title, justify="right", no_wrap=True)
    # Narrow columns wrap their words instead of hiding numbers.
    table.add_column("gives up", min_width=15)
    table.add_column("techniques", min_width=25, overflow="fold")
    for a in plan.alternatives:
        cost = [format_three_digits(a.cost.million_tokens)] if a.cost else []
        table.add_row(format_memory(a.peak_gib), format_rate(a.tokens_per_second), *cost, a.tradeoff, a.what)
    return table


def _describe_reasons(rejected: Sequence[Rejection]) -> list[Text]:
    from rich.text import Text

    return [Text(f"  {r.recipe}: {r.reason}", style="dim") for r in rejected]


def build_serving(result: JsonObject) -> Group:
    """Returns the memory and speed of serving, one row per format."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    d, batch = result["device"], result.get("batch")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    # A line each, explained below the table.
    last = ("fit", "longest", "prompt", "one", "all") if batch is None else ("batch", "total", "devices", "tokens/s")
    titles = ("weights", "cache", "size", "each", *last)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number > 1 else "left", no_wrap=True)
    for f in result["formats"]:
        first = f["seconds_to_first_token"]
        sizes = (format_memory(f["weights_gib"]), format_memory(f["cache_gib_per_row"]))  # one sequence of `length`
        if batch is not None:
            speed, needed = f["batch_tokens_per_second_at_most"], f["batch_devices"]
            table.add_row(
                f["weights"],
                f["cache"],
                *sizes,
                format_memory(f["batch_cache_gib"]),
                format_memory(f["batch_cache_gib"] + f["weights_gib"] * d["count"]),
                "-" if needed is None else f"{needed:,}",
                format_rate(speed) if speed is not None else "no room",
            )
            continue
        table.add_row(
            f["weights"],
            f["cache"],
            *sizes,
            f"{f['rows']:,}",
            "-" if not f["rows"] else f"{f['longest_context']:,}" if f["longest_context"] < 1 << 30 else "any",
            "-" if first is None else f"{first * 1e3:,.0f} ms" if first < 1 else f"{first:,.1f} s",
            format_rate(f["tokens_per_second_alone"]) if f["rows"] else "-",
            format_rate(f["tokens_per_second_at_most"]) if f["rows"] else "no room",
        )
    many = f"{d['count']} x " if d["count"] > 1 else ""
    idle = result["active_parameters"] < result["parameters"]
    active = f" ({result['active_parameters']:,} active)" if idle else ""
    row_state = result["state_bytes_per_row"]
    state = f", a sequence {format_bytes(row_state)} of recurrent state" if row_state else ""
    explained = (
        "fit: how many sequences fit. longest: tokens of the longest sequence that fits. prompt: time to the first "
        "token, by the FLOPs of the prompt. one, all: tokens/s of one sequence and of all that fit"
        if batch is None
        else f"batch: the cache of {batch:,} sequences over all devices. total: that and the weights. devices: the "
        "fewest that hold the total, if they share weights and key-value heads. tokens/s: of the batch"
    )
    measured = " (as copies reach it here; reading alone may go beyond)" if d["kind"] == "cpu" else ""
    return Group(
        Text(
            (
                f"{result['model']}: {result['parameters']:,} parameters{active}, served on {many}{d['name']} of "
                f"{format_memory(d['memory_gib'])}"
            ),
            style="bold",
        ),
        Text(
            f"a token takes {result['cache_bytes_per_token'] / 1024:,.0f} KiB of cache{state}, a sequence has "
            f"{result['length']:,} tokens; per device:"
        ),
        table,
        Text(
            f"size: of the weights. each: the cache of one sequence. {explained}, at best: the memory's bandwidth over "
            f"weights and caches{measured}. Embedding and head are in bf16.",
            style="dim",
        ),
    )


def build_budget(flops: float, approaches: Sequence[JsonObject]) -> Group:
    """Returns the compute-optimal model size, one row per approach."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("approach", "parameters", "tokens", "tokens a parameter", "by", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for o in approaches:
        table.add_row(
            f"  {o['approach']}",
            _count(o["parameters"]),
            _count(o["tokens"]),
            f"{o['tokens'] / o['parameters']:.0f}",
            o["source"],
        )
    # In the form in which `preheat plan` reads a size: 1.21B.
    middle = _count(approaches[0]["parameters"]).replace(" ", "")
    return Group(
        Text(
            (
                f"{flops:g} FLOPs: compute-optimal model (Hoffmann et al. 2022, arXiv:2203.15556; FLOPs = 6 x "
                "parameters x tokens)"
            ),
            style="bold",
        ),
        table,
        Text(f"plan it: preheat plan {middle} --gpu H100 --count 8", style="dim"),
    )


def _count(value: float) -> str:
    """Returns a count with three digits and its unit.

    >>> _count(1_210_000_000.0), _count(69e9)
    ('1.21 B', '69.0 B')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}" if value / size < 10 else f"{value / size:.1f} {letter}"
    return f"{value:,.0f}"
