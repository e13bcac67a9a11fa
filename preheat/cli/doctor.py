"""The `preheat doctor` command: findings about this machine, a recipe on it, or a run that ran out of memory."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.views.console import Json, Set
from preheat.core.finding import AppliedFix, Diagnosis, Finding, FixKind, Severity
from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.text import Text

    from preheat.hardware.checks.probing import Probe

__all__ = ["doctor"]

_OOM = "oom"


def doctor(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE | oom RUN]",
            help="A recipe to check on this machine, or `oom` and the folder of a run that ran out of memory.",
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="The folder of a run, after `oom`.", hidden=True)
    ] = None,
    set: Set = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Run the fixes that preheat can run, each after a question; then check again.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --fix: do not ask, also before packages are installed.")
    ] = False,
    json: Json = False,
) -> None:
    """List problems of this machine, each with its cost and the command that mends it: Python, torch, driver, GPUs,
    kernels, compiler, threads, memory, disk, cache, hub. With a recipe, what concerns it comes first.

    `oom RUN` shows what filled the memory of a run, the three cheapest fallbacks by the plan, and allocator settings
    if the free memory was fragmented.

    Exit code 1 if something would stop a run.

    Example: `preheat doctor`, `preheat doctor demo --fix`, `preheat doctor oom runs/demo`
    """
    from preheat.errors import RecipeError

    if what == _OOM:
        if run is None:
            raise RecipeError("doctor oom: names no run; add the folder of one that ran out of memory: RUN")
        _diagnose_memory(run, json=json)
        return
    if run is not None:
        raise RecipeError(f"{run}: one recipe is checked at a time; leave it out, or write: preheat doctor oom {run}")
    if what is None and set:
        raise RecipeError(f"--set {set[0]}: no recipe is named that it would change; name one: preheat doctor RECIPE")
    if fix and not yes and (json or not sys.stdin.isatty()):
        raise RecipeError("--fix: nobody can be asked here; add --yes, or run it in a terminal without --json")
    name, probes = _list_probes(what, set)
    findings, fixed = _run_probes(probes, quiet=json), []
    if fix and (commands := _list_commands(findings)):
        fixed = _apply_fixes(commands, ask=not yes, quiet=json)
        findings = _run_probes(probes, quiet=json) if fixed else findings
    diagnosis = Diagnosis(
        any(finding.severity is Severity.STOPS for finding in findings), tuple(findings), name, tuple(fixed)
    )
    _show(diagnosis, json=json)
    if diagnosis.stops:
        raise typer.Exit(1)


def _diagnose_memory(run: Path, *, json: bool) -> None:
    from preheat.cli.views.console import build_console, emit
    from preheat.training.recovery.oom_report import diagnose

    diagnosis = diagnose(run)
    if json:
        emit(diagnosis)
    else:
        build_console().print(_render(diagnosis, run), soft_wrap=True)


def _list_probes(what: str | None, overrides: Sequence[str] | None) -> tuple[str | None, list[Probe]]:
    """Returns the name of the recipe, and the checks to run."""
    from preheat.hardware.checks.machine import list_probes
    from preheat.hardware.checks.probing import Probe

    if what is None:
        return None, list_probes()
    from preheat import recipe as recipes
    from preheat.cli.options.recipe_argument import load_recipe
    from preheat.recipe.yaml_io import write

    # Here, because a wrong recipe is an error of the command, not of the machine.
    recipe = load_recipe(what, "doctor", overrides)
    text = write(recipes.to_values(recipe))
    check = Probe("recipe", "preheat.training.recipe_findings:check_recipe", (text,), 180, Severity.STOPS)
    return recipe.name, [check, *list_probes()]


def _run_probes(probes: Sequence[Probe], *, quiet: bool) -> list[Finding]:
    """Returns the findings of all checks: those of the recipe first, then by severity, then in the checks' order."""
    from preheat.cli.views.console import build_console
    from preheat.hardware.checks.probing import run_probes

    with build_console(error=True, quiet=quiet).status("checking") as status:
        findings = run_probes(
            probes, lambda part, done: status.update(f"checking: {part} done ({done} of {len(probes)})")
        )
    order = list(Severity)
    return sorted(findings, key=lambda finding: (not finding.of_recipe, order.index(finding.severity)))


def _list_commands(findings: Sequence[Finding]) -> dict[str, FixKind]:
    """Returns the commands that preheat can run, each once: those without an installation first.

    Not those of notes: nobody needs what they propose.
    """
    serious = [finding.fix for finding in findings if finding.severity is not Severity.NOTE]
    fixes = [fix for fix in serious if fix is not None and fix.kind is not FixKind.MANUAL]
    return {fix.command: fix.kind for fix in sorted(fixes, key=lambda fix: fix.kind is FixKind.INSTALL)}


def _apply_fixes(commands: dict[str, FixKind], *, ask: bool, quiet: bool) -> list[AppliedFix]:
    """Shows the commands, and runs those that the user agrees to; their output goes to standard error."""
    from preheat.cli.views.output import say

    for command, kind in commands.items():
        say(f"fix: {command}{_describe_kind(kind)}", error=True)
    applied = []
    for command, kind in commands.items():
        if ask and not typer.confirm(f"run {command}{_describe_kind(kind)}?", err=True):
            continue
        code = _run_command(command)
        applied.append(AppliedFix(command, code))
        if code and not quiet:
            say(f"failed with exit code {code}: {command}", error=True)
    return applied


def _describe_kind(kind: FixKind) -> str:
    return " (installs a package into this environment)" if kind is FixKind.INSTALL else ""


def _run_command(command: str) -> int:
    """Runs a fix without a shell; pip and preheat are those of this environment. Returns its exit code."""
    program, *arguments = shlex.split(command)
    module = {"pip": "pip", "preheat": "preheat"}.get(program)
    start = [sys.executable, "-m", module] if module else [program]
    try:
        return subprocess.run([*start, *arguments], stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError:
        return 127  # as a shell does for a command that does not exist


def _show(diagnosis: Diagnosis, *, json: bool) -> None:
    from preheat.cli.views.console import build_console, emit
    from preheat.files import to_plain_data

    if json:
        emit(to_plain_data(diagnosis))
        return
    screen = build_console()
    for finding in diagnosis.findings:
        screen.print(_format_finding(finding), soft_wrap=True)
    stops = sum(finding.severity is Severity.STOPS for finding in diagnosis.findings)
    subject = f"a run of {diagnosis.recipe}" if diagnosis.recipe else "a run"
    if stops:
        screen.print(f"{stops} finding{'s' if stops > 1 else ''} would stop {subject} here", style="red")
    else:
        screen.print(f"nothing would stop {subject} here", style="green")
    commands = _list_commands(diagnosis.findings)
    if commands and not diagnosis.fixed:
        screen.print(f"preheat doctor --fix runs, after asking: {'; '.join(commands)}", style="dim", soft_wrap=True)


_STYLES = {
    Severity.STOPS: "red",
    Severity.RISKS: "yellow",
    Severity.SLOWS: "yellow",
    Severity.NOTE: "cyan",
    Severity.OK: "green",
}


def _format_finding(finding: Finding) -> Text:
    """Returns the lines of a finding; a terminal may wrap them, so that a fix can be copied whole."""
    from rich.text import Text

    lines = [
        Text.assemble((f"{finding.severity:<6}", _STYLES[finding.severity]), f" {finding.part:<10} {finding.message}")
    ]
    if finding.cost:
        lines.append(Text(f"{'':18}cost: {finding.cost}", style="dim"))
    if finding.fix is not None:
        lines.append(Text(f"{'':18}fix: {finding.fix.command}"))
    return Text("\n").join(lines)


def _render(diagnosis: JsonObject, run: Path) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from preheat.core.units import format_memory, format_rate

    failure = diagnosis["failure"]
    parts: list[RenderableType] = []
    if failure:
        requested = f" when {format_memory(failure.requested / 2**30)} more were asked for" if failure.requested else ""
        head = f"out of memory in step {failure.step + 1}, {failure.phase}, on rank {failure.rank}{requested}"
        # By category, the largest first.
        filled = Table("memory in use", "", box=None, pad_edge=False, title=None)
        for name, gib in sorted(diagnosis["in_use"].items(), key=lambda item: -item[1]):
            filled.add_row(
                f"{name} (activations and temporary tensors)" if name == "other" else name, format_memory(gib)
            )
        parts += [Text(head, style="bold"), filled]
    else:
        parts.append(Text("the plan says that it does not fit", style="bold"))
    parts.append(
        Text(
            f"predicted peak: {format_memory(diagnosis['peak_gib'])} (in {diagnosis['peak_phase']}) of "
            f"{format_memory(diagnosis['room_gib'])} available"
        )
    )
    # Recoveries that the run has tried already.
    for rung in diagnosis["fallbacks"]:
        parts.append(Text(f"resumed from step {rung.step} with {', '.join(rung.changed) or 'the recipe as written'}"))
    # Fixes that fit by the plan, with their cost in time.
    if diagnosis["options"]:
        table = Table("fixes, the cheapest first", "peak", "s a step", "", box=None, pad_edge=False)
        for way in diagnosis["options"]:
            flags = " ".join(f"--set {item}" for item in way["set"])
            table.add_row(
                flags,
                format_memory(way["peak_gib"]),
                format_rate(way["seconds_per_step"])
                if way["seconds_per_step"] >= 0.1
                else f"{way['seconds_per_step']:.2g}",
                f"{way['slower']:+.0%}",
            )
        # The first fix as a command to copy.
        parts += [
            table,
            Text(
                f"preheat train {run}/recipe.yaml --out {run} --resume "
                f"{' '.join(f'--set {item}' for item in diagnosis['options'][0]['set'])}"
            ),
        ]
    else:
        least = diagnosis["least"]
        message = f"no fallback fits: the least needs {format_memory(least['peak_gib'])}"
        message += (
            f"; it would fit with {' '.join(f'--set {item}' for item in diagnosis['shorter'])}"
            if diagnosis["shorter"]
            else "; use a smaller model"
        )
        parts.append(Text(message, style="yellow"))
    if diagnosis["allocator"]:
        advice = diagnosis["allocator"]
        parts.append(
            Text(
                f"{advice['why']}: run it with --set {advice['set']}, or, if that is not available, start it with "
                f"{advice['or']}"
            )
        )
    return Group(*parts)
