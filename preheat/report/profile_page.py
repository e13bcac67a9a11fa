"""HTML page of a profile: where the time of a training step goes, beside the plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.operator_kinds import OperatorKind
from preheat.core.step_profile import Part, PhasePeak, StepProfile
from preheat.errors import RunError
from preheat.files import parse_json, read_bytes, read_record, write_atomic
from preheat.report import page
from preheat.report.formatting import (
    escape,
    format_duration,
    format_gib,
    format_grouped,
    format_headline,
    format_percent,
)
from preheat.report.page import LegendEntry, bullets, cell, number_cell, text_cell
from preheat.report.svg import NARROW, SENTINEL, WIDE, draw_both_widths, render_plot, set_ticks
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_profile"]

_UNPLANNED = "not planned"


def write_profile(folder: Path, name: str) -> Path | None:
    """Writes the page of a profile and returns its path; None if the folder has no profile.

    Args:
        folder: of `profile.json`; gets `profile.html`.
        name: of what was profiled.

    Raises:
        RunError: the profile is damaged, or the page cannot be written.
    """
    source = folder / "profile.json"
    if not source.exists():
        return None
    try:
        profile = read_record(StepProfile, parse_json(read_bytes(source)))
    except ValueError as error:
        raise RunError(f"{source}: is damaged ({error}); remove it, or profile the recipe in another run") from None
    path = source.with_suffix(".html")
    try:
        write_atomic(path, _page(profile, format_headline(name)))
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); make the folder writable or free some room"
        ) from None
    return path


def _page(profile: StepProfile, name: str) -> str:
    phases, kinds = _with_gradients(profile), profile.kinds
    sections = (
        ("phases", "By phase", _parts("profile-phases", phases, "phase", _PHASES_NOTE)),
        ("kinds", "By kind of operator", _parts("profile-kinds", kinds, "kind", _kinds_note(profile))),
        ("operators", "The costliest operators", _operators(profile)),
        ("transfers", "Copies between host and GPU", _transfers(profile)),
        ("memory", "Memory by phase", _peaks(profile.memory, "memory.pickle", "the steps before the profiled ones")),
        (
            "out-of-memory",
            "Memory by phase until the step ran out of memory",
            _peaks(profile.out_of_memory, "out-of-memory.pickle", "the step that failed"),
        ),
        ("basis", "How it was measured", _basis(profile)),
    )
    more = bullets(escape(finding.text) for finding in profile.findings[1:]) if profile.findings[1:] else ""
    footer = (
        "All figures as data: profile.json, next to this page. Every operator in order: trace.json.gz, which "
        "ui.perfetto.dev and TensorBoard open."
    )
    return page.document(
        f"{name} · preheat profile",
        f"""{page.header("preheat profile", name, profile.findings[0].text, more + _busy(profile))}
{_tiles(profile)}
{"".join(page.section(*parts) for parts in sections)}<footer>{footer}</footer>""",
    )


def _busy(profile: StepProfile) -> str:
    """Returns a notice if other processes slowed the steps; a plan is for an idle machine."""
    use = profile.machine
    if use is None or use.alone is not False:
        return ""
    return page.notice(
        f"Other processes used {use.other_cores:.1f} of {use.cpus} cores meanwhile, so all times may be too long; "
        "shares are less affected."
    )


def _tiles(profile: StepProfile) -> str:
    bound = profile.launch_bound
    return page.tiles(
        [
            ("A step", format_duration(profile.seconds), f"planned {format_duration(profile.seconds_planned)}"),
            ("Without the profiler", format_duration(profile.seconds_unprofiled), "a step before it began"),
            ("Waiting for data", format_percent(profile.waiting_for_data, 1), "of the step"),
            ("Bound by launches", format_percent(bound), "of the step the GPU idles while the host launches"),
        ]
    )


# --- phases and kinds

_PHASES_NOTE = (
    "The plan knows forward and backward together; it has no time for data, for reading the loss back and for logging."
)


def _kinds_note(profile: StepProfile) -> str:
    host = (
        "Host only: the GPU idles while Python, autograd and the driver launch its kernels, or read data."
        if profile.launch_bound is not None
        else "Host only: Python, autograd and the launch of operators. Other operators count their own time."
    )
    return f"{host} The optimizer includes clipping; norms written out as several operators are elementwise."


def _with_gradients(profile: StepProfile) -> tuple[Part, ...]:
    """Returns the phases with the sum of forward and backward, which the plan knows."""
    data, forward, backward, *rest = profile.phases
    return (data, forward, backward, profile.gradients, *rest)


def _parts(name: str, parts: Sequence[Part], what: str, note: str) -> str:
    rows = (
        page.named_row(
            part.name,
            number_cell(format_duration(part.seconds), format_percent(part.share, 1)),
            number_cell(_UNPLANNED)
            if part.planned is None
            else number_cell(format_duration(part.planned), _difference(part)),
        )
        for part in parts
    )
    table = page.table((what, "a step, and its share", "planned, and the difference"), rows)
    legend = [LegendEntry("measured", "series-1")]
    legend += [LegendEntry("planned", "series-6")] if any(part.planned is not None for part in parts) else []
    alt = ", ".join(f"{part.name} {format_duration(part.seconds)}" for part in parts)

    def bars(name: str, size: tuple[float, float]) -> str:
        return render_plot(name, size, f"Time of a step: {alt}", lambda axes: _bars(axes, parts))

    drawing = draw_both_widths(
        name, bars, wide=(WIDE[0], 0.7 + 0.36 * len(parts)), narrow=(NARROW[0], 0.7 + 0.36 * len(parts))
    )
    return page.figure("Milliseconds of a step", note, drawing, legend) + table


def _difference(part: Part) -> str:
    assert part.planned is not None
    more = part.seconds - part.planned
    sign = "+" if more > 0 else "\u2212"
    return f"{sign}{format_duration(abs(more))}"


def _bars(axes: Axes, parts: Sequence[Part]) -> None:
    for y, part in enumerate(parts):
        axes.barh(y - 0.19, 1e3 * part.seconds, height=0.36, color=SENTINEL["series-1"])
        if part.planned is not None:
            axes.barh(y + 0.19, 1e3 * part.planned, height=0.36, color=SENTINEL["series-6"])
    longest = max(max(part.seconds, part.planned or 0.0) for part in parts) or 1.0
    axes.set_xlim(0, 1e3 * longest * 1.04)
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.set_yticks(range(len(parts)), [shorten(part.name, 32) for part in parts])
    axes.tick_params(axis="y", colors=SENTINEL["ink"])
    set_ticks(axes.xaxis)
    axes.grid(axis="x", color=SENTINEL["grid"], linewidth=0.8)
    axes.set_xlabel("ms", loc="right", labelpad=2)


# --- operators


def _operators(profile: StepProfile) -> str:
    rows = (
        page.row(
            text_cell(row.name, row.kind),
            number_cell(format_grouped(row.calls, 0 if row.calls >= 10 or row.calls == int(row.calls) else 1)),
            number_cell(format_duration(row.seconds)),
            number_cell(format_percent(row.share, 1)),
        )
        for row in profile.operators
    )
    own = "Time in the operator itself" if profile.launch_bound is None else "Time of its kernels on the GPU"
    host = sum(part.share for part in profile.kinds if part.name == OperatorKind.HOST)
    listed = sum(row.share for row in profile.operators)
    text = f"{own}. Together {format_percent(listed)} of the step; {format_percent(host)} are host only."
    return page.small(text) + page.table(("operator and its kind", "calls", "a step", "share"), rows)


def _transfers(profile: StepProfile) -> str:
    if not profile.transfers:
        return ""
    rows = (
        page.row(
            cell(escape(row.direction)),
            number_cell(format_grouped(row.copies)),
            number_cell(format_gib(row.bytes / 2**30)),
            number_cell(format_duration(row.seconds)),
        )
        for row in profile.transfers
    )
    return page.table(("direction", "copies", "size", "a step"), rows)


def _peaks(peaks: Sequence[PhasePeak], snapshot: str, steps: str) -> str:
    if not peaks:
        return ""
    rows = (
        page.row(
            cell(escape(peak.phase)),
            number_cell(format_gib(peak.gib)),
            number_cell(_UNPLANNED if peak.planned_gib is None else format_gib(peak.planned_gib)),
        )
        for peak in peaks
    )
    text = (
        f"The most that tensors took in each phase of {steps}; the plan's figures include the context and the "
        f"allocator's reserve. Every allocation, with its phase: {snapshot}, which docs.pytorch.org/memory_viz opens."
    )
    return page.small(text) + page.table(("phase", "peak", "planned"), rows)


def _basis(profile: StepProfile) -> str:
    last = profile.first_step + profile.steps - 1
    steps = f"Steps {profile.first_step:,} to {last:,}" if profile.steps > 1 else f"Step {profile.first_step:,}"
    verb = "were" if profile.steps > 1 else "was"
    ranks = f", of {profile.ranks:,} ranks" if profile.ranks > 1 else ""
    text = f"{steps} {verb} profiled on {profile.device}, rank {profile.rank}{ranks}, with torch's profiler."
    before = profile.seconds_unprofiled
    if before:
        times = f"{format_duration(profile.seconds)} with it and {format_duration(before)} before"
        text += f" A step took {times}: it slows mostly the host."
    return page.small(text)
