"""Plots as inline SVG, drawn with matplotlib's object interface and coloured by CSS variables of the page.

Each colour is drawn as a sentinel and replaced by `var(--name)`, so that one drawing works in light mode, in dark mode
and in print. Text stays text in the page's font. Ids start with the plot's name, since a page holds several drawings.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from preheat.report.formatting import choose_unit, format_change, read_number
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as MatplotlibAxis

__all__ = [
    "COLOURS",
    "SENTINEL",
    "NARROW",
    "SHORT",
    "WIDE",
    "Curve",
    "Span",
    "draw_both_widths",
    "draw_by_size",
    "draw_curves",
    "render_plot",
    "read_numbers",
    "smooth",
    "draw_spans",
    "draw_stacked",
    "downsample",
    "format_tick_labels",
    "set_ticks",
]

COLOURS = ("ink", "muted", "grid", "page", "warn", *(f"series-{n}" for n in range(1, 9)))
# Colours that occur nowhere else, so that `_rewrite_style` can recognize each in matplotlib's output.
SENTINEL = {name: f"#a1b2{n:02x}" for n, name in enumerate(COLOURS)}
_POINTS = 640  # more than the pixels of a plot's width on a phone; more points would only enlarge the page

NARROW = (5.3, 2.85)  # inches; 11 points of it are 10 pixels at 343 and 14 at 500 pixels of width
WIDE = (10.8, 4.0)
SHORT = (5.3, 1.55)
_STEPS = [1, 2, 2.5, 5, 10]  # between ticks: round numbers only


@dataclass(frozen=True)
class Curve:
    """A line of a plot: its name in the legend, points, colour and style."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "series-1"
    style: str = "line"
    """line, raw (light and thin), points (with markers), level (a dashed reference), named (a level with its label)"""


def format_tick_labels(values: Sequence[float]) -> list[str]:
    """Returns tick labels with the fewest decimals that distinguish all ticks; very small or large ones use exponents.

    Example:
        >>> format_tick_labels([0.0, 0.5, 1.0]), format_tick_labels([1000.25, 1000.5]), format_tick_labels([0.0, 2e-5])
        (['0', '0.5', '1'], ['1,000.25', '1,000.5'], ['0', '2e-5'])
    """
    most = max(map(abs, values), default=0.0)
    if not most:
        return ["0" for _ in values]
    ordered = sorted(set(values))
    # Differences of rounding are no gaps: two such ticks are one.
    gaps = [b - a for a, b in itertools.pairwise(ordered) if b - a > 1e-15 * most]
    exact = min([*gaps, most]) / 100  # ticks are round numbers, so a label this close to its value is exact
    plain = 1e-3 <= most < 1e9
    for decimals in range(16):
        # A tick at -1e-17 is 0, and must not become "-0".
        labels = [f"{0.0 if abs(v) < exact else v:,.{decimals}{'f' if plain else 'e'}}" for v in values]
        # The first number of decimals with which every label reads back as its tick.
        if all(abs(float(label.replace(",", "")) - v) <= exact for label, v in zip(labels, values, strict=True)):
            break
    return [_tidy(label) for label in labels]


def _tidy(label: str) -> str:
    """'1,000.50' -> '1,000.5', '2.0e-05' -> '2e-5', '0.000' -> '0', with a minus sign."""
    mantissa, _, exponent = label.partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    if mantissa in ("0", "-0"):
        return "0"
    mantissa = mantissa.replace("-", "\u2212")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def set_ticks(
    axis: MatplotlibAxis, nbins: int = 5, *, integer: bool = False, format: Callable[[float], str] | None = None
) -> None:
    """Puts the ticks of an axis on round numbers with distinct labels.

    On a logarithmic axis the ticks are at 1, 2 and 5 of each decade, and over more than three decades at its start.

    Args:
        format: formats a tick value; default, and fallback if two labels would be equal: `format_tick_labels`.
    """
    from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter

    base = axis.get_transform().base if axis.get_scale() == "log" else None  # type: ignore[attr-defined]

    # Defined here, because their bases come from matplotlib, which is imported only to draw.
    class Labels(Formatter):
        def format_ticks(self, values: Sequence[float]) -> list[str]:  # type: ignore[override]
            labels = [format(v) for v in values] if format is not None else []
            return (
                labels
                if labels and len(set(labels)) == len(set(values))
                else format_tick_labels([float(v) for v in values])
            )

        def __call__(self, x: float, pos: int | None = None) -> str:
            return self.format_ticks([x])[0]

    class Decades(LogLocator):
        def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
            """Returns linear ticks if the range contains fewer than two ticks of the decades."""
            low, high = min(vmin, vmax), max(vmin, vmax)
            if base == 10 and high > 1000 * low > 0:
                return LogLocator(numticks=8).tick_values(low, high)
            locations = super().tick_values(vmin, vmax)
            if sum(low <= v <= high for v in locations) >= 2:
                return locations
            return [v for v in MaxNLocator(nbins=nbins, steps=_STEPS).tick_values(low, high) if v > 0]

    # Base 2: powers only, because 2 and 5 times a power of two are no round numbers.
    if base is not None:
        axis.set_major_locator(
            Decades(base=base, subs=(1, 2, 5) if base == 10 else (1,), numticks=8 if base == 10 else 6)
        )
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins=nbins, steps=_STEPS, integer=integer, min_n_ticks=1 if integer else 2))
    axis.set_major_formatter(Labels())


def smooth(values: Sequence[float], half: int) -> list[float]:
    """Centred moving average over `half` values on either side, ignoring NaN; the window shrinks at the start.

    Shrinking on both sides at the start preserves the steep beginning of a loss curve; a trailing mean would lag.

    Example:
        >>> smooth([4.0, 2.0, 3.0, 1.0], 1)
        [4.0, 3.0, 2.0, 2.0]
    """
    # Prefix sums: the mean of any window is a difference of two entries.
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    smoothed = []
    for i, value in enumerate(values):
        low, high = i - min(half, i), min(len(values), i + min(half, i) + 1)
        count = counts[high] - counts[low]
        smoothed.append((sums[high] - sums[low]) / count if count and math.isfinite(value) else math.nan)
    return smoothed


def downsample(x: Sequence[float], y: Sequence[float], points: int = _POINTS) -> tuple[list[float], list[float]]:
    """Downsamples a curve to at most `points`: minimum and maximum of each stretch, so that no spike is lost."""
    if len(x) <= points:
        return list(x), list(y)
    # Two points per stretch, and the ends of the curve.
    keep: set[int] = {0, len(x) - 1}
    stretches = points // 2 - 1
    for n in range(stretches):
        stretch = range(n * len(x) // stretches, (n + 1) * len(x) // stretches)
        finite = [i for i in stretch if math.isfinite(y[i])] or [stretch[0]]  # keeps a stretch of NaN as a gap
        keep |= {min(finite, key=lambda i: y[i]), max(finite, key=lambda i: y[i])}
    indices = sorted(keep)
    return [x[i] for i in indices], [y[i] for i in indices]


def draw_curves(
    name: str,
    lines: Sequence[Curve],
    alt_text: str,
    *,
    from_zero: bool = False,
    marks: Sequence[float] = (),
    size: tuple[float, float] = NARROW,
) -> str:
    """Draws curves over steps as an SVG element.

    Args:
        name: unique in the page; ids start with it.
        lines: in drawing order; a level spans the plot.
        alt_text: description for screen readers.
        from_zero: start the y axis at 0 unless a value is negative.
        marks: steps to mark at the upper edge (losses that are not finite).
        size: inches.
    """

    def draw(axes: Axes) -> None:
        for line in lines:
            x, y = (list(line.x), list(line.y)) if line.style in ("level", "named") else downsample(line.x, line.y)
            colour = SENTINEL[line.colour]
            # A line of one point is invisible, so few points get markers.
            lone = sum(map(math.isfinite, y)) < 3
            if line.style in ("level", "named"):
                _draw_level(axes, line)
            elif line.style == "raw":
                axes.plot(x, y, color=colour, linewidth=0.9, alpha=0.5, marker="o" if lone else None, markersize=5)
            elif line.style == "points":
                axes.plot(
                    x, y, color=colour, linewidth=1.6, marker="o" if len(x) < 40 else None, markersize=4.5, zorder=3
                )
            else:
                axes.plot(x, y, color=colour, linewidth=2, marker="o" if lone else None, markersize=5)
        if from_zero and min((v for line in lines for v in line.y if math.isfinite(v)), default=-1) >= 0:
            axes.set_ylim(0, axes.get_ylim()[1] or 1)
        for mark in downsample(marks, marks)[0]:
            axes.plot(
                [mark],
                # In fractions of the axes' height: at the upper edge, whatever the values are.
                [0.985],
                transform=axes.get_xaxis_transform(),
                marker="v",
                markersize=6,
                color=SENTINEL["warn"],
                clip_on=False,
            )
        set_ticks(axes.xaxis, integer=True)
        set_ticks(axes.yaxis)
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.margins(x=0.01)
        axes.set_xlabel("step", loc="right", labelpad=2)

    return render_plot(name, size, alt_text, draw)


def _draw_level(axes: Axes, line: Curve) -> None:
    """Draws a dashed line across the plot, with its name above it if it is a named level."""
    axes.axhline(line.y[0], color=SENTINEL["muted"], linewidth=1, dashes=(4, 3), zorder=1.5)
    if line.style == "named":
        axes.annotate(
            line.name,
            (1, line.y[0]),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=SENTINEL["muted"],
            fontsize=10.5,
            parse_math=False,
        )


def draw_by_size(
    name: str,
    lines: Sequence[Curve],
    alt_text: str,
    *,
    format: Callable[[float], str],
    label: str = "size",
    size: tuple[float, float] = NARROW,
) -> str:
    """Draws points over sizes as an SVG element, both axes logarithmic.

    Args:
        name: unique in the page; ids start with it.
        lines: in drawing order; a named level spans the plot.
        alt_text: description for screen readers.
        format: formats a size for the x axis.
        label: of the x axis.
        size: inches.
    """

    def draw(axes: Axes) -> None:
        for line in lines:
            if line.style == "named":
                _draw_level(axes, line)
            else:
                axes.plot(line.x, line.y, color=SENTINEL[line.colour], linewidth=1.6, marker="o", markersize=4.5)
        axes.set_xscale("log", base=2, nonpositive="mask")
        axes.set_yscale("log", nonpositive="mask")
        set_ticks(axes.xaxis, format=format)
        set_ticks(axes.yaxis)
        axes.tick_params(which="minor", length=0)
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel(label, loc="right", labelpad=2)

    return render_plot(name, size, alt_text, draw)


def draw_stacked(
    name: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    alt_text: str,
    *,
    limit: tuple[str, float] | None = None,
) -> str:
    """Draws horizontal stacked bars, one per row, as an SVG element.

    Args:
        rows: (label, [(colour, GiB), ...]) from the top; the unit of the axis depends on the longest row.
        limit: (label, GiB): a line across the rows, or an arrow to the right if it is far beyond them.
    """

    # One unit for all rows, so that they can be compared.
    unit, scale = choose_unit([sum(length for _, length in pieces) for _, pieces in rows])
    rows = [(label, [(colour, length * scale) for colour, length in pieces]) for label, pieces in rows]
    limit = (limit[0], limit[1] * scale) if limit is not None else None

    def draw(axes: Axes) -> None:
        longest = max((sum(length for _, length in pieces) for _, pieces in rows), default=0) or 1
        for y, (_, pieces) in enumerate(rows):
            left = 0.0
            for colour, length in pieces:
                axes.barh(
                    y, length, left=left, height=0.62, color=SENTINEL[colour], edgecolor=SENTINEL["page"], linewidth=1
                )
                left += length
        # Inverted, so that the first row is on top, with room above it for the label of the limit.
        axes.set_ylim(len(rows) - 0.4, -0.85)
        axes.set_yticks(range(len(rows)), [shorten(label, 32) for label, _ in rows])
        axes.tick_params(axis="y", colors=SENTINEL["ink"])
        axes.set_xlim(0, longest * 1.06)
        if limit is not None and limit[1] <= 2.5 * longest:
            axes.set_xlim(0, max(longest, limit[1]) * 1.06)
            axes.axvline(limit[1], color=SENTINEL["ink"], linewidth=1.5)
            axes.annotate(
                limit[0],
                (limit[1], 1),
                xycoords=("data", "axes fraction"),
                xytext=(-4, -1),
                textcoords="offset points",
                ha="right",
                va="top",
                color=SENTINEL["ink"],
            )
        # Drawn to scale, a limit this far off would shrink the bars to nothing.
        elif limit is not None:
            axes.annotate(
                f"{limit[0]} →",
                (1, 1),
                xycoords="axes fraction",
                xytext=(0, -1),
                textcoords="offset points",
                ha="right",
                va="top",
                color=SENTINEL["ink"],
            )
        set_ticks(axes.xaxis)
        axes.grid(axis="x", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel(unit, loc="right", labelpad=2)

    return render_plot(name, SHORT if len(rows) < 4 else NARROW, alt_text, draw)


@dataclass(frozen=True)
class Span:
    """A bar of a waterfall chart, from `start` to `end`."""

    name: str
    start: float
    end: float
    colour: str


def draw_spans(name: str, rows: Sequence[Span], alt_text: str, *, unit: str) -> str:
    """Draws a waterfall as an SVG element: one horizontal bar per row, labelled with its (signed) length."""

    def draw(axes: Axes) -> None:
        reach = max((max(row.start, row.end) for row in rows), default=1.0) or 1.0
        least = min(0.0, min((min(row.start, row.end) for row in rows), default=0.0))
        for y, row in enumerate(rows):
            axes.barh(y, row.end - row.start, left=row.start, height=0.62, color=SENTINEL[row.colour])
            # Bars from zero are totals; all others are changes and get a sign.
            is_total = row.start == 0.0
            axes.annotate(
                f"{row.end - row.start:,.3g}" if is_total else format_change(row.end - row.start, reach),
                (max(row.start, row.end), y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=SENTINEL["ink"],
                fontsize=10.5,
            )
            if y + 1 < len(rows):
                # A thin line from the end of this bar to the start of the next.
                axes.plot([row.end, row.end], [y, y + 1], color=SENTINEL["muted"], linewidth=0.8, zorder=0.5)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(least * 1.05, reach * 1.16)
        axes.set_yticks(range(len(rows)), [shorten(row.name, 32) for row in rows])
        axes.tick_params(axis="y", colors=SENTINEL["ink"])
        set_ticks(axes.xaxis, 4)
        axes.grid(axis="x", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel(unit, loc="right", labelpad=2)

    return render_plot(name, (NARROW[0], 0.62 + 0.3 * len(rows)), alt_text, draw)


def draw_both_widths(
    name: str,
    draw: Callable[[str, tuple[float, float]], str],
    *,
    wide: tuple[float, float] = WIDE,
    narrow: tuple[float, float] = NARROW,
) -> str:
    """Returns a drawing twice, of which the page shows the one that suits its width.

    Args:
        name: of the drawing, without its width.
        draw: returns the SVG element for a name and a size.
        wide, narrow: sizes on a wide and on a narrow page.
    """
    sizes = {"wide": wide, "narrow": narrow}
    return "".join(f'<div class="{width}">{draw(f"{name}-{width}", size)}</div>' for width, size in sizes.items())


def render_plot(name: str, size: tuple[float, float], alt_text: str, draw: Callable[[Axes], None]) -> str:
    """Returns the plot that `draw` makes on its axes as an SVG element.

    Markers at an edge are not clipped, and text is shortened and cleaned.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.text import Text

    with matplotlib.rc_context(), warnings.catch_warnings():
        # The page's font renders the text, so glyphs missing from matplotlib's fonts do not matter.
        warnings.filterwarnings("ignore", message="(?s).*[Gg]lyph", category=UserWarning)
        # Damaged figures may leave no room for the axes; draw the plot anyway.
        warnings.filterwarnings("ignore", message="constrained_layout not applied", category=UserWarning)
        matplotlib.rcdefaults()  # ignores the user's matplotlibrc: equal runs give equal reports
        matplotlib.rcParams.update(
            {
                # Text elements rather than outlines: smaller, searchable and read aloud.
                "svg.fonttype": "none",
                # Without a salt, ids are random and equal runs give different pages.
                "svg.hashsalt": name,
                "font.size": 11,
                # Names from outside may contain dollar signs, which are no formulas.
                "text.parse_math": False,
                "axes.axisbelow": True,
                "axes.spines.left": False,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.edgecolor": SENTINEL["muted"],
                "axes.labelcolor": SENTINEL["muted"],
                "xtick.color": SENTINEL["muted"],
                "ytick.color": SENTINEL["muted"],
                "ytick.major.size": 0,
                "xtick.major.size": 3,
            }
        )
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02), facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        draw(axes)
        # A marker at the edge of the axes would be cut in half.
        for line in axes.get_lines():
            line.set_clip_on(False)
        for text in axes.findobj(Text):
            text.set_text(shorten(text.get_text(), 48))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(name, buffer.getvalue(), alt_text)


def _inline(name: str, drawing: bytes, alt_text: str) -> str:
    """Turns matplotlib's SVG file into an inline element: page colours; no namespaces, unused ids, fonts or styles."""
    # 1. Drop namespaces, metadata and styles, which an inline element does not need.
    root = ElementTree.fromstring(drawing)
    names = {code: variable for variable, code in SENTINEL.items()}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for child in [child for child in element if child.tag.rpartition("}")[2] in ("metadata", "style")]:
            element.remove(child)
    # 2. Keep only ids that are referenced, with the plot's name in front, because ids are unique in a page.
    used = set(re.findall(r"#([\w-]+)[)\"]", drawing.decode()))
    for element in root.iter():
        old = dict(element.attrib)
        element.attrib.clear()
        for key, text in old.items():
            key = key.rpartition("}")[2]
            if key == "id":
                if text in used:
                    element.set("id", f"{name}-{text}")
            elif key == "href":
                element.set("href", f"#{name}-{text[1:]}")
            elif key == "style":
                element.set("style", _rewrite_style(text, names))
            else:
                element.set(key, _shorten_coordinates(text).replace("url(#", f"url(#{name}-"))
        element.tail = None
        if element.text is not None and not element.text.strip():
            element.text = None
    box = root.get("viewBox", "")
    # 3. No width or height: the page scales the drawing by its view box.
    root.attrib.clear()
    root.attrib |= {"viewBox": box, "role": "img", "aria-label": shorten(alt_text, 2000)}
    return ElementTree.tostring(root, encoding="unicode")


def _shorten_coordinates(text: str) -> str:
    """Rounds coordinates to 0.01 points: invisible, and halves the size of the page."""
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m.group()):.2f}".rstrip("0").rstrip("."), " ".join(text.split()))


def _rewrite_style(text: str, names: dict[str, str]) -> str:
    """Rewrites a style with the page's colours; keeps the font size, drops matplotlib's fonts."""
    rules = []
    for rule in text.split(";"):
        key, _, value = (part.strip() for part in rule.partition(":"))
        if key == "font":
            rules.append(f"font-size: {value.split('px')[0].split()[-1]}px")
        elif key and key != "font-family":
            rules.append(f"{key}: " + re.sub(r"#[0-9a-f]{6}", lambda m: f"var(--{names[m.group()]})", value))
    return "; ".join(rules)


def read_numbers(values: Sequence[object]) -> list[float]:
    """Returns logged values as floats; missing values and non-numbers become NaN, a gap in the curve."""
    return [math.nan if (finite := read_number(v)) is None else finite for v in values]
