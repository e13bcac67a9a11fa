"""The `preheat track` command: sends runs to experiment trackers."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.output import say

__all__ = ["track"]

_INTERVAL = 1.0
"""Seconds between two looks at a run's files."""


def track(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="FOLDER...", help="Folders or URLs of runs, finished or not; of benchmarks or compressions."
        ),
    ],
    to: Annotated[
        list[str],
        typer.Option(
            "--to", metavar="TRACKER", help="trackio, wandb, mlflow, tensorboard, swanlab, or one of a package."
        ),
    ],
    project: Annotated[
        str | None, typer.Option("--project", help="Project or experiment there; default: that of the recipe.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name there; default: the folder's name.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where the tracker keeps files on this machine; default: its own.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    follow: Annotated[bool, typer.Option("--follow", hidden=True)] = False,
) -> None:
    """Send runs to an experiment tracker: parameters, metrics, evaluations, samples, the plan and the report.

    Of benchmarks and compressions: the table of results and the page.

    A run that was sent before, by this command or while it trained, continues there. Trackers read their own variables:
    WANDB_MODE=offline, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID, ...

    Example: preheat track runs/demo --to tensorboard
    """
    from preheat.errors import RecipeError, RunError
    from preheat.tracking.progress import SentState
    from preheat.tracking.tracker import find

    if follow:
        _follow(Path(runs[0]), to[0], project, name, folder)
        return
    for tracker in to:
        find(tracker)
    if name is not None and len(runs) > 1:
        raise RecipeError(f"--name {name}: names one run, and {len(runs)} are given; leave --name out")
    sent = []
    for run in runs:
        folder_of_run = Path(find_local_folder(run))
        for tracker in to:
            command = [sys.executable, "-m", "preheat", "track", str(folder_of_run), "--to", tracker, "--follow"]
            stated = {"--project": project, "--name": name, "--folder": folder}
            command += [part for key, value in stated.items() if value is not None for part in (key, str(value))]
            # In a process of its own, so that any error of the tracker's package is one line here.
            ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if ended.returncode:
                reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
                raise RunError(f"{run}: {tracker}: {reason.removeprefix('error: ')}")
            progress = SentState.read(folder_of_run, tracker)
            assert progress is not None, "the process has recorded what it sent"
            sent.append({"run": run, "tracker": tracker, "url": progress.url, "step": progress.step})
            if not json:
                upto = f" up to step {progress.step:,}" if progress.step else ""
                say(f"{run}: {tracker}: sent{upto}: {progress.url}")
    if json:
        from preheat.files import to_json

        say(to_json({"sent": sent}))


def _follow(run: Path, tracker: str, project: str | None, name: str | None, folder: Path | None) -> None:
    """Sends a run until standard input closes, then the rest and the report. Prints where people see it."""
    from preheat import recipe as recipes
    from preheat.core.schema import Tracking
    from preheat.files import write_atomic
    from preheat.report.report_data import collect
    from preheat.report.run_page import render
    from preheat.run.reader import Reader
    from preheat.tracking.results import result_file, send_result
    from preheat.tracking.sender import Sender

    os.nice(10)  # the run comes first
    # Redirects the output of the tracker's package to the log: standard output is for the user.
    printed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    result = result_file(run)
    settings = Tracking()
    if result is None:
        settings = recipes.parse(Reader(run).recipe_text, where=str(run / "recipe.yaml")).tracking
    settings = replace(
        settings,
        project=project or settings.project,
        name=name or settings.name,
        folder=settings.folder if folder is None else str(folder),
    )
    if result is not None:
        send_result(result, tracker, settings)
        return

    def report() -> Path:
        page = run / "tracking" / "report.html"
        write_atomic(page, render(collect(run)))
        return page

    sender = Sender(run, tracker, settings, report)
    url = sender.begin()
    if url is not None:
        printed.write(f"{url}\n")
        printed.flush()
    sender.send()
    while not select.select([sys.stdin], [], [], _INTERVAL)[0]:
        sender.send()
    sender.finish()
