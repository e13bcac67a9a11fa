"""The `preheat plan` command."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from preheat.cli.views.console import Json, Set

if TYPE_CHECKING:
    from preheat.training.plan_request import PlanRequest

__all__ = ["plan"]


def plan(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RECIPE",
            help=(
                "A model by its name on the hub, its folder or its size (15M); or a recipe file, or a built-in "
                "recipe's name."
            ),
        ),
    ] = None,
    set: Set = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="A device of the catalogue (H100, RTX-4090), or stated: name=X,memory=24GiB,bandwidth=1008,bf16=165.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Devices of a host; of the whole run where --nodes is not given."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Hosts, of --count devices each.")] = 1,
    length: Annotated[int | None, typer.Option("--length", min=2, help="Tokens in a row.")] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option("--batch-tokens", help="Tokens of a global batch: of one optimizer step, over all devices."),
    ] = None,
    method: Annotated[
        Literal["full", "lora", "qlora"] | None,
        typer.Option(
            "--method",
            help="For a model: train all of it (when not given), an adapter, or an adapter on a base in 4 bits.",
        ),
    ] = None,
    aim: Annotated[
        Literal["fastest", "cheapest", "largest-batch", "longest-context", "closest"] | None,
        typer.Option(
            "--aim",
            help=(
                "What to search for; fastest for a model. A recipe is planned as it is when not given, else "
                "searched around."
            ),
        ),
    ] = None,
    allow: Annotated[
        Literal["exact", "rounding", "different"] | None,
        typer.Option(
            "--allow",
            help=(
                "How far the search may change numbers: exact keeps them, rounding takes bf16 (the default for "
                "a model), different more. exact is the default for a recipe."
            ),
        ),
    ] = None,
    price: Annotated[float | None, typer.Option("--price", min=0, help="Dollars for an hour of a device.")] = None,
    inference: Annotated[
        bool,
        typer.Option(
            "--inference", help="What serving needs: weights, KV cache, rows that fit; and how fast it can be."
        ),
    ] = False,
    compute_budget: Annotated[
        float | None,
        typer.Option(
            "--compute-budget", metavar="FLOPS", help="The model and tokens that so many FLOPs are best spent on."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the recipe there, for `preheat train`.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots there.")] = None,
    json: Json = False,
) -> None:
    """Predict memory and speed by a dry run, for this machine or any GPU; explain what does not fit.

    Example: `preheat plan Qwen/Qwen3-8B --gpu RTX-4090 --method lora`, `preheat plan llama-3.1-70b --gpu H100 --count 8
    --nodes 8`. A recipe is planned as it is: `preheat plan demo --set batch.size=64`. Exit code 3: it does not fit.
    """
    from preheat.cli.options.unused import name_unread
    from preheat.cli.plan_modes import budget, plan_as_written, searched, served

    if compute_budget is not None:
        budget(compute_budget, json)
        return
    from preheat.errors import RecipeError

    if what is None and not set:
        raise RecipeError("preheat plan: name a model or a recipe, such as: preheat plan Qwen/Qwen3-8B --gpu RTX-4090")
    devices = (count or 1) * nodes
    per_host = count if nodes > 1 and count else min(devices, 8)

    def question(method: str) -> PlanRequest:
        return resolve_request(
            what, set or [], method=method, length=length, batch_tokens=batch_tokens, devices=devices
        )

    gc.set_threshold(50_000)  # garbage collection would take a tenth of torch's import time
    from preheat.training.plan_request import resolve_request

    first = question(method or "full")
    if first.from_user and method is not None:
        raise RecipeError(
            f"--method: {method}: a recipe says how it trains by its techniques; leave --method out, or name a model"
        )
    if first.from_user:
        options = {"compute_budget": None, "inference": inference, "gpu": gpu}
        name_unread("plan", options, first.recipe, besides=("parallel.devices",) if devices > 1 else ())
    if inference:
        served(first, gpu, devices, json)
        return
    if first.from_user and aim is None and allow is None:
        result, page = plan_as_written(first, gpu, devices, per_host, price)
    else:
        others = {name: question(name) for name in ("lora", "qlora")} if method is None and not first.from_user else {}
        limit = allow or ("exact" if first.from_user else "rounding")
        result, page = searched(
            first, others, gpu, devices, per_host, aim=aim or "fastest", allow=limit, price=price, quiet=json
        )
    finish(result, page, first, out=out, html=html, json=json)


def finish(
    result: dict[str, Any],
    page: Callable[[], dict[str, Any]],
    question: PlanRequest,
    *,
    out: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    """Writes the recipe and the page if requested, prints the plan, and exits with code 3 if it does not fit."""
    from preheat.cli.plan_modes import recipe_text, write_recipe
    from preheat.cli.views.console import console, emit
    from preheat.cli.views.plan_view import plan_overview

    if out is not None:
        write_recipe(result, question, out)
    if html is not None:
        from preheat.report.plan_page import write_plan

        write_plan({**result, "figures": page(), "recipe_text": recipe_text(result, question)}, html)
    if json:
        emit({**result, "absent": question.absent} if question.absent else result)
    else:
        screen = console()
        screen.print(plan_overview(result, question.recipe.name))
        if question.absent:
            screen.print(
                (
                    f"{question.absent} is not here: planned by its built-in configuration; tokenizer, weights "
                    "and data were not looked at"
                ),
                style="dim",
            )
        for path, label in ((out, "recipe"), (html, "page")):
            if path is not None:
                screen.print(f"{label}: {path}", soft_wrap=True)
    if not result["fits"]:
        raise typer.Exit(3)
