"""Shared by the commands: common options, number formatting, the plan view, and the live view of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preheat.cli.views.output import build_console, build_progress_bar, say
from preheat.cli.views.plan_answer import Answer
from preheat.core.plan import Plan
from preheat.core.units import format_duration, format_memory, format_rate
from preheat.files import to_json
from preheat.training.observer import Watch

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import TaskID

    from preheat.cli.views.output import PlainConsole

__all__ = [
    "Alarms",
    "Base",
    "Checkpoint",
    "Json",
    "Live",
    "Accelerate",
    "DeepSpeed",
    "From",
    "RecipeArgument",
    "Set",
    "build_console",
    "emit",
    "build_answer",
]

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help=(
            "A recipe file, the name of a built-in recipe (see: preheat recipes), or the configuration, script (.py, "
            ".sh) or notebook of another trainer: axolotl, LLaMA-Factory, TRL, unsloth, torchtitan, ..."
        ),
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="TRAINER",
        help="The format of another trainer's file (axolotl, trl-dpo, ...), if its keys do not tell.",
    ),
]
DeepSpeed = Annotated[
    Path | None,
    typer.Option(
        "--deepspeed", metavar="FILE", help="DeepSpeed's JSON beside another trainer's file; default: the one it names."
    ),
]
Accelerate = Annotated[
    Path | None,
    typer.Option("--accelerate", metavar="FILE", help="accelerate's configuration beside another trainer's file."),
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
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="best|last|N",
        help="The checkpoint of a run: best (by checkpoint.best), last (the newest intact one, the default) or a step.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def emit(value: object) -> None:
    """Prints one JSON object on standard output; NaN becomes null."""
    say(to_json(value))


def format_expert_load(metrics: Mapping[str, Any]) -> str:
    """Returns the load balance of a step's experts as a short text.

    Example:
        >>> format_expert_load({"expert_load": 1.84, "experts_idle": 3})
        'busiest expert x1.8, 3 idle'
    """
    idle = f", {metrics['experts_idle']} idle" if metrics["experts_idle"] else ""
    return f"busiest expert x{metrics['expert_load']:.1f}{idle}"


def build_answer(plan: Plan, name: str) -> Answer:
    """Returns a plan as a rich renderable of one screen: verdict, memory by category, speed and time."""
    return Answer(plan, name)


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

    def __init__(self, screen: PlainConsole, name: str, *, planned: bool = False):
        from rich.progress import BarColumn

        self.screen, self.name, self._planned = screen, name, planned
        self._bar = build_progress_bar(
            screen, "{task.description}", BarColumn(bar_width=24), "{task.fields[words]}", auto_refresh=False
        )
        self._task: TaskID | None = None
        self._drawn = 0.0
        # Seconds, tokens and MFU of the last 20 steps: a mean follows a change of pace, without the noise of one step.
        self._recent = deque[tuple[float, float, float]](maxlen=20)
        self._warm = False
        self._validation = ""

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            assert self._task is not None, "a stage has begun"
            self._bar.update(self._task, completed=done, total=total, words=what)
            self._bar.refresh()

    def planned(self, plan: Plan) -> None:
        if not self._planned:
            self.screen.print(build_answer(plan, self.name))

    def step(self, metrics: Mapping[str, Any], total: int | None) -> None:
        # The first step of a process takes several times as long as any other, so that it says nothing about them.
        if self._warm:
            self._recent.append((metrics["seconds"], metrics["tokens_per_second"], metrics["mfu"]))
        self._warm = True
        # On a screen, redrawing at every step would take longer than a short step. A log gets the first and the last
        # step, every fiftieth, and one a minute.
        step, since = metrics["step"], time.monotonic() - self._drawn
        due = since >= 0.25 if self.screen.is_terminal else step == 1 or step % 50 == 0 or since >= 60
        if not due and step != total:
            return
        self._drawn += since
        speed, left = "warming up", None
        if self._recent:
            seconds = sum(recent[0] for recent in self._recent)
            tokens, mfu = (sum(recent[0] * recent[value] for recent in self._recent) / seconds for value in (1, 2))
            speed = f"{format_rate(tokens)} tok/s  MFU {mfu:.0%}"
            left = (total - step) * seconds / len(self._recent) if total else None
        line = (
            f"step {step:,}{f'/{total:,}' if total else ''}  loss {metrics['loss']:.3f}{self._validation}  "
            f"{speed}  {format_memory(metrics['memory'] / 2**30)}"
            + (f"  {format_expert_load(metrics)}" if "expert_load" in metrics else "")
            + (f"  {format_duration(round(left))} left" if left is not None else "")
        )
        if self.screen.is_terminal:
            assert self._task is not None, "a stage has begun"
            self._bar.update(self._task, completed=step, total=total, words=line)
            self._bar.refresh()
        else:
            self.screen.print(line, soft_wrap=True)

    def evaluated(self, step: int, loss: float, scores: Mapping[str, float] | None = None) -> None:
        self._validation = f" (validation {loss:.3f})"
        shown_scores = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in (scores or {}).items())
        self.screen.print(f"step {step:,}: validation loss {loss:.4f}{shown_scores}")

    def notice(self, message: str) -> None:
        self.screen.note(message)
