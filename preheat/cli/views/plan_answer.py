"""The answer of `preheat plan` on one screen: 24 lines of 80 columns, whatever is planned. No torch.

Everything that does not fit on it (memory by phase, all alternatives, every rejection) is behind `--verbose` and on the
page (`plan_view.details`, `report.plan_page`).
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from preheat.core.mesh import DATA, Axis, sizes_of
from preheat.core.plan import Alternative, Cost, Energy, Improvement, LargestValue, Plan, SpeedNow, Verdict
from preheat.core.units import (
    format_duration,
    format_gflops,
    format_memory,
    format_percent,
    format_rate,
    format_three_digits,
)
from preheat.sanitize import escape_control_characters, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderResult

    from preheat.core import Recipe, Technique
    from preheat.report.plan_page import PlanTexts

__all__ = ["LINES", "WIDTH", "Answer", "wrap_command", "describe", "build_page_texts", "format_count", "resolve_recipe"]

LINES, WIDTH = 24, 80
_LABEL = 10  # columns of a line's label
_BAR = 34  # columns of the longest bar
_SMALL = 0.02  # of the peak: smaller categories share a bar
_TIGHT = 0.05  # the same if the lines of the answer are too many
_LIKELY = 0.95  # chance to fit that needs no note
_BILLION = 1e9
_FIRST = 9  # order of what is left out before anything else is shortened
_NUMERICS = {
    "exact": "numerics unchanged",
    "rounding": "numerics differ by rounding",
    "different": "numerics differ by more than rounding",
}


@dataclass(frozen=True)
class _Entry:
    """A labelled text of the answer, wrapped to at most `most` lines; what is beyond is cut with an ellipsis."""

    label: str
    text: str
    style: str = ""
    most: int = 2
    least: int = 1  # lines that it keeps while it is not left out
    order: int = 0  # if the answer is too long, the highest gives up lines first; 0 keeps all of them
    uncut: bool = False  # left out as a whole before it loses lines

    def lines(self, width: int) -> list[str]:
        room = max(width - _LABEL, 20)
        rows = textwrap.wrap(self.text, room, break_long_words=True, break_on_hyphens=False) or [""]
        if len(rows) > self.most:
            last = rows[self.most - 1]
            rows = [*rows[: self.most - 1], last[: room - 2].rstrip(" ,;") + " …"]
        return [f"{self.label if n == 0 else '':<{_LABEL}}{row}" for n, row in enumerate(rows)]


@dataclass(frozen=True)
class Answer:
    """A plan as a rich renderable of at most `LINES` lines.

    Attributes:
        name: of the recipe or model.
        assumed: settings that nobody stated.
        notes: sentences to print below the answer.
        below: lines that the caller prints after it, such as the next command.
    """

    plan: Plan
    name: str
    assumed: Sequence[str] = ()
    notes: Sequence[str] = ()
    below: int = 0

    def __rich_console__(self, console: Any, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line, style in self.lines(min(options.max_width, WIDTH)):
            yield Text(escape_control_characters(line), style=style, no_wrap=True, overflow="ellipsis")

    def lines(self, width: int = WIDTH) -> list[tuple[str, str]]:
        """Returns (line, style) of each line."""
        recipe = resolve_recipe(self.plan) if self.plan.recipe else None
        entries, head = self._build_entries(recipe), self._build_head(recipe, width)
        bars = _draw_bars(self.plan, width)
        room = LINES - self.below - len(head)
        if len(bars) + sum(len(e.lines(width)) for e in entries if e.order < _FIRST) > room:
            bars = _draw_bars(self.plan, width, _TIGHT)
        while len(bars) + sum(len(e.lines(width)) for e in entries) > room:
            loose = [n for n, e in enumerate(entries) if e.order]
            if not loose:
                break
            # First the ends of long entries, and entries that are not cut; the least important first.
            long = [n for n in loose if len(entries[n].lines(width)) > entries[n].least and not entries[n].uncut]
            first = [n for n in loose if entries[n].order >= _FIRST]
            uncut = [n for n in loose if entries[n].uncut]
            n = max(first or [*long, *uncut] or loose, key=lambda n: (entries[n].order, n))
            if n in long and n not in first:
                entries[n] = replace(entries[n], most=len(entries[n].lines(width)) - 1)
            else:
                del entries[n]
        body = [(line, e.style) for e in entries for line in e.lines(width)]
        return [*head, *bars, *body]

    def _build_head(self, recipe: Recipe | None, width: int) -> list[tuple[str, str]]:
        plan, device = self.plan, self.plan.device
        count = plan.devices
        where = f"{count:,} x {device.name}" if count > 1 else device.name
        verdict = plan.verdict
        verdict_text = "nothing fits so far" if verdict is Verdict.NO and plan.searched.interrupted else verdict.value
        model = _describe_model(plan, recipe)
        # Verdict and size are never cut off, however long the names are.
        room = width - len(model) - len(verdict_text) - 9
        place = shorten(where, max(room - 8, 8))
        about = f"{shorten(self.name, max(room - len(place), 8))} ({model}) on {place}"
        low, high = (format_memory(gib) for gib in plan.peak_gib_interval)
        has, needs = format_memory(plan.available_gib), format_memory(plan.peak_gib)
        if plan.available_gib * 1024 < 1:
            needed = f"needs {needs}, and the process itself takes all that is there"
        elif plan.fits:
            needed = f"{_join_amounts(needs, has)}{' a device' if count > 1 else ''}"
        else:
            needed = f"needs {_join_amounts(needs, has)}{' a device' if count > 1 else ''}"
        style = {Verdict.NO: "bold red", Verdict.UNSAFE: "bold yellow"}.get(verdict, "bold green")
        lines = [
            (f"{about}: {verdict_text}", style),
            (f"{'memory':<{_LABEL}}{needed} ({_join_amounts(low, high, ' to ')} in nine of ten runs)", "bold"),
        ]
        return [
            (part, style)
            for line, style in lines
            for part in textwrap.wrap(line, width, subsequent_indent=" " * _LABEL, break_on_hyphens=False)
        ]

    def _build_entries(self, recipe: Recipe | None) -> list[_Entry]:
        plan = self.plan
        if plan.fits:
            entries = [_Entry("speed", _describe_speed(plan)), _Entry("time", _describe_time(plan), most=3)]
            if plan.now:
                entries.insert(1, _Entry("now", _describe_present_speed(plan.now, plan.contended), style="yellow"))
            if cost := plan.cost:
                entries.append(_Entry("cost", _describe_cost(cost, plan)))
            if plan.energy:
                entries.append(_Entry("energy", _describe_energy(plan.energy), most=1, order=_FIRST))
        else:  # how fast it would be is of no use
            entries = [_Entry("short by", _describe_shortfall(plan))]
        if recipe is not None:
            if plan.devices > 1 and _count_stages(plan, recipe) == 1:  # stages differ in size
                entries.append(_Entry("state", _describe_state(plan), most=1, order=_FIRST))
            entries.append(_Entry("batch", _describe_batch(recipe, plan), most=3))
            entries.append(_Entry("method", _describe_method(recipe, plan), most=4, least=2, order=4))
        if self.assumed:
            entries.append(_Entry("assumed", ", ".join(self.assumed), most=3, order=3))
        if largest := plan.largest_value:
            entries.append(_Entry("largest", _describe_largest(largest), style="bold", most=4))
        if longest := plan.longest_context:
            reached = (
                f"{longest.length:,} tokens a sequence fit ({format_memory(longest.peak_gib)})"
                if longest.peak_gib is not None
                else "no sequence fits"
            )
            entries.append(_Entry("longest", f"{reached}; {longest.limit}", order=2))
        if plan.improvements:
            entries += _list_improvements(plan)
        alternatives = plan.alternatives
        for n, alternative in enumerate(alternatives[:3]):
            text = _describe_alternative(alternative, plan, recipe)
            text = text if plan.improvements is None else f"as preheat would: {text}"
            # Half an alternative cannot be typed; the closest one stays longest.
            order = 6 + n if n else 2
            entries.append(_Entry("" if n else "instead", text, style="cyan", most=4, order=order, uncut=True))
        if later := _export(plan):
            entries.append(_Entry("export", later, style="dim", order=1))
        entries += [_Entry("note", text, style="yellow", most=2, order=1) for text in list_warnings(plan)]
        entries += [_Entry("note", text, style="dim", most=2, order=5) for text in self.notes]
        return entries


# --- parts of the answer


def _join_amounts(first: str, last: str, between: str = " of ") -> str:
    """Joins two amounts, with the unit once if they share it.

    Example:
        >>> _join_amounts("14.60 GiB", "24.00 GiB"), _join_amounts("512 MiB", "1.50 GiB", " to ")
        ('14.60 of 24.00 GiB', '512 MiB to 1.50 GiB')
    """
    amount, _, unit = first.partition(" ")
    return f"{amount if last.endswith(f' {unit}') else first}{between}{last}"


def _draw_bars(plan: Plan, width: int, small: float = _SMALL) -> list[tuple[str, str]]:
    """Returns a bar per category of memory at the peak, and one for what is left; `small` ones share a bar."""
    peak, has = plan.peak_gib, plan.available_gib
    large = {c: gib for c, gib in plan.memory.items() if gib >= small * peak}
    rest = sum(plan.memory.values()) - sum(large.values())
    rows = [*large.items(), *([("other", rest)] if rest >= _SMALL / 2 * peak else [])]
    label = max(13, *(len(c) for c, _ in rows))
    room = max(min(_BAR, width - label - 14), 6)
    # Scaled to the device's memory; if that is far more than the peak, its bar is cut off.
    far = has >= 2.5 * peak
    scale = (room - 4) / max(peak, 1e-9) if far else room / max(peak, has, 1e-9)
    lines = [(f"  {c:<{label}}{format_memory(gib):>10}  {'█' * round(gib * scale) or '▏'}", "") for c, gib in rows]
    if plan.fits and has - peak >= _SMALL / 4 * has:
        left = "░ …" if far else "░" * max(room - round(peak * scale), 0)
        lines.append((f"  {'free':<{label}}{format_memory(has - peak):>10}  {' ' * round(peak * scale)}{left}", "dim"))
    return lines


def format_count(value: float) -> str:
    """Returns a count with its unit.

    Example:
        >>> format_count(8.234e9), format_count(43_646_976), format_count(512)
        ('8.23B', '43.6M', '512')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}"


def format_hours(seconds: float) -> str:
    """Returns a long time in hours, and in days beyond two of them.

    Example:
        >>> format_hours(90), format_hours(7300), format_hours(420_000)
        ('1.5 min', '2.0 h', '117 h (4.9 days)')
    """
    if seconds < 3600:
        return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
    days = f" ({seconds / 86400:,.1f} days)" if seconds >= 2 * 86400 else ""
    return f"{seconds / 3600:,.1f} h" if seconds < 360_000 else f"{seconds / 3600:,.0f} h{days}"


def build_page_texts(plan: Plan, *, assumed: Sequence[str] = (), command: Sequence[str] = ()) -> PlanTexts:
    """Returns the texts of the answer that the page shows as well.

    Args:
        assumed: settings that nobody stated.
        command: what to type next.
    """
    from preheat.report.plan_page import PlanTexts

    recipe = resolve_recipe(plan)
    stages = _count_stages(plan, recipe)
    return PlanTexts(
        method=", ".join(_describe_techniques(recipe.techniques.values())) or "no techniques",
        batch=_describe_batch(recipe, plan),
        startup=_start(plan),
        export=_export(plan),
        now=_describe_present_speed(plan.now, plan.contended) if plan.now else "",
        stage=f", in one of {stages} stages" if stages > 1 else "",
        changes=tuple(a.what if a.options else _describe_changes(a, plan, recipe) for a in plan.alternatives),
        assumed=tuple(assumed),
        command=tuple(command),
    )


def _describe_speed(plan: Plan) -> str:
    low, high = plan.tokens_per_second_interval
    peak = plan.matrix_rate
    flops = f"{format_three_digits(peak / 1e12)} TFLOP/s" if peak >= 1e12 else f"{format_gflops(peak)} GFLOP/s"
    # Of a catalogue's device the rate is that of its data sheet.
    of = f"the {flops} measured here" if plan.device.kind == "cpu" else f"the device's {flops}"
    speed = f"{format_rate(plan.tokens_per_second)} tokens/s ({format_rate(low)} to {format_rate(high)})"
    return f"{speed}, {format_percent(plan.mfu)} of {of}"


def _describe_state(plan: Plan) -> str:
    """Describes the weights, gradients and optimizer states of all devices, also those that several have a copy of."""
    # Each at its own largest: gradients grow during the backward pass.
    each = sum(
        max(phase.get(category, 0.0) for phase in plan.phase_memory.values())
        for category in ("parameters", "gradients", "optimizer")
    )
    total = each * 2**30 * plan.devices
    size = f"{format_three_digits(total / 1e12)} TB" if total >= 1e12 else f"{format_three_digits(total / 1e9)} GB"
    return f"{size} in all: weights, gradients, optimizer; {total / plan.parameters.total:.3g} bytes a parameter"


def _describe_present_speed(now: SpeedNow, contended: bool) -> str:
    """Describes the speed of a machine that is slower now than it was calibrated."""
    machine, speed = now.machine, f"{format_rate(now.tokens_per_second)} tokens/s"
    if machine.alone is False:
        used = f"other processes use {machine.other_cores:.1f} of {machine.cpus} cores"
        above = "is an estimate for" if contended else "assumes"
        return f"{speed}, because {used}; the speed above {above} an idle machine"
    why = ", though no other process uses its cores" if machine.alone else ""
    return f"{speed}: slower than when it was calibrated{why}; to measure again: preheat calibrate"


def _describe_time(plan: Plan) -> str:
    parts = [f"{plan.seconds_per_step:.3g} s a step of {plan.tokens_per_step:,} tokens"]
    if plan.steps and plan.seconds_total:
        parts.append(f"{format_duration(plan.seconds_total)} for {plan.steps:,} step{'s' if plan.steps != 1 else ''}")
    else:
        parts.append(f"{format_hours(_BILLION / plan.tokens_per_second)} per billion tokens")
        if plan.seconds_total:
            parts.append(f"ends after {format_hours(plan.seconds_total)}")
    if start := _start(plan):
        parts.append(start)
    return "; ".join(parts)


def _start(plan: Plan) -> str:
    """Describes what delays the first step, and from how many steps on that pays; "" if nothing does."""
    parts = []
    if plan.seconds_to_start:
        parts.append(f"the first step comes {plan.seconds_to_start:.0f} s later, after compiling")
    if plan.startup and plan.startup.pays_from_steps:
        parts.append(f"{', '.join(plan.startup.techniques)} pays from {plan.startup.pays_from_steps:,} steps on")
    return "; ".join(parts)


def _describe_cost(cost: Cost, plan: Plan) -> str:
    money = plan.currency
    run = f"{_format_money(cost.run)} {money} for the run" if cost.run else None
    parts = [
        run,
        f"{_format_money(cost.million_tokens * 1000)} {money} per billion tokens",
        f"{_format_money(cost.hour)} an hour",
    ]
    return ", ".join(p for p in parts if p)


def _format_money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 0.1 or not amount else f"{amount:.2g}"


def _describe_energy(energy: Energy) -> str:
    run = f"{format_three_digits(energy.run)} kWh for the run, " if energy.run else ""
    return (
        f"{run}at most {format_three_digits(energy.million_tokens * 1000)} kWh per billion tokens, boards at full power"
    )


def _describe_batch(recipe: Recipe, plan: Plan) -> str:
    """Describes the micro-batch, the length of a sequence and the layout."""
    techniques = list(recipe.techniques.values())
    count = plan.devices
    sizes = sizes_of(techniques, count) if any(t.is_parallel() for t in techniques) else {}
    ranks = math.prod(sizes.get(axis, 1) for axis in DATA)
    micros = math.prod(t.micro_batch_count() for t in techniques)
    rows = math.ceil(recipe.batch.size / ranks / micros)
    sequences = f"{rows:,} sequence{'s' if rows > 1 else ''}"
    text = f"micro-batches of {sequences} of {recipe.batch.seq_len:,} tokens, {micros:,} a step"
    if count > 1:
        layout = " x ".join(f"{axis} {n:,}" for axis, n in sizes.items() if n > 1)
        text += f" on each rank; {count:,} devices = {layout or 'unused'}"
    return text


def _describe_model(plan: Plan, recipe: Recipe | None) -> str:
    p = plan.parameters
    trained = f", {format_count(p.trained)} trained" if p.trained != p.total else ""
    active = f", {format_count(p.active)} active" if p.active != p.total else ""
    text = f"{format_count(p.total)} parameters{active}{trained}"
    stages = 1 if recipe is None else _count_stages(plan, recipe)
    # A pipeline's dry run builds one stage.
    return f"{text}, in one of {stages} stages" if stages > 1 else text


def _count_stages(plan: Plan, recipe: Recipe) -> int:
    techniques = list(recipe.techniques.values())
    if not any(Axis.PIPELINE in t.degrees() for t in techniques):
        return 1
    return sizes_of(techniques, plan.devices)[Axis.PIPELINE]


def _describe_shortfall(plan: Plan) -> str:
    """Returns the memory that a plan lacks, and what would make it fit."""
    searched, peak, has = plan.searched, plan.peak_gib, plan.available_gib
    least = f", the least of {searched.candidates:,} candidates" if searched.candidates else ""
    if searched.interrupted:
        return f"{format_memory(peak - has)}; a candidate that was not tried yet may fit"
    if has * 1024 < 1:
        return f"{format_memory(peak)}{least}; the limit must exceed what the process takes"
    text = f"{format_memory(peak - has)}{least}; would fit in {format_memory(peak)}"
    if any("--count" in alternative.options for alternative in plan.alternatives):
        return text  # the number of devices that suffice is known
    # At best, all memory divides by the devices.
    devices = math.ceil(plan.devices * peak / has)
    return f"{text}, or split over at least {devices:,} of these devices"


def describe(technique: Technique, plain: Technique | None = None) -> str:
    """Returns a technique's name with the settings that differ from its defaults; a mode is named by its value alone.

    Args:
        plain: the same technique with the settings to compare with, instead of the defaults.

    Example:
        >>> from preheat.core import registry
        >>> checkpointing = registry()["activation_checkpointing"]
        >>> describe(checkpointing(mode="selective", products=2)), describe(checkpointing(mode="budget", budget=0.5))
        ('activation_checkpointing (selective, products 2)', 'activation_checkpointing (budget 0.5)')
    """
    plain = plain or type(technique)()
    changed = {key: value for key, value in vars(technique).items() if value != getattr(plain, key)}
    mode = changed.pop("mode", None)
    parts = [] if mode is None or mode in changed else [str(mode)]
    # A flag is named alone.
    parts += [key if value is True else f"{key} {value}" for key, value in changed.items()]
    return technique.name() + (f" ({', '.join(parts)})" if parts else "")


def resolve_recipe(plan: Plan, techniques: Mapping[str, Any] | None = None) -> Recipe:
    """Returns the recipe of a plan, or the same with the techniques of an alternative."""
    from preheat import recipe as recipes
    from preheat.recipe.yaml_io import write

    assert plan.recipe is not None, "only plans of a command have their recipe"
    values = dict(plan.recipe)
    return recipes.parse(write(values if techniques is None else {**values, "techniques": techniques}))


def _describe_techniques(techniques: Iterable[Technique]) -> list[str]:
    # Accumulation shows as the rows of a micro-batch.
    return [describe(t) for t in techniques if t.is_parallel() or t.micro_batch_count() == 1]


def _list_improvements(plan: Plan) -> list[_Entry]:
    """Returns the changes of another trainer's file that help, the best first, and what they give together."""
    from preheat.cli.plan_improving import describe_keys

    improvements = plan.improvements
    assert improvements is not None, "only plans of another trainer's file have improvements"
    label = "faster" if plan.fits_safely else "to fit"
    entries = [
        _Entry(
            "" if n else label, f"{describe_keys(each)}: {_describe_gain(each, plan)}", style="cyan", most=3, order=n
        )
        for n, each in enumerate(improvements.singles)
    ]
    if improvements.together and len(improvements.together.kinds) > 1:
        kinds = " + ".join(improvements.together.kinds)
        text = f"{kinds}: {_describe_gain(improvements.together, plan)}; --write FILE writes them"
        entries.append(_Entry("together", text, style="cyan", order=1))
    if improvements.note:
        entries.append(_Entry("note", improvements.note, style="dim", order=5))
    return entries


def _describe_gain(improvement: Improvement, plan: Plan) -> str:
    """Describes the memory and the speed of an improvement.

    Twice as fast and more is a factor, less is in percent.
    """
    speed = improvement.speedup
    change = f"{speed:.1f} times the tokens/s" if speed >= 2 else f"{format_percent(abs(speed - 1))} faster"
    if abs(speed - 1) < 0.005:
        change = "as fast"
    elif speed < 1:
        change = f"{format_percent(1 - speed)} slower"
    peak = format_memory(improvement.peak_gib)
    fits = f"needs {peak} and does not fit alone" if not improvement.fits_safely else f"fits in {peak}"
    numerics = {"exact": "", "rounding": "", "different": "; other results"}[improvement.numerics]
    return f"{fits if not plan.fits_safely else peak}, {change}{numerics}"


def _describe_largest(largest: LargestValue) -> str:
    """Describes the largest value that fits, why no larger one does, and what sets it."""
    limit = largest.limit
    if largest.next_value is not None:
        limit = f"{largest.next_value:,} {'is refused: ' if largest.next_peak_gib is None else ''}{limit}"
    ways = [f"write `{largest.line}`"] if largest.line else []
    ways += [" ".join(f"--set {item}" for item in largest.overrides)] if largest.overrides else []
    return "; ".join(
        filter(None, (f"{largest.key} {largest.value:,} is the largest that fits", limit, " or ".join(ways)))
    )


def _describe_method(recipe: Recipe, plan: Plan) -> str:
    text = ", ".join(_describe_techniques(recipe.techniques.values())) or "no techniques"
    searched = plan.searched.candidates
    return f"{text}; {_NUMERICS[plan.numerics]}" if searched else text


def _describe_alternative(alternative: Alternative, plan: Plan, recipe: Recipe | None) -> str:
    """Describes what an alternative gives up and what it changes in the best recipe."""
    if options := alternative.options:
        return (
            f"{' '.join(options)}: fits in {format_memory(alternative.peak_gib)}, "
            f"{format_rate(alternative.tokens_per_second)} tokens/s; {alternative.tradeoff}"
        )
    if recipe is None:
        return f"{alternative.tradeoff}: {alternative.what}"
    return f"{alternative.tradeoff}: {_describe_changes(alternative, plan, recipe)}"


def _describe_changes(alternative: Alternative, plan: Plan, recipe: Recipe) -> str:
    """Describes what an alternative changes in the best recipe."""
    other = resolve_recipe(plan, alternative.recipe)
    ours, theirs = _describe_techniques(recipe.techniques.values()), _describe_techniques(other.techniques.values())
    names = {t.name() for t in recipe.techniques.values()} & {t.name() for t in other.techniques.values()}
    added = [text for text in theirs if text not in ours and text.split(" ")[0] not in names]
    changed = [
        _describe_change(other.techniques[text.split(" ")[0]], recipe.techniques[text.split(" ")[0]])
        for text in theirs
        if text not in ours and text.split(" ")[0] in names
    ]
    without = [text.split(" ")[0] for text in ours if text.split(" ")[0] not in names]
    micros = [math.prod(t.micro_batch_count() for t in r.techniques.values()) for r in (recipe, other)]
    if micros[0] != micros[1]:
        changed.append(f"{micros[1]:,} micro-batch{'es' if micros[1] > 1 else ''}")
    parts = [f"with {', '.join([*added, *changed])}" if added or changed else ""]
    parts.append(f"without {', '.join(without)}" if without else "")
    return ", ".join(filter(None, parts)) or "the same techniques"


def _describe_change(technique: Technique, ours: Technique) -> str:
    """Describes a technique by what differs from ours; another mode has settings of its own, so all are shown."""
    same_mode = getattr(technique, "mode", None) == getattr(ours, "mode", None)
    return describe(technique, ours if same_mode else None)


def _export(plan: Plan) -> str:
    """Says where a later export runs, if it needs more than the device."""
    needs = sum((plan.export or {}).values())
    if needs <= plan.available_gib:
        return ""
    if plan.device.kind == "cpu":
        return f"does not fit here: a later preheat export needs {format_memory(needs)}"
    return f"runs on the host: a later preheat export needs {format_memory(needs)} of its memory"


def list_warnings(plan: Plan) -> list[str]:
    """Returns the doubts about a plan, none of which changes its verdict."""
    from preheat.planning.search.result import hint_fragmentation

    warnings = [hint] if (hint := hint_fragmentation(plan)) else []
    # Cached memory that is released in time takes nothing from the chance.
    if plan.is_tight and (chance := plan.chance) < _LIKELY:
        smaller = any(a.peak_gib < plan.peak_gib for a in plan.alternatives)
        advice = "an alternative is safer" if smaller else "shorter sequences are safer"
        warnings.append(f"little room: the chance to fit is {format_percent(chance)}; {advice}")
    if quicker := plan.fp32_rate:
        warnings.append(
            f"{plan.device.name} is slow in bf16: {format_gflops(plan.matrix_rate)} GFLOP/s, and "
            f"{format_gflops(quicker)} in fp32; a step is faster without mixed_precision"
        )
    if abs(plan.pace - 1) > 0.02:
        warnings.append(f"speed: {plan.pace:.2f} times as long as the measured rates predict, like the last runs here")
    if plan.host:
        warnings.append(
            f"speed: the host launches {plan.host.operators:,} operators at {plan.host.seconds_each * 1e6:.3g} µs and "
            "is slower than the device: larger micro-batches cost little"
        )
    for faster in plan.faster_sizes:
        warnings.append(
            f"{faster.key}: {faster.size:,} is not a multiple of 64: {faster.better:,} is "
            f"{format_percent(faster.gain)} faster"
        )
    if plan.doubt:
        warnings.append(plan.doubt)
    if plan.contended:
        warnings.append(
            "the machine was busy when it was calibrated and still is, so speeds may be too low by a third: plan again "
            "when it is quiet"
        )
    if plan.heap:
        warnings.append(
            f"{plan.heap}; torch's own allocator will be used, which often takes a third more memory than planned"
        )
    return warnings


def wrap_command(arguments: Sequence[str], width: int = WIDTH, label: str = "next") -> list[str]:
    r"""Returns a command to type, wrapped with backslashes so that a shell still reads it.

    Example:
        >>> wrap_command(["preheat", "train", "my recipe.yaml"], 30)
        ['next      preheat train \\', "            'my recipe.yaml'"]
    """
    lines = [f"{label:<{_LABEL}}"]
    for word in map(shlex.quote, arguments):
        blank = lines[-1].isspace() or lines[-1] == f"{label:<{_LABEL}}"
        # Two columns stay free for the backslash.
        if not blank and len(lines[-1]) + 1 + len(word) > width - 2:
            lines[-1] += " \\"
            lines.append(" " * (_LABEL + 2) + word)
        else:
            lines[-1] += word if blank else f" {word}"
    return lines
