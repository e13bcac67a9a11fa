"""Turns the events of torch's profiler into a `StepProfile`: times by phase, by kind and by operator, and findings.

On a CPU, an operator's time is its own, without that of the
operators that it calls. On a GPU, it is that of its kernels; where several run at once, computing counts before
communication, and that before copies, so that the parts add up to the step.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from preheat.core import MachineUse, Phase
from preheat.core.operator_kinds import OperatorKind, is_score_shaped, kind_of
from preheat.core.plan import StepSeconds
from preheat.core.step_profile import Finding, OperatorTime, Part, StepProfile, Transfer
from preheat.core.units import format_duration, format_percent

__all__ = ["STEP_MARK", "Measured", "Setting", "TraceEvent", "figures_of", "phase_mark"]

STEP_MARK = "preheat step "
"""Start of the name of the event that spans a step."""
_MARK = "preheat: "
_OF_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_LISTED = 20  # operators
_NOTABLE = 0.05  # of the step: smaller gaps are within the noise of steps and the plan's error

_DATA, _FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = "data", "forward", "backward", "optimizer", "other"
_PHASES = (_DATA, _FORWARD, _BACKWARD, _OPTIMIZER, _OTHER)


def phase_mark(phase: Phase) -> str:
    """Returns the name of the event that spans a phase."""
    return f"{_MARK}{phase}"


class TraceEvent(NamedTuple):
    """An event of torch's profiler; times in microseconds.

    Attributes:
        kind: as torch names it: cpu_op and user_annotation of the host; kernel, gpu_memcpy and gpu_memset of a GPU.
        thread: of the host; a stream of a GPU.
        shapes: of an operator's tensors; () of other arguments.
        operator: number of the operator; of a kernel, the number of the one that launched it; 0: none did.
        bytes: of a copy.
    """

    kind: str
    name: str
    start: float
    end: float
    thread: int
    shapes: tuple[tuple[int, ...], ...] = ()
    operator: int = 0
    bytes: int = 0

    @property
    def duration(self) -> float:
        return self.end - self.start


class Setting(NamedTuple):
    """The subject of a profile.

    Attributes:
        length: tokens of a sequence; vocabulary: rows of the head (see `kind_of`).
    """

    rank: int
    ranks: int
    device: str
    length: int
    vocabulary: int | None


class Measured(NamedTuple):
    """The loop's own figures of the profiled steps.

    Attributes:
        unprofiled: seconds of a step before them; None: unknown.
        machine: its use meanwhile; None: unknown.
    """

    first_step: int
    unprofiled: float | None
    machine: MachineUse | None = None


class _Span(NamedTuple):
    start: float
    end: float
    name: str = ""


@dataclass(slots=True)
class _Operator:
    """An operator call of the host."""

    name: str
    thread: int
    number: int
    end: float
    kind: OperatorKind
    phase: str
    on_scores: bool
    own: float
    """Microseconds without those of the operators that it calls."""
    whole: bool
    """The operators that it calls have its kind: they are part of one kernel by the plan."""


@dataclass
class _Totals:
    """Microseconds of all profiled steps."""

    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kinds: dict[OperatorKind, float] = field(default_factory=lambda: defaultdict(float))
    operators: dict[tuple[str, OperatorKind], float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    on_scores: float = 0.0

    def add(self, name: str, kind: OperatorKind, time: float, *, on_scores: bool) -> None:
        self.kinds[kind] += time
        if kind is not OperatorKind.HOST:
            self.operators[name, kind] += time
        self.on_scores += time if on_scores else 0.0


def figures_of(
    events: Sequence[TraceEvent],
    setting: Setting,
    measured: Measured,
    *,
    planned: StepSeconds | None,
    planned_seconds: float,
) -> StepProfile:
    """Returns the figures of profiled steps.

    Args:
        events: with a `STEP_MARK` for each step, and a `phase_mark` for each of its phases.
        planned: by kind; None: unknown.
        planned_seconds: of a step.
    """
    main = next(event.thread for event in events if _is_mark(event, STEP_MARK))
    steps = sorted(_span(event) for event in events if _is_mark(event, STEP_MARK) and event.thread == main)
    segments = _segments(events, main, steps)
    operators = _operators_of(events, segments, setting)
    kernels = [event for event in events if event.kind in _OF_GPU]
    totals, length = _Totals(), sum(step.end - step.start for step in steps)
    idle = None
    if kernels:
        idle = _add_kernels(totals, kernels, operators, segments, steps, setting)
    else:
        _add_operators(totals, [op for op in operators if op.thread == main], segments, length)
    scale = 1e-6 / len(steps)

    def part(name: str, time: float, expected: float | None = None) -> Part:
        return Part(name, time * scale, time / length, expected)

    phases = tuple(
        part(name, totals.phases[name], planned.update if planned and name == _OPTIMIZER else None) for name in _PHASES
    )
    expected = planned.kinds if planned else {}
    # The plan knows all kinds if it knows any: one that it does not list takes it no time.
    kinds = tuple(
        part(kind, totals.kinds[kind], expected.get(kind, 0.0) if planned else None)
        for kind in OperatorKind
        if totals.kinds[kind] or expected.get(kind)
    )
    profile = StepProfile(
        rank=setting.rank,
        ranks=setting.ranks,
        device=setting.device,
        first_step=measured.first_step,
        steps=len(steps),
        seconds=length * scale,
        seconds_unprofiled=measured.unprofiled,
        seconds_planned=planned_seconds,
        phases=phases,
        gradients=part(
            "forward and backward",
            totals.phases[_FORWARD] + totals.phases[_BACKWARD],
            planned.gradients if planned else None,
        ),
        kinds=kinds,
        operators=_costliest(totals, len(steps), length),
        launch_bound=None if idle is None else idle / length,
        waiting_for_data=totals.phases[_DATA] / length,
        transfers=_transfers(kernels, scale),
        stores_scores=totals.on_scores > 0,
        machine=measured.machine,
        findings=(),
    )
    return _with_findings(profile, _time_to_store_scores(totals, setting) * scale)


def _is_mark(event: TraceEvent, start: str) -> bool:
    return event.kind == "user_annotation" and event.name.startswith(start)


def _span(event: TraceEvent) -> _Span:
    return _Span(event.start, event.end, event.name)


# --- phases


class _Segments:
    """Spans of the host's time, in order and without overlaps, each with its phase."""

    def __init__(self, spans: Iterable[_Span]):
        self.spans = sorted(spans)
        self._starts = [span.start for span in self.spans]

    def at(self, time: float) -> str | None:
        """Returns the phase at a time; None outside of all steps."""
        n = bisect.bisect_right(self._starts, time) - 1
        return self.spans[n].name if n >= 0 and time < self.spans[n].end else None


def _segments(events: Sequence[TraceEvent], main: int, steps: Sequence[_Span]) -> _Segments:
    """Returns the phases of all steps without gaps: what no phase has is `other`."""
    marks = sorted(_span(event) for event in events if _is_mark(event, _MARK) and event.thread == main)
    # Of any thread: on a GPU, autograd has one of its own.
    nodes = sorted(_span(e) for e in events if e.name.startswith("autograd::engine::evaluate_function"))
    forward = [mark for mark in marks if mark.name == phase_mark(Phase.FORWARD)]
    known: list[_Span] = []
    for mark in marks:
        if mark.name == phase_mark(Phase.DATA):
            known.append(_Span(mark.start, mark.end, _DATA))
        elif mark.name == phase_mark(Phase.UPDATE):
            known.append(_Span(mark.start, mark.end, _OPTIMIZER))
        elif mark.name == phase_mark(Phase.GRADIENTS):
            known += _gradients(mark, [f for f in forward if mark.start <= f.start < mark.end], nodes)
    known.sort()
    filled: list[_Span] = []
    for step in steps:
        at = step.start
        for span in known:
            if not step.start <= span.start < step.end:
                continue
            if span.start > at:
                filled.append(_Span(at, span.start, _OTHER))
            filled.append(_Span(max(span.start, at), min(span.end, step.end), span.name))
            at = max(at, span.end)
        if at < step.end:
            filled.append(_Span(at, step.end, _OTHER))
    return _Segments(filled)


def _gradients(whole: _Span, forward: Sequence[_Span], nodes: Sequence[_Span]) -> list[_Span]:
    """Splits the computation of gradients: backward lasts from the first of autograd's nodes to the last."""
    spans = [_Span(mark.start, mark.end, _FORWARD) for mark in forward]
    starts = [node.start for node in nodes]
    # Of each micro-batch, from the end of its forward pass to the beginning of the next.
    ends = [*(mark.start for mark in forward[1:]), whole.end]
    for start, end in zip([mark.end for mark in forward] or [whole.start], ends, strict=True):
        between = nodes[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, end)]
        if between:
            spans.append(_Span(between[0].start, min(max(node.end for node in between), end), _BACKWARD))
    return spans


# --- operators


def _operators_of(events: Sequence[TraceEvent], segments: _Segments, setting: Setting) -> list[_Operator]:
    """Returns the operators within the steps."""
    operators: list[_Operator] = []
    stacks: dict[int, list[_Operator]] = defaultdict(list)
    calls = (event for event in events if event.kind == "cpu_op")
    # An operator begins before those that it calls; of two that begin at once, the longer one is outside.
    for event in sorted(calls, key=lambda event: (event.start, -event.end)):
        if (phase := segments.at(event.start)) is None:
            continue
        stack = stacks[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        caller = stack[-1] if stack else None
        name, shapes = event.name, [shape for shape in event.shapes if shape]
        # Without a namespace it is an autograd function in Python, or a compiled region.
        kind = (
            kind_of(name, shapes, length=setting.length, vocabulary=setting.vocabulary, updating=phase == _OPTIMIZER)
            if "::" in name
            else OperatorKind.HOST
        )
        # Only its softmax is certain: the queries of a short sequence may be square, too.
        on_scores = "_softmax" in name and is_score_shaped(name, shapes, setting.length)
        whole = kind is OperatorKind.ATTENTION or (name.startswith("preheat::") and kind is not OperatorKind.HOST)
        if caller is not None and caller.whole:
            kind, whole = caller.kind, True
        operator = _Operator(
            name, event.thread, event.operator, event.end, kind, phase, on_scores, event.duration, whole
        )
        if caller is not None:
            caller.own -= event.duration
        stack.append(operator)
        operators.append(operator)
    return operators


def _add_operators(totals: _Totals, operators: Iterable[_Operator], segments: _Segments, length: float) -> None:
    """Adds a CPU's operators; what they leave of the steps is the host's."""
    for span in segments.spans:
        totals.phases[span.name] += span.end - span.start
    for op in operators:
        # The clock's resolution may make the operators that one calls longer than itself.
        totals.add(op.name, op.kind, max(op.own, 0.0), on_scores=op.on_scores)
        totals.calls[op.name] += 1
    computing = sum(time for kind, time in totals.kinds.items() if kind is not OperatorKind.HOST)
    totals.kinds[OperatorKind.HOST] = max(length - computing, 0.0)


# --- kernels of a GPU


class _Kernel(NamedTuple):
    start: float
    end: float
    order: int  # of those that run at once, the lowest counts
    name: str
    kind: OperatorKind
    phase: str
    on_scores: bool


def _add_kernels(
    totals: _Totals,
    events: Sequence[TraceEvent],
    operators: Sequence[_Operator],
    segments: _Segments,
    steps: Sequence[_Span],
    setting: Setting,
) -> float:
    """Adds a GPU's kernels; returns the microseconds in which it idles, except while the host reads data."""
    launched_by = {operator.number: operator for operator in operators if operator.number}
    kernels = []
    for event in events:
        kernel = _kernel_of(event, launched_by.get(event.operator), segments, setting)
        if kernel is not None:
            kernels.append(kernel)
            totals.calls[kernel.name] += 1
    idle = 0.0
    for start, end, kernel in _exposed(kernels, steps):
        if kernel is not None:
            totals.phases[kernel.phase] += end - start
            totals.add(kernel.name, kernel.kind, end - start, on_scores=kernel.on_scores)
            continue
        # The idle time of each phase of the host.
        for span in segments.spans[max(bisect.bisect_right(segments._starts, start) - 1, 0) :]:
            if span.start >= end:
                break
            time = max(min(span.end, end) - max(span.start, start), 0.0)
            waits = span.name == _DATA
            totals.phases[_DATA if waits else _OTHER] += time
            totals.kinds[OperatorKind.HOST] += time
            idle += 0.0 if waits else time
    return idle


def _kernel_of(event: TraceEvent, operator: _Operator | None, segments: _Segments, setting: Setting) -> _Kernel | None:
    phase = operator.phase if operator else segments.at(event.start)
    if phase is None:
        return None
    by_name = kind_of(event.name, (), length=setting.length, vocabulary=setting.vocabulary)
    if event.kind == "gpu_memcpy":
        kind = OperatorKind.COPIES
    # The compiler's operators have no kind of their own, and a collective's kernel has no operator.
    elif operator is None or operator.kind is OperatorKind.HOST or by_name is OperatorKind.COMMUNICATION:
        kind = OperatorKind.OPTIMIZER if phase == _OPTIMIZER and operator is not None else by_name
    else:
        kind = operator.kind
    order = {OperatorKind.COPIES: 2, OperatorKind.COMMUNICATION: 1}.get(kind, 0)
    name = operator.name if operator and operator.kind is not OperatorKind.HOST else event.name
    return _Kernel(event.start, event.end, order, name, kind, phase, operator.on_scores if operator else False)


def _exposed(kernels: Sequence[_Kernel], steps: Sequence[_Span]) -> Iterable[tuple[float, float, _Kernel | None]]:
    """Yields the stretches of the steps, each with the kernel that counts; None: the device idles."""
    for step in steps:
        inside = sorted(k for k in kernels if k.start < step.end and k.end > step.start)
        edges = sorted({step.start, step.end, *(t for k in inside for t in k[:2] if step.start < t < step.end)})
        running: list[_Kernel] = []
        waiting = iter(inside)
        coming = next(waiting, None)
        for start, end in itertools.pairwise(edges):
            running = [kernel for kernel in running if kernel.end > start]
            while coming is not None and coming.start <= start:
                if coming.end > start:
                    running.append(coming)
                coming = next(waiting, None)
            yield start, end, min(running, key=lambda kernel: (kernel.order, kernel.start), default=None)


def _transfers(events: Iterable[TraceEvent], scale: float) -> tuple[Transfer, ...]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in events:
        if event.kind == "gpu_memcpy":
            # "Memcpy HtoD (Pinned -> Device)"
            row = sums[event.name.removeprefix("Memcpy ").partition(" ")[0]]
            row[0] += 1
            row[1] += event.bytes
            row[2] += event.duration
    per_step = scale * 1e6
    return tuple(Transfer(name, n * per_step, size * per_step, time * scale) for name, (n, size, time) in sums.items())


def _costliest(totals: _Totals, steps: int, length: float) -> tuple[OperatorTime, ...]:
    scale = 1e-6 / steps
    times: dict[str, float] = defaultdict(float)
    kinds: dict[str, tuple[float, OperatorKind]] = {}
    for (name, kind), time in totals.operators.items():
        times[name] += time
        kinds[name] = max(kinds.get(name, (0.0, kind)), (time, kind))
    rows = [
        OperatorTime(name, kinds[name][1], totals.calls[name] / steps, time * scale, time / length)
        for name, time in times.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name))[:_LISTED])


# --- findings

_TAKES = {
    OperatorKind.MATMUL: "Matmuls take",
    OperatorKind.ATTENTION: "Attention takes",
    OperatorKind.NORM: "Norms take",
    OperatorKind.LOSS: "The loss takes",
    OperatorKind.ELEMENTWISE: "Elementwise operators take",
    OperatorKind.COPIES: "Copies take",
    OperatorKind.OPTIMIZER: "The optimizer takes",
    OperatorKind.COMMUNICATION: "Communication takes",
}


def _time_to_store_scores(totals: _Totals, setting: Setting) -> float:
    """Returns the time of attention outside of its matmuls, which a fused kernel computes, too."""
    return sum(
        time
        for (name, kind), time in totals.operators.items()
        if kind is OperatorKind.ATTENTION
        and kind_of(name, (), length=setting.length, vocabulary=setting.vocabulary) is not OperatorKind.MATMUL
    )


def _with_findings(profile: StepProfile, storing: float) -> StepProfile:
    findings = sorted(_findings(profile, storing), key=lambda finding: -finding.seconds)
    notable = [finding for finding in findings if finding.seconds >= _NOTABLE * profile.seconds]
    return replace(profile, findings=tuple(notable or [_nothing(profile)]))


def _findings(profile: StepProfile, storing: float) -> Iterable[Finding]:
    """Yields all findings, also those that are too small to mention.

    Args:
        storing: seconds of attention that a kernel which stores no scores would avoid.
    """
    data = profile.waiting_for_data
    waiting = f"Waiting for data takes {format_percent(data)} of the step, which the plan leaves out."
    yield Finding(_DATA, data * profile.seconds, waiting)
    slowed, total = _slowed(profile), sum(part.planned or 0.0 for part in profile.kinds)
    for part in profile.kinds:
        if part.name == OperatorKind.ATTENTION and profile.stores_scores:
            text = (
                "Attention runs with the math kernel, which stores all scores: "
                f"{_share(part)}{_planned(part, profile)}; efficient_attention would avoid "
                f"about {format_percent(storing / profile.seconds)} of the step."
            )
            yield Finding(part.name, storing, text)
        elif part.planned is not None:
            # The profiler slows the host, and data has a finding of its own.
            beside = slowed + data * profile.seconds if part.name == OperatorKind.HOST else 0.0
            # By shares: a machine that is slower than planned in everything has no gap in one part.
            more = (part.seconds - beside) / profile.seconds - part.planned / total
            yield Finding(part.name, more * profile.seconds, f"{_subject(part, profile)}{_planned(part, profile)}.")


def _share(part: Part) -> str:
    return f"{format_percent(part.share)} of the step"


def _subject(part: Part, profile: StepProfile) -> str:
    if part.name != OperatorKind.HOST:
        return f"{_TAKES[OperatorKind(part.name)]} {_share(part)}"
    if profile.launch_bound is not None:
        return f"The GPU idles for {_share(part)} while the host launches its kernels or reads"
    return f"Python and the launch of operators take {_share(part)}"


def _planned(part: Part, profile: StepProfile) -> str:
    if part.planned is None:
        return ""
    share = part.planned / sum(kind.planned or 0.0 for kind in profile.kinds)
    times = f"{format_duration(part.seconds)} instead of {format_duration(part.planned)}"
    return f", planned {format_percent(share)} ({times})"


def _slowed(profile: StepProfile) -> float:
    """Returns the seconds by which profiling slowed a step, as far as known."""
    return 0.0 if profile.seconds_unprofiled is None else max(profile.seconds - profile.seconds_unprofiled, 0.0)


def _nothing(profile: StepProfile) -> Finding:
    longest = max((part for part in profile.kinds), key=lambda part: part.seconds)
    if longest.planned is None:
        text = f"{_subject(longest, profile)}, the most of all; the plan has no times to compare it with."
    else:
        text = (
            f"No part has a share that is {format_percent(_NOTABLE)} of the step above the planned one. "
            f"{_subject(longest, profile)}{_planned(longest, profile)}."
        )
    return Finding(longest.name, 0.0, text)
