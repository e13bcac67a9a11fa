"""The `preheat plan` command: plans a recipe unchanged, searches around it, plans serving, or sizes a model."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from preheat.cli.views.console import Json, Set
from preheat.cli.views.output import passing

if TYPE_CHECKING:
    from preheat.cli.options.subject import Subject
    from preheat.core.plan import Alternative, Plan, PlanFigures
    from preheat.hardware.catalogue import Accelerator
    from preheat.planning.request import Request
    from preheat.planning.search.result import SearchResult
    from preheat.recipe import Recipe

__all__ = ["finish", "parse_price", "plan", "plan_as_written", "recipe_text", "text_part_note"]

_METHODS = ("full", "lora", "qlora")  # each needs less memory than the one before


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
                "A device of the catalogue (H100, RTX-4090; --gpu list prints all), or its figures: "
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
    price: Annotated[
        str | None,
        typer.Option(
            "--price",
            metavar="AMOUNT",
            help="Price of a device with its currency and time, such as 2.5USD/h or 1800EUR/month; adds the cost.",
        ),
    ] = None,
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
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Also print memory by phase, all alternatives, and why others were rejected."),
    ] = False,
    json: Json = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of what --json prints, and plan nothing.")
    ] = False,
) -> None:
    """Predict memory and speed by a dry run, for this machine or any GPU; explain what does not fit.

    Example: `preheat plan Qwen/Qwen3-8B --gpu RTX-4090 --method lora`, `preheat plan llama-3.1-70b --gpu H100 --count 8
    --nodes 8`. A recipe is planned as it is: `preheat plan demo --set batch.size=64`. Exit code 3: it does not fit.
    """
    from preheat.cli.options.unused import name_unread
    from preheat.hardware.catalogue import named_or_described

    if schema:
        _print_schema()
        return
    per_hour, currency = (None, None) if price is None else parse_price(price)
    if gpu == "list":
        _list_devices(json)
        return
    # Reports an unknown device before torch is imported, which takes seconds.
    accelerator = None if gpu is None else named_or_described(gpu)
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
    from preheat.cli.options.subject import subject_of
    from preheat.planning.plan_request import request_of

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
        _served(first.recipe, accelerator, devices, json)
        return
    asked = {
        "--gpu": gpu,
        "--count": count,
        "--nodes": nodes if nodes > 1 else None,
        "--length": length,
        "--batch-tokens": batch_tokens,
        "--method": method,
        "--aim": aim,
        "--allow": allow,
        "--price": price,
    }
    typed = [part for name, value in asked.items() if value is not None for part in (name, str(value))]
    sets = [part for item in set or [] for part in ("--set", item)]
    again = ["preheat", "plan", *([what] if what is not None else []), *sets, *typed]

    def answer(result: Plan, page: Callable[[], PlanFigures], text: str | None) -> None:
        assumed = _assumed(first, result, again, per_host=per_host) if not first.from_user else []
        command = _next_command(result, first, what, sets, again, out=out, gpu=gpu, nodes=nodes, per_host=per_host)
        shown = {"out": out, "html": html, "json": json, "verbose": verbose}
        finish(result, page, first, text, **shown, assumed=assumed, command=command)  # type: ignore[arg-type]

    # A plan of this machine is always made anew: its memory and its speed change with what else runs.
    key = None
    if accelerator is not None:
        import preheat.planning.answer_cache as answers

        question = [
            what,
            set,
            asdict(accelerator),
            devices,
            per_host,
            length,
            batch_tokens,
            method,
            aim,
            allow,
            price,
            first.from_user,
        ]
        key = answers.key_of(first.recipe, {"plan": question, "absent": first.absent})
    stored = answers.load(key) if key is not None else None
    if stored is not None and (html is None or stored.figures is not None):
        drawn = stored.figures

        def stored_figures() -> PlanFigures:
            assert drawn is not None, "without figures the answer is computed again"
            return drawn

        answer(stored.plan, stored_figures, stored.recipe)
        return
    if not json:
        passing("dry run: starting")  # the imports take seconds
    # A recipe is planned as it is unless a search is asked for.
    if first.from_user and aim is None and allow is None:
        request = request_of(first.recipe, accelerator, world=None if gpu is None else devices, per_host=per_host)
        result, page = plan_as_written(request, devices, per_hour)
    else:
        request = request_of(first.recipe, accelerator, world=devices, per_host=per_host, count_rows=first.from_user)
        others: dict[str, Recipe] = {}
        if not first.from_user:  # methods that need less memory
            others = {name: subject(name).recipe for name in _METHODS[_METHODS.index(method or "full") + 1 :]}

        def request_on(devices: int) -> Request | None:
            if gpu is None:  # more processes share this machine's memory
                return None
            try:
                many = subject_of(
                    what, set or [], method=method or "full", length=length, batch_tokens=batch_tokens, devices=devices
                )
                hosted = per_host if nodes > 1 else min(devices, 8)
                return request_of(many.recipe, accelerator, world=devices, per_host=hosted, count_rows=False)
            except RecipeError:  # the recipe is for a stated number of devices
                return None

        limit = allow or ("exact" if first.from_user else "rounding")
        fixes = Fixes(others, request_on, ("--set", "batch.seq_len=") if first.from_user else ("--length", ""))
        result, page = _searched(request, fixes, aim=aim or "fastest", allow=limit, price=per_hour, quiet=json)
    result = replace(
        result, text_part=text_part_note(first.recipe), currency=currency or result.currency, absent=first.absent
    )
    if result.searched.interrupted:
        # The best so far is no answer to store, and the page takes another dry run.
        answer(result, page, None)
        return
    drawn = None if html is None else page()
    text = recipe_text(result, first)
    if key is not None:
        answers.store(key, answers.Answer(result, text, drawn))
    answer(result, lambda: drawn or page(), text)


def parse_price(text: str) -> tuple[float, str]:
    """Returns a price per device-hour and its currency.

    Raises:
        RecipeError: no amount, or an amount without a unit: a bare number may be per hour, per month or per million.

    Example:
        >>> parse_price("2.5USD/h"), parse_price("$1.2 / GPU-hour"), parse_price("730 eur/month")
        ((2.5, 'USD'), (1.2, 'USD'), (1.0, 'EUR'))
    """
    from preheat.errors import RecipeError
    from preheat.sanitize import quoted

    match = re.fullmatch(
        # Commas between thousands only: 1,5 may be a decimal comma.
        r"([$€£¥]?)\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)\s*([$€£¥]|[a-zA-Z]{3})?"
        r"\s*/\s*(?:(?:gpu|device)-?)?(h|hr|hour|d|day|mo|month)",
        text.strip()[:60],
        re.IGNORECASE,
    )
    signs = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}
    # One currency, before or after the amount.
    if match is None or bool(match[1]) == bool(match[3]):
        raise RecipeError(
            f"--price: {quoted(text)}: must be an amount with its currency and time, such as --price 2.5USD/h (of one "
            "device)"
        )
    currency = match[1] or match[3]
    per = {"h": 1, "d": 24, "m": 730}[match[4][0].lower()]  # a month of a cloud has 730 hours
    return float(match[2].replace(",", "").replace("_", "")) / per, signs.get(currency, currency.upper())


def _assumed(subject: Subject, result: Plan, again: Sequence[str], *, per_host: int) -> list[str]:
    """Returns the settings of a model's plan that the command does not state, with the options that do."""
    from preheat.planning.plan_request import lacks_tokenizer

    batch, count = subject.recipe.batch, result.devices
    stated = {item.partition("=")[0].strip() for item in again}

    def open_(option: str, *keys: str) -> bool:
        return not stated & {option, *keys, *(key.partition(".")[0] for key in keys)}

    rows = batch.size * batch.seq_len
    return [
        text
        for missing, text in (
            (open_("--method", "techniques.lora"), "all weights (--method)"),
            (open_("--length", "batch.seq_len"), f"{batch.seq_len:,} tokens a row (--length)"),
            (open_("--batch-tokens", "batch.size"), f"{rows:,} tokens a step (--batch-tokens)"),
            (count > per_host and open_("--nodes"), f"{per_host} devices a host (--nodes)"),
            # A model of the hub has a tokenizer there, which a plan does not download.
            (
                subject.checkpoint is None and lacks_tokenizer(subject.recipe),
                "a tokenizer for the model's embedding (--set data.tokenizer)",
            ),
            (not result.steps, "run of unknown length (--set stop.tokens=1e9)"),
        )
        if missing
    ]


def _next_command(
    result: Plan,
    subject: Subject,
    what: str | None,
    sets: Sequence[str],
    again: Sequence[str],
    *,
    out: Path | None,
    gpu: str | None,
    nodes: int,
    per_host: int,
) -> list[str]:
    """Returns the command to type after this plan; empty if there is none.

    Args:
        again: the command that was typed, without its output options.
        sets: its `--set` options.
    """
    from preheat.core.plan import Verdict
    from preheat.recipe import Data

    devices, searched = result.devices, bool(result.searched.candidates)
    if not result.fits or (searched and result.verdict is Verdict.UNSAFE):
        return _what_would_fit(result, again, searched=searched, gpu=gpu)
    if out is None and (searched or what is None):
        return [*again, "--out", "recipe.yaml"]
    recipe = str(out) if out is not None else str(what)
    # The written recipe contains the settings already; a model's recipe lacks the data.
    settings = [] if out is not None else list(sets)
    if out is not None and not subject.from_user and subject.recipe.data.source == Data().source:
        settings += ["--set", "data.source=DATA.jsonl"]
    if devices > 1 and gpu is not None:
        hosts = max(nodes, math.ceil(devices / per_host))
        return [
            *("preheat", "launch", recipe, *settings, "--scheduler", "slurm", "--nodes", str(hosts)),
            *("--gpus-per-node", str(per_host), "-o", "job.sbatch"),
        ]
    # Trained elsewhere: the last check before it.
    last = ["--dry-run", "--gpu", gpu] if gpu is not None else []
    return ["preheat", "train", recipe, *settings, *last]


def _what_would_fit(result: Plan, again: Sequence[str], *, searched: bool, gpu: str | None) -> list[str]:
    """Returns the command that plans the nearest change that may fit."""

    def having(*options: str) -> list[str]:
        arguments = list(again)
        for option, value in zip(options[::2], options[1::2], strict=True):
            if option in arguments and option != "--set":
                arguments[arguments.index(option) + 1] = value
            else:
                arguments += [option, value]
        return arguments

    if instead := [a.options for a in result.alternatives if a.options]:
        return having(*instead[0])
    if result.searched.interrupted:
        return list(again)
    if not searched:
        return having("--aim", "fastest")
    # The numerics first: they cost no hardware.
    allowed = again[list(again).index("--allow") + 1] if "--allow" in again else None
    if allowed != "different":
        return having("--allow", "different")
    if gpu is None:
        return []
    if "--nodes" in again:
        return having("--nodes", str(2 * int(again[list(again).index("--nodes") + 1])))
    return having("--count", str(2 * result.devices))


def finish(
    result: Plan,
    page: Callable[[], PlanFigures],
    subject: Subject,
    text: str | None = None,
    *,
    out: Path | None,
    html: Path | None,
    json: bool,
    verbose: bool = False,
    assumed: Sequence[str] = (),
    command: Sequence[str] = (),
) -> None:
    """Writes the recipe and the page if requested, prints the plan, and exits with code 3 if it does not fit.

    After an interrupted search the exit code is 130, as of any command that Ctrl-C ends.

    Args:
        page: computes the figures of the page.
        text: the chosen recipe as YAML; written from `result` by default.
        verbose: also print what the answer leaves out.
        assumed: settings that the command does not state.
        command: what to type next.
    """
    from preheat.cli.views.console import console, emit
    from preheat.cli.views.plan_answer import WIDTH, Answer, command_lines, page_texts
    from preheat.cli.views.plan_view import plan_details
    from preheat.planning.search.result import held_by_others

    interrupted = result.searched.interrupted
    if out is not None:
        from preheat.files import write_generated

        so_far = "; the search was interrupted, this is the best so far" if interrupted else ""
        write_generated(out, text or recipe_text(result, subject), f"# written by preheat plan{so_far}")
    if html is not None and not interrupted:  # the page takes another dry run
        from preheat.report.plan_page import write_plan

        texts = page_texts(result, assumed=assumed, command=command)
        # The figures are computed only if a page is written.
        write_plan(result, page(), texts, text or recipe_text(result, subject), html)
    if json:
        emit(result)
    else:
        notes = [result.text_part] if result.text_part else []
        if result.packages:
            notes.append(
                f"its recurrent layers are planned with fused kernels: the device needs {' and '.join(result.packages)}"
            )
        notes += filter(None, (held_by_others(result), result.device.notice))
        if result.absent:
            notes.append(
                f"{result.absent} is not on this machine: planned by its built-in configuration; tokenizer, "
                "weights and data were not checked"
            )
        screen = console()
        written = [(path, label) for path, label in ((out, "recipe"), (html, "page")) if path is not None]
        if interrupted:
            written = [(path, label) for path, label in written if label != "page"]
            searched = result.searched
            notes.insert(
                0,
                f"the search was interrupted: {searched.candidates:,} candidates, {searched.dry_runs} dry-run; "
                "this is the best so far" + ("" if html is None else f"; the page {html} was not written"),
            )
        last = command_lines(command, min(screen.width, WIDTH)) if command else []
        below = len(last) + len(written)
        screen.print(Answer(result, subject.recipe.name, assumed=assumed, notes=notes, below=below))
        if verbose:
            screen.print(plan_details(result))
        for path, label in written:
            screen.print(f"{label:<10}{path}", soft_wrap=True)
        for line in last:
            screen.print(line, style="bold", soft_wrap=True)
    if interrupted:
        raise typer.Exit(128 + SIGINT)
    # Last, after all output: a script reads the plan and the code.
    if not result.fits:
        raise typer.Exit(3)


def text_part_note(recipe: Recipe) -> str | None:
    """Returns the sentence to print if only the text part of a checkpoint is planned; else None."""
    from preheat.models import configs, text_part

    wrapper = configs.wrapper(recipe)
    return text_part.describe(wrapper.model_type) if wrapper is not None else None


def plan_as_written(request: Request, devices: int, price: float | None) -> tuple[Plan, Callable[[], PlanFigures]]:
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
    extended = any(Tag.EXTENDED_CONTEXT in t.provided() for t in added)  # also report the longest context that fits
    result = SearchResult(EvaluatedPlan(recipe, prediction, worst(added), recipe.batch.size, ()))

    def page() -> PlanFigures:
        return figures(replace(result, evaluated=[result.best]), replace(request, world=devices))

    # Settings that were `auto` in the recipe, with the values that the dry run chose.
    settled = {
        f"{name}.{key}": value
        for name, t in recipe.techniques.items()
        for key, value in vars(t).items()
        if key != "on_gpu" and value != getattr(as_written.techniques[name], key)
    }
    return replace(
        explain(result, devices=devices, price=price),
        chosen=prediction.chosen,
        longest_context=longest_as_stated(request) if extended else None,
        settled=settled,
    ), page


@dataclass(frozen=True)
class Fixes:
    """Alternatives to try if nothing fits.

    Attributes:
        methods: recipes of the same model by method.
        request_on: returns the request for another number of devices; None if the recipe does not go with it.
        length: arguments that set the length of rows, up to the number.
    """

    methods: Mapping[str, Recipe]
    request_on: Callable[[int], Request | None]
    length: Sequence[str]


def _searched(
    request: Request, fixes: Fixes, *, aim: str, allow: str, price: float | None, quiet: bool
) -> tuple[Plan, Callable[[], PlanFigures]]:
    """Searches for the best recipe; if nothing fits, the alternatives are what does.

    Args:
        quiet: do not print progress.
    """
    from preheat.core.plan import Alternative
    from preheat.hardware.interrupts import Interrupted
    from preheat.planning.explain import explain, figures
    from preheat.planning.observation_cache import observe_for_others
    from preheat.planning.search.candidates import Space
    from preheat.planning.search.max_context import longest
    from preheat.planning.search.nearest_miss import on_more_devices, with_shorter_rows
    from preheat.planning.search.result import SearchResult
    from preheat.planning.search.search import passes_for, search
    from preheat.planning.worker_pool import worker_pool

    devices, passes = request.devices, passes_for(request.devices)

    def tell(message: str) -> None:
        if not quiet:
            passing(f"dry run: {message}")

    def search_for(request: Request, *, passes: int = passes, confirm: bool = True) -> SearchResult:
        space = Space(request, allow)  # type: ignore[arg-type]
        if aim == "longest-context":
            return longest(space, passes=passes, tell=tell)
        return search(space, aim=aim, passes=passes, confirm=confirm, tell=tell)  # type: ignore[arg-type]

    def fitting(result: SearchResult) -> Iterator[Alternative]:
        """Yields what fits instead, as alternatives."""

        def alternative(
            options: Sequence[str], instead: SearchResult, tradeoff: str, devices: int = devices
        ) -> Alternative:
            would = explain(instead, devices=devices, price=price)
            assert would.recipe is not None
            return Alternative(
                what=f"{' '.join(options)}: {would.chosen}",
                recipe=would.recipe["techniques"],
                peak_gib=would.peak_gib,
                tokens_per_second=would.tokens_per_second,
                seconds_per_step=would.seconds_per_step,
                mfu=would.mfu,
                tradeoff=tradeoff,
                cost=would.cost,
                energy=would.energy,
                options=tuple(options),
            )

        for name, other in fixes.methods.items():
            instead = search_for(replace(request, recipe=other), passes=passes // 2, confirm=False)
            if instead.best.plan.fits_safely:
                base = " on a base in 4 bits" if name == "qlora" else ""
                yield alternative(["--method", name], instead, f"trains an adapter{base}")
        space = Space(request, allow)  # type: ignore[arg-type]
        if shorter := with_shorter_rows(result.best, space):
            length = shorter.recipe.batch.seq_len
            yield alternative(
                [*fixes.length[:-1], f"{fixes.length[-1]}{length}"], SearchResult(shorter), f"rows of {length:,} tokens"
            )
        if more := on_more_devices(result.best, space, fixes.request_on, passes=passes // 2, tell=tell):
            count, instead = more
            hosts = [] if count <= 8 else ["--nodes", str(count // 8)]
            yield alternative(["--count", str(min(count, 8)), *hosts], instead, f"{count} devices", count)

    with worker_pool(observe_for_others):
        result = search_for(request)
        explained = explain(result, devices=devices, price=price)
        if not explained.fits_safely and not result.interrupted:
            instead: list[Alternative] = []
            try:
                instead.extend(fitting(result))
            except Interrupted as signal:
                if signal.number != SIGINT:
                    raise
                explained = replace(explained, searched=replace(explained.searched, interrupted=True))
            explained = replace(explained, alternatives=(*explained.alternatives, *instead))
        if not quiet:
            passing()

    def page() -> PlanFigures:
        return figures(result, request)

    return explained, page


def recipe_text(result: Plan, subject: Subject) -> str:
    """Returns the chosen recipe as YAML; a model given by name gets the path of its checkpoint."""
    from preheat.recipe import Data
    from preheat.recipe.commented_yaml import brief

    assert result.recipe is not None
    values = dict(result.recipe)
    # A model that was given by name trains from its published weights.
    model = values["model"]
    # A model of the hub that is no preset was planned from the folder of its config.json in the hub's cache.
    planned = model["path"] is None or model["preset"] is None
    if subject.checkpoint and planned and model["weights"] != "random":
        values["model"] = {**model, "path": subject.checkpoint}
    text = brief(values)
    if not subject.from_user and values["data"]["source"] == Data().source:
        # As comments: the recipe is valid without them, but trains on the built-in text.
        text += "# data.source is not stated, so a run trains on Python's standard library. Name your data:\n"
        text += "# data: {source: DATA.jsonl}\n"
    return text


def _print_schema() -> None:
    from preheat.cli.views.console import emit
    from preheat.core.plan import Plan
    from preheat.files import schema_of

    emit(schema_of(Plan))


def _list_devices(json: bool) -> None:
    """Prints the catalogue of devices that a plan can be for."""
    from preheat.cli.views.console import emit
    from preheat.cli.views.output import say
    from preheat.hardware.catalogue import accelerators

    # Those with the figures that a plan needs.
    devices = [d for d in accelerators().values() if d.memory and d.bandwidth and d.peaks()]
    if json:
        emit({"devices": {d.name: {"memory": d.memory, "bandwidth": d.bandwidth, "peaks": d.peaks()} for d in devices}})
        return
    row = "{:<18}{:>5}{:>7}{:>7}{:>7}".format

    def cell(value: float | None, unit: float) -> str:
        return "-" if value is None else f"{value / unit:,.0f}"

    say(row("device", "GiB", "GB/s", "bf16", "fp8"))
    for d in devices:
        rates = cell(d.peaks().get("bf16"), 1e12), cell(d.fp8, 1e12)
        say(row(d.name, cell(d.memory, 2**30), cell(d.bandwidth, 1e9), *rates))
    say(
        "\nbf16 (or fp16) and fp8: dense peaks in TFLOP/s; "
        "another device: --gpu name=X,memory=24GiB,bandwidth=1008,bf16=165"
    )


def _served(recipe: Recipe, gpu: Accelerator | None, devices: int, json: bool) -> None:
    """Prints weights, KV cache, rows that fit and peak speed for each combination of weight and cache format."""
    from preheat.cli.views.console import console, emit
    from preheat.cli.views.plan_view import serving_picture
    from preheat.hardware.rates import Rates
    from preheat.planning.analytic import serving, size_of
    from preheat.planning.inference_cache import CACHES, cache_bytes
    from preheat.planning.plan_request import hardware

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
    if note := text_part_note(recipe):
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
