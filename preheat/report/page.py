"""The page: sections in their order, one HTML text that needs nothing else."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from preheat.errors import RunError
from preheat.report import charts
from preheat.report.figures import collect
from preheat.report.lengths import lengths
from preheat.report.words import (
    MISSING,
    between,
    count,
    duration,
    escape,
    gib,
    grouped,
    loss,
    number,
    percent,
    signed_percent,
    tied,
    value,
)
from preheat.run import MARK, require_own, to_json, write_atomic

__all__ = ["GENERATOR", "render", "write"]

GENERATOR = '<meta name="generator" content="preheat">'
"""In the head of each page: a file that has it may be replaced."""


def write(run: str | Path) -> Path:
    """Writes `report.html` and `report.json` into a run's folder and returns the path of the page.

    Args:
        run: the folder of a run: finished, going on, stopped or failed.

    Raises:
        RunError: no run lies there, or the report cannot be written.

    Example:
        >>> write("runs/demo")                                          # doctest: +SKIP
        PosixPath('runs/demo/report.html')
    """
    figures = collect(run)
    page = render(figures)
    data = to_json(figures, indent=1) + "\n"
    path = Path(run) / "report.html"
    if not (Path(run) / MARK).exists():  # a folder that has a recipe.yaml, perhaps, and is no run
        require_own(path, [GENERATOR])
    try:
        write_atomic(path.with_name("report.json"), data)
        write_atomic(path, page)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); make the folder writable or free some room") from None
    return path


def render(figures: dict[str, Any]) -> str:
    """The page of `figures.collect`'s figures."""
    sections = (
        ("loss", "Loss", charts.losses(figures)),
        ("evaluation", "Before and after", _evaluation(figures)),
        ("over-time", "Over the run", f'<div class="two">{"".join(charts.over_time(figures))}</div>'),
        ("memory", "Memory, predicted and measured", _memory(figures)),
        ("techniques", "Techniques", _techniques(figures["changes"])),
        ("samples", "Samples", _samples(figures["samples"])),
        ("timeline", "Timeline", _timeline(figures["events"])),
        ("environment", "Environment", _environment(figures["environment"])),
        ("recipe", "Recipe", _recipe(figures)),
    )
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{content}</section>\n' for name, title, content in sections)
    footer = "All figures as data: report.json, beside this page. Losses are in nats a token; 1 GiB is 2³⁰ bytes, less what the imports took."
    return document(
        f"{figures['title']} · preheat report", f"{_header(figures)}\n{_tiles(figures)}\n{body}<footer>{footer}</footer>"
    )


def document(title: str, body: str) -> str:
    """A page that needs nothing else: `body` (HTML) under the house's style, with nothing allowed to load."""
    css = resources.files("preheat.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
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


def _table(rows: Iterable[str], head: Sequence[tuple[str, str]] = ()) -> str:
    """head: (title, class) of each column."""
    titles = "".join(
        f'<th scope="col" class="{kind}">{title}</th>' if kind else f'<th scope="col">{title}</th>' for title, kind in head
    )
    return f"<table>{f'<thead><tr>{titles}</tr></thead>' if head else ''}<tbody>{''.join(rows)}</tbody></table>"


def _absent(words: str) -> str:
    return f'<p class="small">{escape(words)}</p>'


def _header(figures: dict[str, Any]) -> str:
    state = figures["state"]
    notice = ""
    if state["kind"] != "finished":
        notice = f'<p class="notice{" bad" if state["kind"] == "failed" else ""}" role="status">{escape(state["words"])}</p>'
    if figures["damaged"]:
        words = "Damaged files of this run, of which a part is left out: " + "; ".join(figures["damaged"]) + "."
        notice += f'<p class="notice bad" role="status">{escape(words)}</p>'
    return (
        f'<header id="verdict"><p class="eyebrow">preheat report · {escape(_WORD[state["kind"]])}</p>'
        f'<h1>{escape(figures["title"])}</h1><p class="verdict">{escape(figures["verdict"])}</p>{notice}</header>'
    )


_WORD = {"finished": "finished", "failed": "failed", "stopped": "stopped early", "open": "not finished"}


def _tiles(figures: dict[str, Any]) -> str:
    summary, predicted, measured, off = (figures[k] for k in ("summary", "predicted", "measured", "difference"))
    parameters = summary["parameters"] if isinstance(summary["parameters"], dict) else {}
    held_out = number(summary["validation_loss"])

    def against(key: str, words: Any) -> str:
        if number(predicted[key]) is None:
            return "no prediction"
        return f"predicted {words(predicted[key])}" + (f" ({signed_percent(off[key])})" if off[key] is not None else "")

    steps = grouped(summary["steps"]) if summary["steps"] is not None else "0"
    total = number(predicted["seconds_total"])
    tiles = (
        (
            "Training loss",
            loss(summary["loss"]),
            f"from {loss(summary['first_loss'])}" if summary["first_loss"] is not None else "",
        ),
        (
            "Validation loss",
            loss(summary["validation_loss"]),
            f"perplexity {math.exp(held_out):,.3g}" if held_out is not None and held_out < 50 else "",
        ),
        ("Tokens per second", grouped(measured["tokens_per_second"]), against("tokens_per_second", grouped)),
        ("Peak memory", gib(measured["peak_gib"]), against("peak_gib", gib)),
        ("Time", duration(summary["seconds"]), f"predicted {duration(total)}" if total is not None else "no prediction"),
        (
            "Steps",
            steps,
            f"{count(summary['tokens'])} tokens" if number(summary["tokens"]) is not None else f"tokens {MISSING}",
        ),
        ("Model FLOPs utilisation", percent(measured["mfu"]), against("mfu", percent)),
        (
            "Parameters",
            count(parameters.get("total")),
            f"{count(parameters['trained'])} trained" if "trained" in parameters else "",
        ),
    )
    return '<dl class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</dl>"


def _tile(label: str, figure: str, below: str) -> str:
    kind = ' class="absent"' if figure == MISSING else ' class="bad"' if figure == "not finite" else ""
    return (
        f"<div><dt>{escape(label)}</dt><dd{kind}>{tied(figure)}</dd>" + (f"<dd>{tied(below)}</dd>" if below else "") + "</div>"
    )


def _memory(figures: dict[str, Any]) -> str:
    parts = charts.categories(figures)
    predicted, measured, off = figures["predicted"], figures["measured"], figures["difference"]["peak_gib"]
    whole = sum(size for _, size, _ in parts) or 1
    digits = 2 if whole >= 10 else 3 if whole >= 0.1 else 5
    rows = [
        f'<tr><td><span class="key" style="--c: var(--{colour})"></span>{escape(name)}</td><td class="n">{size:,.{digits}f}</td><td class="n">{percent(size / whole)}</td></tr>'
        for name, size, colour in parts
    ]
    if not parts:
        rows.append(f'<tr><td>by category</td><td class="n">{MISSING}</td><td></td></tr>')
    rows.append(
        f'<tr class="sum"><td>predicted peak</td><td class="n">{grouped(predicted["peak_gib"], digits)}</td><td></td></tr>'
    )
    told = f'<span class="small">the prediction is off by {signed_percent(off)}</span>' if off is not None else ""
    key = '<span class="key" style="--c: var(--ink)"></span>'
    rows.append(
        f'<tr class="sum"><td>{key}measured peak{told}</td><td class="n">{grouped(measured["peak_gib"], digits)}</td><td></td></tr>'
    )
    table = _table(rows, (("at the peak", ""), ("GiB", "n"), ("share", "n")))
    phases = f"<h3>Peak by phase</h3>{_phases(figures['phases'])}"
    return f'<div class="two"><div>{charts.memory(figures)}{table}</div><div>{phases}</div></div>{_rungs(figures["events"])}'


def _rungs(events: list[dict[str, Any]]) -> str:
    """What a run that was out of memory went on with."""
    rows = [
        f'<tr><td class="n">{value(e.get("step"))}</td><td>{escape(value(e.get("where")))}</td><td class="free">{escape(", ".join(e.get("took") or ["the recipe as written"]))}</td>'
        f'<td class="n">{gib(e.get("was_gib"))}</td><td class="n">{gib(e.get("peak_gib"))}</td></tr>'
        for e in events
        if e["kind"] == "rung"
    ]
    if not rows:
        return ""
    head = (("after step", "n"), ("out of memory while", ""), ("went on with", ""), ("plan before", "n"), ("and after", "n"))
    return "<h3>Out of memory</h3>" + _table(rows, head)


def _phases(phases: Any) -> str:
    sizes = {
        name: size
        for name, found in (phases.items() if isinstance(phases, dict) else ())
        if (size := number(found)) is not None
    }
    if not sizes:
        return _absent(f"Predicted peaks of the phases: {MISSING}.")
    most = max(sizes.values())
    highest = next(name for name, size in sizes.items() if size == most)
    rows = (
        f'<tr><td>{escape(name)}</td><td class="n">{gib(size)}</td><td class="track"><span class="bar" style="width: {max(0.0, 100 * size / most) if most > 0 else 0:.1f}%"></span></td></tr>'
        for name, size in sizes.items()
    )
    return _absent(f"Predicted. The peak of a step lies in: {highest}.") + _table(
        rows, (("phase", ""), ("peak", "n"), ("", ""))
    )


def _evaluation(figures: dict[str, Any]) -> str:
    found = figures["evaluation"] if isinstance(figures["evaluation"], dict) else {}
    after, before, off = ((found.get(k) or {}) for k in ("after", "before", "difference"))
    rows = []
    for part in ("texts", "tasks"):
        for name, result in (after.get(part) or {}).items():
            measured = result["metrics"]
            old, apart = (((of.get(part) or {}).get(name) or {}).get("metrics") or {} for of in (before, off))
            cut = f" ({result['truncated']:,} without room for all of their context)" if result.get("truncated") else ""
            rows.append(
                f'<tr><th scope="rowgroup" colspan="4">{escape(name)}: {escape(grouped(result.get("rows")))} rows{cut}</th></tr>'
            )
            for metric, told in measured.items():
                cells = [between(old.get(metric)), between(told), between(apart.get(metric), signed=True)]
                rows.append(
                    f"<tr><td>{escape(metric.replace('_', ' '))}</td>"
                    + "".join(f'<td class="n">{tied(cell)}</td>' for cell in cells)
                    + "</tr>"
                )
    if not rows:
        return _absent("No evaluation with intervals is recorded.")
    told = (
        ""
        if before
        else " Nothing was measured before the first step: a pretrained model, tasks or a forgetting text make that so."
    )
    words = f"At step {value(found.get('step'))}. In brackets: 95 % of 1,000 bootstrap resamples of the rows; of the difference, row by row.{told}"
    table = _table(rows, (("", ""), ("before", "n"), ("after", "n"), ("difference", "n")))
    return f'{_absent(words)}{table}<div class="two">{"".join(charts.evaluations(figures))}</div>{lengths(after, before)}'


def _techniques(changes: Any) -> str:
    if not isinstance(changes, dict) or not changes:
        return _absent("No technique recorded a change.")
    rows = []
    for name, found in changes.items():
        rows.append(f'<tr><th scope="rowgroup" colspan="2">{escape(name)}</th></tr>')
        for change in found or [{}]:
            kernel = f'<br><span class="small">kernel: {escape(change["kernel"])}</span>' if change.get("kernel") else ""
            rows.append(
                f'<tr><td class="free">{escape(value(change.get("what")))}{kernel}</td><td class="n">{escape(grouped(change.get("count")))}</td></tr>'
            )
    return _table(rows, (("what it changed", ""), ("count", "n")))


def _samples(samples: list[dict[str, Any]]) -> str:
    if not samples:
        return _absent("No generated text is recorded.")
    shown = []
    for sample in samples:
        prompt = sample["prompt"] or ""
        if not isinstance(prompt, str):  # a chat
            prompt = "".join(f"{message.get('role')}: {message.get('content')}\n" for message in prompt)
        before, after = (
            None if text is None else str(text).removeprefix(prompt) for text in (sample["before"], sample["text"])
        )
        if before is None:
            shown.append(f'<pre class="sample"><b>{escape(prompt)}</b>{escape(after or "")}</pre>')
            continue
        columns = (("Before training", before), ("After training", after))
        shown.append(
            f'<div class="sample"><pre><b>{escape(prompt)}</b></pre><div class="two">'
            + "".join(
                f"<div><h3>{title}</h3>" + (f"<pre>{escape(text)}</pre>" if text is not None else _absent(MISSING)) + "</div>"
                for title, text in columns
            )
            + "</div></div>"
        )
    return '<p class="small">The prompt stands in colour; what follows is generated.</p>' + "".join(shown)


def _timeline(events: list[dict[str, Any]]) -> str:
    if not events:
        return _absent("No event is recorded.")
    begin = number(events[0].get("time"))
    rows = []
    for group in _groups(events):
        first, last = group[0], group[-1]
        at = number(first.get("time"))
        after = f"+ {duration(at - begin)}" if at is not None and begin is not None and at >= begin else MISSING
        kind = f"{first['kind']} × {len(group)}" if len(group) > 1 else str(first["kind"])
        told = {k: v for k, v in last.items() if k not in ("time", "kind", "skipped", "allocator")}
        words = "; ".join(f"{k.replace('_', ' ')} {value(v)}" for k, v in told.items())
        if len(group) > 1:
            words = f"steps {value(first.get('step'))} to {value(last.get('step'))}"
        bad = " bad" if first["kind"] in ("failed", "damaged", "out_of_memory", "unsaved") else ""
        rows.append(
            f'<tr><td class="n">{after}</td><td class="free"><span class="event{bad}">{escape(kind)}</span> {escape(words)}</td></tr>'
        )
    started = "" if begin is None else f"Begun {datetime.datetime.fromtimestamp(begin, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC."
    return _absent(started) + _table(rows, (("after", "n"), ("event", "")))


def _groups(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Events in order; four or more checkpoints in a row stand as one."""
    groups: list[list[dict[str, Any]]] = []
    for event in events:
        if groups and event["kind"] == "checkpoint" == groups[-1][0]["kind"]:
            groups[-1].append(event)
        else:
            groups.append([event])
    return [part for group in groups for part in ([group] if len(group) > 3 else [[event] for event in group])]


def _environment(environment: Any) -> str:
    found = dict(environment) if isinstance(environment, dict) else {}
    for key in ("command", "device", "threads", "machine", "versions"):
        found.setdefault(key, None)
    plain = {k: v for k, v in found.items() if not isinstance(v, dict)}
    rows = [_row(k, v) for k, v in plain.items()]
    for name, group in found.items():
        if isinstance(group, dict):
            rows.append(f'<tr><th scope="rowgroup" colspan="2">{escape(name)}</th></tr>')
            rows += [_row(k, v) for k, v in group.items()]
    return _table(rows)


def _row(key: Any, found: Any) -> str:
    return f'<tr><th scope="row">{escape(key)}</th><td class="free">{escape(value(found))}</td></tr>'


def _recipe(figures: dict[str, Any]) -> str:
    return (
        f'<p class="again small">Runs it again:<code>{escape(figures["again"])}</code></p>'
        f"<details><summary>The recipe, with every default written out</summary><pre>{escape(figures['recipe'])}</pre></details>"
    )
