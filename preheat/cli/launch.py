"""The `preheat launch` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from preheat.cli.options.foreign_options import ForeignOptions
from preheat.cli.options.recipe_argument import load_recipe
from preheat.cli.views.console import Accelerate, DeepSpeed, From, Json, RecipeArgument, Set
from preheat.cli.views.output import say
from preheat.files import write_generated
from preheat.recipe import field_docs
from preheat.training.launch import Job
from preheat.training.launch.job import Kind

__all__ = ["launch"]

# The options are the fields of a job: one text documents both.
_HELP = field_docs(Job)


def launch(
    recipe: RecipeArgument,
    scheduler: Annotated[
        Literal["slurm", "kubernetes", "skypilot", "ray"],
        typer.Option(
            "--scheduler",
            help="The scheduler: an sbatch script, Kubeflow manifests, a SkyPilot task, or an entry script for Ray.",
        ),
    ],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help=_HELP["nodes"])] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=0, help=_HELP["gpus_per_node"])] = 0,
    processes_per_node: Annotated[
        int | None, typer.Option("--processes-per-node", min=1, help=_HELP["processes_per_node"])
    ] = None,
    cpus_per_node: Annotated[int | None, typer.Option("--cpus-per-node", min=1, help=_HELP["cpus_per_node"])] = None,
    memory: Annotated[str | None, typer.Option("--memory", help=_HELP["memory"])] = None,
    out: Annotated[str | None, typer.Option("--out", help=_HELP["out"])] = None,
    storage: Annotated[str | None, typer.Option("--storage", help=_HELP["storage"])] = None,
    time: Annotated[str | None, typer.Option("--time", help=_HELP["time"])] = None,
    save_within: Annotated[int, typer.Option("--save-within", min=10, help=_HELP["save_within"])] = 300,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help=_HELP["restarts"])] = 3,
    port: Annotated[int | None, typer.Option("--port", help=_HELP["port"])] = None,
    interface: Annotated[str | None, typer.Option("--interface", help=_HELP["interface"])] = None,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="KEY=VALUE", help=_HELP["env"])] = None,
    setup: Annotated[list[str] | None, typer.Option("--setup", metavar="LINE", help=_HELP["setup"])] = None,
    image: Annotated[str | None, typer.Option("--image", help=_HELP["image"])] = None,
    accelerator: Annotated[str | None, typer.Option("--accelerator", help=_HELP["accelerator"])] = None,
    partition: Annotated[str | None, typer.Option("--partition", help=_HELP["partition"])] = None,
    account: Annotated[str | None, typer.Option("--account", help=_HELP["account"])] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help=_HELP["namespace"])] = None,
    kind: Annotated[Kind | None, typer.Option("--kind", help=_HELP["kind"])] = None,
    set: Set = None,
    from_: From = None,
    deepspeed: DeepSpeed = None,
    accelerate: Accelerate = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The output file; default: standard output.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a cluster job that trains a recipe, with rendezvous, restarts and environment; a restarted job resumes the
    run.

    Example: `preheat launch demo --scheduler slurm --nodes 2 --gpus-per-node 4 --time 4:00:00 --set techniques.fsdp={}
    -o demo.sbatch`
    """
    from preheat import recipe as recipes
    from preheat.cli.views.console import build_console, emit
    from preheat.training.launch import render_job, submit

    foreign = ForeignOptions(from_, deepspeed, accelerate)
    world = nodes * (processes_per_node or gpus_per_node or 1)
    job = Job(
        # Another trainer's file leaves the number of devices to the job.
        recipe=load_recipe(recipe, "launch", set, foreign=foreign, devices=world if world > 1 else None),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        processes_per_node=processes_per_node,
        cpus_per_node=cpus_per_node,
        memory=memory,
        out=out,
        storage=storage,
        time=time,
        save_within=save_within,
        restarts=restarts,
        port=port,
        interface=interface,
        env=tuple(env or ()),
        setup=tuple(setup or ()),
        image=image,
        accelerator=accelerator,
        partition=partition,
        account=account,
        namespace=namespace,
        kind=kind,
    )
    # Checks the job first; nothing is written for one that cannot run.
    text = render_job(job, scheduler)
    built_in = job.recipe.data.source == recipes.Data().source
    if not json and built_in and not recipes.has_key(recipe, "data.source", set or []):
        build_console(error=True).note(
            f"{recipe}: data.source is not stated, so the job trains on Python's standard library; name the data: "
            "--set data.source=PATH"
        )
    if output is not None:
        write_generated(output, text, "# written by preheat launch")
    summary = {"scheduler": scheduler, **job.described(), "path": str(output) if output else None}
    if json:
        # Without a file there is nothing to submit.
        emit(
            summary | ({} if output else {"job": text}) | {"submit": submit(scheduler, str(output)) if output else None}
        )
    elif output is None:
        say(text, end="")
    else:
        mesh = " x ".join(f"{axis} {size}" for axis, size in summary["mesh"].items()) or "1 device"
        screen = build_console()
        screen.print(
            f"{output}: {summary['devices']} devices on {nodes} host{'s' if nodes > 1 else ''}, {mesh}", soft_wrap=True
        )
        screen.print(f"submit it with: {submit(scheduler, str(output))}", soft_wrap=True)
