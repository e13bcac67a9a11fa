"""HTML page of `preheat nettest`: bus bandwidth and time by message size, pairs of ranks, all figures.

NettestResult ──write_net──▶ page.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from preheat.core.nettest import CollectiveRow, NettestResult
from preheat.core.units import format_bytes, format_duration
from preheat.report import page, svg
from preheat.report.formatting import escape
from preheat.report.page import LegendEntry, cell, number_cell, series_colour
from preheat.report.svg import Curve

__all__ = ["compare_with_expected", "write_net"]


def compare_with_expected(result: NettestResult) -> str:
    """Returns a sentence that compares the best bus bandwidth of each collective with the catalogue's link rate."""
    where = "between neighbours in a host" if result.hosts == 1 else "of a device to other hosts"
    if result.link_rate is None:
        return (
            f"The catalogue has no figure for links {where} of {result.hardware} over {result.backend}; nothing "
            "to compare these with."
        )
    shares = ", ".join(f"{name.replace('_', '-')} {share:.0%}" for name, share in result.expected.share.items())
    return (
        f"The catalogue gives {result.link_rate / 1e9:,.0f} GB/s {where}; of that the best bus bandwidth is: {shares}."
    )


def write_net(result: NettestResult, path: str | Path) -> Path:
    """Writes the page and returns its path.

    Raises:
        RunError: it cannot be written.
    """
    return page.write_page(_render_page(result), path)


def _render_page(result: NettestResult) -> str:
    hosts = f"{result.hosts} hosts" if result.hosts > 1 else "one host"
    title = f"{result.devices} processes on {hosts} over {result.backend}"
    by_collective: dict[str, list[CollectiveRow]] = {}
    for row in result.rows:
        by_collective.setdefault(row.collective, []).append(row)
    figures = (_render_bandwidths(by_collective, result.link_rate), _render_times(by_collective))
    return page.document(
        f"{title} · preheat nettest",
        f"""{page.header("preheat nettest", title, f"{result.hardware}. {compare_with_expected(result)}")}
{page.section("plots", "By size", page.two_columns(*figures))}
{page.section("pairs", "Point to point", _render_pairs(result))}
{page.section("figures", "Every figure", _render_rows(result))}
<footer>Median over the samples of the slowest process of each, with the tenths at both ends. Size and bus bandwidth \
as nccl-tests count them. torch
{escape(result.torch)}.</footer>""",
    )


def _render_bandwidths(by_collective: Mapping[str, Sequence[CollectiveRow]], link_rate: float | None) -> str:
    lines, parts = [], []
    for n, (name, rows) in enumerate(by_collective.items()):
        rates = [row.bus_bandwidth / 1e9 for row in rows]
        lines.append(Curve(name, [row.bytes for row in rows], rates, series_colour(n), "points"))
        parts.append(f"{name.replace('_', '-')} {max(rates):.3g}")
    if link_rate:
        lines.append(Curve("catalogue", [0.0], [link_rate / 1e9], style="named"))
    about = "What a link carries, whatever the number of devices; the best size of each: "
    return _draw_figure("net-bus-bandwidth", "Bus bandwidth, GB/s", f"{about}{', '.join(parts)}.", lines, by_collective)


def _render_times(by_collective: Mapping[str, Sequence[CollectiveRow]]) -> str:
    lines, parts = [], []
    for n, (name, rows) in enumerate(by_collective.items()):
        times = [row.seconds * 1e3 for row in rows]
        lines.append(Curve(name, [row.bytes for row in rows], times, series_colour(n), "points"))
        parts.append(f"{name.replace('_', '-')} {times[0]:.3g}")
    about = "Flat where latency rules, straight where bandwidth does; the smallest size of each: "
    return _draw_figure("net-seconds", "Time, milliseconds", f"{about}{', '.join(parts)}.", lines, by_collective)


def _draw_figure(name: str, title: str, caption: str, lines: Sequence[Curve], collectives: Iterable[str]) -> str:
    drawing = svg.draw_by_size(name, lines, f"{title}. {caption}", format=format_bytes)
    legend = [LegendEntry(key.replace("_", "-"), series_colour(n)) for n, key in enumerate(collectives)]
    return page.figure(title, caption, drawing, legend)


def _render_pairs(result: NettestResult) -> str:
    if not result.pairs:
        return ""
    rows = (
        page.named_row(
            pair.kind,
            cell(f"{pair.ranks[0]} and {pair.ranks[1]}"),
            cell(escape(", ".join(pair.hosts))),
            number_cell(format_duration(pair.latency)),
            number_cell(f"{pair.bandwidth / 1e9:.3g}"),
        )
        for pair in result.pairs
    )
    return page.small("Half the time of a message there and back.") + page.table(
        ("pair", "ranks", "hosts", "latency", "GB/s"), rows, text=(0, 1, 2)
    )


def _render_rows(result: NettestResult) -> str:
    rows = (
        page.named_row(
            row.collective.replace("_", "-"),
            number_cell(format_bytes(row.bytes)),
            number_cell(format_duration(row.seconds)),
            number_cell(f"{format_duration(row.low)} to {format_duration(row.high)}"),
            number_cell(f"{row.algorithm_bandwidth / 1e9:.3g}"),
            number_cell(f"{row.bus_bandwidth / 1e9:.3g}"),
        )
        for row in result.rows
    )
    return page.table(("collective", "size", "time", "10 to 90 %", "GB/s", "bus GB/s"), rows)
