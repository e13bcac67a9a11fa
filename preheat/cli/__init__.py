"""The command line: one file a command. The only place that prints."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from preheat import trust
from preheat.cli import (
    bench,
    calibrate,
    chat,
    compress,
    data,
    demo,
    doctor,
    evaluate,
    export,
    generate,
    launch,
    models,
    nettest,
    plan,
    recipes,
    report,
    techniques,
    train,
    try_,
)
from preheat.cli.consent import opens_models
from preheat.cli.warned import warnings_shown
from preheat.errors import PreheatError
from preheat.hardware.interrupts import Interrupted, raising
from preheat.run import to_json
from preheat.training.launch import LAUNCHED

__all__ = ["app", "main"]


app = typer.Typer(
    name="preheat",
    help="Know that it fits and how fast it will run before you train; then train it, and see the evidence.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _global(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. Stands before the command.")] = False,
) -> None:
    if version:
        from preheat import __version__

        print(__version__)
        raise typer.Exit


app.command("plan")(opens_models(plan.plan))
app.command("data")(opens_models(data.data))
app.command("train")(opens_models(train.train))
app.command("bench")(opens_models(bench.bench))
app.command("report")(report.report)
app.command("eval")(opens_models(evaluate.evaluate))
app.command("generate")(opens_models(generate.generate))
app.command("chat")(opens_models(chat.chat))
app.command("compress")(opens_models(compress.compress))
app.command("export")(opens_models(export.export))
app.command("demo")(demo.demo)
app.add_typer(models.app, name="models")
app.add_typer(recipes.app, name="recipes")
app.command("init")(recipes.init)
app.add_typer(techniques.app, name="techniques")
app.command("try")(try_.try_)
app.command("launch")(opens_models(launch.launch))
app.add_typer(doctor.app, name="doctor")
app.command("calibrate")(calibrate.calibrate)
app.command("nettest")(nettest.nettest)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command line and exits: 0 done, 1 the run failed, 2 the command or recipe is wrong, 3 it does not fit, 4 the data is wrong;
    130, 143 or 129 after SIGINT, SIGTERM or SIGHUP."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # transformers imports torchao where it is installed, which then logs warnings that nobody here can act on; so do torch's ONNX exporter
    # and its compiler, of layers that are computed again.
    for noisy in (
        "torchao",
        "torch.utils._pytree",
        "torch.onnx._internal.exporter._registration",
        "torch._higher_order_ops.wrap",
    ):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    command = typer.main.get_command(app)
    try:
        with raising(), trust.consent(), warnings_shown():
            # Exits with 0, or 2 after a message where the command is wrong.
            command.main(arguments, prog_name="preheat", obj=tuple(arguments))
    except Interrupted as signal:
        _tell(signal, json_wanted="--json" in arguments)
        sys.exit(signal.exit_code)
    except PreheatError as error:
        if "--debug" in arguments[:1]:
            raise
        if "--json" in arguments:
            print(to_json({"error": str(error), "exit_code": error.exit_code}))
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever reads what we print went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _tell(signal: Interrupted, *, json_wanted: bool) -> None:
    if LAUNCHED in os.environ:
        return  # one of several processes; whoever started them says it
    if json_wanted:
        resume = {"resume": signal.resume} if signal.resume else {}
        print(to_json({"error": str(signal), "stopped": signal.number.name, "exit_code": signal.exit_code, **resume}))
    else:
        print(f"{signal}{f'; to go on: {signal.resume}' if signal.resume else ''}", file=sys.stderr)
