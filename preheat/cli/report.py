"""The `preheat report` command: a run as one HTML page."""

from __future__ import annotations

from typing import Annotated

import typer

from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.output import say

__all__ = ["report"]


def report(
    runs: Annotated[
        list[str],
        typer.Argument(help="Folders or URLs of runs: finished, running, stopped or failed.", show_default=False),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write the report of a run: one HTML page that works offline, and its figures in report.json.

    Example: preheat report runs/demo
    """
    from preheat.report import write

    written = [(run, write(find_local_folder(run))) for run in runs]
    if json:
        from json import dumps

        rows = [{"run": run, "report": str(page), "data": str(page.with_name("report.json"))} for run, page in written]
        say(dumps({"reports": rows}))
        return
    for _, page in written:
        say(page)
