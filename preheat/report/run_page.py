"""HTML page of a run's report, and the page template of all other reports."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from preheat.errors import RunError
from preheat.report import run_charts
from preheat.report.formatting import (
    LONG,
    MISSING,
    NOT_FINITE,
    between,
    clock,
    count,
    duration,
    escape,
    gib,
    grouped,
    headline,
    loss,
    mapping,
    nbsp_units,
    number,
    percent,
    signed_percent,
    sizes,
    value,
)
from preheat.report.long_context_charts import lengths
from preheat.report.report_data import collect
from preheat.run_dir import MARK, parse_json, require_overwritable, to_json, write_atomic, write_user_file
from preheat.sanitize import shorten

__all__ = ["GENERATOR", "render", "write"]

GENERATOR = '<meta name="generator" content="preheat">'
"""Marker in the head of each page: preheat overwrites only files that contain it."""


def write(run: str | Path) -> Path:
    """Writes `report.html` and `report.json` into a run's folder and returns the path of the page.

    Args:
        run: the folder of a run: finished, running, stopped or failed.

    Raises:
        RunError: the folder holds no run, or the report cannot be written.

    Example:
        >>> write("runs/demo")                                          # doctest: +SKIP
        PosixPath('runs/demo/report.html')
    """
    figures = collect(run)
    page = render(figures)
    data = to_json(figures, indent=1) + "\n"
    path = Path(run) / "report.html"
    if not (Path(run) / MARK).exists():  # not a run folder of ours, though it may hold a recipe.yaml
        require_overwritable(path, [GENERATOR])
        require_overwritable(path.with_name("report.json"), ['{\n "title": '])
    try:
        write_atomic(path.with_name("report.json"), data)
        write_atomic(path, page)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); make the folder writable or free some room"
        ) from None
    return path


def render(figures: dict[str, Any]) -> str:
    """Returns the page for the figures of `report_data.collect`; sections without records are left out."""
    over_time = "".join(run_charts.over_time(figures))
    sections = (
        ("loss", "Loss", run_charts.losses(figures)),
        ("evaluation", "Before and after" if _before(figures) else "Evaluation", _evaluation(figures)),
        ("over-time", "Over the run", f'<div class="two">{over_time}</div>' if over_time else ""),
        ("memory", "Memory, predicted and measured", _memory(figures)),
        ("techniques", "Techniques", _techniques(figures["changes"])),
        ("samples", "Samples", _samples(figures["samples"])),
        ("timeline", "Timeline", _timeline(figures["events"])),
        ("environment", "Environment", _environment(figures["environment"])),
        ("recipe", "Recipe", _recipe(figures)),
    )
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{content}</section>\n' for name, title, content in sections if content
    )
    footer = (
        "All figures as data: report.json, beside this page. Losses are in nats a token; 1 GiB is 2³⁰ bytes, "
        "less what the imports took."
    )
    return document(
        f"{figures['title']} · preheat report",
        f"{_header(figures)}\n{_tiles(figures)}\n{_setup(figures['setup'])}\n{body}<footer>{footer}</footer>",
    )


def document(title: str, body: str) -> str:
    """Returns a self-contained HTML page with our style; its content security policy blocks external resources."""
    css = resources.files("preheat.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(headline(title))}</title>
<style>
{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def read_figures(source: Path, command: str, keys: Iterable[str]) -> dict[str, Any]:
    """Reads the JSON figures that a command wrote for its page.

    Args:
        command: the command that writes the file, for error messages.
        keys: required keys, whose values must be non-empty lists or mappings.

    Raises:
        RunError: there is no such file, or it is damaged.
    """
    try:
        figures = parse_json(source.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{source}: no such file; {command} writes it") from None
    except ValueError as error:
        raise RunError(f"{source}: is damaged ({shorten(str(error))}); run {command} again") from None
    lacking = [key for key in keys if not mapping(figures).get(key)]
    if lacking:
        raise RunError(f"{source}: is damaged (it has no {lacking[0]}); run {command} again")
    return mapping(figures)


def write_figures(source: Path, command: str, keys: Iterable[str], draw: Callable[[dict[str, Any]], str]) -> Path:
    """Writes the page of a file of figures next to it; arguments and errors are those of `read_figures`.

    Args:
        draw: figures to HTML.
    """
    figures = read_figures(source, command, keys)
    try:
        page = draw(figures)
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        # A row lacks a key or holds a value of the wrong type.
        kind = f"{type(error).__name__}: {shorten(str(error))}"
        raise RunError(f"{source}: is damaged ({kind}); run {command} again") from error
    fix = "make the folder writable or free some room"
    return write_user_file(source.with_suffix(".html"), page, marks=[GENERATOR], fix=fix)


_MOST_ROWS = 400  # of a table: keeps the page small


def scrolling(table: str) -> str:
    """Wraps a table so that it scrolls horizontally if the page is narrower."""
    return f'<div class="scroll">{table}</div>'


def _table(rows: Iterable[str], head: Sequence[tuple[str, str]] = ()) -> str:
    """Returns a table of at most `_MOST_ROWS` rows; beyond that, rows in the middle are left out.

    Args:
        head: (title, class) of each column.
    """
    titles = "".join(
        f'<th scope="col" class="{kind}">{title}</th>' if kind else f'<th scope="col">{title}</th>'
        for title, kind in head
    )
    rows = list(rows)
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        left_out = f'<tr><td colspan="9" class="small">{len(rows) - 2 * half:,} rows left out</td></tr>'
        rows = [*rows[:half], left_out, *rows[-half:]]
    thead = f"<thead><tr>{titles}</tr></thead>" if head else ""
    return scrolling(f"<table>{thead}<tbody>{''.join(rows)}</tbody></table>")


def _absent(text: str) -> str:
    return f'<p class="small">{escape(text)}</p>'


def _header(figures: dict[str, Any]) -> str:
    state = figures["state"]
    notice = ""
    if state["kind"] != "finished":
        bad = " bad" if state["kind"] == "failed" else ""
        notice = f'<p class="notice{bad}" role="status">{escape(state["message"])}</p>'
    if figures["damaged"]:
        message = "Damaged files of this run, of which a part is left out: " + "; ".join(figures["damaged"]) + "."
        notice += f'<p class="notice bad" role="status">{escape(message)}</p>'
    return (
        f'<header id="verdict"><p class="eyebrow">preheat report · {escape(_WORD[state["kind"]])}</p>'
        f'<h1>{escape(figures["title"])}</h1><p class="verdict">{escape(figures["verdict"])}</p>{notice}</header>'
    )


def _setup(rows: Sequence[tuple[str, str]]) -> str:
    """Returns the settings of the recipe for the head of the page."""
    shown = "".join(f"<div><dt>{escape(what)}</dt><dd>{nbsp_units(text)}</dd></div>" for what, text in rows)
    return f'<dl class="setup" id="setup">{shown}</dl>' if rows else ""


_WORD = {"finished": "finished", "failed": "failed", "stopped": "stopped early", "open": "not finished"}


def _tiles(figures: dict[str, Any]) -> str:
    """Returns tiles with the most important figures; unrecorded figures have none."""
    summary, predicted, measured, off = (figures[k] for k in ("summary", "predicted", "measured", "difference"))
    parameters = mapping(summary["parameters"])
    held_out, tokens = (number(summary[key]) for key in ("validation_loss", "tokens"))

    def against(key: str, show: Callable[[Any], str]) -> str:
        if number(predicted[key]) is None:
            return "no prediction"
        return f"predicted {show(predicted[key])}" + (f" ({signed_percent(off[key])})" if off[key] is not None else "")

    total = number(predicted["seconds_total"])
    first, trained = summary["first_loss"], number(parameters.get("trained"))
    tiles = (
        ("Training loss", loss(summary["loss"]), f"from {loss(first)}" if first is not None else ""),
        (
            "Validation loss",
            loss(summary["validation_loss"]),
            f"perplexity {value(math.exp(held_out))}" if held_out is not None and held_out < 50 else "",
        ),
        ("Tokens per second", grouped(measured["tokens_per_second"]), against("tokens_per_second", grouped)),
        ("Peak memory", gib(measured["peak_gib"]), against("peak_gib", gib)),
        (
            "Time",
            duration(summary["seconds"]),
            f"predicted {duration(total)}" if total is not None else "no prediction",
        ),
        ("Steps", grouped(summary["steps"]), f"{count(tokens)} tokens" if tokens is not None else ""),
        ("Model FLOPs utilisation", percent(measured["mfu"]), against("mfu", percent)),
        ("Parameters", count(parameters.get("total")), f"{count(trained)} trained" if trained is not None else ""),
    )
    shown = "".join(_tile(*tile) for tile in tiles if tile[1] != MISSING)
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


def _tile(label: str, figure: str, below: str) -> str:
    kind = ' class="bad"' if figure == NOT_FINITE else ""
    return (
        f"<div><dt>{escape(label)}</dt><dd{kind}>{nbsp_units(figure)}</dd>"
        + (f"<dd>{nbsp_units(below)}</dd>" if below else "")
        + "</div>"
    )


def _memory(figures: dict[str, Any]) -> str:
    parts = run_charts.categories(figures)
    predicted, measured = (number(figures[k]["peak_gib"]) for k in ("predicted", "measured"))
    off = figures["difference"]["peak_gib"]
    total = sum(size for _, size, _ in parts) or 1
    unit, texts = sizes([*(size for _, size, _ in parts), predicted, measured])
    rows = [
        (
            f'<tr><td><span class="key" style="--c: var(--{colour})"></span>{escape(name)}</td>'
            f'<td class="n">{text}</td><td class="n">{percent(size / total)}</td></tr>'
        )
        for (name, size, colour), text in zip(parts, texts, strict=False)
    ]
    if predicted is not None:
        rows.append(f'<tr class="sum"><td>predicted peak</td><td class="n">{texts[-2]}</td><td></td></tr>')
    if measured is not None:
        apart = f'<span class="small">the prediction is off by {signed_percent(off)}</span>' if off is not None else ""
        key = '<span class="key" style="--c: var(--ink)"></span>'
        rows.append(f'<tr class="sum"><td>{key}measured peak{apart}</td><td class="n">{texts[-1]}</td><td></td></tr>')
    table = _table(rows, (("at the peak", ""), (unit, "n"), ("share", "n"))) if rows else ""
    table += _memory_of_gpu(figures)
    left, right = f"{run_charts.memory(figures)}{table}", _phases(figures["phases"])
    shown = f'<div class="two"><div>{left}</div><div>{right}</div></div>' if left or right else ""
    return shown + _fallbacks(figures["events"])


def _memory_of_gpu(figures: dict[str, Any]) -> str:
    """Returns a table of predicted and measured GPU memory: allocated, reserved, context."""
    names = {
        "allocated_gib": "allocated: tensors",
        "reserved_gib": "reserved by torch's allocator",
        "context_gib": "context",
    }
    keys = [key for key in names if number(figures["measured"].get(key)) is not None]
    pairs = [(number(figures["predicted"].get(key)), number(figures["measured"][key])) for key in keys]
    unit, texts = sizes([size for pair in pairs for size in pair])
    rows = [
        f'<tr><td>{escape(names[key])}</td><td class="n">{predicted}</td><td class="n">{measured}</td>'
        '<td class="n">'
        f"{signed_percent(figures['difference'][key]) if figures['difference'][key] is not None else ''}</td></tr>"
        for key, predicted, measured in zip(keys, texts[::2], texts[1::2], strict=True)
    ]
    head = (("at the most", ""), (f"predicted, {unit}", "n"), ("measured", "n"), ("difference", "n"))
    return _table(rows, head) if rows else ""


def _fallbacks(events: list[dict[str, Any]]) -> str:
    """Returns a table of out-of-memory errors and the fallbacks that the run continued with."""
    fallbacks = [e for e in events if e["kind"] == "fallback"]
    if not fallbacks:
        return ""
    unit, texts = sizes([e.get(key) for e in fallbacks for key in ("was_gib", "peak_gib")])
    rows = []
    for n, e in enumerate(fallbacks):
        took = e.get("changed") if isinstance(e.get("changed"), list) else []
        rows.append(
            f'<tr><td class="n">{escape(value(e.get("step")))}</td><td>{escape(value(e.get("cause")))}</td>'
            f'<td class="free">{escape(", ".join(map(str, took or ["the recipe as written"])))}</td>'
            f'<td class="n">{texts[2 * n]}</td><td class="n">{texts[2 * n + 1]}</td></tr>'
        )
    planned = f"planned peak before, {unit}", f"and after, {unit}"
    head = (
        ("after step", "n"),
        ("out of memory while", ""),
        ("continued with", ""),
        *((title, "n") for title in planned),
    )
    return "<h3>Out of memory</h3>" + _table(rows, head)


def _phases(phases: Any) -> str:
    peaks = {name: size for name, of in mapping(phases).items() if (size := number(of)) is not None}
    if not peaks:
        return ""
    most = max(peaks.values())
    highest = next(name for name, size in peaks.items() if size == most)
    unit, texts = sizes(list(peaks.values()))
    rows = (
        (
            f'<tr><td>{escape(name)}</td><td class="n">{text}</td><td class="track">'
            '<span class="bar" style="width: '
            f'{max(0.0, 100 * size / most) if most > 0 else 0:.1f}%"></span></td></tr>'
        )
        for (name, size), text in zip(peaks.items(), texts, strict=True)
    )
    return (
        "<h3>Peak by phase</h3>"
        + _absent(f"Predicted. The peak of a step lies in: {headline(highest)}.")
        + _table(rows, (("phase", ""), (f"peak, {unit}", "n"), ("", "")))
    )


def _before(figures: dict[str, Any]) -> dict[str, Any]:
    return mapping(figures["evaluation"].get("before"))


def _evaluation(figures: dict[str, Any]) -> str:
    evaluation = figures["evaluation"]
    after, before, off = (mapping(evaluation.get(k)) for k in ("after", "before", "difference"))
    compared = bool(before)
    rows = []
    for part in ("texts", "tasks"):
        for name, result in mapping(after.get(part)).items():
            result = mapping(result)
            old, apart = (mapping(mapping(mapping(of.get(part)).get(name)).get("metrics")) for of in (before, off))
            truncated = number(result.get("truncated"))
            cut = f" ({truncated:,.0f} without room for all of their context)" if truncated else ""
            rows.append(
                f'<tr><th scope="rowgroup" colspan="{4 if compared else 2}">{escape(name)}: '
                f"{grouped(result.get('rows'))} rows{cut}</th></tr>"
            )
            for metric, measured in mapping(result.get("metrics")).items():
                cells = [between(measured)]
                if compared:
                    cells = [between(old.get(metric)), *cells, between(apart.get(metric), signed=True)]
                rows.append(
                    f"<tr><td>{escape(metric.replace('_', ' '))}</td>"
                    + "".join(f'<td class="n">{_interval(cell)}</td>' for cell in cells)
                    + "</tr>"
                )
    drawn = "".join(run_charts.evaluations(figures))
    if not rows:
        return f'<div class="two">{drawn}</div>' if drawn else ""
    caption = f"At step {value(evaluation.get('step'))}. In brackets: 95 % of 1,000 bootstrap resamples of the rows"
    caption += "; of the difference, row by row." if compared else "."
    if not compared:
        caption += (
            " Nothing was measured before the first step; preheat does that for a pretrained model, for tasks "
            "and for a forgetting text."
        )
    head = (
        (("", ""), ("before", "n"), ("after", "n"), ("difference", "n")) if compared else (("", ""), ("measured", "n"))
    )
    return f'{_absent(caption)}{_table(rows, head)}<div class="two">{drawn}</div>{lengths(after, before)}'


def _interval(text: str) -> str:
    """Wraps the interval of '1.788 [1.70, 1.88]' in a span, so that it can move to a line of its own."""
    if text == MISSING:
        return '<span class="small">not measured</span>'
    figure, _, interval = nbsp_units(text).partition(" [")
    return figure + (f' <span class="interval">[{interval}</span>' if interval else "")


def _techniques(changes: dict[str, Any]) -> str:
    rows = []
    for name, entries in changes.items():
        rows.append(f'<tr><th scope="rowgroup" colspan="2">{escape(name)}</th></tr>')
        for change in map(mapping, entries if isinstance(entries, list) else []):
            kernel = (
                f'<br><span class="small">kernel: {escape(change["kernel"])}</span>' if change.get("kernel") else ""
            )
            count = grouped(change.get("count")) if change.get("count") is not None else ""
            rows.append(
                f'<tr><td class="free">{escape(value(change.get("what")))}{kernel}</td><td class="n">{count}</td></tr>'
            )
    return _table(rows, (("what it changed", ""), ("count", "n"))) if rows else ""


def _samples(samples: list[dict[str, Any]]) -> str:
    if not samples:
        return ""
    shown = []
    for sample in samples[:_MOST_SAMPLES]:
        prompt = _prompt(sample.get("prompt"))
        before, after = (
            None if text is None else str(text).removeprefix(prompt)
            for text in (sample.get("before"), sample.get("text"))
        )
        expected = sample.get("expected")
        if before is None and expected is None:
            shown.append(f'<pre class="sample"><b>{escape(prompt, LONG)}</b>{escape(after or "", LONG)}</pre>')
            continue
        columns: list[tuple[str, str | None]] = [("Before training", before)] if before is not None else []
        columns += [("After training", after)]
        if expected is not None:
            columns.append(("The row's own answer", str(expected)))
        shown.append(
            f'<div class="sample"><pre><b>{escape(prompt, LONG)}</b></pre><div class="two">'
            + "".join(
                f"<div><h3>{title}</h3>"
                + (f"<pre>{escape(text, LONG)}</pre>" if text is not None else _absent("Not generated yet."))
                + "</div>"
                for title, text in columns
            )
            + "</div></div>"
        )
    if len(samples) > _MOST_SAMPLES:
        shown.append(_absent(f"{len(samples) - _MOST_SAMPLES:,} more are in report.json."))
    return '<p class="small">The prompt is in colour; what follows is generated.</p>' + "".join(shown)


_MOST_SAMPLES = 50


def _prompt(prompt: Any) -> str:
    """Returns a prompt as text, with one line per chat message."""
    if not isinstance(prompt, list):
        return "" if prompt is None else str(prompt)
    messages = (message if isinstance(message, dict) else {"content": message} for message in prompt)
    return "".join(f"{message.get('role') or 'message'}: {message.get('content')}\n" for message in messages)


def _timeline(events: list[dict[str, Any]]) -> str:
    if not events:
        return ""
    begin = number(events[0].get("time"))
    rows = []
    for group in _groups(events):
        first, last = group[0], group[-1]
        at = number(first.get("time"))
        after = clock(at - begin) if at is not None and begin is not None and at >= begin else ""
        kind = str(first["kind"]).replace("_", " ") + (f" × {len(group)}" if len(group) > 1 else "")
        details = f"steps {value(first.get('step'))} to {value(last.get('step'))}" if len(group) > 1 else _event(last)
        bad = " bad" if first["kind"] in ("failed", "damaged", "out_of_memory", "unsaved") else ""
        rows.append(
            f'<tr><td class="n">{after}</td><td class="free">'
            f'<span class="event{bad}">{escape(kind)}</span> {escape(details)}</td></tr>'
        )
    started = ""
    if begin is not None and 0 <= begin < 2e11:
        started = f"Begun {datetime.datetime.fromtimestamp(begin, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC."
    return _absent(started) + _table(rows, (("h:min:s", "n"), ("event", "")))


# Fields of events: {key: (label on the page, formatter)}. Other fields are labelled by their key without underscores.
_RECORDED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "requested": ("it asked for", lambda recorded: gib(number(recorded) and recorded / 2**30)),
    "room": ("free", lambda recorded: gib(number(recorded) and recorded / 2**30)),
    "overhead": ("taken beside the tensors", lambda recorded: gib(number(recorded) and recorded / 2**30)),
    "loss": ("loss", loss),
    "mfu": ("model FLOPs utilisation", percent),
    "peak_gib": ("peak memory", gib),
    "seconds": ("took", lambda recorded: f"{value(recorded)} s" if (number(recorded) or 9) < 1 else duration(recorded)),
    "seconds_per_step": (
        "seconds a step",
        lambda recorded: " to ".join(map(value, recorded)) if isinstance(recorded, list) else value(recorded),
    ),
    "signal": ("by", str),
    "spread": (
        "spread",
        lambda recorded: " to ".join(map(grouped, recorded)) if isinstance(recorded, list) else value(recorded),
    ),
    "steps": ("steps", grouped),
    "tokens": ("tokens", grouped),
    "tokens_per_second": ("tokens a second", grouped),
    "validation_loss": ("validation loss", loss),
    "changed": (
        "continued with",
        lambda recorded: ", ".join(map(str, recorded)) if isinstance(recorded, list) else value(recorded),
    ),
    "was_gib": ("peak before", gib),
    "cause": ("while", value),
    "phase": ("while", value),
    "message": ("reason", value),
}
# Fields left out of the timeline: shown elsewhere, meant for `preheat doctor oom`, or redundant (a checkpoint's
# `wait_seconds` is most of its `seconds`).
_NOT_SHOWN = ("time", "kind", "skipped", "allocator", "set", "wait_seconds", "in_use", "path")


def _event(event: dict[str, Any]) -> str:
    parts = []
    for key, recorded in event.items():
        if key not in _NOT_SHOWN and recorded not in (None, "", [], {}):
            label, write = _RECORDED.get(key, (key.replace("_", " "), value))
            parts.append(f"{label} {write(recorded)}")
    return "; ".join(parts)


def _groups(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups four or more consecutive checkpoint events; every other event is a group of its own."""
    groups: list[list[dict[str, Any]]] = []
    for event in events:
        if groups and event["kind"] == "checkpoint" == groups[-1][0]["kind"]:
            groups[-1].append(event)
        else:
            groups.append([event])
    return [part for group in groups for part in ([group] if len(group) > 3 else [[event] for event in group])]


_ENVIRONMENT: dict[str, tuple[str, Callable[[Any], str]]] = {"memory_gib": ("memory", gib)}


def _environment(environment: dict[str, Any]) -> str:
    rows = [_row(k, v) for k, v in environment.items() if not isinstance(v, dict)]
    for name, group in environment.items():
        if isinstance(group, dict) and group:
            rows.append(f'<tr><th scope="rowgroup" colspan="2">{escape(name)}</th></tr>')
            rows += [_row(k, v) for k, v in group.items()]
    return _table(filter(None, rows)) if any(rows) else ""


def _row(key: str, recorded: Any) -> str:
    if recorded in (None, "", [], {}):
        return ""
    label, write = _ENVIRONMENT.get(key, (key.replace("_", " "), value))
    return f'<tr><th scope="row">{escape(label)}</th><td class="free">{escape(write(recorded))}</td></tr>'


def _recipe(figures: dict[str, Any]) -> str:
    return (
        f'<p class="again small">Runs it again:<code>{escape(figures["again"])}</code></p>'
        "<details><summary>The recipe, with every default written out</summary>"
        f"<pre>{escape(figures['recipe'], LONG)}</pre></details>"
    )
