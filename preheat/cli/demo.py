"""The `preheat demo` command."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.views.console import Json, Set

if TYPE_CHECKING:
    from preheat.core.plan import Plan
    from preheat.hardware.rates import Rates
    from preheat.recipe import Recipe

__all__ = ["demo", "count_steps_within"]

# Seconds of training: on CPUs with AVX512, which compute in bf16, and on others, which need longer for as good a text.
_FAST, _SLOW = 45.0, 60.0
# The model learns little in fewer steps, and has seen most of the standard library after more.
_LEAST, _MOST = 60, 2000


def demo(
    set: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; default: a new one under runs/.")] = None,
    json: Json = False,
) -> None:
    """Plan and train a small model on Python's standard library, evaluate it, generate text and write a report. Takes
    two minutes, offline: the plan chooses how many steps that allows, unless --set names a stop.

    Example: `preheat demo`
    """
    from preheat import recipe as recipes

    recipes.load("demo", set or [])  # reports a wrong key before torch is imported
    from preheat.cli.train import run
    from preheat.cli.views.console import build_answer, build_console
    from preheat.core.run_records import Baseline, SampleEvent
    from preheat.run.reader import Reader
    from preheat.run.writer import check_folder

    folder = out or _find_free_path(Path("runs") / "demo")
    check_folder(folder, resume=False)
    screen = build_console(quiet=json)
    screen.print("planning a step of the demo …", style="dim")
    settings = list(set or [])
    rates, plan = _plan_demo(recipes.load("demo", settings, warn=False), quiet=json)
    # The user's own end of the run wins; a run without it takes about a minute.
    chooses = not any(item.startswith("stop.") for item in set or [])
    seconds = _SLOW if _is_slow_in_bf16() else _FAST
    if chooses:
        # If other processes use the cores, a step takes longer than on an idle machine.
        seconds_per_step = (plan.now or plan).seconds_per_step
        steps = count_steps_within(seconds, seconds_per_step)
        settings = [*_build_run_settings(steps), *settings]
        plan = replace(plan, steps=steps, seconds_total=steps * plan.seconds_per_step + plan.seconds_to_start)
    screen.print(build_answer(plan, "demo"))
    if chooses:
        takes = steps * seconds_per_step
        limit = f"the demo trains for about {seconds:.0f} s"
        if takes > seconds:
            limit = f"more than the demo's {seconds:.0f} s, because fewer steps teach it little"
        screen.print(f"training {steps:,} steps of {seconds_per_step:.3g} s each, {takes:.0f} s by the plan; {limit}")
    result = run(
        recipes.load("demo", settings, warn=False),
        out=folder,
        resume=False,
        force=False,
        json=json,
        # `preheat train`, which resumes the demo, chooses neither the precision nor the steps by itself.
        again=["train", "demo", *(part for item in settings for part in ("--set", item))],
        rates=rates,
        planned=True,
    )
    if json:
        return
    reader = Reader(result["run"])
    for base in reader.events(Baseline):
        screen.print(
            f"validation loss, nats a token: this model {result['validation_loss']:.2f}, bigram "
            f"{base.bigram:.2f}, unigram {base.unigram:.2f}"
        )
    for sample in reader.events(SampleEvent):
        screen.print("─" * 60, style="dim")
        screen.print(sample.prompt, style="bold", end="")
        screen.print(sample.text)
    screen.print("─" * 60, style="dim")
    screen.print(f"open {result['report']} in a browser; edit the recipe with: preheat init demo")


def count_steps_within(seconds: float, step: float) -> int:
    """Returns how many steps of `step` seconds fit into `seconds`, in fives and within the demo's limits.

    >>> count_steps_within(60, 0.25), count_steps_within(60, 7), count_steps_within(45, 1e-4)
    (240, 60, 2000)
    """
    return min(max(5 * math.floor(seconds / step / 5), _LEAST), _MOST)


def _build_run_settings(steps: int) -> list[str]:
    """Returns the settings of a run of so many steps: three evaluations, and two checkpoints."""
    thirds, halves = math.ceil(steps / 3), math.ceil(steps / 2)
    return [f"stop.max_steps={steps}", f"evaluate.every={thirds}", f"checkpoint.every={halves}"]


def _plan_demo(recipe: Recipe, *, quiet: bool) -> tuple[Rates, Plan]:
    """Measures this machine at the sizes of the demo, unless its rates are stored, and plans a step.

    Before the data is read, because it needs none of it: only the size of the vocabulary.
    """
    from preheat.cli.views.console import build_console
    from preheat.engine.device import resolve_device
    from preheat.hardware.rate_probe import probe_present_rate
    from preheat.models import configs
    from preheat.planning.plan import plan, resolve_auto
    from preheat.planning.plan_request import choose_step_rates, find_vocabulary_size, read_bytes_in_use
    from preheat.planning.request import Request

    screen = build_console(quiet=quiet)
    device, threads = resolve_device(recipe)
    source = configs.source_config(recipe)
    vocabulary = find_vocabulary_size(recipe, source)
    request = Request(recipe, device, vocabulary=vocabulary, in_use=read_bytes_in_use(device), source_config=source)

    with screen.status("measuring this machine at the sizes of this step") as status:
        rates, measured = choose_step_rates(
            request, threads, lambda what, done: status.update(f"measuring {what} ({done:.0%})")
        )
    if measured:
        screen.print(
            f"measured this machine at the sizes of this step in {rates.seconds:.1f} s; all sizes: preheat calibrate",
            style="dim",
        )
    # A quiet machine that was measured just now has these rates.
    if rates.contended or not measured:
        rates = probe_present_rate(rates, threads)
    return rates, plan(resolve_auto(replace(request, rates=rates)))


def _is_slow_in_bf16() -> bool:
    """Returns whether bf16 on this CPU would turn two minutes into an hour."""
    import torch

    from preheat.hardware.cuda_driver import has_cuda
    from preheat.hardware.probe import fastest_half_dtype

    return not has_cuda() and fastest_half_dtype() == torch.float32


def _find_free_path(path: Path) -> Path:
    """Returns the path, or the first free one of path-2, path-3, ... if it exists."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
