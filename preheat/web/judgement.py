"""Judges a run against its plan: how much faster or slower, larger or smaller it is, and the causes that are recorded.

A profile (`preheat train --profile`) is the only record of where the time of a step goes. Without one, the judgement
names what else is known: fallbacks after out-of-memory errors, other processes on the machine, idle GPUs.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.core.plan import Interval
from preheat.report.formatting import format_gib, format_grouped, format_percent, format_signed_percent, read_number

if TYPE_CHECKING:
    from preheat.core.plan import Plan
    from preheat.core.run_records import Fallback, MachineLoad, Measured, SystemMetrics
    from preheat.core.step_profile import Part, StepProfile

__all__ = ["Evidence", "Judgement", "judge"]

_NOTABLE = 0.02
"""Share of a planned step from which a difference is named; smaller ones are within the noise of steps."""
_SAME = 0.015
"""Difference up to which a run is as planned: relative, and of a part of the memory relative to the planned peak."""
_MOST_CAUSES = 3
_IDLE_PERCENT = 80
"""Utilization below which a GPU waits for something, by the driver's counter."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The records of a run that say why it differs from its plan.

    Attributes:
        tokens_per_second: of the last steps, or measured at the end of the session.
        measured: of the last session that ended; None before.
        profile: of some steps of the run; None without `--profile`.
        fallbacks: after out-of-memory errors.
        system: the newest samples of the machine.
        is_live: a process trains it now.
        has_steps_left: it can be resumed.
    """

    plan: Plan | None = None
    tokens_per_second: float | None = None
    measured: Measured | None = None
    profile: StepProfile | None = None
    fallbacks: Sequence[Fallback] = ()
    system: Sequence[SystemMetrics] = ()
    is_live: bool = False
    has_steps_left: bool = True


@dataclass(frozen=True)
class Judgement:
    """Sentences on the speed and the memory of a run, and what they cannot know.

    Attributes:
        is_slow, is_large: outside of the plan's interval on the bad side.
    """

    speed: str
    memory: str
    unknown: tuple[str, ...] = ()
    is_slow: bool = False
    is_large: bool = False


def judge(evidence: Evidence) -> Judgement:
    """Returns the judgement of a run."""
    if evidence.plan is None:
        text = "no plan of this version of preheat is in the run's folder, so there is nothing to compare with."
        return Judgement(f"Speed: {text}", "", ())
    speed, is_slow, unknown = _judge_speed(evidence, evidence.plan)
    memory, is_large, unknown_memory = _judge_memory(evidence, evidence.plan)
    return Judgement(speed, memory, (*unknown, *unknown_memory), is_slow, is_large)


def _judge_speed(evidence: Evidence, plan: Plan) -> tuple[str, bool, tuple[str, ...]]:
    planned, real = read_number(plan.tokens_per_second), read_number(evidence.tokens_per_second)
    if not planned or not real:
        return "Speed: no step is measured yet.", False, ()
    ratio = real / planned - 1
    if abs(ratio) < _SAME:
        head = "As fast as planned"
    else:
        head = f"{format_percent(abs(ratio))} {'slower' if ratio < 0 else 'faster'} than planned"
    is_slow = real < plan.tokens_per_second_interval.low
    causes = _find_causes(evidence, plan, real)
    interval = _format_interval(plan.tokens_per_second_interval)
    figures = f"{format_grouped(real)} tokens/s, planned {format_grouped(planned)} ({interval} in nine of ten runs)"
    # A profile of a run that is as fast as planned needs no explanation, but a cause may be of interest all the same.
    text = f"{head}: {', '.join(causes)}; {figures}." if causes else f"{head}: {figures}."
    unknown: tuple[str, ...] = ()
    if ratio <= -_SAME and evidence.profile is None:
        advice = "resume the run" if evidence.has_steps_left else "run it again"
        unknown = (
            f"Which part of the step takes longer is not recorded: {advice} with --profile 5, which measures five "
            "steps.",
        )
    return text, is_slow, unknown


def _format_interval(interval: Interval) -> str:
    return f"{format_grouped(interval.low)} to {format_grouped(interval.high)}"


def _find_causes(evidence: Evidence, plan: Plan, real: float) -> list[str]:
    causes = [_describe_fallback(evidence.fallbacks[-1])] if evidence.fallbacks else []
    if evidence.profile is not None:
        causes += _find_profiled(evidence.profile, plan)
    # A profile names the machine's use while it was taken.
    if evidence.profile is None:
        causes += _find_machine_causes(evidence, plan)
    if plan.contended and real > plan.tokens_per_second:
        causes.append("the machine was busy when its rates were measured, so the plan is too slow")
    return causes


def _describe_fallback(fallback: Fallback) -> str:
    text = f"since step {fallback.step:,} it runs with {', '.join(fallback.changed) or 'the recipe as written'}"
    if fallback.seconds_per_step is not None:
        before, after = map(read_number, fallback.seconds_per_step)
        if before and after:
            text += f" after an out-of-memory error (planned {format_signed_percent(after / before - 1)} per step)"
            return text
    return text + " after an out-of-memory error"


def _find_profiled(profile: StepProfile, plan: Plan) -> list[str]:
    """Returns how a profile differs from the plan, the most first, and the largest part that is as planned."""
    step = profile.seconds_planned or plan.seconds_per_step
    causes: list[tuple[float, str]] = []
    if profile.waiting_for_data >= _NOTABLE:
        causes.append((profile.waiting_for_data, f"data waits {format_percent(profile.waiting_for_data)}"))
    if profile.launch_bound is not None and profile.launch_bound >= _NOTABLE:
        causes.append((profile.launch_bound, f"the GPU idles {format_percent(profile.launch_bound)} for launches"))
    usual: list[Part] = []
    use = profile.machine
    # Other processes lengthen all parts: their seconds say nothing then.
    if use is not None and use.alone is False and use.other_cores is not None:
        named = [text for _, text in sorted(causes, key=lambda cause: -cause[0])]
        return [*named, f"other processes used {use.other_cores:.1f} of {use.cpus} cores while it was profiled"]
    for part in profile.kinds:
        if part.planned is None or not step:
            continue
        share = (part.seconds - part.planned) / step
        if abs(share) < _NOTABLE:
            usual.append(part)
        else:
            causes.append((abs(share), f"{part.name} {format_signed_percent(share)} of the step"))
    named = [text for _, text in sorted(causes, key=lambda cause: -cause[0])[:_MOST_CAUSES]]
    if usual:
        largest = max(usual, key=lambda part: part.seconds)
        named.append(f"{largest.name} as planned")
    return named


def _find_machine_causes(evidence: Evidence, plan: Plan) -> list[str]:
    causes = []
    load = evidence.measured.machine if evidence.measured is not None and not evidence.is_live else None
    if plan.device.kind == "cpu":
        others = _count_other_cores(evidence.system) if evidence.is_live else _read_other_cores(load)
        if others is not None and others >= 0.2:
            causes.append(
                f"other processes use {others:.1f} cores" if evidence.is_live else _describe_load(others, load)
            )
    elif evidence.system:
        busy = _read_gpu_utilization(evidence.system)
        if busy is not None and busy < _IDLE_PERCENT and evidence.is_live:
            causes.append(f"its GPUs are busy {busy:.0f} % of the time")
    return causes


def _read_other_cores(load: MachineLoad | None) -> float | None:
    return read_number(load.other_cores) if load is not None and load.alone is False else None


def _describe_load(others: float, load: MachineLoad | None) -> str:
    of = f" of {load.cpus}" if load is not None and load.cpus else ""
    return f"other processes used {others:.1f}{of} cores"


def _count_other_cores(samples: Sequence[SystemMetrics]) -> float | None:
    """Returns the cores of this machine that other processes use, in the median of the samples; None: unknown."""
    import os

    cores = os.cpu_count()
    counts = [
        (sample.figures["machine_cpu_percent"] * cores - sample.figures["cpu_percent"]) / 100
        for sample in samples
        if cores and {"machine_cpu_percent", "cpu_percent"} <= sample.figures.keys()
    ]
    return max(0.0, statistics.median(counts)) if counts else None


def _read_gpu_utilization(samples: Sequence[SystemMetrics]) -> float | None:
    """Returns the utilization of the GPUs that the samples cover, in percent; None without any."""
    values = [
        value
        for sample in samples
        for key, value in sample.figures.items()
        if re.fullmatch(r"gpu_\d+/utilization_percent", key)
    ]
    return statistics.mean(values) if values else None


def _judge_memory(evidence: Evidence, plan: Plan) -> tuple[str, bool, tuple[str, ...]]:
    measured = evidence.measured
    real = read_number(measured.peak_gib) if measured is not None else None
    planned = f"planned {format_gib(plan.peak_gib)} of {format_gib(plan.available_gib)}"
    if measured is None or real is None:
        return f"Memory: {planned}; the peak is measured when the session ends.", False, ()
    difference, same_gib = real - plan.peak_gib, _SAME * plan.peak_gib
    is_large = real > plan.peak_gib_interval.high
    figures = f"{format_gib(real)}, {planned}"
    parts = [
        (name, measured_gib - planned_gib)
        for name, measured_gib, planned_gib in (
            ("tensors", measured.allocated_gib, plan.predicted.allocated_gib),
            (
                "cached by torch's allocator",
                _subtract(measured.reserved_gib, measured.allocated_gib),
                _subtract(plan.predicted.reserved_gib, plan.predicted.allocated_gib),
            ),
            ("the context", measured.context_gib, plan.predicted.context_gib),
        )
        if measured_gib is not None and planned_gib is not None
    ]
    if abs(difference) < same_gib:
        return f"As much memory as planned: {figures}.", is_large, ()
    head = f"{format_gib(abs(difference))} {'more' if difference > 0 else 'less'} memory than planned"
    causes = [
        f"{name} as planned"
        if abs(size) < same_gib
        else f"{name} {format_gib(abs(size))} {'more' if size > 0 else 'less'}"
        for name, size in parts
    ]
    if (phase := _describe_phase(evidence.profile, same_gib)) and difference > 0:
        causes.append(phase)
    text = f"{head}: {', '.join(causes)}; {figures}." if causes else f"{head}: {figures}."
    unknown = (
        () if causes else ("Which part of the memory differs is not known: a CPU measures the whole process only.",)
    )
    return text, is_large, unknown


def _subtract(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part


def _describe_phase(profile: StepProfile | None, same_gib: float) -> str:
    """Returns the phase whose peak is farthest above the plan, from a profile; "" without one."""
    peaks = profile.memory if profile is not None else ()
    above = [(peak.gib - peak.planned_gib, peak.phase) for peak in peaks if peak.planned_gib is not None]
    size, phase = max(above, default=(0.0, ""))
    return f"most of it in {phase} (+{format_gib(size)})" if size >= same_gib else ""
