"""A plan as one page: verdict, memory by category and over a step, what was looked at, roofline, alternatives, reasons, the recipe.

{plan, alternatives, rejected, figures: {timeline, roofline, pareto}} ──write_plan──▶ page.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat.report import drawings, plots
from preheat.report.page import document
from preheat.report.words import count, duration, escape, gib, grouped, percent, tied
from preheat.run import write_asked

__all__ = ["write_plan"]

_COLOURS = dict(
    zip(
        ("parameters", "gradients", "optimizer", "activations", "temporary", "overhead"),
        (f"series-{n}" for n in range(1, 7)),
        strict=True,
    )
)


def write_plan(made: Mapping[str, Any], path: str | Path) -> Path:
    """Writes the page and returns its path.

    Raises:
        RunError: it cannot be written.
    """
    return write_asked(path, _page(made))


def _page(made: Mapping[str, Any]) -> str:
    name = made["recipe"]["name"]
    many = f"{made['devices']:,} x " if made["devices"] > 1 else ""
    where = f"{many}{made['device']['name']}"
    drawn = made["figures"]
    sections = (
        ("memory", "Memory of a device", _memory(made)),
        (
            "step",
            "A step",
            f'<div class="two">{drawings.timeline(drawn["timeline"], made["available_gib"])}{drawings.roofline(drawn["roofline"])}</div>',
        ),
        (
            "choice",
            "What was looked at",
            drawings.pareto(drawn["pareto"], drawn["front"], made["available_gib"]) + _alternatives(made),
        ),
        ("reasons", "Why not the others", _reasons(made)),
        ("recipe", "Recipe", f"<pre>{escape(made['recipe_text'])}</pre>"),
    )
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{content}</section>\n' for key, title, content in sections)
    return document(
        f"{name} on {where} · preheat plan",
        f"""<header id="verdict"><p class="eyebrow">preheat plan</p><h1>{escape(name)} on {escape(where)}</h1>
<p class="verdict">{tied(_verdict(made))}</p></header>
{_tiles(made)}
{body}<footer>Predicted by a dry run of the step; nothing was trained. 1 GiB is 2³⁰ bytes. All figures as data: preheat plan --json.</footer>""",
    )


def _verdict(made: Mapping[str, Any]) -> str:
    fits = "Fits" if made["fits"] else "Does not fit"
    peak = f"{gib(made['peak_gib'])} of {gib(made['available_gib'])}"
    numbers = {"exact": "no numbers change", "rounding": "numbers are rounded", "different": "numbers differ"}[made["numerics"]]
    searched = made["searched"]
    how = (
        f" The best of {searched['candidates']:,} candidates, of which {searched['looked_at']} were dry-run"
        if searched["candidates"]
        else ""
    )
    sure = ", this one with all its layers" if searched["confirmed"] else ""
    return f"{fits}: {peak}, {grouped(made['tokens_per_second'])} tokens a second. {made['chosen']}; {numbers}.{how}{sure}{'.' if how else ''}"


def _tiles(made: Mapping[str, Any]) -> str:
    p, cost = made["parameters"], made["cost"]
    tiles = [
        ("Peak memory", gib(made["peak_gib"]), f"of {gib(made['available_gib'])}, in {made['peak_phase']}"),
        (
            "Tokens per second",
            grouped(made["tokens_per_second"]),
            f"{grouped(made['tokens_per_second'] / made['devices'])} a device",
        ),
        ("A step", duration(made["seconds_per_step"]), f"{count(made['tokens_per_step'])} tokens"),
        ("Model FLOPs utilisation", percent(made["mfu"]), f"of {made['matrix_rate'] / 1e12:,.4g} TFLOP/s"),
        ("Parameters", count(p["total"]), f"{count(p['trained'])} trained"),
    ]
    if made["seconds_total"]:
        tiles.append(("Time", duration(made["seconds_total"]), f"{grouped(made['steps'])} steps"))
    if cost:
        run = f"${cost['run']:,.2f} for the run" if cost["run"] else f"${cost['hour']:,.2f} an hour"
        tiles.append(("Cost", f"${cost['million_tokens']:.3g}", f"a million tokens; {run}"))
    if energy := made["energy"]:
        run = f"{energy['run']:,.3g} kWh for the run" if energy["run"] else f"{energy['kilowatts']:,.3g} kW"
        tiles.append(
            ("Energy, at most", f"{energy['million_tokens']:.3g} kWh", f"a million tokens; {run}; boards at full power")
        )
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{a}</dt><dd>{tied(b)}</dd><dd>{tied(c)}</dd></div>" for a, b, c in tiles)
        + "</dl>"
    )


def _memory(made: Mapping[str, Any]) -> str:
    parts = list(made["memory"].items())
    drawing = plots.stacked(
        "plan-memory",
        [("peak", [(_COLOURS[category], size) for category, size in parts])],
        "Memory at the peak by category: " + ", ".join(f"{category} {gib(size)}" for category, size in parts),
        limit=(f"{made['available_gib']:,.4g} GiB", made["available_gib"]),
    )
    rows = "".join(
        f'<tr><td><span class="key" style="--c: var(--{_COLOURS[category]})"></span>{escape(category)}</td><td class="n">{tied(gib(size))}</td></tr>'
        for category, size in parts
    )
    bars, split = _phases(made)
    return (
        f'<div class="two"><div>{drawing}<table><tbody>{rows}<tr class="sum"><td>peak</td><td class="n">{tied(gib(made["peak_gib"]))}</td></tr></tbody></table>'
        f"</div><div>{bars}</div></div>{split}{_overhead(made)}"
    )


def _phases(made: Mapping[str, Any]) -> tuple[str, str]:
    """A bar a phase, and the same in figures."""
    split = made["phase_memory"] | ({"export, later": made["export"]} if made["export"] else {})
    drawing = plots.stacked(
        "plan-phases",
        [(phase, [(_COLOURS[c], size) for c, size in found.items()]) for phase, found in split.items()],
        "Peak by phase: " + ", ".join(f"{phase} {gib(size)}" for phase, size in made["phases"].items()),
    )
    head = "".join(f'<th scope="col" class="n">{escape(c)}</th>' for c in made["memory"])
    rows = "".join(
        f"<tr{' class=sum' if phase == made['peak_phase'] else ''}><td>{escape(phase)}</td>"
        + "".join(f'<td class="n">{size:,.2f}</td>' for size in (*found.values(), sum(found.values())))
        + "</tr>"
        for phase, found in split.items()
    )
    return (
        f"<h3>Peak by phase</h3>{drawing}",
        f'<table><thead><tr><th scope="col">phase, GiB</th>{head}<th scope="col" class="n">all</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>",
    )


def _overhead(made: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{escape(what)}</td><td class="n">{tied(gib(size))}</td><td class="free">{escape(made["overhead_sources"][what])}</td></tr>'
        for what, size in made["overhead"].items()
    )
    head = '<th scope="col">overhead at the peak</th><th scope="col" class="n">size</th><th scope="col">where the figure is from</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _alternatives(made: Mapping[str, Any]) -> str:
    if not made["alternatives"]:
        return '<p class="small">Nothing else of other techniques was found to fit.</p>'
    priced = made["cost"] is not None
    titles = ["techniques", "memory", "tokens/s", *(["$ a million tokens"] if priced else []), "beside the best"]
    head = "".join(
        f'<th scope="col"{" class=n" if 0 < n < len(titles) - 1 else ""}>{title}</th>' for n, title in enumerate(titles)
    )
    rows = "".join(
        f'<tr><td class="free">{escape(a["what"])}</td><td class="n">{tied(gib(a["peak_gib"]))}</td><td class="n">{grouped(a["tokens_per_second"])}</td>'
        + (f'<td class="n">{a["cost"]["million_tokens"]:.3g}</td>' if priced else "")
        + f"<td>{tied(a['gives_up'])}</td></tr>"
        for a in made["alternatives"]
    )
    return f"<h3>Alternatives</h3><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _reasons(made: Mapping[str, Any]) -> str:
    if not made["rejected"]:
        return '<p class="small">Nothing was searched.</p>'
    rows = "".join(
        f'<tr><td class="free">{escape(r["recipe"])}</td><td class="free">{tied(r["reason"])}</td></tr>'
        for r in made["rejected"]
    )
    return f'<table><thead><tr><th scope="col">what</th><th scope="col">why not</th></tr></thead><tbody>{rows}</tbody></table>'
