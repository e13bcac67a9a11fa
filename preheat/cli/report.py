"""The `preheat report` command: a run as one HTML page, or the hours, energy and cost of the runs in a folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.output import say

if TYPE_CHECKING:
    from rich.console import Group

    from preheat.report.usage import FolderUsage

__all__ = ["report"]


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Folders or URLs of runs: finished, running, stopped or failed; or folders that hold runs.",
            show_default=False,
        ),
    ],
    carbon: Annotated[
        float | None,
        typer.Option(
            "--carbon",
            metavar="GRAMS",
            min=0,
            help="For a folder of runs: grams of CO2 per kWh of your electricity; adds the emissions.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write the report of a run: one HTML page that works offline, and its figures in report.json.

    Of a folder that holds runs, print what they used instead: device-hours, energy and cost, with sums.

    Example: `preheat report runs/demo`; the sum of all runs: `preheat report runs`
    """
    from preheat.cli.views.console import build_console
    from preheat.errors import RecipeError
    from preheat.files import to_json
    from preheat.report import write
    from preheat.report.usage import sum_usage

    if carbon is not None and not math.isfinite(carbon):
        raise RecipeError(f"--carbon {carbon}: must be a number of grams per kWh, such as 350")
    opened = {run: Path(find_local_folder(run)) for run in runs}
    folders = [run for run, folder in opened.items() if folder.is_dir() and not (folder / "recipe.yaml").exists()]
    if carbon is not None and not folders:
        raise RecipeError(f"--carbon {carbon:g}: is for a folder that holds runs, and none is named; leave it out")
    written = [(run, write(folder)) for run, folder in opened.items() if run not in folders]
    sums = [sum_usage(opened[run], carbon) for run in folders]
    if json:
        rows = [{"run": run, "report": str(page), "data": str(page.with_name("report.json"))} for run, page in written]
        say(to_json({"reports": rows, **({"usage": sums} if sums else {})}))
        return
    for _, page in written:
        say(page)
    for usage in sums:
        build_console().print(_build_table(usage))


def _build_table(usage: FolderUsage) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from preheat.core.units import format_three_digits

    def show(value: float | None, unit: str = "") -> str:
        return "-" if value is None else f"{format_three_digits(value)}{unit}"

    total = usage.total
    table = Table("run", "device", box=None, pad_edge=False)
    headers = ("device-hours", "kWh", "by", "cost", *(["CO2, kg"] if usage.carbon is not None else []))
    for header in headers:
        table.add_column(header, justify="left" if header == "by" else "right")
    for run in usage.runs:
        u = run.usage
        figures = ["-"] * 4
        if u is not None:
            cost = show(u.cost, f" {u.currency}")
            figures = [show(u.device_hours), show(u.energy_kwh), ", ".join(u.energy_sources or ()) or "-", cost]
        emissions = [show(run.co2_kg)] if usage.carbon is not None else []
        table.add_row(Text(run.run), Text(run.device or "-"), *map(Text, (*figures, *emissions)))
    costs = ", ".join(show(amount, f" {currency}") for currency, amount in total.cost.items()) or "-"
    sums = [show(total.device_hours), show(total.energy_kwh), "", costs]
    sums += [show(total.co2_kg)] if usage.carbon is not None else []
    table.add_section()
    table.add_row(f"{total.runs:,} run{'s' if total.runs != 1 else ''}", "", *map(Text, sums), style="bold")
    notes = [
        f"{count:,} of {total.runs:,} runs: {what} unknown, and not in the sum"
        for count, what in (
            (total.without_hours, "hours are"),
            (total.without_energy, "energy is"),
            (total.without_cost if total.cost else 0, "cost is"),
        )
        if count
    ]
    return Group(table, *map(Text, (*notes, *usage.damaged)))
