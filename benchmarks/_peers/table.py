"""The benchmark's result as a table: rows of cells, and Markdown. No torch."""

from __future__ import annotations

from typing import Any

from contract import UNTIMED

GIB = 2**30
STEADY = 0.1
"""A matrix rate that changes by more than this share over the run says that something else was running."""
DISTURBED = "The matrix rate changed over the run: something else was running, and the speeds mean little."

COLUMNS = (
    "contender",
    "tokens/s (low to high)",
    "x Trainer",
    "x Trainer bf16",
    "peak RSS",
    "less imports",
    "memory x Trainer",
    "loss",
    "against Trainer",
    "of matrix rate",
)
NARROW = (0, 1, 2, 3, 5, 6, 8, 9)
"""The columns that fit a terminal."""


def format_cells(row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [f"{row['name']}: {row['what']}", f"failed: {row['failed']}", *[""] * (len(COLUMNS) - 2)]

    def format_ratio(key: str) -> str:
        return f"{row[key]['median']:.2f}" if key in row else "-"

    rate = row["tokens_per_second"]
    loss = (
        f"{row['loss_difference']:+.2%}{'' if row['equal_loss'] else ' NOT EQUAL'}" if "loss_difference" in row else "-"
    )
    return [
        f"{row['name']}: {row['what']}",
        f"{rate['median']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f})",
        format_ratio("speed_against_trainer"),
        format_ratio("speed_against_trainer-bf16"),
        f"{row['peak_rss_bytes'] / GIB:.2f} GiB",
        f"{row['bytes_less_imports'] / GIB:.2f} GiB",
        format_ratio("memory_against_trainer"),
        f"{row['loss']:.4f}",
        loss,
        f"{row['model_flops_share']:.0%}",
    ]


def format_giga(rate: float) -> str:
    return f"{rate / 1e9:,.0f}" if rate >= 1e10 else f"{rate / 1e9:.2g}"


def is_steady(machine: dict[str, dict[str, Any]]) -> bool:
    return all(abs(machine["end"][kind] / machine["begin"][kind] - 1) <= STEADY for kind in ("bf16", "fp32"))


def render_markdown(result: dict[str, Any]) -> str:
    """The table and what one must know to repeat it."""
    shape, begin, end = result["shape"], result["machine"]["begin"], result["machine"]["end"]
    versions = {k: v for row in result["rows"] for k, v in row.get("versions", {}).items()}
    rates = [
        f"{kind} {format_giga(begin[kind])} before and {format_giga(end[kind])} after" for kind in ("bf16", "fp32")
    ]
    notes = [
        f"Machine: {begin['cpu']}, {begin['threads']} threads; matrix rate in GFLOP/s: {'; '.join(rates)}.",
        *([] if is_steady(result["machine"]) else [f"**{DISTURBED}**"]),
        f"Versions: {', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}; Python {result['python']}.",
        f"Model: {shape['layers']} layers of width {shape['width']}, {shape['heads']} heads, "
        f"feed-forward {shape['feed_forward']}, vocabulary {shape['vocabulary']:,}, tied.",
        f"Work: {shape['batch']} x {shape['length']} tokens per step, {result['steps']} steps, "
        f"AdamW at a constant {shape['lr']:g}; text: {result['text']}.",
        f"tokens/s: median of the steps after the first {UNTIMED}, then over the rounds ({result['repeats']}; low to high). "
        "Ratios: within each round, then the median.",
        "less imports: the high-water mark of resident memory less what was resident after the imports; its ratio is of that.",
        f"loss: mean of the last 5 steps; equal within {result['equal_within']:.0%} of the Trainer's.",
        f"of matrix rate: tokens/s x {shape['flops_per_token'] / 1e6:.1f} MFLOP per token (6 x (matrices of the layers + head) + "
        "12 x layers x width x (length + 1) / 2), of the highest of these rates.",
        *(f"Left out: {name}: {why}." for name, why in result.get("skipped", {}).items()),
    ]
    lines = [
        f"# Training a {result['size']} Llama on a CPU: preheat and its peers",
        "",
        f"`{result['command']}` on {result['date']}",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(format_cells(row)) + " |" for row in result["rows"]),
        "",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n"
