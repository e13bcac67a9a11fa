"""Plans as rich renderables: memory, alternatives and rejections of training plans; serving; FLOPs budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from preheat.cli.views.console import picture, rate
from preheat.core.json_types import JsonObject
from preheat.sanitize import memory

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["budget_picture", "serving_picture", "plan_overview"]

_REASONS = 12  # rejections listed on a terminal; --json and --html list all


def plan_overview(result: JsonObject, name: str) -> Group:
    """Returns a plan with the chosen recipe, the alternatives, and the reasons for rejecting the others."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    # Nothing was searched for a recipe that is planned as it is.
    if result["searched"]["candidates"]:
        s = result["searched"]
        sure = ", dry-run with all its layers" if s["confirmed"] else ""
        searched = f"{s['candidates']:,} candidates, {s['dry_runs']} dry-run"
        if s["interrupted"]:
            parts.append(Text(f"the search was interrupted: {searched}; the best so far:", style="bold yellow"))
        else:
            parts.append(Text(f"{searched}; the best{sure}:", style="dim"))
        numbers = {"exact": "numbers unchanged", "rounding": "numbers rounded", "different": "other numbers"}[
            result["numerics"]
        ]
        parts.append(Text(f"{result['chosen']} ({numbers})", style="bold cyan"))
    parts.append(picture(result, name))
    if settled := result.get("settled"):
        parts.append(Text(f"  chosen   {', '.join(f'{key}: {value}' for key, value in settled.items())}"))
    if longest := result.get("longest_context"):
        reached = (
            f"{longest['length']:,} tokens a row fit ({memory(longest['peak_gib'])})"
            if longest["length"]
            else "no row fits"
        )
        parts.append(Text(f"  longest  {reached}; {longest['limit']}"))
    if result["cost"]:
        parts.append(Text(f"  cost     {_cost(result['cost'])}"))
    if result["energy"]:
        parts.append(Text(f"  energy   {_energy(result['energy'])}"))
    if result["alternatives"]:
        parts += [Text("alternatives" if result["fits"] else "what would fit"), _alternatives(result)]
    if result["rejected"]:
        parts += [Text("why not"), *_reasons(result["rejected"])]
    return Group(*parts)


def _cost(cost: JsonObject | None) -> str:
    if cost is None:
        return "-"
    run = f", ${cost['run']:,.2f} for the run" if cost["run"] else ""
    return f"${cost['million_tokens']:.3g} a million tokens, ${cost['hour']:,.2f} an hour{run}"


def _energy(energy: JsonObject) -> str:
    run = f", {energy['run']:,.3g} kWh for the run" if energy["run"] else ""
    return (
        f"at most {energy['million_tokens']:.3g} kWh a million tokens{run}: boards at full power, "
        f"{energy['kilowatts']:,.3g} kW"
    )


def _alternatives(result: JsonObject) -> Table:
    from rich.table import Table

    # Numbers come first and are never wrapped; the techniques get the rest of the line.
    table = Table(box=None, pad_edge=False)
    for title in ("memory", "tokens/s", *(["$ / M tokens"] if result["cost"] else [])):
        table.add_column(title, justify="right", no_wrap=True)
    # Narrow columns wrap their words instead of hiding numbers.
    table.add_column("vs. the best", min_width=15)
    table.add_column("techniques", min_width=25, overflow="fold")
    for a in result["alternatives"]:
        cost = [f"{a['cost']['million_tokens']:.3g}"] if result["cost"] else []
        table.add_row(memory(a["peak_gib"]), rate(a["tokens_per_second"]), *cost, a["tradeoff"], a["what"])
    return table


def _reasons(rejected: Sequence[Mapping[str, str]]) -> list[Text]:
    from rich.text import Text

    shown = [Text(f"  {r['recipe']}: {r['reason']}", style="dim") for r in rejected[:_REASONS]]
    left = len(rejected) - len(shown)
    return [*shown, *([Text(f"  and {left} more; --json has them", style="dim")] if left else [])]


def serving_picture(result: JsonObject) -> Group:
    """Returns the memory and speed of serving, one row per format."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    d = result["device"]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    titles = (
        "weights\nin",
        "cache\nin",
        "weights\ntake",
        "a row's\ncache",
        "rows\nthat fit",
        "longest\nrow",
        "first\ntoken",
        "tokens/s\nof one",
        "of all",
    )
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number > 1 else "left", vertical="bottom", no_wrap=True)
    for f in result["formats"]:
        first = f["seconds_to_first_token"]
        table.add_row(
            f["weights"],
            f["cache"],
            memory(f["weights_gib"]),
            # of one row of `length` tokens
            memory(f["cache_gib_per_row"]),
            f"{f['rows']:,}",
            "-" if not f["rows"] else f"{f['longest_context']:,}" if f["longest_context"] < 1 << 30 else "any",
            "-" if first is None else f"{first * 1e3:,.0f} ms" if first < 1 else f"{first:,.1f} s",
            rate(f["tokens_per_second_alone"]) if f["rows"] else "-",
            rate(f["tokens_per_second_at_most"]) if f["rows"] else "does not fit",
        )
    many = f"{d['count']} x " if d["count"] > 1 else ""
    idle = result["active_parameters"] < result["parameters"]
    active = f" ({result['active_parameters']:,} active)" if idle else ""
    row_state = result["state_bytes_per_row"]
    state = f", a row {row_state / 2**20:,.1f} MiB of recurrent state" if row_state else ""
    measured = " (as copies reach it here; reading alone may go beyond)" if d["kind"] == "cpu" else ""
    return Group(
        Text(
            (
                f"{result['model']}: {result['parameters']:,} parameters{active}, served on {many}{d['name']} of "
                f"{memory(d['memory_gib'])}"
            ),
            style="bold",
        ),
        Text(
            f"a token takes {result['cache_bytes_per_token'] / 1024:,.0f} KiB of cache{state}, a row has "
            f"{result['length']:,} tokens; memory of each device:"
        ),
        table,
        Text(
            "at best: tokens/s are the memory's bandwidth over weights and caches, of one row and of all that "
            f"fit{measured}; the first token comes when the "
            "prompt's FLOPs are done; embedding and head are in bf16",
            style="dim",
        ),
    )


def budget_picture(flops: float, approaches: Sequence[JsonObject]) -> Group:
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
