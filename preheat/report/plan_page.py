"""HTML page of a plan: verdict, memory, step timeline, roofline, candidates, alternatives, rejections, recipe.

(Plan, PlanFigures, PlanTexts) ──write_plan──▶ page.html
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from preheat.core.plan import Candidate, Interval, Plan, PlanFigures, Verdict
from preheat.core.units import format_three_digits
from preheat.report import page, plan_charts, svg
from preheat.report.formatting import (
    LONG,
    count,
    escape,
    format_duration,
    format_gib,
    format_grouped,
    format_headline,
    format_percent,
    format_sizes,
    join_units,
)
from preheat.report.page import cell, number_cell, text_cell
from preheat.report.run_charts import CATEGORY_COLOURS

__all__ = ["PlanTexts", "write_plan"]


@dataclass(frozen=True)
class PlanTexts:
    """Sentences of a plan that the terminal shows as well; "" leaves one out.

    Attributes:
        method: all techniques.
        batch: micro-batch, length and layout.
        startup: from how many steps techniques that delay the first step pay.
        export: where a later export runs, if it needs more than the device.
        now: speed of a machine that is slower now than it was calibrated.
        stage: which part of a pipeline the figures belong to.
        changes: what each alternative changes.
        assumed: settings that nobody stated.
        command: what to type next.
    """

    method: str
    batch: str
    startup: str = ""
    export: str = ""
    now: str = ""
    stage: str = ""
    changes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def write_plan(plan: Plan, figures: PlanFigures, texts: PlanTexts, recipe: str, path: str | Path) -> Path:
    """Writes the page and returns its path.

    Args:
        recipe: as YAML.

    Raises:
        RunError: it cannot be written.
    """
    return page.write_page(_render_page(plan, figures, texts, recipe), path)


def _render_page(plan: Plan, figures: PlanFigures, texts: PlanTexts, recipe: str) -> str:
    name = format_headline((plan.recipe or {}).get("name"))
    many = f"{plan.devices:,} x " if plan.devices > 1 else ""
    where = f"{many}{plan.device.name}"
    step = page.two_columns(
        plan_charts.draw_timeline(figures.timeline, plan.available_gib), plan_charts.draw_roofline(figures.roofline)
    )
    sections = (
        ("memory", "Memory of a device", _render_memory(plan)),
        ("step", "A step", step),
        ("choice", "Candidates", _render_candidates(plan, figures, texts)),
        ("reasons", "Why not the others", _render_reasons(plan)),
        ("recipe", "Recipe", f"<pre>{escape(recipe, LONG)}</pre>"),
    )
    return page.document(
        f"{name} on {where} · preheat plan",
        f"""{page.header("preheat plan", f"{name} on {where}", _render_verdict(plan, texts.method))}
{_render_tiles(plan, texts.stage)}
{_render_basis(texts)}
{"".join(page.section(*parts) for parts in sections)}
<footer>Predicted by a dry run of the step; nothing was trained. 1 GiB is 2³⁰ bytes. All figures as data: \
preheat plan --json.</footer>""",
    )


def _render_verdict(plan: Plan, method: str) -> str:
    verdict = plan.verdict
    fits = verdict.capitalize()
    if verdict in (Verdict.TIGHT, Verdict.UNSAFE):
        fits += f", with a chance of {format_percent(plan.chance)}"
    peak_interval = _format_interval(plan.peak_gib_interval, format_gib)
    peak = f"{format_gib(plan.peak_gib)} of {format_gib(plan.available_gib)}{peak_interval}"
    speed_interval = _format_interval(plan.tokens_per_second_interval, format_grouped)
    speed = f"{format_grouped(plan.tokens_per_second)} tokens a second{speed_interval}"
    searched = plan.searched
    if not searched.candidates:
        return f"{fits}: {peak}; {speed}. {method}."
    numerics = {
        "exact": "numerics unchanged",
        "rounding": "numerics differ by rounding",
        "different": "numerics differ by more than rounding",
    }[plan.numerics]
    runs = f"{searched.dry_runs} {'was' if searched.dry_runs == 1 else 'were'} dry-run"
    sure = ", this one with all its layers" if searched.confirmed else ""
    best = f"The best of {searched.candidates:,} candidates, of which {runs}{sure}"
    return f"{fits}: {peak}; {speed}. {method}; {numerics}. {best}."


def _format_interval(interval: Interval, show: Callable[[object], str]) -> str:
    """Returns the interval of nine of ten runs in parentheses."""
    return f" ({show(interval.low)} to {show(interval.high)} in nine of ten runs)"


def _render_basis(texts: PlanTexts) -> str:
    """Returns the setup of the figures, what was assumed, and the next command; "" without any of them."""
    lines = [
        ("Batch", texts.batch),
        ("Assumed, as nothing states it", ", ".join(texts.assumed)),
        ("Start", texts.startup),
        ("Export", texts.export),
        ("Speed now", texts.now),
    ]
    shown = "".join(f"<div><dt>{escape(label)}</dt><dd>{join_units(text)}</dd></div>" for label, text in lines if text)
    basis = f'<dl class="setup">{shown}</dl>' if shown else ""
    if texts.command:
        basis += f'<div class="again small">Next:<code>{escape(shlex.join(texts.command))}</code></div>'
    return basis


def _render_tiles(plan: Plan, stage: str) -> str:
    p, cost, money = plan.parameters, plan.cost, plan.currency
    active = f"{count(p.active)} active, " if p.active != p.total else ""
    tiles = [
        ("Peak memory", format_gib(plan.peak_gib), f"of {format_gib(plan.available_gib)}, in {plan.peak_phase}"),
        (
            "Tokens per second",
            format_grouped(plan.tokens_per_second),
            f"{format_grouped(plan.tokens_per_second / plan.devices)} a device",
        ),
        ("A step", format_duration(plan.seconds_per_step), f"{count(plan.tokens_per_step)} tokens"),
        ("Model FLOPs utilisation", format_percent(plan.mfu), f"of {plan.matrix_rate / 1e12:,.4g} TFLOP/s"),
        ("Parameters", count(p.total), f"{active}{count(p.trained)} trained{stage}"),
    ]
    if plan.seconds_total and plan.steps:
        unit = "steps" if plan.steps != 1 else "step"
        tiles.append(("Time", format_duration(plan.seconds_total), f"{format_grouped(plan.steps)} {unit}"))
    else:
        tiles.append(("Time", format_duration(1e9 / plan.tokens_per_second), "a billion tokens"))
    if cost:
        run = f"{cost.run:,.2f} {money} for the run" if cost.run else f"{cost.hour:,.2f} {money} an hour"
        tiles.append(("Cost", f"{format_three_digits(1000 * cost.million_tokens)} {money}", f"a billion tokens; {run}"))
    if energy := plan.energy:
        power = f"{format_three_digits(energy.kilowatts)} kW"
        run = f"{format_three_digits(energy.run)} kWh for the run" if energy.run else power
        of_billion = f"{format_three_digits(1000 * energy.million_tokens)} kWh"
        tiles.append(("Energy, at most", of_billion, f"a billion tokens; {run}; boards at full power"))
    return page.tiles(tiles)


def _render_memory(plan: Plan) -> str:
    parts = list(plan.memory.items())
    drawing = svg.draw_stacked(
        "plan-memory",
        [("peak", [(CATEGORY_COLOURS[category], size) for category, size in parts])],
        "Memory at the peak by category: " + ", ".join(f"{category} {format_gib(size)}" for category, size in parts),
        limit=(f"{plan.available_gib:,.4g} GiB", plan.available_gib),
    )
    unit, texts = format_sizes([*(size for _, size in parts), plan.peak_gib])
    rows = [
        page.row(cell(page.colour_key(CATEGORY_COLOURS[category]) + escape(category)), number_cell(text))
        for (category, _), text in zip(parts, texts, strict=False)
    ]
    rows.append(page.row(cell("peak"), number_cell(texts[-1]), kind="sum"))
    table = page.table(("at the peak", unit), rows)
    bars, split = _render_phases(plan)
    return page.two_columns(f"<div>{drawing}{table}</div>", f"<div>{bars}</div>") + split + _render_overhead(plan)


def _render_phases(plan: Plan) -> tuple[str, str]:
    """Returns (chart of memory by phase, table of the same figures)."""
    # An export happens after the run and may need more than any of its phases.
    split = {**plan.phase_memory, **({"export, later": plan.export} if plan.export else {})}
    drawing = svg.draw_stacked(
        "plan-phases",
        [
            (phase, [(CATEGORY_COLOURS[c], size) for c, size in categories.items()])
            for phase, categories in split.items()
        ],
        "Peak by phase: " + ", ".join(f"{phase} {format_gib(size)}" for phase, size in plan.phases.items()),
    )
    unit, texts = format_sizes(
        [size for categories in split.values() for size in (*categories.values(), sum(categories.values()))]
    )
    # `texts` is flat: each phase has its categories and their sum.
    across = len(plan.memory) + 1
    rows = (
        page.row(
            cell(escape(phase)),
            *map(number_cell, texts[n * across : (n + 1) * across]),
            kind="sum" if phase == plan.peak_phase else "",
        )
        for n, phase in enumerate(split)
    )
    return f"<h3>Peak by phase</h3>{drawing}", page.table((f"phase, {unit}", *plan.memory, "all"), rows)


def _render_overhead(plan: Plan) -> str:
    unit, texts = format_sizes(list(plan.overhead.values()))
    rows = (
        page.row(cell(escape(what)), number_cell(text), text_cell(plan.overhead_sources[what]))
        for what, text in zip(plan.overhead, texts, strict=True)
    )
    return page.table(("overhead at the peak", unit, "source of the figure"), rows, text=(0, 2))


_MOST_LISTED = 12  # rows for estimated candidates that do not fit; the fastest are listed


def _render_candidates(plan: Plan, figures: PlanFigures, texts: PlanTexts) -> str:
    """Returns the candidates as a chart and a table, and the alternatives; a recipe planned unchanged has neither."""
    available, tried, guesses = plan.available_gib, figures.tried, figures.guesses
    if len(tried) + len(guesses) < 2 and not plan.alternatives:
        return page.small(
            "The recipe was planned as it is, so there is nothing to compare; --aim fastest searches around it."
        )
    known = {p.techniques for p in tried}
    least: dict[str, Candidate] = {}  # {techniques: their candidate with the least memory}
    for p in guesses:
        if p.techniques not in least or p.peak_gib < least[p.techniques].peak_gib:
            least[p.techniques] = p
    # Sets of techniques that do not fit even in their smallest variant, and that no dry run looked at.
    too_large = [p for name, p in least.items() if p.peak_gib > available and name not in known]
    listed = [(p, _describe_candidate(p, available)) for p in tried]
    listed += [
        (p, f"not dry-run: estimated {format_gib(p.peak_gib - available)} too much") for p in too_large[:_MOST_LISTED]
    ]
    unit, amounts = format_sizes([p.peak_gib for p, _ in listed])
    rows = (
        page.row(
            text_cell(p.what), number_cell(text), number_cell(format_grouped(p.tokens_per_second)), text_cell(verdict)
        )
        for (p, verdict), text in zip(listed, amounts, strict=True)
    )
    titles = ("techniques", f"memory, {unit}", "tokens/s", "verdict")
    rest = len(too_large) - _MOST_LISTED
    more = page.small(f"{rest:,} slower sets of techniques are estimated not to fit either.") if rest > 0 else ""
    table = page.table(titles, rows, text=(0, 3)) if len(listed) > 1 else ""
    return plan_charts.draw_pareto(tried, guesses, available) + table + more + _render_alternatives(plan, texts.changes)


def _describe_candidate(candidate: Candidate, available: float) -> str:
    verdict, missing = candidate.verdict, format_gib(candidate.peak_gib - available)
    if candidate.best and verdict is not Verdict.UNSAFE:
        return f"needs the least, {missing} too much" if verdict is Verdict.NO else "chosen"
    return f"{verdict}: {missing} too much" if verdict is Verdict.NO else str(verdict)


def _render_alternatives(plan: Plan, changes: Sequence[str]) -> str:
    if not plan.alternatives:
        return page.small("No other set of techniques was found to fit.")
    priced = plan.cost is not None
    unit, texts = format_sizes([a.peak_gib for a in plan.alternatives])
    titles = [
        "compared with the best",
        f"memory, {unit}",
        "tokens/s",
        *([f"{plan.currency}, a billion tokens"] if priced else []),
        "gives up",
    ]
    rows = (
        page.row(
            text_cell(change),
            number_cell(text),
            number_cell(format_grouped(a.tokens_per_second)),
            *([number_cell(f"{format_three_digits(1000 * a.cost.million_tokens)}")] if a.cost else []),
            cell(join_units(a.tradeoff)),
        )
        for a, change, text in zip(plan.alternatives, changes, texts, strict=True)
    )
    return "<h3>Alternatives</h3>" + page.table(titles, rows, text=(0, len(titles) - 1))


def _render_reasons(plan: Plan) -> str:
    if not plan.rejected:
        return ""
    rows = (page.row(text_cell(r.recipe), text_cell(r.reason)) for r in plan.rejected)
    return page.table(("what", "why not"), rows, text=(0, 1))
