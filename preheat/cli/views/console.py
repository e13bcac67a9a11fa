"""Shared by the commands: common options, number formatting, the plan view, and the live view of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preheat.cli.views.output import bar, console, say
from preheat.run_dir import to_json
from preheat.sanitize import memory
from preheat.training.observer import Watch

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

__all__ = [
    "Alarms",
    "Json",
    "Live",
    "RecipeArgument",
    "Set",
    "console",
    "duration",
    "emit",
    "gflops",
    "picture",
    "rate",
]

RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe (see: preheat recipes)."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, e.g. --set batch.size=64. Repeatable.",
    ),
]
Base = Annotated[
    str | None,
    typer.Option("--base", help="The base model of an adapter or run, if it is not at the recorded path."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def emit(value: object) -> None:
    """Prints one JSON object on standard output; NaN becomes null."""
    say(to_json(value))


def rate(value: float | None) -> str:
    """Returns a rate as text: 12,345, or 12.3 below 100."""
    if value is None:
        return "-"
    # Below 100, a digit after the point is still significant.
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def gflops(rate: float) -> str:
    """Returns FLOP/s as a number of GFLOP/s.

    >>> gflops(2.3e8), gflops(9.81e11)
    ('0.23', '981')
    """
    giga = rate / 1e9
    return f"{giga:.2g}" if giga < 10 else f"{giga:,.0f}"


def duration(seconds: float | None) -> str:
    """Returns seconds as text in its two largest units.

    >>> duration(75), duration(7300), duration(3 * 86400)
    ('1 min 15 s', '2 h 1 min', '3 d 0 h')
    """
    # A plan without a known end has no duration.
    if seconds is None or not math.isfinite(seconds):
        return "-"
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


def experts(metrics: Mapping[str, Any]) -> str:
    """Returns the load balance of a step's experts as a short text.

    Example:
        >>> experts({"expert_load": 1.84, "experts_idle": 3})
        'busiest expert x1.8, 3 idle'
    """
    idle = f", {metrics['experts_idle']} idle" if metrics["experts_idle"] else ""
    return f"busiest expert x{metrics['expert_load']:.1f}{idle}"


def picture(plan: Mapping[str, Any], name: str) -> Group:
    """Returns a plan as a rich renderable: memory by category against the device's memory, speed, and the verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from preheat.planning.search.result import falls_short, fragmentation_hint

    peak, has = plan["peak_gib"], plan["available_gib"]
    bars = Table.grid(padding=(0, 2))
    # Characters of the longest bar.
    width = 36
    scale = width / max(
        peak, has if has < 2.5 * peak else 0.0, 1e-9
    )  # scale to the device's memory unless it is far more than the peak
    for category, gib in plan["memory"].items():
        # A category too small for a block still gets a mark.
        bars.add_row(
            f"  {category}", Text(memory(gib), justify="right"), Text("█" * round(gib * scale) or "▏", style="cyan")
        )
    total = Text(
        (
            # Below a MiB, a percentage of what is left would be meaningless.
            f"{f'{peak / has:.1%} of the {memory(has)} left' if has * 1024 >= 1 else 'nothing is left'} of "
            f"{plan['device']['name']}"
        ),
        style="green" if plan["fits"] else "red",
    )
    bars.add_row("  peak", Text(memory(peak), justify="right", style="bold"), total)
    speed = Table.grid(padding=(0, 2))
    speed.add_row(
        "  step",
        (
            f"{plan['seconds_per_step']:.3g} s for {plan['tokens_per_step']:,} tokens, "
            f"{plan['flops_per_step'] / 1e9:,.0f} GFLOP"
        ),
    )
    speed.add_row(
        "  speed",
        (
            f"{rate(plan['tokens_per_second'])} tokens/s, {plan['mfu']:.0%} of "
            f"{plan['matrix_rate'] / 1e12:,.3g} TFLOP/s "
            f"{'measured here' if plan['device']['kind'] == 'cpu' else 'at most'}"
        ),
    )
    if plan.get("seconds_to_start"):
        speed.add_row("  to start", f"about {duration(plan['seconds_to_start'])}, once, until layers are compiled")
    if plan["steps"]:
        speed.add_row("  to finish", f"{duration(plan['seconds_total'])} for {plan['steps']:,} steps")
    p = plan["parameters"]
    head = Text(
        f"{name}: {p['total']:,} parameters, {p['trained']:,} trained, on {plan['device']['name']}", style="bold"
    )
    verdict = Text("fits", style="bold green") if plan["fits"] else Text(falls_short(plan), style="bold red")
    if abs(plan.get("pace", 1.0) - 1) > 0.02:
        speed.add_row("  ", f"{plan['pace']:.2f} times as long as the measured rates predict, like the last runs here")
    parts: list[RenderableType] = [head, Text(f"peak memory (in {plan['peak_phase']})"), bars]
    parts += [_phases(plan), Text("time"), speed, verdict]
    # Doubts about a plan, none of which changes its verdict.
    warnings = [hint] if (hint := fragmentation_hint(plan)) else []
    # The prediction fits, but not the upper end of its interval.
    if plan["fits"] and (most := plan["peak_gib_interval"][1]) > has:
        warnings.append(
            f"little room: nine in ten runs need at most {memory(most)}, and {memory(has)} is left; smaller "
            "micro-batches are safer"
        )
    if quicker := plan.get("fp32_rate"):
        warnings.append(
            f"{plan['device']['name']} is slow in bf16: {gflops(plan['matrix_rate'])} GFLOP/s, and {gflops(quicker)} "
            "in fp32; a step is faster without mixed_precision"
        )
    if plan.get("contended"):
        warnings.append(
            "the machine was busy when it was calibrated and still is, so speeds are too low: plan again "
            "when it is quiet"
        )
    if plan.get("heap"):
        warnings.append(
            f"{plan['heap']}; torch's own allocator will be used, which often takes a third more memory than planned"
        )
    parts += [Text(warning, style="yellow") for warning in warnings]
    return Group(*parts)


def _phases(plan: Mapping[str, Any]) -> Table:
    """Returns a table of memory with a row per phase and a column per category; the peak phase is bold."""
    from rich.table import Table

    # One unit for the whole table, so that its columns can be compared.
    unit, scale = ("GiB", 1) if plan["peak_gib"] >= 1 else ("MiB", 1024)

    def size(gib: float) -> str:
        text = f"{gib * scale:,.2f}" if scale == 1 else f"{gib * scale:,.0f}"
        # What rounds to zero is shown as a dash.
        return text if float(text.replace(",", "")) else "-"

    heads = ("params", "grads", "optim", "activ", "temp", "overhead")
    table = Table(f"peak by phase, {unit}", *heads, "all", box=None, pad_edge=False, header_style="")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase, categories in plan["phase_memory"].items():
        style = "bold" if phase == plan["peak_phase"] else None
        table.add_row(f"  {phase}", *map(size, categories.values()), size(plan["phases"][phase]), style=style)
    # A command of its own after the run: not part of the peak.
    if plan["export"]:
        table.add_row(
            "  export, later", *map(size, plan["export"].values()), size(sum(plan["export"].values())), style="dim"
        )
    return table


# For --json and for all ranks but the first.
class Alarms(Watch):
    """Prints alarms only."""

    def alarm(self, message: str) -> None:
        say(message, error=True)


class Live(Alarms):
    """Live view of a run: stages, notices, and a progress bar with loss, speed, MFU, memory and time left.

    Args:
        planned: the plan was printed already.
    """

    def __init__(self, screen: Any, name: str, *, planned: bool = False):
        from rich.progress import BarColumn

        self.screen, self.name, self._planned = screen, name, planned
        self._bar = bar(
            screen, "{task.description}", BarColumn(bar_width=24), "{task.fields[words]}", auto_refresh=False
        )
        self._task: Any = None
        self._drawn = 0.0
        # Of the last 20 steps: their mean follows a change of pace, without the noise of one step.
        self._seconds: list[float] = []
        self._validation = ""

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def stage(self, message: str) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        # Without a total the bar only shows that something runs.
        self._task = self._bar.add_task(message, total=None, words="")
        self._bar.refresh()
        # A log has no bar: each stage gets a line.
        if not self.screen.is_terminal:
            self.screen.print(f"{message} …")

    def progress(self, what: str, done: float, total: float | None) -> None:
        if time.monotonic() - self._drawn > 0.2:
            self._drawn = time.monotonic()
            self._bar.update(self._task, completed=done, total=total, words=what)
            self._bar.refresh()

    def planned(self, plan: Mapping[str, Any]) -> None:
        if not self._planned:
            self.screen.print(picture(plan, self.name))

    def step(self, metrics: Mapping[str, Any], total: int | None) -> None:
        self._seconds = [*self._seconds[-19:], metrics["seconds"]]
        # Redrawing at every step would take longer than a short step.
        if time.monotonic() - self._drawn < 0.25 and metrics["step"] != total:
            return
        self._drawn = time.monotonic()
        left = (total - metrics["step"]) * sum(self._seconds) / len(self._seconds) if total else None
        line = (
            f"step {metrics['step']:,}{f'/{total:,}' if total else ''}  loss {metrics['loss']:.3f}{self._validation}  "
            f"{rate(metrics['tokens_per_second'])} tok/s  MFU {metrics['mfu']:.0%}  {memory(metrics['memory'] / 2**30)}"
            + (f"  {experts(metrics)}" if "expert_load" in metrics else "")
            + (f"  {duration(left)} left" if left is not None else "")
        )
        self._bar.update(self._task, completed=metrics["step"], total=total, words=line)
        self._bar.refresh()
        # In a log: the first and the last step, and every fiftieth.
        if not self.screen.is_terminal and (metrics["step"] in (1, total) or metrics["step"] % 50 == 0):
            self.screen.print(line, soft_wrap=True)

    def evaluated(self, step: int, loss: float, scores: Mapping[str, float] | None = None) -> None:
        self._validation = f" (validation {loss:.3f})"
        shown_scores = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in (scores or {}).items())
        self.screen.print(f"step {step:,}: validation loss {loss:.4f}{shown_scores}")

    def notice(self, message: str) -> None:
        self.screen.note(message)
