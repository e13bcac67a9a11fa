"""Command-line interface: one module per command. Only this package prints."""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from typing import Annotated, Any, NoReturn

import typer

from preheat import plugins, remote_code
from preheat.cli import (
    bench,
    calibrate,
    chat,
    compress,
    convert,
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
    serve,
    techniques,
    track,
    train,
    try_,
    ui,
    upload,
)
from preheat.cli.bytecode import keep_bytecode
from preheat.cli.options import unused
from preheat.cli.options.remote_code import add_trust_option
from preheat.cli.views.log_warnings import show_warnings
from preheat.cli.views.output import say
from preheat.errors import PreheatError
from preheat.files import to_json
from preheat.hardware.interrupts import Interrupted, raise_on_signal
from preheat.hardware.openmp import choose_waiting
from preheat.sanitize import quote_value, shorten
from preheat.training.launch.local import LAUNCHED
from preheat.training.signals import is_under_agent

__all__ = ["app", "main"]


app = typer.Typer(
    name="preheat",
    help="Know that it fits and how fast it will run before you train; then train it, and see the evidence.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    # A bug keeps Python's plain traceback, which can be copied into a report.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _global(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Goes before the command.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin",
            metavar="MODULE",
            help="A Python module with techniques or trackers. Goes before the command; repeatable.",
        ),
    ] = None,
) -> None:
    if plugin:
        plugins.add(plugin)
    if version:
        from preheat import __version__

        say(__version__)
        raise typer.Exit


app.command("plan", cls=unused.Command)(add_trust_option(plan.plan))
app.command("data", cls=unused.Command)(add_trust_option(data.data))
app.command("train", cls=unused.Command)(add_trust_option(train.train))
app.command("bench", cls=unused.Command)(add_trust_option(bench.bench))
app.command("ui")(ui.ui)
app.command("report")(report.report)
app.command("track")(track.track)
app.command("upload")(upload.upload)
app.command("eval", cls=unused.Command)(add_trust_option(evaluate.evaluate))
app.command("generate", cls=unused.Command)(add_trust_option(generate.generate))
app.command("chat", cls=unused.Command)(add_trust_option(chat.chat))
app.command("compress", cls=unused.Command)(add_trust_option(compress.compress))
app.command("export")(add_trust_option(export.export))
app.command("serve")(add_trust_option(serve.serve))
app.command("demo")(demo.demo)
app.add_typer(models.app, name="models")
app.add_typer(recipes.app, name="recipes")
app.command("init")(recipes.init)
app.add_typer(techniques.app, name="techniques")
app.command("try", cls=unused.Command)(try_.try_)
app.command("convert")(add_trust_option(convert.convert))
app.command("launch")(add_trust_option(launch.launch))
app.command("doctor", cls=unused.Command)(add_trust_option(doctor.doctor))
app.command("calibrate")(calibrate.calibrate)
app.command("nettest", cls=unused.Command)(nettest.nettest)


_COMPUTING = frozenset(
    {"bench", "calibrate", "chat", "compress", "demo", "eval", "export", "generate", "plan", "train", "try"}
)
"""Commands that may compute with all cores."""

_UsageError: Any = next(
    cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException"
)  # typer does not export it


def _see_help(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"; see: {context.command_path} --help" if context is not None else ""


def _describe_usage_error(error: Any) -> str:
    """Returns the message for a usage error; an option that names a recipe key is answered with its `--set`."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", "")
    # Drop pydantic's prefix; shorten arguments that click quotes at full length; join its choices, listed one per line.
    message = " ".join(shorten(word) for word in error.format_message().replace("Value error, ", "").split())
    message = shorten(message, 480).rstrip(".")
    if option and getattr(error, "possibilities", None):  # click suggests even distant names: --help for --lr
        close = difflib.get_close_matches(option, error.possibilities, n=1, cutoff=0.75)
        message = f"No such option: {quote_value(option)}" + (f"; did you mean {close[0]}?" if close else "")
    if context is not None and any(p.name == "set" for p in context.command.params):
        from preheat.recipe.synonyms import hint_recipe_key

        extra = re.search(r"unexpected extra argument\S* \((\S+?)=", message)
        if hint := hint_recipe_key(option or (extra[1] if extra else "")):
            return f"{message.partition('; did you mean')[0]}; {hint}"
    return message + _see_help(error)


def _end(arguments: list[str], message: str, code: int) -> NoReturn:
    """Prints one line per problem on standard error (and a JSON object with --json), then exits."""
    if "--json" in arguments:
        say(to_json({"error": message, "exit_code": code}))
    for line in message.split("\n"):
        say(f"error: {shorten(line, _LONGEST)}", error=True)
    sys.exit(code)


_LONGEST = 680  # characters of a printed message: a last limit, since errors already shorten what they quote


class _DropRepeated(logging.Filter):
    """Drops messages that were logged before."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        first = message not in self.messages
        self.messages.add(message)
        return first


_ONCE = _DropRepeated()


def main(arguments: list[str] | None = None) -> None:
    """Runs a command line and exits.

    Exit codes: 0 success, 1 the run failed, 2 the command or recipe is wrong, 3 the plan does not fit, 4 the data is
    wrong; 130, 143 or 129 after SIGINT, SIGTERM or SIGHUP.
    """
    if arguments is None:  # this process is the command's own; before anything imports torch
        arguments = sys.argv[1:]
        keep_bytecode()
        if _COMPUTING & {*arguments}:
            choose_waiting()
    # These log warnings that the user cannot act on: torchao (imported by transformers if installed), torch's ONNX
    # exporter, and torch.compile for layers with activation checkpointing.
    for noisy in (
        "torchao",
        "torch.utils._pytree",
        "torch.onnx._internal.exporter._registration",
        "torch._higher_order_ops.wrap",
    ):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # It warns each time that a configuration is created, which a plan does for every dry run.
    logging.getLogger("transformers.modeling_rope_utils").addFilter(_ONCE)
    command = typer.main.get_command(app)
    try:
        # In this order: signals become exceptions first, so that consent and warnings are restored when one arrives.
        with raise_on_signal(), remote_code.preserve_consent(), show_warnings():
            # Not standalone: click would print errors and exit by itself. `obj` keeps the command for the hint to
            # resume.
            sys.exit(command.main(arguments, prog_name="preheat", standalone_mode=False, obj=tuple(arguments)) or 0)
    except Interrupted as signal:
        _report_signal(signal, json_wanted="--json" in arguments)
        # A nonzero exit would make torchrun or the scheduler restart this process.
        sys.exit(0 if is_under_agent() and LAUNCHED not in os.environ else signal.exit_code)
    except PreheatError as error:
        if "--debug" in arguments[:1]:
            raise
        _end(arguments, str(error), error.exit_code)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was printed instead
            sys.exit(error.exit_code)
        _end(arguments, _describe_usage_error(error), error.exit_code)
    except typer.Abort:
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has exited, as `head` does
        # Python flushes stdout once more at exit, which would fail again: let it write to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _report_signal(signal: Interrupted, *, json_wanted: bool) -> None:
    if LAUNCHED in os.environ:
        return  # one of several ranks; the launcher prints the message
    if json_wanted:
        resume = {"resume": signal.resume} if signal.resume else {}
        say(to_json({"error": str(signal), "stopped": signal.number.name, "exit_code": signal.exit_code, **resume}))
    else:
        say(f"{signal}{f'; to resume: {signal.resume}' if signal.resume else ''}", error=True)
