"""The `preheat plan` command: plans a recipe unchanged, searches around it, plans serving, or sizes a model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from preheat.cli.views.console import Json, Set
from preheat.cli.views.output import passing
from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from preheat.planning.request import Request
    from preheat.planning.search.result import SearchResult
    from preheat.recipe import Recipe
    from preheat.training.plan_request import Subject

__all__ = ["finish", "plan", "recipe_text", "plan_as_written"]

# More devices mean more layouts to try.
_SECONDS = {1: 4.0, 64: 25.0}  # {largest number of devices: seconds for the search}
_MANY = 30.0  # seconds for the search on more devices


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
            help=(
                "A device of the catalogue (H100, RTX-4090), or its figures: "
                "name=X,memory=24GiB,bandwidth=1008,bf16=165."
            ),
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Devices per host; without --nodes, of the whole run."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Hosts, of --count devices each.")] = 1,
    length: Annotated[int | None, typer.Option("--length", min=2, help="Tokens per sequence.")] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option("--batch-tokens", help="Tokens per optimizer step, over all devices (the global batch)."),
    ] = None,
    method: Annotated[
        Literal["full", "lora", "qlora"] | None,
        typer.Option(
            "--method",
            help="For a model: train all weights (default), an adapter, or an adapter on a 4-bit base.",
        ),
    ] = None,
    aim: Annotated[
        Literal["fastest", "cheapest", "largest-batch", "longest-context", "closest"] | None,
        typer.Option(
            "--aim",
            help="What to search for; default: fastest for a model; a recipe is planned as it is, without a search.",
        ),
    ] = None,
    allow: Annotated[
        Literal["exact", "rounding", "different"] | None,
        typer.Option(
            "--allow",
            help=(
                "How far the search may change the numerics: exact: not at all (the default for a recipe), rounding: "
                "bf16 (the default for a model), different: more."
            ),
        ),
    ] = None,
    price: Annotated[float | None, typer.Option("--price", min=0, help="Price of a device-hour in dollars.")] = None,
    inference: Annotated[
        bool,
        typer.Option("--inference", help="Plan serving: weights, KV cache, how many sequences fit, and peak speed."),
    ] = False,
    compute_budget: Annotated[
        float | None,
        typer.Option(
            "--compute-budget",
            metavar="FLOPS",
            help="The compute-optimal model size and number of tokens for this many FLOPs.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the recipe to this file, for `preheat train`.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write an HTML page with plots to this file.")] = None,
    json: Json = False,
) -> None:
    """Predict memory and speed by a dry run, for this machine or any GPU; explain what does not fit.

    Example: `preheat plan Qwen/Qwen3-8B --gpu RTX-4090 --method lora`, `preheat plan llama-3.1-70b --gpu H100 --count 8
    --nodes 8`. A recipe is planned as it is: `preheat plan demo --set batch.size=64`. Exit code 3: it does not fit.
    """
    from preheat.cli.options.unused import name_unread

    if compute_budget is not None:
        _budget(compute_budget, json)
        return
    from preheat.errors import RecipeError

    if what is None and not set:
        raise RecipeError("preheat plan: name a model or a recipe, such as: preheat plan Qwen/Qwen3-8B --gpu RTX-4090")
    # --count is per host if --nodes is given.
    devices = (count or 1) * nodes
    per_host = count if nodes > 1 and count else min(devices, 8)

    def subject(method: str) -> Subject:
        return subject_of(what, set or [], method=method, length=length, batch_tokens=batch_tokens, devices=devices)

    # Set before torch is imported, which the next import does.
    gc.set_threshold(50_000)  # garbage collection would take a tenth of torch's import time
    from preheat.training.plan_request import request_of, subject_of

    first = subject(method or "full")
    if first.from_user and method is not None:
        raise RecipeError(
            f"--method: {method}: a recipe's techniques define how it trains; leave --method out, or name a model"
        )
    # A recipe may state its devices itself: the options must not contradict it.
    if first.from_user and nodes == 1 and (stated := first.recipe.parallel.devices or 1) > 1:
        if count == 1:
            raise RecipeError(
                f"--count: 1: the recipe is for parallel.devices: {stated}; leave --count out, or set both alike"
            )
        if count is None and gpu is not None:  # the recipe says how many
            devices, per_host = stated, min(stated, 8)
    if first.from_user:
        options = {"compute_budget": None, "inference": inference, "gpu": gpu}
        name_unread("plan", options, first.recipe, besides=("parallel.devices",) if devices > 1 else ())
    if inference:
        _served(first.recipe, gpu, devices, json)
        return
    # A plan of this machine is always made anew: its memory and its speed change with what else runs.
    key = None
    if gpu is not None:
        import preheat.planning.answer_cache as answers

        question = [what, set, gpu, devices, per_host, length, batch_tokens, method, aim, allow, price, first.from_user]
        key = answers.key_of(first.recipe, {"plan": question, "absent": first.absent})
    stored = answers.load(key) if key is not None else None
    if stored is not None and (html is None or "figures" in stored):
        text = stored["recipe_text"]
        finish(stored["plan"], lambda: stored["figures"], first, text, out=out, html=html, json=json)
        return
    if not json:
        passing("dry run: starting")  # the imports take seconds
    # A recipe is planned as it is unless a search is asked for.
    if first.from_user and aim is None and allow is None:
        request = request_of(first.recipe, gpu, world=None if gpu is None else devices, per_host=per_host)
        result, page = plan_as_written(request, devices, price)
    else:
        request = request_of(first.recipe, gpu, world=devices, per_host=per_host, count_rows=first.from_user)
        # Other methods to suggest if full training does not fit: only if the user left the method open.
        others = (
            {name: subject(name).recipe for name in ("lora", "qlora")} if method is None and not first.from_user else {}
        )
        # A recipe's numerics are the user's own choice; for a model given by name, bf16 is the usual one.
        limit = allow or ("exact" if first.from_user else "rounding")
        result, page = _searched(request, others, aim=aim or "fastest", allow=limit, price=price, quiet=json)
    result["text_part"] = _of_text_part(first.recipe)
    drawn = None if html is None else page()
    text = recipe_text(result, first)
    if key is not None:
        answers.store(key, {"plan": result, "recipe_text": text} | ({} if drawn is None else {"figures": drawn}))
    finish(result, lambda: drawn or page(), first, text, out=out, html=html, json=json)


def finish(
    result: JsonObject,
    page: Callable[[], JsonObject],
    subject: Subject,
    text: str | None = None,
    *,
    out: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    """Writes the recipe and the page if requested, prints the plan, and exits with code 3 if it does not fit.

    Args:
        page: computes the figures of the page.
        text: the chosen recipe as YAML; written from `result` by default.
    """
    from preheat.cli.views.console import console, emit
    from preheat.cli.views.plan_view import plan_overview

    if out is not None:
        from preheat.run_dir import write_generated

        write_generated(out, text or recipe_text(result, subject), "# written by preheat plan")
    if html is not None:
        from preheat.report.plan_page import write_plan

        # The figures are computed only if a page is written.
        write_plan({**result, "figures": page(), "recipe_text": text or recipe_text(result, subject)}, html)
    if subject.absent:
        result = {**result, "absent": subject.absent}
    note = result["text_part"] if "text_part" in result else _of_text_part(subject.recipe)
    result = {key: value for key, value in result.items() if key != "text_part"}
    if note:
        result["text_part"] = note
    if json:
        emit(result)
    else:
        screen = console()
        screen.print(plan_overview(result, subject.recipe.name))
        if note:
            screen.print(note, style="dim", soft_wrap=True)
        if packages := result.get("packages"):
            screen.print(
                f"its recurrent layers are planned with fused kernels: the device needs {' and '.join(packages)}",
                style="dim",
                soft_wrap=True,
            )
        if subject.absent:
            screen.print(
                (
                    f"{subject.absent} is not on this machine: planned by its built-in configuration; tokenizer, "
                    "weights and data were not checked"
                ),
                style="dim",
            )
        for path, label in ((out, "recipe"), (html, "page")):
            if path is not None:
                screen.print(f"{label}: {path}", soft_wrap=True)
    # Last, after all output: a script reads the plan and the code.
    if not result["fits"]:
        raise typer.Exit(3)


def _of_text_part(recipe: Recipe) -> str | None:
    """Returns the sentence to print if only the text part of a checkpoint is planned; else None."""
    from preheat.models import configs, text_part

    wrapper = configs.wrapper(recipe)
    return text_part.describe(wrapper.model_type) if wrapper is not None else None


def plan_as_written(request: Request, devices: int, price: float | None) -> tuple[JsonObject, Callable[[], JsonObject]]:
    """Plans a recipe without a search, after resolving the settings that it leaves `auto`.

    Args:
        devices: number of devices, for cost, energy and figures.
        price: of a device-hour in dollars; None: unknown.

    Returns:
        The plan (`settled` has the resolved settings), and a function that computes the figures of its page.
    """
    from preheat.core import Tag
    from preheat.planning.explain import explain, figures
    from preheat.planning.plan import plan, resolve_auto
    from preheat.planning.search.candidates import worst
    from preheat.planning.search.max_context import longest_as_stated
    from preheat.planning.search.result import EvaluatedPlan, SearchResult

    as_written = request.recipe
    request = resolve_auto(request)
    recipe, prediction = request.recipe, plan(request)
    added = tuple(recipe.techniques.values())
    more: JsonObject = {}
    if any(Tag.EXTENDED_CONTEXT in t.provided() for t in added):  # also report the longest context that fits
        more["longest_context"] = longest_as_stated(request)
    result = SearchResult(EvaluatedPlan(recipe, prediction, worst(added), recipe.batch.size, ()))

    def page() -> JsonObject:
        return figures(replace(result, evaluated=[result.best]), replace(request, world=devices))

    # Settings that were `auto` in the recipe, with the values that the dry run chose.
    more["settled"] = {
        f"{name}.{key}": value
        for name, t in recipe.techniques.items()
        for key, value in vars(t).items()
        if key != "on_gpu" and value != getattr(as_written.techniques[name], key)
    }
    return {**explain(result, devices=devices, price=price), "chosen": "the recipe as it is", **more}, page


def _searched(
    request: Request, others: Mapping[str, Recipe], *, aim: str, allow: str, price: float | None, quiet: bool
) -> tuple[JsonObject, Callable[[], JsonObject]]:
    """Searches for the best recipe; if nothing fits, plans of other methods that do are added to the alternatives.

    Args:
        others: recipes of the same model to try in that case, by method.
        quiet: do not print progress.
    """
    from preheat.planning.explain import explain, figures
    from preheat.planning.observation_cache import observe_for_others
    from preheat.planning.search.candidates import Space
    from preheat.planning.search.max_context import longest
    from preheat.planning.search.search import search
    from preheat.planning.worker_pool import worker_pool

    devices = request.devices
    # By the first entry that covers the devices.
    seconds = next((s for most, s in _SECONDS.items() if devices <= most), _MANY)

    def tell(message: str) -> None:
        if not quiet:
            passing(f"dry run: {message}")

    def search_for(request: Request, *, seconds: float = seconds, confirm: bool = True) -> SearchResult:
        space = Space(request, allow)  # type: ignore[arg-type]
        if aim == "longest-context":
            return longest(space, seconds=seconds, confirm=confirm, tell=tell)
        return search(space, aim=aim, seconds=seconds, confirm=confirm, tell=tell)  # type: ignore[arg-type]

    # Dry runs of candidates run in other processes while this one plans.
    with worker_pool(observe_for_others):
        result = search_for(request)
        if not quiet:
            passing()
        explained = explain(result, devices=devices, price=price)
        if not explained["fits"]:
            for name, other in others.items():
                # Half the time each, unconfirmed: these are suggestions, not the plan.
                instead = search_for(replace(request, recipe=other), seconds=seconds / 2, confirm=False)
                would = explain(instead, devices=devices, price=price)
                if would["fits"]:
                    keys = ("peak_gib", "tokens_per_second", "seconds_per_step", "mfu", "cost", "energy")
                    metrics = {key: would[key] for key in keys}
                    explained["alternatives"].append(
                        {
                            "what": f"--method {name}: {would['chosen']}",
                            "recipe": would["recipe"]["techniques"],
                            **metrics,
                            "tradeoff": "trains an adapter" + (" on a base in 4 bits" if name == "qlora" else ""),
                        }
                    )

    def page() -> JsonObject:
        return figures(result, request)

    return explained, page


def recipe_text(result: JsonObject, subject: Subject) -> str:
    """Returns the chosen recipe as YAML; a model given by name gets the path of its checkpoint."""
    from preheat.recipe.commented_yaml import brief

    values = dict(result["recipe"])
    # A model that was given by name trains from its published weights.
    if subject.checkpoint and values["model"]["path"] is None and values["model"]["weights"] != "random":
        values["model"] = {**values["model"], "path": subject.checkpoint}
    return brief(values)


def _served(recipe: Recipe, gpu: str | None, devices: int, json: bool) -> None:
    """Prints weights, KV cache, rows that fit and peak speed for each combination of weight and cache format."""
    from preheat.cli.views.console import console, emit
    from preheat.cli.views.plan_view import serving_picture
    from preheat.hardware.rates import Rates
    from preheat.planning.analytic import serving, size_of
    from preheat.planning.inference_cache import CACHES, cache_bytes
    from preheat.training.plan_request import hardware

    model = size_of(recipe)
    device, rates, _ = hardware(gpu, recipe, devices)
    # Measured rates of this machine, or the sustained ones of a device in the catalogue.
    if isinstance(rates, Rates):
        bandwidth, peaks = rates.bandwidth, rates.peak_matrix_rate  # measured on this machine
    else:
        assert rates.device.bandwidth is not None
        bandwidth, peaks = rates.device.bandwidth, rates.device.sustained()
    length, state = recipe.batch.seq_len, cache_bytes(model.config, 0)
    rows = [
        estimate
        for cache_format in CACHES
        for estimate in serving(
            model,
            memory=device.memory,
            length=length,
            devices=devices,
            bandwidth=bandwidth,
            # The format of serving is half precision, if the device's rate for it is known.
            matrix_rate=peaks.get("bf16") or max(peaks.values()),
            kept=cache_format,
        )
    ]
    result = {
        "model": recipe.name,
        "device": {"kind": device.kind, "name": device.name, "memory_gib": device.memory / 2**30, "count": devices},
        "parameters": model.parameters,
        "active_parameters": model.active,
        "length": length,
        "cache_bytes_per_token": (cache_bytes(model.config, length) - state) / length,
        "state_bytes_per_row": state,
        "fits": any(s.rows for s in rows),
        "formats": [
            {
                "weights": s.format,
                "cache": s.cache_dtype,
                "weights_gib": s.weights / 2**30,
                "cache_gib_per_row": s.cache / 2**30,
                "rows": s.rows,
                "longest_context": s.longest,
                "tokens_per_second_at_most": s.tokens_per_second,
                "tokens_per_second_alone": s.alone,
                "seconds_to_first_token": s.first_token,
            }
            for s in rows
        ],
    }
    if note := _of_text_part(recipe):
        result["text_part"] = note
    if json:
        emit(result)
    else:
        console().print(serving_picture(result))
        if note:
            console().print(note, style="dim", soft_wrap=True)
    if not result["fits"]:
        raise typer.Exit(3)


def _budget(flops: float, json: bool) -> None:
    """Prints the compute-optimal model size and tokens for a budget of FLOPs, by three approaches."""
    from preheat.cli.views.console import console, emit
    from preheat.cli.views.plan_view import budget_picture
    from preheat.planning.analytic import compute_optimal

    approaches = [vars(o) for o in compute_optimal(flops)]
    if json:
        emit({"flops": flops, "approaches": approaches})
    else:
        console().print(budget_picture(flops, approaches))
