"""Prints a plan, and its recipe as YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from preheat.cli.options.subject import Subject
    from preheat.core.plan import Plan
    from preheat.recipe import Recipe

__all__ = ["finish", "render_recipe", "text_part_note"]


def finish(
    result: Plan,
    subject: Subject,
    *,
    json: bool,
    verbose: bool = False,
    out: Path | None = None,
    html: Path | None = None,
    improved: Path | None = None,
    assumed: Sequence[str] = (),
    command: Sequence[str] = (),
) -> None:
    """Prints a plan, and exits with code 3 if it does not fit.

    After an interrupted search the exit code is 130, as of any command that Ctrl-C ends.

    Args:
        verbose: also print what the answer leaves out.
        out, html: the files of the recipe and the page, written already; after an interrupted search there is no page.
        improved: another trainer's file with its improvements, written already.
        assumed: settings that the command does not state.
        command: what to type next.
    """
    from preheat.cli.views.console import build_console, emit
    from preheat.cli.views.plan_answer import WIDTH, Answer, wrap_command
    from preheat.cli.views.plan_view import build_details

    interrupted = result.searched.interrupted
    if json:
        emit(result)
    else:
        screen = build_console()
        page = None if interrupted else html
        files = ((out, "recipe"), (page, "page"), (improved, "improved"))
        written = [(path, label) for path, label in files if path is not None]
        last = wrap_command(command, min(screen.width, WIDTH)) if command else []
        below = len(last) + len(written)
        notes = _collect_notes(result, html)
        screen.print(Answer(result, subject.recipe.name, assumed=assumed, notes=notes, below=below))
        if verbose:
            screen.print(build_details(result))
        for path, label in written:
            screen.print(f"{label:<10}{path}", soft_wrap=True)
        for line in last:
            screen.print(line, style="bold", soft_wrap=True)
    if interrupted:
        raise typer.Exit(128 + SIGINT)
    # Last, after all output: a script reads the plan and the code.
    if not result.fits:
        raise typer.Exit(3)


def _collect_notes(result: Plan, html: Path | None) -> list[str]:
    """Returns the notes below an answer.

    Args:
        html: the file of the page, which an interrupted search does not write.
    """
    from preheat.planning.search.result import describe_held_memory

    notes = []
    if (searched := result.searched).interrupted:
        notes.append(
            f"the search was interrupted: {searched.candidates:,} candidates, {searched.dry_runs} dry-run; "
            "this is the best so far" + ("" if html is None else f"; the page {html} was not written")
        )
    if result.text_part:
        notes.append(result.text_part)
    if result.packages:
        notes.append(
            f"its recurrent layers are planned with fused kernels: the device needs {' and '.join(result.packages)}"
        )
    notes += filter(None, (describe_held_memory(result), result.device.notice))
    if result.absent:
        notes.append(
            f"{result.absent} is not on this machine: planned by its built-in configuration; tokenizer, "
            "weights and data were not checked"
        )
    return notes


def text_part_note(recipe: Recipe) -> str | None:
    """Returns the sentence to print if only the text part of a checkpoint is planned; else None."""
    from preheat.models import configs, text_part

    wrapper = configs.wrapper_config(recipe)
    return text_part.describe(wrapper.model_type) if wrapper is not None else None


def render_recipe(result: Plan, subject: Subject, overrides: Sequence[str] = ()) -> str:
    """Returns the chosen recipe as YAML; a model given by name gets the path of its checkpoint.

    Args:
        overrides: `key=value` each, as the command states them.
    """
    from preheat.recipe import Data
    from preheat.recipe.commented_yaml import render_brief

    assert result.recipe is not None
    values = dict(result.recipe)
    # A model that was given by name trains from its published weights.
    model = values["model"]
    # A model of the hub that is no preset was planned from the folder of its config.json in the hub's cache.
    planned = model["path"] is None or model["preset"] is None
    if subject.checkpoint and planned and model["weights"] != "random":
        values["model"] = {**model, "path": subject.checkpoint}
    text = render_brief(values)
    # `data={workers: 2}` states another key.
    is_stated = any(re.match(r"\s*data\.source\s*=|\s*data\s*=.*\bsource\b", item) for item in overrides)
    if not subject.from_user and not is_stated and values["data"]["source"] == Data().source:
        # As comments: the recipe is valid without them, but trains on the built-in text.
        text += "# data.source is not stated, so a run trains on Python's standard library. Name your data:\n"
        text += "# data: {source: DATA.jsonl}\n"
    return text
