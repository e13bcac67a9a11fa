"""The `preheat train` command."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options.foreign_options import ForeignOptions
from preheat.cli.options.plan_options import parse_price
from preheat.cli.options.recipe_argument import load_recipe, refuse_model
from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.console import Accelerate, DeepSpeed, From, Json, Set
from preheat.cli.views.output import say
from preheat.core.json_types import JsonObject
from preheat.hardware.interrupts import Interrupted
from preheat.run.layout import PROFILE
from preheat.storage import is_url
from preheat.training.launch.local import LAUNCHED
from preheat.training.signals import is_under_agent

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from preheat.cli.find_lr import LrTest
    from preheat.core.plan import Price
    from preheat.hardware.catalogue import Accelerator
    from preheat.hardware.rates import Rates
    from preheat.recipe import Recipe
    from preheat.training.spikes import Range

__all__ = ["build_resume_command", "run", "train"]


def run(
    recipe: Recipe,
    *,
    out: str | Path | None,
    resume: bool,
    force: bool,
    json: bool,
    again: Sequence[str],
    rates: Rates | None = None,
    planned: bool = False,
    profile: int | None = None,
    price: Price | None = None,
    skip_rows: Sequence[Range] = (),
) -> JsonObject:
    """Trains, writes the report, and prints predictions next to measurements (or the JSON object).

    Args:
        out: a folder, or a URL to which the run is uploaded.
        rates: measured rates to plan with; by default those of this machine.
        planned: the plan was printed already.
        profile: number of steps to profile.
        price: of a device-hour; None: that of the run's last session.
        skip_rows: ranges of rows to leave out.
        again: arguments of the user's command, for the command that resumes an interrupted run.

    Raises:
        typer.Exit: a signal ended the run after its checkpoint was saved.
    """
    from preheat import report as reports
    from preheat.cli.views.console import Alarms, Live, build_console, emit
    from preheat.training.loop import train as start
    from preheat.training.uploader import open_run_folder

    screen = build_console()
    lead = int(os.environ.get("RANK", "0")) == 0  # only rank 0 prints and writes the report
    live = Live(screen, recipe.name, planned=planned) if lead and not json else None
    watch = live or Alarms()
    target = out or Path("runs") / recipe.name
    # The report is written within the first block, so that it is uploaded too.
    with open_run_folder(target, resume=resume, watch=watch) as folder:
        with live or nullcontext(), _add_resume_command(folder, target, again):
            result = start(
                recipe,
                out=folder,
                resume=resume,
                force=force,
                watch=watch,
                rates=rates,
                profile=profile,
                price=price,
                skip_rows=skip_rows,
            )
        if lead and not result.get("already_finished"):
            result["report"] = str(reports.write(result["run"]))
    if is_url(target):
        result["url"] = str(target)
    if result.get("already_finished"):
        if json and lead:
            emit(result)
        elif lead:
            screen.print(_describe_finish(result, recipe), soft_wrap=True)
        return result
    code = _exit_code(result["stopped"])
    if lead:
        # A run that ended early has none.
        if profile is not None and (profiled := Path(result["run"]) / PROFILE / "profile.html").exists():
            result["profile"] = str(profiled)
        # Under the launcher, the parent process prints the command.
        if code and LAUNCHED not in os.environ:
            result["resume"] = build_resume_command(again, target)
        if json:
            emit(result)
        else:
            screen.print(_build_summary(result))
            if "resume" in result:
                say(f"to resume: {result['resume']}")
    if code:
        raise typer.Exit(code)
    return result


def _exit_code(stopped: str | None) -> int:
    """Returns the exit code of a run that a signal ended after its checkpoint was saved.

    It is 0 under torchrun or in a cluster job, which would restart a process that failed.
    """
    import signal

    # 128 + number of the signal, as shells report it.
    known = {number.name: int(number) for number in signal.Signals}
    return 128 + known[stopped] if stopped in known and (LAUNCHED in os.environ or not is_under_agent()) else 0


def build_resume_command(arguments: Sequence[str], folder: str | Path) -> str:
    """Returns the shell command that resumes a run: the user's command with the run's folder or URL and --resume.

    The steps that it profiled are not profiled again, going back to a checkpoint is done once, and the run has the rows
    to leave out on record.
    """
    left, rest = [], iter(arguments)
    for part in rest:
        if part in ("--out", "--profile", "--checkpoint", "--skip-rows"):
            # Its value, which is the next argument.
            next(rest, None)
        elif part not in ("--resume", "--auto-resume") and not part.startswith(
            ("--out=", "--profile=", "--checkpoint=", "--skip-rows=")
        ):
            left.append(part)
    return shlex.join(["preheat", *left, "--out", str(folder), "--resume"])


def _describe_finish(result: JsonObject, recipe: Recipe) -> Text:
    from rich.text import Text

    early = {"patience": "a larger stop.patience", "target_loss": "a lower stop.target_loss"}
    if (reason := result.get("reason")) in early:
        return Text(
            f"{result['run']}: is finished already, at step {result['steps']:,}; nothing was written. To train longer, "
            f"resume it with {early[reason]}: --set stop.{reason}=VALUE (null: none)"
        )
    limits = {key: limit for key in ("tokens", "epochs", "hours") if (limit := getattr(recipe.stop, key))}
    # A run without any limit of its own ended at its number of steps.
    if recipe.stop.max_steps or not limits:
        limits["max_steps"] = result["steps"]
    later = " ".join(
        f"--set stop.{key}={2 * limit:g}" for key, limit in limits.items()
    )  # the first limit reached ends the run
    return Text(
        f"{result['run']}: is finished already, at step {result['steps']:,}; nothing was written. To train longer, "
        f"resume it with a later end: {later}"
    )


@contextmanager
def _add_resume_command(folder: Path, target: str | Path, arguments: Sequence[str]) -> Iterator[None]:
    """Adds the command that resumes the run to an `Interrupted` error, if the folder holds a run by then.

    Args:
        target: the folder, or the URL that it is uploaded to.
    """
    from preheat.run.reader import count_sessions

    before = count_sessions(folder)
    try:
        yield
    except Interrupted as signal:
        sessions = count_sessions(folder)
        # Before the run has resumed, its checkpoints are as they were: the same command goes back and skips rows again.
        again = shlex.join(["preheat", *arguments])
        resume = build_resume_command(arguments, target) if sessions > before else again if sessions else None
        raise Interrupted(signal.number, resume) from None


def _build_summary(result: JsonObject) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from preheat.core.units import format_memory, format_rate

    table = Table("", "predicted", "measured", "difference", box=None, pad_edge=False)
    shown = (
        ("peak memory", "peak_gib", format_memory),
        ("  allocated", "allocated_gib", format_memory),
        ("  reserved", "reserved_gib", format_memory),
        ("  context", "context_gib", format_memory),
        ("tokens/s", "tokens_per_second", format_rate),
    )
    for label, key, show in shown:
        expected, measured = result["predicted"].get(key), result.get(key)
        if measured is not None:
            off = f"{expected / measured - 1:+.0%}" if measured and expected is not None else "-"
            table.add_row(label, show(expected), show(measured), off)
    for row in _build_usage_rows(result):
        table.add_row(*row)
    end = f"stopped by {result['stopped']} at" if result["stopped"] else "done:"
    # A stopped run ends without its last evaluation.
    figures = {"loss": result["loss"], "validation loss": None if result["stopped"] else result["validation_loss"]}
    machine, shared = result.get("machine") or {}, []
    if machine.get("alone") is False:
        text = (
            f"measured while other processes used {machine['other_cores']:.1f} of {machine['cpus']} cores, so this run "
            "does not correct later plans"
        )
        shared.append(Text(text, style="yellow"))
    loss = "".join(
        f", {name} {value:.4f}" for name, value in figures.items() if value is not None and math.isfinite(value)
    )
    if best := result.get("best"):
        loss += f"; best {best['name']} {best['value']:.4f} at step {best['step']:,}"
    if target := result.get("target"):
        time = f"{target['tokens']:,} tokens and {target['seconds']:.1f} s of training"
        loss += f"; stop.target_loss {target['loss']:g} reached in {time}"
    skipped = f" ({count:,} skipped: fp16 overflow)" if (count := result.get("skipped_steps")) else ""
    return Group(
        Text(f"{end} step {result['steps']:,}{skipped}{loss}", style="bold"),
        table,
        *shared,
        Text(f"run: {result['run']}\nreport: {result['report']}"),
        *([Text(f"uploaded to: {result['url']}")] if "url" in result else []),
        *([Text(f"profile: {result['profile']}")] if "profile" in result else []),
    )


def _build_usage_rows(result: JsonObject) -> list[tuple[str, str, str, str]]:
    """Returns the rows of a run's energy and cost. Their predictions are of the whole run: only its end is compared."""
    from preheat.core.units import format_three_digits

    rows = []
    for label, key in (
        (f"energy, kWh ({', '.join(result.get('energy_sources') or ())})", "energy_kwh"),
        (f"cost, {result.get('currency')}", "cost"),
    ):
        if (measured := result.get(key)) is not None:
            expected = None if result["stopped"] else result["predicted"].get(key)
            off = f"{expected / measured - 1:+.0%}" if measured and expected is not None else "-"
            rows.append(
                (label, "-" if expected is None else format_three_digits(expected), format_three_digits(measured), off)
            )
    return rows


def _run_dry(
    recipe: str,
    overrides: list[str],
    *,
    gpu: Accelerator | None,
    out: str | None,
    resume: bool,
    nproc: int,
    price: Price | None,
    foreign: ForeignOptions,
    json: bool,
) -> None:
    """Checks the data and the run's folder and plans the recipe unchanged; exits with code 3 if it does not fit."""
    from preheat.cli.options.subject import find_subject
    from preheat.planning.plan_request import choose_hardware, request_of

    # Reports recipe errors before torch is imported, which takes seconds.
    subject = find_subject(recipe, overrides, devices=nproc, foreign=foreign)
    # These import torch.
    from preheat.cli.plan_output import finish, text_part_note
    from preheat.cli.plan_training import plan_as_written
    from preheat.cli.views.console import Alarms, build_console
    from preheat.engine.device import resolve_device
    from preheat.errors import RecipeError
    from preheat.models import configs
    from preheat.models.presets import require_weights
    from preheat.run.remote_copy import RemoteCopy
    from preheat.run.writer import check_folder
    from preheat.training.session import read_data

    if not subject.from_user:
        raise RecipeError(f"{recipe}: --dry-run takes a recipe; preheat plan takes a model, and writes one with --out")
    # The folder first: reading the data may take minutes.
    if out is not None and is_url(out):
        if resume:
            find_local_folder(out)
        else:
            RemoteCopy(out).check(resume=False, say=Alarms().alarm)
    check_folder(_find_run_folder(out, subject.recipe.name), resume=resume)
    devices = subject.recipe.parallel.devices or 1
    # None: this process alone, on this machine.
    world = None if gpu is None else devices
    device = resolve_device(subject.recipe)[0] if gpu is None else choose_hardware(gpu, subject.recipe, 1)[0]
    # A model that is absent is planned by its preset: there is nothing to read.
    if subject.absent is None:
        require_weights(subject.recipe)
        data, _, _ = read_data(
            subject.recipe, configs.source_config(subject.recipe), Alarms(), device=device, world=world
        )
        if not json:
            build_console().print(f"data: {data.source}; {data.text()}", soft_wrap=True, markup=False, highlight=False)
    request = request_of(subject.recipe, gpu, world=world, per_host=min(devices, 8))
    result, _ = plan_as_written(request, devices, None if price is None else price.per_hour)
    result = replace(
        result,
        text_part=text_part_note(subject.recipe),
        currency=price.currency if price is not None else result.currency,
        absent=subject.absent,
    )
    again = [part for item in overrides for part in ("--set", item)]
    # For another device, the run starts elsewhere.
    command = ["preheat", "train", recipe, *again] if gpu is None and nproc < 2 and result.fits else []
    finish(result, subject, json=json, command=command)


def _launch(
    command: list[str],
    folder: Path,
    target: str | Path,
    *,
    nproc: int,
    restarts: int,
    json: bool,
    typed: Sequence[str],
) -> None:
    """Trains in several processes and exits with their exit code."""
    from preheat.cli.views.console import Alarms, emit
    from preheat.training.launch.local import start
    from preheat.training.recovery.fallback_log import find_oom_records

    with _add_resume_command(folder, target, typed):
        # A failure that has left a record of exhausted memory restarts with the next fallback, whatever --restarts is.
        ended = start(
            command,
            processes=nproc,
            restarts=restarts,
            again=lambda: bool(find_oom_records(folder)),
            say=Alarms().alarm,
        )
        if ended.signal is not None and not (json and ended.result):
            raise Interrupted(ended.signal)
    if json and ended.result:
        emit(ended.result | ({"resume": build_resume_command(typed, target)} if ended.signal is not None else {}))
    raise typer.Exit(ended.code)


def _find_run_folder(out: str | None, name: str) -> Path:
    """Returns the local folder of a run: of a URL, the one that it is uploaded from."""
    from preheat.run.remote_copy import RemoteCopy
    from preheat.storage import require_scheme

    require_scheme("--out", out or "")
    if out is not None and is_url(out):
        return RemoteCopy(out).folder
    return Path(out or Path("runs") / name)


def _holds_run(target: str | Path) -> bool:
    """Returns True if there is a run to resume in a folder or at a URL."""
    from preheat.run.remote_copy import RemoteCopy

    return RemoteCopy(str(target)).holds_run() if is_url(target) else (Path(target) / "recipe.yaml").exists()


def _open_remote_run(url: str, out: str | None, *, resume: bool) -> tuple[str, str]:
    """Returns the recipe of the run at a URL, as a local file, and the URL as its output folder."""
    from preheat.errors import RecipeError
    from preheat.run.remote_copy import RemoteCopy

    if not resume:
        raise RecipeError(f"{url}: is not a recipe; to resume the run there, add --resume")
    if out is not None and out.rstrip("/") != url.rstrip("/"):
        raise RecipeError(f"--out {out}: the run at {url} is resumed there; leave --out out")
    return str(RemoteCopy(url).read_recipe()), url


def _at_checkpoint(
    recipe: Recipe, folder: Path, out: str | None, checkpoint: str | None, *, resume: bool
) -> AbstractContextManager[None]:
    """Returns a context that goes back to a checkpoint, once and before processes start: not at each restart."""
    from preheat.cli.views.console import Alarms
    from preheat.errors import RecipeError

    if checkpoint is None:
        return nullcontext()
    if is_url(out):
        find_local_folder(str(out))
    if not resume:
        raise RecipeError(f"--checkpoint {checkpoint}: says where --resume continues; add --resume, or leave it out")
    if "RANK" in os.environ:
        raise RecipeError(
            f"--checkpoint {checkpoint}: torchrun would go back to it at each restart; leave it out, and rename the "
            f"later folders in {folder / 'checkpoints'} to step-M.aside-1"
        )
    from preheat.training.rewind import rewound

    return rewound(recipe, folder, checkpoint, Alarms().alarm)


def _parse_rows(text: str) -> Range:
    """Returns the range of --skip-rows.

    Raises:
        RecipeError: it is none, or empty.
    """
    from preheat.errors import RecipeError
    from preheat.sanitize import quote_value

    match = re.fullmatch(r"\s*([0-9]{1,15})\s*\.\.\s*([0-9]{1,15})\s*", text[:60])
    if match is None or int(match[1]) >= int(match[2]):
        raise RecipeError(
            f"--skip-rows: {quote_value(text)}: must be A..B with A below B, such as --skip-rows 640..704, which "
            "leaves out 64 rows"
        )
    return int(match[1]), int(match[2])


def _choose_lr_test(
    *, find_lr: bool, lr_range: str | None, lr_steps: int | None, others: Mapping[str, bool]
) -> LrTest | None:
    """Returns the learning-rate range test to run; None for a training.

    Args:
        others: option -> whether the user gave it; a test does not read them.

    Raises:
        RecipeError: an option has no effect beside the others.
    """
    from preheat.cli.find_lr import parse_lr_test
    from preheat.errors import RecipeError

    if not find_lr:
        for option, value in (("--lr-range", lr_range), ("--lr-steps", lr_steps)):
            if value is not None:
                raise RecipeError(f"{option} {value}: is of the learning-rate range test; add --find-lr")
        return None
    if unread := next((option for option, given in others.items() if given), None):
        raise RecipeError(f"{unread}: --find-lr tests learning rates and trains no run; leave {unread} out")
    return parse_lr_test(lr_range, lr_steps)


def train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help=(
                "A recipe file, the name of a built-in recipe (see: preheat recipes), or the configuration, script "
                "(.py, .sh) or notebook of another trainer: axolotl, LLaMA-Factory, TRL, unsloth, ...; with --resume "
                "also the URL of a run."
            ),
        ),
    ],
    set: Set = None,
    from_: From = None,
    deepspeed: DeepSpeed = None,
    accelerate: Accelerate = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FOLDER|URL",
            help=(
                "The run's folder; default: runs/NAME. With s3://, gs://, az:// or hf://BUCKET/FOLDER, the run is "
                "uploaded there after each checkpoint."
            ),
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help=(
                "Resume the run in that folder, or at that URL, from its last intact checkpoint: bit for bit on CPUs, "
                "and on a GPU with hardware.deterministic=true."
            ),
        ),
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option("--auto-resume", help="Resume the run if that folder holds one, otherwise start it."),
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="best|last|N",
            help=(
                "With --resume: continue from the best checkpoint or that of step N; later ones are renamed to "
                "step-M.aside-1, and back if the run cannot resume."
            ),
        ),
    ] = None,
    skip_rows: Annotated[
        list[str] | None,
        typer.Option(
            "--skip-rows",
            metavar="A..B",
            help=(
                "Leave out rows A to B - 1 in the order of training, counted from 0, such as the batches before a "
                "spike; with --resume and --checkpoint, those after the checkpoint. Repeatable."
            ),
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train even if the plan predicts that it does not fit.")
    ] = False,
    nproc: Annotated[
        int,
        typer.Option(
            "--nproc",
            min=1,
            help="Processes on this host, one per device; the recipe's techniques decide how the work is split.",
        ),
    ] = 1,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts",
            min=0,
            help="With --nproc: maximum number of restarts from the last checkpoint after a process died.",
        ),
    ] = 0,
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track",
            metavar="TRACKER",
            help=(
                "Send the run to a tracker while it trains: trackio, wandb, mlflow, tensorboard, swanlab, webhook, "
                "or one of a package. Repeatable; the same as tracking.to in the recipe."
            ),
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help=(
                "Stop before the first step and write no files: read the data, build the model, simulate a step, plan."
            ),
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="With --dry-run: plan for another device, by name or by its figures, as in preheat plan.",
        ),
    ] = None,
    profile: Annotated[
        int | None,
        typer.Option(
            "--profile",
            metavar="STEPS",
            help=(
                "After 3 steps to warm up, profile so many steps: where their time goes, beside the plan. Writes "
                "profile/ in the run's folder: a page, its figures, and a trace for Perfetto or TensorBoard."
            ),
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            "--price",
            metavar="AMOUNT",
            help=(
                "Price of a device with its currency and time, such as 2.5USD/h or 1800EUR/month; adds the cost, "
                "predicted and real. A resumed run keeps its price."
            ),
        ),
    ] = None,
    find_lr: Annotated[
        bool,
        typer.Option(
            "--find-lr",
            help=(
                "Test learning rates instead of training: raise the rate over some steps until the loss diverges, and "
                "suggest one. Writes lr-range.json and a page to --out; default: runs/NAME-find-lr."
            ),
        ),
    ] = False,
    lr_range: Annotated[
        str | None,
        typer.Option("--lr-range", metavar="LOW..HIGH", help="With --find-lr: the rates to test; default: 1e-6..1."),
    ] = None,
    lr_steps: Annotated[
        int | None, typer.Option("--lr-steps", metavar="N", help="With --find-lr: steps of the test; default: 100.")
    ] = None,
    json: Json = False,
) -> None:
    """Train a recipe, print the prediction next to the measurement, and write a report.

    Example: `preheat train demo --set stop.max_steps=50 --out runs/first`; after a crash, the same with `--resume`. On
    several devices: `preheat train demo --set techniques.fsdp={} --nproc 2`; on several hosts under torchrun, in jobs
    that `preheat launch` writes. To check a run before it starts: `preheat train demo --dry-run`.
    """
    from preheat.errors import RecipeError
    from preheat.hardware.catalogue import resolve_accelerator

    test = _choose_lr_test(
        find_lr=find_lr,
        lr_range=lr_range,
        lr_steps=lr_steps,
        others={
            "--resume": resume,
            "--auto-resume": auto_resume,
            "--checkpoint": checkpoint is not None,
            "--skip-rows": bool(skip_rows),
            "--profile": profile is not None,
            "--restarts": restarts > 0,
            "--price": price is not None,
            "--track": bool(track),
            "--dry-run": dry_run,
        },
    )
    if is_url(recipe):
        recipe, out = _open_remote_run(recipe, out, resume=resume or auto_resume)
        resume = True
    refuse_model(recipe, "train")
    device_hour = None if price is None else parse_price(price)
    # An override like any other, so that the run's recipe names its trackers.
    set = [*(set or []), *([f"tracking.to=[{', '.join(track)}]"] if track else [])]
    if profile is not None and profile < 1:
        raise RecipeError(f"--profile {profile}: must be at least 1, the number of steps to profile")
    ranges = [_parse_rows(text) for text in skip_rows or ()]
    if dry_run and ranges:
        raise RecipeError(f"--skip-rows {(skip_rows or [''])[0]}: --dry-run trains on no rows; leave it out")
    if dry_run and checkpoint is not None:
        raise RecipeError(f"--checkpoint {checkpoint}: renames later checkpoints, and --dry-run writes nothing")
    foreign = ForeignOptions(from_, deepspeed, accelerate)
    if dry_run:
        device = None if gpu is None else resolve_accelerator(gpu)
        _run_dry(
            recipe, set, gpu=device, out=out, resume=resume, nproc=nproc, price=device_hour, foreign=foreign, json=json
        )
        return
    if gpu is not None:
        raise RecipeError("--gpu: a run uses the devices of this machine; add --dry-run to plan it for another")
    # With several processes, rank 0 prints the warnings.
    world = int(os.environ.get("WORLD_SIZE", nproc))
    warn = nproc < 2 or "RANK" in os.environ
    read = load_recipe(recipe, "train", set, foreign=foreign, devices=world if world > 1 else None, warn=warn)
    folder, target = _find_run_folder(out, read.name), out or Path("runs") / read.name
    with _at_checkpoint(read, folder, out, checkpoint, resume=resume):
        # Under torchrun (RANK is set) the processes exist already.
        if nproc > 1 and "RANK" not in os.environ:
            # The same command for each process, without the options of the launcher.
            command = ["train", recipe, *(part for item in set for part in ("--set", item))]
            command += [part for typed in foreign.list_typed().items() for part in typed]
            command += ["--out", out] if out else []
            # A process may die before the run has begun: --resume would then be an error, --auto-resume starts it.
            command += ["--auto-resume"] if auto_resume or restarts else ["--resume"] if resume else []
            command += ["--profile", str(profile)] if profile is not None else []
            command += ["--price", price] if price is not None else []
            command += [part for first, end in ranges for part in ("--skip-rows", f"{first}..{end}")]
            command += test.list_arguments() if test is not None else []
            command += [flag for flag, on in (("--force", force), ("--json", json)) if on]
            _launch(command, folder, target, nproc=nproc, restarts=restarts, json=json, typed=context.obj)
            return
        if test is not None:
            from preheat.cli.find_lr import find

            find(read, test, out, force=force, json=json)
            return
        resume = resume or (auto_resume and _holds_run(target))
        run(
            read,
            out=out,
            resume=resume,
            force=force,
            json=json,
            again=context.obj,
            profile=profile,
            price=device_hour,
            skip_rows=ranges,
        )
