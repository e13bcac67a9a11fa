"""The `preheat plan` command: plans training or serving, or sizes a model."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options.plan_options import (
    Aim,
    Method,
    PlanOptions,
    ServingPlanOptions,
    TrainingPlanOptions,
    parse_price,
)
from preheat.cli.views.console import Accelerate, DeepSpeed, From, Json, Set
from preheat.core import Numerics

if TYPE_CHECKING:
    from preheat.planning.prices import Offer

__all__ = ["plan"]


def plan(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RECIPE",
            help=(
                "A model by its name on the hub, its folder or its size (15M); a recipe file, or a built-in recipe's "
                "name; or the configuration, script (.py, .sh) or notebook of another trainer: axolotl, LLaMA-Factory, "
                "TRL, unsloth, torchtitan, Megatron-LM, ..."
            ),
        ),
    ] = None,
    set: Set = None,
    from_: From = None,
    deepspeed: DeepSpeed = None,
    accelerate: Accelerate = None,
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
        Method | None,
        typer.Option(
            "--method",
            help="For a model: train all weights (default), an adapter, or an adapter on a 4-bit base.",
        ),
    ] = None,
    aim: Annotated[
        Aim | None,
        typer.Option(
            "--aim",
            help="What to search for; default: fastest for a model; a recipe is planned as it is, without a search.",
        ),
    ] = None,
    allow: Annotated[
        Numerics | None,
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
    prices: Annotated[
        Path | None,
        typer.Option(
            "--prices",
            metavar="FILE",
            help=(
                "With --aim cheapest: a file of dated prices (YAML, or a vms.csv of SkyPilot's catalogue), whose "
                "devices are compared; --gpu H100,L40S names some of them."
            ),
        ),
    ] = None,
    solve: Annotated[
        str | None,
        typer.Option(
            "--solve",
            metavar="KEY",
            help=(
                "Find the largest value of a numeric key that fits, such as batch.seq_len or batch.size, or of a key "
                "of another trainer's file, such as sequence_len."
            ),
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write another trainer's file with the changes that help most; comments and order are kept.",
        ),
    ] = None,
    inference: Annotated[
        bool,
        typer.Option("--inference", help="Plan serving: weights, KV cache, how many sequences fit, and peak speed."),
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            max=2**24,
            help="With --inference: sequences at a time, each of --length tokens; adds the devices that they need.",
        ),
    ] = None,
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
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", help="Write the data of the page's plots, such as all candidates, to this JSON file."
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help=(
                "Also print memory by phase, all alternatives, why others were rejected, and every key of another "
                "trainer's file."
            ),
        ),
    ] = False,
    json: Json = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of what --json prints, and plan nothing.")
    ] = False,
) -> None:
    """Predict memory and speed by a dry run, for this machine or any GPU; explain what does not fit.

    Example: `preheat plan Qwen/Qwen3-8B --gpu RTX-4090 --method lora`, `preheat plan llama-3.1-70b --gpu H100 --count 8
    --nodes 8`. A recipe is planned as it is: `preheat plan demo --set batch.size=64`; so is the configuration of
    another trainer: `preheat plan my_axolotl.yaml --gpu H100`. Exit code 3: it does not fit.
    """
    from preheat.errors import RecipeError
    from preheat.hardware.catalogue import resolve_accelerator

    if schema:
        _print_schema()
        return
    parsed_price = None if price is None else parse_price(price)
    if gpu == "list":
        _list_devices(json)
        return
    if compute_budget is not None:
        _compute_optimal(compute_budget, json)
        return
    # Errors of devices and prices come before torch is imported, which takes seconds.
    contradicting = {"--price": price, "--solve": solve, "--nodes": nodes if nodes > 1 else None}
    offers = () if prices is None else _choose_offers(prices, gpu, count, aim, contradicting)
    accelerator = None if gpu is None or offers else resolve_accelerator(gpu)
    if what is None and not set:
        raise RecipeError("preheat plan: name a model or a recipe, such as: preheat plan Qwen/Qwen3-8B --gpu RTX-4090")
    # Set before torch is imported: garbage collection would take a tenth of torch's import time.
    gc.set_threshold(50_000)
    asked = PlanOptions(
        what=what,
        set=tuple(set or ()),
        gpu=accelerator,
        count=count,
        nodes=nodes,
        length=length,
        json=json,
        from_=from_,
        deepspeed=deepspeed,
        accelerate=accelerate,
    )
    if inference:
        from preheat.cli.plan_serving import plan_serving

        plan_serving(ServingPlanOptions(**vars(asked), batch=batch))
        return
    from preheat.cli.plan_training import plan_training

    typed = {
        **asked.foreign.list_typed(),
        "--gpu": gpu,
        "--count": count,
        "--nodes": nodes if nodes > 1 else None,
        "--length": length,
        "--batch-tokens": batch_tokens,
        "--method": method,
        "--aim": aim,
        "--allow": allow,
        "--price": price,
        "--solve": solve,
    }
    training = TrainingPlanOptions(
        **vars(asked),
        batch_tokens=batch_tokens,
        method=method,
        aim=aim,
        allow=allow,
        price=parsed_price,
        solve=solve,
        write=write,
        out=out,
        html=html,
        figures=figures,
        verbose=verbose,
    )
    if offers:
        from preheat.cli.plan_training import plan_for_prices

        again = _remove_output_options(what, asked.set, {**typed, "--gpu": None, "--count": None, "--aim": None})
        plan_for_prices(training, offers, again)
        return
    plan_training(training, _remove_output_options(what, asked.set, typed))


def _choose_offers(
    prices: Path, gpu: str | None, count: int | None, aim: Aim | None, contradicting: Mapping[str, object]
) -> Sequence[tuple[Offer, list[int]]]:
    """Returns the offers of a file of prices; raises RecipeError if another option contradicts it."""
    from preheat.cli.plan_cheapest import choose_offers
    from preheat.errors import RecipeError

    if aim != "cheapest":
        raise RecipeError("--prices: compares devices by their cost; add --aim cheapest, or use --price for one device")
    for option, value in contradicting.items():
        if value is not None:
            raise RecipeError(f"--prices: compares devices of one host by the prices of a file; leave {option} out")
    return choose_offers(prices, gpu, count)


def _remove_output_options(what: str | None, overrides: Sequence[str], typed: Mapping[str, object]) -> list[str]:
    """Returns the command that was typed, without the options of its output."""
    sets = [part for item in overrides for part in ("--set", item)]
    options = [part for name, value in typed.items() if value is not None for part in (name, str(value))]
    return ["preheat", "plan", *([what] if what is not None else []), *sets, *options]


def _print_schema() -> None:
    from preheat.cli.views.console import emit
    from preheat.core.plan import Plan
    from preheat.files import build_schema

    emit(build_schema(Plan))


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

    def format_cell(value: float | None, unit: float) -> str:
        return "-" if value is None else f"{value / unit:,.0f}"

    say(row("device", "GiB", "GB/s", "bf16", "fp8"))
    for d in devices:
        rates = format_cell(d.peaks().get("bf16"), 1e12), format_cell(d.fp8, 1e12)
        say(row(d.name, format_cell(d.memory, 2**30), format_cell(d.bandwidth, 1e9), *rates))
    say(
        "\nbf16 (or fp16) and fp8: dense peaks in TFLOP/s; "
        "another device: --gpu name=X,memory=24GiB,bandwidth=1008,bf16=165"
    )


def _compute_optimal(flops: float, json: bool) -> None:
    """Prints the compute-optimal model size and tokens for a budget of FLOPs, by three approaches."""
    from preheat.cli.views.console import build_console, emit
    from preheat.cli.views.plan_view import build_budget
    from preheat.planning.analytic import compute_optimal

    approaches = [vars(o) for o in compute_optimal(flops)]
    if json:
        emit({"flops": flops, "approaches": approaches})
    else:
        build_console().print(build_budget(flops, approaches))
