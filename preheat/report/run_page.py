"""HTML page of a run's report."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from preheat.core.run_records import (
    Checkpoint,
    Damaged,
    Environment,
    Event,
    Failed,
    Fallback,
    OutOfMemory,
    Overflow,
    Overflows,
    Prompt,
    ResultDifferences,
    Results,
    SampleTexts,
    Spike,
    Unsaved,
)
from preheat.core.slots import Change
from preheat.core.units import format_three_digits
from preheat.errors import RunError
from preheat.files import require_overwritable, to_json, to_plain_data, write_atomic
from preheat.report import page, run_charts
from preheat.report.formatting import (
    LONG,
    MISSING,
    count,
    escape,
    format_clock,
    format_duration,
    format_gib,
    format_grouped,
    format_headline,
    format_interval,
    format_loss,
    format_percent,
    format_signed_percent,
    format_sizes,
    format_value,
    join_units,
    read_number,
)
from preheat.report.long_context_charts import render_lengths
from preheat.report.page import GENERATOR, cell, colour_key, number_cell, text_cell, two_columns
from preheat.report.profile_page import write_profile
from preheat.report.report_data import RunFigures, collect
from preheat.run.layout import MARK, PROFILE

__all__ = [
    "describe_event",
    "render",
    "render_environment",
    "render_evaluation",
    "render_fallbacks",
    "render_gpu_memory",
    "render_recipe",
    "render_samples",
    "render_setup",
    "render_techniques",
    "write",
]


def write(run: str | Path) -> Path:
    """Writes `report.html` and `report.json` into a run's folder and returns the path of the page.

    A run that was profiled also gets `profile/profile.html`.

    Args:
        run: the folder of a run: finished, running, stopped or failed.

    Raises:
        RunError: the folder holds no run, or the report cannot be written.

    Example:
        >>> write("runs/demo")                                          # doctest: +SKIP
        PosixPath('runs/demo/report.html')
    """
    figures = collect(run)
    html = render(figures)
    data = to_json(figures, indent=1) + "\n"
    path = Path(run) / "report.html"
    # In a run folder the report is ours; elsewhere it may only replace a page or figures that preheat wrote.
    if not (Path(run) / MARK).exists():  # not a run folder of ours, though it may hold a recipe.yaml
        require_overwritable(path, [GENERATOR])
        require_overwritable(path.with_name("report.json"), ['{\n "title": '])
    # The figures first: a page without its data would be worse than data without its page.
    try:
        write_atomic(path.with_name("report.json"), data)
        write_atomic(path, html)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); make the folder writable or free some room"
        ) from None
    write_profile(Path(run) / PROFILE, Path(run).name)
    return path


def render(figures: RunFigures) -> str:
    """Returns the page for the figures of `report_data.collect`; sections without records are left out."""
    sections = (
        ("loss", "Loss", run_charts.draw_losses(figures)),
        ("loss-by-source", "Loss by source", two_columns(*run_charts.draw_losses_by_source(figures))),
        ("evaluation", "Before and after" if figures.evaluation.before else "Evaluation", render_evaluation(figures)),
        ("over-time", "Over the run", two_columns(*run_charts.draw_over_time(figures))),
        ("memory", "Memory, predicted and measured", _render_memory(figures)),
        ("techniques", "Techniques", render_techniques(figures.changes)),
        ("samples", "Samples", render_samples(figures.samples)),
        ("timeline", "Timeline", _render_timeline(figures.events)),
        ("environment", "Environment", render_environment(figures.environment)),
        ("recipe", "Recipe", render_recipe(figures)),
    )
    body = "".join(page.section(*parts) for parts in sections)
    footer = (
        "All figures as data: report.json, next to this page. Losses are in nats a token; 1 GiB is 2³⁰ bytes, less "
        "what the imports took."
    )
    return page.document(
        f"{figures.title} · preheat report",
        f"{_render_header(figures)}\n{_render_tiles(figures)}\n{render_setup(figures.setup)}\n{body}<footer>{footer}</footer>",
    )


def _render_header(figures: RunFigures) -> str:
    state = figures.state
    notices = ""
    if state.kind != "finished":
        notices += page.notice(state.message, bad=state.kind == "failed")
    if figures.damaged:
        message = "Damaged files of this run, of which a part is left out: " + "; ".join(figures.damaged) + "."
        notices += page.notice(message, bad=True)
    return page.header(f"preheat report · {_WORD[state.kind]}", figures.title, figures.verdict, notices)


def render_setup(rows: Sequence[tuple[str, str]]) -> str:
    """Returns the settings of the recipe for the head of the page."""
    shown = "".join(f"<div><dt>{escape(what)}</dt><dd>{join_units(text)}</dd></div>" for what, text in rows)
    return f'<dl class="setup" id="setup">{shown}</dl>' if rows else ""


_WORD = {"finished": "finished", "failed": "failed", "stopped": "stopped early", "open": "not finished"}


def _render_tiles(figures: RunFigures) -> str:
    """Returns tiles with the most important figures; unrecorded figures have none."""
    summary, predicted, measured, off = figures.summary, figures.predicted, figures.measured, figures.difference
    first = summary.first_loss
    held_out, tokens, total = map(read_number, (summary.validation_loss, summary.tokens, predicted.seconds_total))

    def format_against(guess: float | None, difference: float | None, show: Callable[[object], str]) -> str:
        if read_number(guess) is None:
            return "no prediction"
        return f"predicted {show(guess)}" + (
            f" ({format_signed_percent(difference)})" if difference is not None else ""
        )

    parameters, shares = summary.parameters, []
    if parameters is not None:
        shares = [f"{count(parameters.active)} active"] * (parameters.active < parameters.total)
        shares += [f"{count(parameters.trained)} trained"]
    entries = (
        ("Training loss", format_loss(summary.loss), f"from {format_loss(first)}" if first is not None else ""),
        (
            "Validation loss",
            format_loss(summary.validation_loss),
            # exp(50) is 5e21: beyond it, the number says nothing.
            f"perplexity {format_value(math.exp(held_out))}" if held_out is not None and held_out < 50 else "",
        ),
        (
            "Tokens per second",
            format_grouped(measured.tokens_per_second),
            format_against(predicted.tokens_per_second, off.tokens_per_second, format_grouped),
        ),
        ("Peak memory", format_gib(measured.peak_gib), format_against(predicted.peak_gib, off.peak_gib, format_gib)),
        (
            "Time",
            format_duration(summary.seconds),
            f"predicted {format_duration(total)}" if total is not None else "no prediction",
        ),
        ("Steps", format_grouped(summary.steps), f"{count(tokens)} tokens" if tokens is not None else ""),
        (
            "Model FLOPs utilisation",
            format_percent(measured.mfu),
            format_against(predicted.mfu, off.mfu, format_percent),
        ),
        ("Parameters", count(parameters.total) if parameters else MISSING, ", ".join(shares)),
        *_build_usage_tiles(figures),
    )
    return page.tiles(entries)


def _build_usage_tiles(figures: RunFigures) -> list[tuple[str, str, str]]:
    """Returns the tiles of a run's energy and cost, as far as they are known."""
    usage, predicted, off = figures.usage, figures.predicted, figures.difference
    if usage is None:
        return []
    tiles = []
    for label, unit, value, how, guess, difference in (
        (
            "Energy",
            "kWh",
            usage.energy_kwh,
            f"by {', '.join(usage.energy_sources or ())}",
            predicted.energy_kwh,
            off.energy_kwh,
        ),
        ("Cost", usage.currency, usage.cost, _format_hours(usage.device_hours), predicted.cost, off.cost),
    ):
        if (amount := read_number(value)) is None:
            continue
        expected = "no prediction"
        if (planned := read_number(guess)) is not None:
            # Without a difference the run is not at its end, which is predicted.
            whole = "for the whole run" if difference is None else f"({format_signed_percent(difference)})"
            expected = f"predicted {format_three_digits(planned)} {unit} {whole}"
        tiles.append((label, f"{format_three_digits(amount)} {unit}", f"{how}; {expected}"))
    return tiles


def _format_hours(hours: float) -> str:
    return f"{format_three_digits(hours)} device-hours"


def _render_memory(figures: RunFigures) -> str:
    parts = run_charts.list_categories(figures)
    predicted, measured = read_number(figures.predicted.peak_gib), read_number(figures.measured.peak_gib)
    off = figures.difference.peak_gib
    # 1 avoids a division by zero in a plan without any bytes.
    total = sum(size for _, size, _ in parts) or 1
    # One call for all rows of the table, so that they have the same unit and decimals.
    unit, texts = format_sizes([*(size for _, size, _ in parts), predicted, measured])
    rows = [
        page.row(cell(colour_key(colour) + escape(name)), number_cell(text), number_cell(format_percent(size / total)))
        for (name, size, colour), text in zip(parts, texts, strict=False)
    ]
    if predicted is not None:
        rows.append(page.row(cell("predicted peak"), number_cell(texts[-2]), cell(""), kind="sum"))
    if measured is not None:
        apart = (
            f'<span class="small">the prediction is off by {format_signed_percent(off)}</span>'
            if off is not None
            else ""
        )
        label = cell(f"{colour_key('ink')}measured peak{apart}")
        rows.append(page.row(label, number_cell(texts[-1]), cell(""), kind="sum"))
    table = page.table(("at the peak", unit, "share"), rows) if rows else ""
    table += render_gpu_memory(figures)
    left, right = f"{run_charts.draw_memory(figures)}{table}", _render_phases(figures.phases)
    shown = two_columns(f"<div>{left}</div>", f"<div>{right}</div>") if left or right else ""
    return shown + render_fallbacks(figures.events)


def render_gpu_memory(figures: RunFigures) -> str:
    """Returns a table of predicted and measured GPU memory: allocated, reserved, context."""
    predicted, measured, off = figures.predicted, figures.measured, figures.difference
    parts = [
        (name, guess, real, difference)
        for name, guess, real, difference in (
            ("allocated: tensors", predicted.allocated_gib, measured.allocated_gib, off.allocated_gib),
            ("reserved by torch's allocator", predicted.reserved_gib, measured.reserved_gib, off.reserved_gib),
            ("context", predicted.context_gib, measured.context_gib, off.context_gib),
        )
        if read_number(real) is not None
    ]
    unit, texts = format_sizes([size for _, guess, real, _ in parts for size in (guess, real)])
    rows = [
        page.row(
            cell(escape(name)),
            number_cell(guess),
            number_cell(real),
            number_cell("" if difference is None else format_signed_percent(difference)),
        )
        for (name, _, _, difference), guess, real in zip(parts, texts[::2], texts[1::2], strict=True)
    ]
    return page.table(("at the most", f"predicted, {unit}", "measured", "difference"), rows) if rows else ""


def render_fallbacks(events: Sequence[Event]) -> str:
    """Returns a table of out-of-memory errors and the fallbacks that the run continued with."""
    fallbacks = [event for event in events if isinstance(event, Fallback)]
    if not fallbacks:
        return ""
    unit, texts = format_sizes([size for event in fallbacks for size in (event.was_gib, event.peak_gib)])
    rows = []
    for n, event in enumerate(fallbacks):
        rows.append(
            page.row(
                number_cell(format_value(event.step)),
                cell(escape(format_value(event.cause))),
                text_cell(", ".join(event.changed) or "the recipe as written"),
                number_cell(texts[2 * n]),
                number_cell(texts[2 * n + 1]),
            )
        )
    planned = f"planned peak before, {unit}", f"and after, {unit}"
    titles = ("after step", "out of memory while", "continued with", *planned)
    return "<h3>Out of memory</h3>" + page.table(titles, rows, text=(1, 2))


def _render_phases(phases: Mapping[str, float] | None) -> str:
    peaks = {name: size for name, peak in (phases or {}).items() if (size := read_number(peak)) is not None}
    if not peaks:
        return ""
    most = max(peaks.values())
    # The phase that decides if the run fits.
    highest = next(name for name, size in peaks.items() if size == most)
    unit, texts = format_sizes(list(peaks.values()))
    rows = (
        page.row(cell(escape(name)), number_cell(text), page.bar_cell(size / most if most > 0 else 0.0))
        for (name, size), text in zip(peaks.items(), texts, strict=True)
    )
    return (
        "<h3>Peak by phase</h3>"
        + page.small(f"Predicted. The peak of a step lies in: {format_headline(highest)}.")
        + page.table(("phase", f"peak, {unit}", ""), rows, text=(0, 2))
    )


def render_evaluation(figures: RunFigures) -> str:
    """Returns a table of the newest evaluation beside the one before training, with intervals, and its charts."""
    evaluation = figures.evaluation
    after, before = evaluation.after or Results(), evaluation.before or Results()
    difference, compared = evaluation.difference or ResultDifferences(), evaluation.before is not None
    rows = []
    for results, olds, differences in (
        (after.texts, before.texts, difference.texts),
        (after.tasks, before.tasks, difference.tasks),
    ):
        for name, result in results.items():
            old = olds[name].metrics if name in olds else {}
            apart = differences[name].metrics if name in differences else {}
            cut = f" ({result.truncated:,} without room for all of their context)" if result.truncated else ""
            if result.no_room:
                cut += f" ({result.no_room:,} examples left out: no room for an answer)"
            title = f"{name}: {format_grouped(result.rows)} rows{cut}"
            rows.append(page.group_row(title, 4 if compared else 2))
            for metric, measured in result.metrics.items():
                texts = [format_interval(measured)]
                # Three columns: before, after, and the difference with an interval of its own (paired by rows).
                if compared:
                    texts = [format_interval(old.get(metric)), *texts, format_interval(apart.get(metric), signed=True)]
                label = cell(escape(metric.replace("_", " ")))
                rows.append(page.row(label, *(cell(_wrap_interval(text), "n") for text in texts)))
    charts = two_columns(*run_charts.draw_evaluations(figures))
    if not rows:
        return charts
    caption = f"At step {format_value(evaluation.step)}. In brackets: 95 % of 1,000 bootstrap resamples"
    caption += "; of the difference, row by row." if compared else "."
    if not compared:
        caption += (
            " Nothing was measured before the first step; preheat does that for a pretrained model, for tasks "
            "and for a forgetting text."
        )
    titles = ("", "before", "after", "difference") if compared else ("", "measured")
    return page.small(caption) + page.table(titles, rows) + charts + render_lengths(after, before)


def _wrap_interval(text: str) -> str:
    """Wraps the interval of '1.788 [1.70, 1.88]' in a span, so that it can move to a line of its own."""
    if text == MISSING:
        return '<span class="small">not measured</span>'
    figure, _, interval = join_units(text).partition(" [")
    return figure + (f' <span class="interval">[{interval}</span>' if interval else "")


def render_techniques(changes: Mapping[str, Sequence[Change]]) -> str:
    """Returns a table of what each technique changed."""
    rows = []
    for name, entries in changes.items():
        rows.append(page.group_row(name, 2))
        for change in entries:
            kernel = f"kernel: {change.kernel}" if change.kernel else ""
            rows.append(
                page.row(text_cell(format_value(change.what), kernel), number_cell(format_grouped(change.count)))
            )
    return page.table(("what it changed", "count"), rows) if rows else ""


def render_samples(samples: Sequence[SampleTexts]) -> str:
    """Returns the generated texts, those before training beside the newest."""
    if not samples:
        return ""
    shown = []
    for sample in samples[:_MOST_SAMPLES]:
        prompt = _format_prompt(sample.prompt)
        before, after = (
            # The recorded text may begin with the prompt, which the page shows once, in colour.
            None if text is None else text.removeprefix(prompt)
            for text in (sample.before, sample.text)
        )
        expected = sample.expected
        # Nothing to compare with: prompt and text in one block.
        if before is None and expected is None:
            shown.append(f'<pre class="sample"><b>{escape(prompt, LONG)}</b>{escape(after or "", LONG)}</pre>')
            continue
        columns: list[tuple[str, str | None]] = [("Before training", before)] if before is not None else []
        columns += [("After training", after)]
        if expected is not None:
            columns.append(("The row's own answer", expected))
        shown.append(
            f'<div class="sample"><pre><b>{escape(prompt, LONG)}</b></pre>'
            + two_columns(
                *(
                    f"<div><h3>{title}</h3>"
                    + (f"<pre>{escape(text, LONG)}</pre>" if text is not None else page.small("Not generated yet."))
                    + "</div>"
                    for title, text in columns
                )
            )
            + "</div>"
        )
    if len(samples) > _MOST_SAMPLES:
        shown.append(page.small(f"{len(samples) - _MOST_SAMPLES:,} more are in report.json."))
    return page.small("The prompt is in colour; what follows is generated.") + "".join(shown)


_MOST_SAMPLES = 50


def _format_prompt(prompt: Prompt) -> str:
    """Returns a prompt as text, with one line per chat message."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return "".join(f"{message.get('role') or 'message'}: {message.get('content')}\n" for message in prompt)


def _render_timeline(events: Sequence[Event]) -> str:
    if not events:
        return ""
    begin = events[0].time
    rows = []
    for group in _group_events(events):
        first, last = group[0], group[-1]
        at = first.time
        # Clocks may be set back between two sessions: no time rather than a negative one.
        after = format_clock(at - begin) if at is not None and begin is not None and at >= begin else ""
        kind = first.kind.replace("_", " ") + (f" × {len(group)}" if len(group) > 1 else "")
        details = describe_event(last)
        if isinstance(first, Checkpoint | Overflow) and isinstance(last, Checkpoint | Overflow) and len(group) > 1:
            details = f"steps {format_value(first.step)} to {format_value(last.step)}"
        bad = " bad" if isinstance(first, Failed | Damaged | OutOfMemory | Overflows | Spike | Unsaved) else ""
        event = f'<span class="event{bad}">{escape(kind)}</span> {escape(details)}'
        rows.append(page.row(number_cell(after), cell(event, "free")))
    started = ""
    # 2e11 s is the year 8307: datetime raises an error beyond the year 9999.
    if begin is not None and 0 <= begin < 2e11:
        started = f"Begun {datetime.datetime.fromtimestamp(begin, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC."
    return page.small(started) + page.table(("h:min:s", "event"), rows, text=(1,))


def _format_bytes(recorded: object) -> str:
    finite = read_number(recorded)
    return format_gib(None if finite is None else finite / 2**30)


def _format_range(recorded: object) -> str:
    return " to ".join(map(format_value, recorded)) if isinstance(recorded, list) else format_value(recorded)


def _format_load(recorded: object) -> str:
    """Returns how many cores a session left to others, as "others used 1.9 of 2 cores"."""
    load = recorded if isinstance(recorded, dict) else {}
    others, cpus = read_number(load.get("other_cores")), read_number(load.get("cpus"))
    return "not known" if others is None or cpus is None else f"others used {others:.1f} of {cpus:.0f} cores"


def _format_usage(recorded: object) -> str:
    usage = recorded if isinstance(recorded, dict) else {}
    energy, cost = read_number(usage.get("energy_kwh")), read_number(usage.get("cost"))
    parts = [f"{format_value(usage.get('device_hours'))} device-hours"]
    if energy is not None:
        parts.append(f"{format_value(energy)} kWh")
    if cost is not None:
        parts.append(f"{cost:,.2f} {usage.get('currency') or ''}".strip())
    return ", ".join(parts)


# Fields of events: {key: (label on the page, formatter)}. Other fields are labelled by their key without underscores.
_RECORDED: dict[str, tuple[str, Callable[[object], str]]] = {
    "requested": ("it asked for", _format_bytes),
    "room": ("free", _format_bytes),
    "overhead": ("memory in addition to the tensors", _format_bytes),
    "loss": ("loss", format_loss),
    "mfu": ("model FLOPs utilisation", format_percent),
    "peak_gib": ("peak memory", format_gib),
    "seconds": ("took", format_duration),
    "seconds_per_step": ("seconds a step", _format_range),
    "rows": ("rows", _format_range),
    "machine": ("machine:", _format_load),
    "usage": ("so far", _format_usage),
    "signal": ("by", str),
    "spread": (
        "spread",
        lambda recorded: (
            " to ".join(map(format_grouped, recorded)) if isinstance(recorded, list) else format_value(recorded)
        ),
    ),
    "steps": ("steps", format_grouped),
    "tokens": ("tokens", format_grouped),
    "tokens_per_second": ("tokens a second", format_grouped),
    "validation_loss": ("validation loss", format_loss),
    "changed": (
        "continued with",
        lambda recorded: ", ".join(map(str, recorded)) if isinstance(recorded, list) else format_value(recorded),
    ),
    "was_gib": ("peak before", format_gib),
    "cause": ("while", format_value),
    "phase": ("while", format_value),
    "message": ("reason", format_value),
}
# Fields left out of the timeline: shown elsewhere, meant for `preheat doctor oom`, or redundant (a checkpoint's
# `wait_seconds` is most of its `seconds`).
_NOT_SHOWN = ("time", "kind", "skipped", "allocator", "set", "wait_seconds", "in_use", "path")


def describe_event(event: Event) -> str:
    """Returns the figures of an event as text, not escaped."""
    parts = []
    for key, recorded in to_plain_data(event).items():
        if key not in _NOT_SHOWN and recorded not in (None, "", [], {}):
            label, write = _RECORDED.get(key, (key.replace("_", " "), format_value))
            parts.append(f"{label} {write(recorded)}")
    return "; ".join(parts)


def _group_events(events: Sequence[Event]) -> list[list[Event]]:
    """Groups four or more consecutive checkpoints or skipped steps; every other event is a group of its own."""
    groups: list[list[Event]] = []
    for event in events:
        # Long runs save hundreds of checkpoints, and fp16 skips some steps: they would bury all other events.
        if groups and isinstance(event, Checkpoint | Overflow) and event.kind == groups[-1][0].kind:
            groups[-1].append(event)
        else:
            groups.append([event])
    return [part for group in groups for part in ([group] if len(group) > 3 else [[event] for event in group])]


_ENVIRONMENT: dict[str, tuple[str, Callable[[object], str]]] = {"memory_gib": ("memory", format_gib)}


def render_environment(environment: Environment) -> str:
    """Returns a table of the machine, versions and command of a run's last session."""
    recorded = to_plain_data(environment)
    # Plain values first, then each nested mapping under its name.
    rows = [_render_row(k, v) for k, v in recorded.items() if not isinstance(v, dict)]
    for name, group in recorded.items():
        if isinstance(group, dict) and group:
            rows.append(page.group_row(name, 2))
            rows += [_render_row(k, v) for k, v in group.items()]
    return page.table((), filter(None, rows)) if any(rows) else ""


def _render_row(key: str, recorded: object) -> str:
    if recorded in (None, "", [], {}):
        return ""
    label, write = _ENVIRONMENT.get(key, (key.replace("_", " "), format_value))
    return page.named_row(label, text_cell(write(recorded)))


def render_recipe(figures: RunFigures) -> str:
    """Returns the command that repeats a run, and its recipe."""
    return (
        f'<p class="again small">Runs it again:<code>{escape(figures.again)}</code></p>'
        "<details><summary>The recipe, with every default written out</summary>"
        f"<pre>{escape(figures.recipe, LONG)}</pre></details>"
    )
