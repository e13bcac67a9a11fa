"""HTML page of a plan: verdict, memory, step timeline, roofline, candidates, alternatives, rejections, recipe.

{plan, alternatives, rejected, figures: {timeline, roofline, guesses, pareto}, recipe_text, method, rests_on, assumed,
command} ──write_plan──▶ page.html
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from preheat.core.json_types import JsonObject
from preheat.core.plan import Verdict, chance_to_fit, verdict_on
from preheat.report import page, plan_charts, svg
from preheat.report.formatting import LONG, count, duration, escape, gib, grouped, headline, nbsp_units, percent, sizes
from preheat.report.page import cell, number_cell, text_cell
from preheat.report.run_charts import CATEGORY_COLOURS
from preheat.sanitize import three_digits

__all__ = ["write_plan"]


def write_plan(plan: JsonObject, path: str | Path) -> Path:
    """Writes the page and returns its path.

    Args:
        plan: as `preheat plan --json` prints it, with `figures` and `recipe_text` (YAML); and as the terminal shows
            them, `method` (all techniques), `rests_on` (micro-batch, length and layout), `assumed` and `command` (what
            to type next).

    Raises:
        RunError: it cannot be written.
    """
    return page.write_page(_page(plan), path)


def _page(plan: JsonObject) -> str:
    name = headline(plan["recipe"]["name"])
    many = f"{plan['devices']:,} x " if plan["devices"] > 1 else ""
    where = f"{many}{plan['device']['name']}"
    drawn = plan["figures"]
    step = page.two_columns(
        plan_charts.timeline(drawn["timeline"], plan["available_gib"]), plan_charts.roofline(drawn["roofline"])
    )
    sections = (
        ("memory", "Memory of a device", _memory(plan)),
        ("step", "A step", step),
        ("choice", "Candidates", _candidates(plan)),
        ("reasons", "Why not the others", _reasons(plan)),
        ("recipe", "Recipe", f"<pre>{escape(plan['recipe_text'], LONG)}</pre>"),
    )
    return page.document(
        f"{name} on {where} · preheat plan",
        f"""{page.header("preheat plan", f"{name} on {where}", _verdict(plan))}
{_tiles(plan)}
{_basis(plan)}
{"".join(page.section(*parts) for parts in sections)}
<footer>Predicted by a dry run of the step; nothing was trained. 1 GiB is 2³⁰ bytes. All figures as data: \
preheat plan --json.</footer>""",
    )


def _verdict(plan: JsonObject) -> str:
    verdict = verdict_on(plan)
    fits = verdict.capitalize()
    if verdict in (Verdict.TIGHT, Verdict.UNSAFE):
        fits += f", with a chance of {percent(chance_to_fit(plan))}"
    peak = f"{gib(plan['peak_gib'])} of {gib(plan['available_gib'])}{_in_nine(plan, 'peak_gib_interval', gib)}"
    speed = (
        f"{grouped(plan['tokens_per_second'])} tokens a second{_in_nine(plan, 'tokens_per_second_interval', grouped)}"
    )
    searched, chosen = plan["searched"], plan.get("method") or plan["chosen"]
    if not searched["candidates"]:
        return f"{fits}: {peak}; {speed}. {chosen}."
    numerics = {
        "exact": "numerics unchanged",
        "rounding": "numerics differ by rounding",
        "different": "numerics differ by more than rounding",
    }[plan["numerics"]]
    runs = f"{searched['dry_runs']} {'was' if searched['dry_runs'] == 1 else 'were'} dry-run"
    sure = ", this one with all its layers" if searched["confirmed"] else ""
    best = f"The best of {searched['candidates']:,} candidates, of which {runs}{sure}"
    return f"{fits}: {peak}; {speed}. {chosen}; {numerics}. {best}."


def _in_nine(plan: JsonObject, key: str, show: Callable[[object], str]) -> str:
    """Returns the interval of nine in ten runs in parentheses; "" if there is none."""
    low, high = plan.get(key) or (None, None)
    return f" ({show(low)} to {show(high)} in nine of ten runs)" if low is not None else ""


def _basis(plan: JsonObject) -> str:
    """Returns what the figures rest on, what was assumed, and the next command; "" without any of them."""
    lines = [
        ("Rests on", plan.get("rests_on")),
        ("Assumed, as nothing states it", ", ".join(plan.get("assumed") or ())),
        ("Export", plan.get("export_note")),
        ("Speed now", plan.get("now_note")),
        ("Start", plan.get("start_note")),
    ]
    shown = "".join(f"<div><dt>{escape(label)}</dt><dd>{nbsp_units(text)}</dd></div>" for label, text in lines if text)
    basis = f'<dl class="setup">{shown}</dl>' if shown else ""
    if command := plan.get("command"):
        basis += f'<div class="again small">Next:<code>{escape(shlex.join(command))}</code></div>'
    return basis


def _tiles(plan: JsonObject) -> str:
    p, cost, money = plan["parameters"], plan["cost"], plan.get("currency", "USD")
    active = f"{count(p['active'])} active, " if p.get("active", p["total"]) != p["total"] else ""
    tiles = [
        ("Peak memory", gib(plan["peak_gib"]), f"of {gib(plan['available_gib'])}, in {plan['peak_phase']}"),
        (
            "Tokens per second",
            grouped(plan["tokens_per_second"]),
            f"{grouped(plan['tokens_per_second'] / plan['devices'])} a device",
        ),
        ("A step", duration(plan["seconds_per_step"]), f"{count(plan['tokens_per_step'])} tokens"),
        ("Model FLOPs utilisation", percent(plan["mfu"]), f"of {plan['matrix_rate'] / 1e12:,.4g} TFLOP/s"),
        ("Parameters", count(p["total"]), f"{active}{count(p['trained'])} trained{plan.get('of_stage', '')}"),
    ]
    if plan["seconds_total"] and plan["steps"]:
        unit = "steps" if plan["steps"] != 1 else "step"
        tiles.append(("Time", duration(plan["seconds_total"]), f"{grouped(plan['steps'])} {unit}"))
    else:
        tiles.append(("Time", duration(1e9 / plan["tokens_per_second"]), "a billion tokens"))
    if cost:
        run = f"{cost['run']:,.2f} {money} for the run" if cost["run"] else f"{cost['hour']:,.2f} {money} an hour"
        tiles.append(("Cost", f"{three_digits(1000 * cost['million_tokens'])} {money}", f"a billion tokens; {run}"))
    if energy := plan["energy"]:
        power = f"{three_digits(energy['kilowatts'])} kW"
        run = f"{three_digits(energy['run'])} kWh for the run" if energy["run"] else power
        of_billion = f"{three_digits(1000 * energy['million_tokens'])} kWh"
        tiles.append(("Energy, at most", of_billion, f"a billion tokens; {run}; boards at full power"))
    return page.tiles(tiles)


def _memory(plan: JsonObject) -> str:
    parts = list(plan["memory"].items())
    drawing = svg.stacked(
        "plan-memory",
        [("peak", [(CATEGORY_COLOURS[category], size) for category, size in parts])],
        "Memory at the peak by category: " + ", ".join(f"{category} {gib(size)}" for category, size in parts),
        limit=(f"{plan['available_gib']:,.4g} GiB", plan["available_gib"]),
    )
    unit, texts = sizes([*(size for _, size in parts), plan["peak_gib"]])
    rows = [
        page.row(cell(page.colour_key(CATEGORY_COLOURS[category]) + escape(category)), number_cell(text))
        for (category, _), text in zip(parts, texts, strict=False)
    ]
    rows.append(page.row(cell("peak"), number_cell(texts[-1]), kind="sum"))
    table = page.table(("at the peak", unit), rows)
    bars, split = _phases(plan)
    return page.two_columns(f"<div>{drawing}{table}</div>", f"<div>{bars}</div>") + split + _overhead(plan)


def _phases(plan: JsonObject) -> tuple[str, str]:
    """Returns (chart of memory by phase, table of the same figures)."""
    # An export happens after the run and may need more than any of its phases.
    split = plan["phase_memory"] | ({"export, later": plan["export"]} if plan["export"] else {})
    drawing = svg.stacked(
        "plan-phases",
        [
            (phase, [(CATEGORY_COLOURS[c], size) for c, size in categories.items()])
            for phase, categories in split.items()
        ],
        "Peak by phase: " + ", ".join(f"{phase} {gib(size)}" for phase, size in plan["phases"].items()),
    )
    unit, texts = sizes(
        [size for categories in split.values() for size in (*categories.values(), sum(categories.values()))]
    )
    # `texts` is flat: each phase has its categories and their sum.
    across = len(plan["memory"]) + 1
    rows = (
        page.row(
            cell(escape(phase)),
            *map(number_cell, texts[n * across : (n + 1) * across]),
            kind="sum" if phase == plan["peak_phase"] else "",
        )
        for n, phase in enumerate(split)
    )
    return f"<h3>Peak by phase</h3>{drawing}", page.table((f"phase, {unit}", *plan["memory"], "all"), rows)


def _overhead(plan: JsonObject) -> str:
    unit, texts = sizes(list(plan["overhead"].values()))
    rows = (
        page.row(cell(escape(what)), number_cell(text), text_cell(plan["overhead_sources"][what]))
        for what, text in zip(plan["overhead"], texts, strict=True)
    )
    return page.table(("overhead at the peak", unit, "source of the figure"), rows, text=(0, 2))


_MOST_LISTED = 12  # rows for estimated candidates that do not fit; the fastest are listed


def _candidates(plan: JsonObject) -> str:
    """Returns the candidates as a chart and a table, and the alternatives; a recipe planned unchanged has neither."""
    figures, available = plan["figures"], plan["available_gib"]
    tried, guesses = figures["pareto"], figures["guesses"]
    if len(tried) + len(guesses) < 2 and not plan["alternatives"]:
        return page.small(
            "The recipe was planned as it is, so there is nothing to compare; --aim fastest searches around it."
        )
    known = {p["techniques"] for p in tried}
    least: dict[str, JsonObject] = {}  # {techniques: their candidate with the least memory}
    for p in guesses:
        if p["peak_gib"] < least.get(p["techniques"], {"peak_gib": float("inf")})["peak_gib"]:
            least[p["techniques"]] = p
    # Sets of techniques that do not fit even in their smallest variant, and that no dry run looked at.
    too_large = [p for name, p in least.items() if p["peak_gib"] > available and name not in known]
    listed = [(p, _candidate_verdict(p, available)) for p in tried]
    listed += [
        (p, f"not dry-run: estimated {gib(p['peak_gib'] - available)} too much") for p in too_large[:_MOST_LISTED]
    ]
    unit, texts = sizes([p["peak_gib"] for p, _ in listed])
    rows = (
        page.row(
            text_cell(p["what"]), number_cell(text), number_cell(grouped(p["tokens_per_second"])), text_cell(verdict)
        )
        for (p, verdict), text in zip(listed, texts, strict=True)
    )
    titles = ("techniques", f"memory, {unit}", "tokens/s", "verdict")
    rest = len(too_large) - _MOST_LISTED
    more = page.small(f"{rest:,} slower sets of techniques are estimated not to fit either.") if rest > 0 else ""
    table = page.table(titles, rows, text=(0, 3)) if len(listed) > 1 else ""
    return plan_charts.pareto(tried, guesses, available) + table + more + _alternatives(plan)


def _candidate_verdict(candidate: JsonObject, available: float) -> str:
    verdict = verdict_on({**candidate, "available_gib": available})
    if candidate["best"] and verdict is not Verdict.UNSAFE:
        return "chosen" if candidate["fits"] else f"needs the least, {gib(candidate['peak_gib'] - available)} too much"
    return f"{verdict}: {gib(candidate['peak_gib'] - available)} too much" if verdict is Verdict.NO else verdict.value


def _alternatives(plan: JsonObject) -> str:
    if not plan["alternatives"]:
        return page.small("No other set of techniques was found to fit.")
    priced = plan["cost"] is not None
    unit, texts = sizes([a["peak_gib"] for a in plan["alternatives"]])
    titles = [
        "compared with the best",
        f"memory, {unit}",
        "tokens/s",
        *([f"{plan.get('currency', 'USD')}, a billion tokens"] if priced else []),
        "gives up",
    ]
    rows = (
        page.row(
            text_cell(a.get("changes") or a["what"]),
            number_cell(text),
            number_cell(grouped(a["tokens_per_second"])),
            *([number_cell(f"{three_digits(1000 * a['cost']['million_tokens'])}")] if priced else []),
            cell(nbsp_units(a["tradeoff"])),
        )
        for a, text in zip(plan["alternatives"], texts, strict=True)
    )
    return "<h3>Alternatives</h3>" + page.table(titles, rows, text=(0, len(titles) - 1))


def _reasons(plan: JsonObject) -> str:
    if not plan["rejected"]:
        return ""
    rows = (page.row(text_cell(r["recipe"]), text_cell(r["reason"])) for r in plan["rejected"])
    return page.table(("what", "why not"), rows, text=(0, 1))
