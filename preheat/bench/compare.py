"""Contenders of `preheat bench`, their turns, and the verdicts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from preheat import recipe as recipes
from preheat.bench.explanation import NOISE, explain_slowdown, note_busy_machine
from preheat.bench.messages import ProfileJob, Turn, TurnJob, encode, read_turn
from preheat.core import registry
from preheat.core.bench import (
    BenchResult,
    FailedRow,
    Machine,
    MeasuredRow,
    TechniqueVerdict,
    profile_folder,
)
from preheat.core.plan import Plan
from preheat.core.units import format_memory, format_percent
from preheat.errors import RecipeError, RunError
from preheat.files import to_json, write_atomic
from preheat.hardware.child_processes import describe_exit, tie_to_parent
from preheat.planning.search.result import describe_shortfall
from preheat.recipe import Recipe
from preheat.run.layout import MEMORY_KEYS, claim_folder

__all__ = [
    "Contender",
    "list_ablation",
    "run_bench",
    "list_alone",
    "compute_cosine",
    "median_speed",
    "take_turn",
    "judge_techniques",
]

Say = Callable[[str, int, int], None]
"""Progress callback: the current contender, turns done, turns in total."""


@dataclass
class Contender:
    """A named recipe and the measurements of its turns."""

    name: str
    recipe: Recipe
    turns: list[Turn] = field(default_factory=list)
    failed: str = ""
    fits: bool = True


def list_ablation(recipe: Recipe) -> list[Contender]:
    """Returns the plain baseline, the full recipe, the recipe without each technique, and each technique alone.

    Raises:
        RecipeError: the recipe has no technique to leave out.
    """
    names = list(recipe.techniques)
    if not names:
        raise RecipeError(
            "techniques: the recipe has none, so there is nothing to leave out; name some, or use --techniques"
        )

    def build_contender(name: str, techniques: Iterable[str]) -> Contender:
        return Contender(name, replace(recipe, techniques={n: recipe.techniques[n] for n in techniques}))

    contenders = [build_contender("plain", []), build_contender("all", names)]
    if len(names) > 1:  # with one technique, `without` and `only` would repeat `plain` and `all`
        contenders += [build_contender(f"without {name}", [n for n in names if n != name]) for name in names]
        contenders += [build_contender(f"only {name}", [name]) for name in names]
    return contenders


def list_alone(recipe: Recipe, names: Sequence[str]) -> list[Contender]:
    """Returns the plain baseline and each named technique alone, with the recipe's settings if any, else with defaults.

    Raises:
        RecipeError: a technique is unknown.
    """
    known = registry()
    for name in names:
        if name not in known:
            raise RecipeError(f"--techniques: '{name}' is unknown; use one of {', '.join(known)}")
    # The recipe's settings of a technique, so that the comparison is of what the user would run.
    alone = [Contender(n, replace(recipe, techniques={n: recipe.techniques.get(n) or known[n]()})) for n in names]
    return [Contender("plain", replace(recipe, techniques={})), *alone]


def run_bench(
    recipe: Recipe,
    contenders: Sequence[Contender],
    *,
    steps: int = 12,
    repeats: int = 3,
    warmup: int = 2,
    profile: int | None = None,
    out: Path,
    say: Say | None = None,
) -> BenchResult:
    """Runs contenders in alternating turns, each in a process of its own, and writes `bench.json`.

    A contender that does not fit according to the plan, or that its techniques reject, gets a row with the reason.

    Args:
        contenders: the first is the baseline of ratios and gradients.
        steps: steps of each turn.
        repeats: turns of each contender; each round begins with the next contender.
        warmup: untimed steps at the beginning of each turn.
        profile: steps of each contender to profile, after the measured ones of its first turn.

    Raises:
        RecipeError: there are too few steps.
        RunError: the folder cannot be written, or the baseline failed.
    """
    if profile is not None and profile < 1:
        raise RecipeError(f"--profile {profile}: must be at least 1, the number of steps to profile")
    # The first steps allocate memory, choose kernels and compile.
    if steps <= warmup:
        raise RecipeError(f"--steps {steps}: {warmup} of them warm up; take at least {warmup + 1}")
    say = say or (lambda what, done, total: None)
    plans = _plan_contenders(contenders)
    # Contenders that do not fit are not run: their failure would cost time and could end other processes.
    running = [c for c in contenders if not c.failed]
    total, done = len(running) * repeats, 0
    claim_folder(out, "bench", ("bench.json", "bench.html"))
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats):
            # Each round begins with the next contender, so that drifts of clock and temperature reach all of them.
            for c in [*running[turn % len(running) :], *running[: turn % len(running)]]:
                say(c.name, done, total)
                number = contenders.index(c)
                if not c.failed:
                    # One sample of gradients and one profile are enough: every turn begins with the same weights and
                    # rows.
                    job = TurnJob(recipes.dump(c.recipe), steps)
                    if turn == 0:
                        gradient = str(Path(folder) / f"{number}.safetensors")
                        job = replace(
                            job, gradient=gradient, profile=_build_profile_job(c, plans[number], profile, out)
                        )
                    take_turn(c, job, Path(folder))
                done += 1
        say("done", total, total)
        # Before the folder with the samples is removed.
        cosines = [
            compute_cosine(Path(folder) / "0.safetensors", Path(folder) / f"{n}.safetensors")
            for n in range(len(contenders))
        ]
    # Every ratio is against the baseline, so without it there is no comparison.
    if contenders[0].failed:
        raise RunError(f"{contenders[0].name}: {contenders[0].failed}")
    rows = [
        _build_row(c, contenders[0], warmup, cosine, plan)
        for c, cosine, plan in zip(contenders, cosines, plans, strict=True)
    ]
    # The device is the same for all, so the first plan that succeeded is enough.
    available = next((p.available_gib for p in plans if p), math.nan)
    planned = {c.name: plan for c, plan in zip(contenders, plans, strict=True)}
    result = BenchResult(
        name=recipe.name,
        machine=_describe_machine(recipe),
        steps=steps,
        repeats=repeats,
        available_gib=available,
        rows=tuple(rows),
        verdicts=tuple(judge_techniques(rows, list(recipe.techniques), available, planned)),
        recipe=recipes.to_values(recipe),
        notes=tuple(_list_notes(rows, contenders, planned)),
    )
    write_atomic(out / "bench.json", to_json(result, indent=1) + "\n")
    return result


def _list_notes(
    rows: Sequence[MeasuredRow | FailedRow], contenders: Sequence[Contender], plans: Mapping[str, Plan | None]
) -> list[str]:
    """Explains the techniques that alone are slower than the baseline, and says if the machine was busy."""
    baseline, notes = rows[0].name, []
    for row in rows[1:]:
        alone = len(row.techniques) == 1
        if alone and isinstance(row, MeasuredRow) and row.ratio_spread[1] < 1 - NOISE:
            reason = explain_slowdown(plans[row.name], plans[baseline])
            notes += [f"{row.name} is slower than {baseline}: {reason}"] * bool(reason)
    busy = note_busy_machine([turn.use for c in contenders for turn in c.turns])
    return notes + [busy] * bool(busy)


def _describe_machine(recipe: Recipe) -> Machine:
    """Describes the device on which the figures were measured."""
    import torch

    from preheat.engine.device import resolve_device

    device, threads = resolve_device(recipe)
    return Machine(device.name, device.kind, threads, torch.__version__)


def _plan_contenders(contenders: Sequence[Contender]) -> list[Plan | None]:
    """Plans each contender; marks those that do not fit or are rejected as failed."""
    from preheat.planning.plan_request import plan_on_this_machine

    plans: list[Plan | None] = []
    for c in contenders:
        try:
            planned = plan_on_this_machine(c.recipe)
        except RecipeError as error:
            c.failed = str(error).splitlines()[0]
            plans.append(None)
            continue
        # With the settings that the dry run chose, so that the turns use them, too.
        c.recipe = recipes.parse(json.dumps(planned.recipe))
        plans.append(planned)
        if not planned.fits:
            c.failed, c.fits = describe_shortfall(planned), False
    return plans


def _build_profile_job(c: Contender, plan: Plan | None, steps: int | None, out: Path) -> ProfileJob | None:
    if steps is None:
        return None
    assert plan is not None, "contenders without a plan do not run"
    return ProfileJob(str(out / profile_folder(c.name)), steps, plan.split, plan.seconds_per_step)


def take_turn(c: Contender, job: TurnJob, folder: Path) -> None:
    """Runs a contender's turn in its own process; sets its `turns` or `failed`."""
    # A result of the turn before must not be taken for this one's if the process dies.
    message, result = folder / "job.json", folder / "result.json"
    result.unlink(missing_ok=True)
    message.write_text(encode(job), encoding="utf-8")
    command = [sys.executable, "-m", "preheat.bench.worker", str(message), str(result)]
    # A process of its own: peaks of memory, compiled code and allocator state of one contender do not reach
    # the next. `tie_to_parent` ends it if this process ends first.
    done = subprocess.run(tie_to_parent(command), capture_output=True, text=True, check=False)
    if done.returncode or not result.exists():
        # A negative code is a signal: the last line of standard error would not explain it.
        last = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode >= 0 else ""
        c.failed = last or f"its process {describe_exit(done.returncode)}"
        return
    measured = json.loads(result.read_text(encoding="utf-8"))
    if "failed" in measured:
        c.failed = measured["failed"]
    else:
        c.turns.append(read_turn(measured))


def compute_cosine(baseline: Path, other: Path) -> float | None:
    """Returns the cosine of the sampled gradients of the first step, over the parameters that both have."""
    if not (baseline.exists() and other.exists()):
        return None
    from safetensors.torch import load_file

    a, b = load_file(baseline), load_file(other)
    # Adapters have parameters that the baseline lacks; only shared ones can be compared.
    common = [name for name in a if name in b and a[name].shape == b[name].shape]
    if not common:
        return None
    # cos = <a, b> / (|a| |b|) over all parameters together, in fp64: sums of millions of products.
    dot = sum(float((a[n].double() * b[n].double()).sum()) for n in common)
    norm = math.sqrt(sum(float(a[n].double().square().sum()) for n in common))
    other_norm = math.sqrt(sum(float(b[n].double().square().sum()) for n in common))
    # Rounding may give slightly more than 1 for equal gradients.
    return min(1.0, dot / (norm * other_norm)) if norm and other_norm else None


def median_speed(turn: Turn, warmup: int) -> float:
    """Returns the tokens per second of a turn: the median over its steps after the first `warmup`."""
    # The median: single steps are slowed down by other processes.
    return float(median(n / s for n, s in zip(turn.tokens[warmup:], turn.seconds[warmup:], strict=True)))


def _build_row(
    c: Contender, baseline: Contender, warmup: int, cosine: float | None, plan: Plan | None
) -> MeasuredRow | FailedRow:
    name, techniques, predicted = c.name, tuple(c.recipe.techniques), plan.predicted if plan else None
    if c.failed:
        return FailedRow(name=name, techniques=techniques, failed=c.failed, fits=c.fits, predicted=predicted)
    speeds = tuple(median_speed(turn, warmup) for turn in c.turns)
    # Round by round: turns of one round ran close in time and saw the same load.
    ratios = [median_speed(a, warmup) / median_speed(b, warmup) for a, b in zip(c.turns, baseline.turns, strict=False)]
    # A figure counts only if all turns report it; the highest is what the device must have.
    memory_of_turns = [turn.memory for turn in c.turns]
    memory = {
        key: max(turn[key] for turn in memory_of_turns)
        for key in MEMORY_KEYS
        if all(key in turn for turn in memory_of_turns)
    }
    first = c.turns[0]
    return MeasuredRow(
        name=name,
        techniques=techniques,
        predicted=predicted,
        tokens_per_second=median(speeds),
        speeds=speeds,
        spread=(min(speeds), max(speeds)),
        ratio=median(ratios),
        ratio_spread=(min(ratios), max(ratios)),
        # MFU is proportional to speed, so the plan's is scaled to the measured speed.
        mfu=plan.mfu * median(speeds) / plan.tokens_per_second if plan else None,
        peak_gib=memory["peak_gib"],
        allocated_gib=memory.get("allocated_gib"),
        reserved_gib=memory.get("reserved_gib"),
        context_gib=memory.get("context_gib"),
        startup_seconds=median(turn.startup_seconds for turn in c.turns),
        loss=first.losses[-1],
        gradient_cosine=cosine,
        changes={technique: tuple(texts) for technique, texts in first.changes.items()},
        notices=tuple(first.notices),
        finding=first.finding,
    )


def judge_techniques(
    rows: Sequence[MeasuredRow | FailedRow],
    names: Sequence[str],
    available: float,
    plans: Mapping[str, Plan | None],
) -> list[TechniqueVerdict]:
    """Compares the recipe with and without each of its techniques that was left out once.

    Args:
        available: GiB of the device.
        plans: of the rows, by name; they explain why a technique makes the recipe slower.
    """
    by_name = {row.name: row for row in rows}
    entries: list[TechniqueVerdict] = []
    full = by_name.get("all")
    for name in names:
        # With one technique, the recipe without it is the plain one.
        rest = by_name.get(f"without {name}") if len(names) > 1 else by_name.get("plain")
        if full is None or rest is None:
            continue
        if isinstance(full, FailedRow):
            text = f"{name}: the recipe did not run: {full.failed}"
            entries.append(TechniqueVerdict(name, None, None, None, text))
            continue
        if isinstance(rest, FailedRow):
            text = f"{name}: without it the recipe did not run: {rest.failed}"
            if not rest.fits:
                text = f"{name} is needed: without it the recipe {rest.failed}"
            entries.append(TechniqueVerdict(name, None, None, None, text))
            continue
        ratios = [a / b for a, b in zip(full.speeds, rest.speeds, strict=False)]
        speed, freed = median(ratios), rest.peak_gib - full.peak_gib
        # No verdict from one turn of each: other processes on the machine may explain the difference.
        # A difference counts if it exceeds NOISE and the ranges of the two do not overlap.
        noise = None if len(ratios) < 2 else abs(speed - 1) < NOISE or _is_overlapping(full.speeds, rest.speeds)
        text = _describe_verdict(name, speed, noise, freed, rest.peak_gib, available)
        if noise is False and speed < 1 and (reason := explain_slowdown(plans.get("all"), plans.get(rest.name))):
            text += f" ({reason})"
        entries.append(TechniqueVerdict(name, speed, noise, freed, text))
    return entries


def _is_overlapping(a: Sequence[float], b: Sequence[float]) -> bool:
    """Returns True if the ranges of two sets of figures overlap."""
    return max(min(a), min(b)) <= min(max(a), max(b))


def _describe_verdict(
    name: str, speed: float, noise: bool | None, freed: float, without: float, available: float
) -> str:
    change = f"{'gives' if speed > 1 else 'costs'} {format_percent(abs(speed - 1))} speed"
    if noise:
        change = "no difference in speed seen"
    elif noise is None:
        change = "no verdict on speed from one turn (--repeats 3 gives one)"
    # Below 2 % or 0.01 GiB a difference in memory counts as none.
    small = abs(freed) < max(0.02 * without, 0.01)
    size = format_memory(abs(freed))
    space = "memory stays" if small else f"{'frees' if freed > 0 else 'takes'} {size}"
    if noise is False:
        text = f"{name} {change} and {space}" if not small else f"{name} {change}; {space} as it is"
    else:
        text = f"{name}: {change}; {space if not small else 'no difference in memory seen'}"
    slower = noise is False and speed < 1
    if slower and freed > 0 and not small:
        text += f": not needed here, {format_memory(available - without)} are free without it"
    elif slower:
        text += ": leave it out here"
    elif noise and (small or freed < 0):
        text += ": nothing gained here"
    return text
