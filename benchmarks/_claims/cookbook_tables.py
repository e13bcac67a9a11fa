"""Tables of claims.md for the measurements of `cookbooks.py`, and for losses that were measured at one learning rate."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = [
    "format_saving",
    "join_verdicts",
    "list_memory_rows",
    "list_states_rows",
    "render_memory",
    "render_quality",
    "render_rope",
    "render_states",
]

CLAIMS: dict[str, tuple[float, float, float, float]] = {  # least and most speed, least and most memory saved
    "mixed_precision bf16": (1.5, 3.0, 0.30, 0.50),
    "mixed_precision bf16_weights": (1.5, 3.0, 0.30, 0.50),
    "efficient_attention": (1.3, 2.0, 0.30, 0.60),
    "all of these": (5.0, 5.0, 0.70, 0.70),
}


def format_saving(saved: float) -> str:
    """Formats a fraction of memory: `12% less`."""
    return f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"


def join_verdicts(speed: bool, memory: bool) -> str:
    """Returns the verdict on a claim of speed and memory."""
    return "yes" if speed and memory else "speed only" if speed else "memory only" if memory else "no"


def _format_claim(name: str) -> str:
    if name == "all of these":
        return "up to 5 x, up to 70% less"
    low, high, least, most = CLAIMS[name]
    return f"{low:g} to {high:g} x, {least:.0%} to {most:.0%} less"


def list_memory_rows(measured: dict[str, Any]) -> list[str]:
    """Rows of the table of all claims."""
    plain, rows = measured["rows"][0]["peak_gib"], []
    for row in measured["rows"]:
        if row["name"] in CLAIMS and not row["failed"]:
            low, high = row["ratio_spread"]
            saved = 1 - row["peak_gib"] / plain
            verdict = join_verdicts(row["ratio"] >= CLAIMS[row["name"]][0], saved >= CLAIMS[row["name"]][2])
            rows.append(
                f"| {row['name']}: {_format_claim(row['name'])} | cookbooks | {row['ratio']:.2f} x ({low:.2f} to {high:.2f}), "
                f"{format_saving(saved)} | {verdict} | 15M, 8 x 512 tokens, CPU, {measured['date']} |"
            )
    peaks = measured["accumulation_peak_gib"]
    growth = max(peaks.values()) / peaks["1"] - 1
    rows.append(
        f"| accumulation: 2 to 16 times the batch in the same memory | cookbooks | at most {growth:.0%} more "
        f"| {'yes' if growth < 0.05 else 'no'} | 15M, 4 x 512 tokens; dry run, {measured['date']} |"
    )
    return rows


def list_states_rows(measured: dict[str, Any]) -> list[str]:
    """Rows of the table of all claims: the peak of a device against plain data parallelism."""
    base, *stages = measured["stages"].items()
    rows = []
    for name, by_world in stages:
        less = [base[1][world]["peak"] / costs["peak"] for world, costs in by_world.items()]
        rows.append(
            f"| {name}: 2 to 4 times less memory | cookbooks, Rajbhandari et al. 2020 (arXiv:1910.02054) "
            f"| {', '.join(f'{ratio:.1f}' for ratio in less)} times less "
            f"| {'yes' if min(less) >= 2 else 'no' if max(less) < 2 else 'with enough devices'} "
            f"| 1B, {', '.join(by_world)} devices, 2,048 tokens each; dry run, {measured['date']} |"
        )
    return rows


def render_memory(measured: dict[str, Any]) -> list[str]:
    machine, gpus = measured["machine"], list(measured["predicted"])
    lines = [
        f"## Speed and memory: 15M Llama, 8 x 512 ({measured['date']}, {machine['name']}, {machine['threads']} threads)",
        "",
        "For the GPUs: the dry run of a 1B Llama (16 and 8 rows of 2,048 tokens), speed by a flat roofline over the data sheets' rates (fp32",
        "without TF32), memory without the CUDA context. Not measured on a GPU. `all of these` is in one process, without sharding.",
        "",
        f"| technique | speed | memory | {' | '.join(f'predicted, {gpu}' for gpu in gpus)} |",
        "|---|---|---|" + "---|" * len(gpus),
    ]
    plain = measured["rows"][0]["peak_gib"]
    for row in measured["rows"][1:]:
        if row["failed"]:
            lines.append(f"| {row['name']} | {row['failed']} | {'| ' * len(gpus)}|")
            continue
        predicted = [_compare_prediction(measured["predicted"][gpu], row["name"]) for gpu in gpus]
        low, high = row["ratio_spread"]
        saving = format_saving(1 - row["peak_gib"] / plain)
        lines.append(
            f"| {row['name']} | {row['ratio']:.2f} x ({low:.2f} to {high:.2f}) | {saving} | {' | '.join(predicted)} |"
        )
    peaks = measured["accumulation_peak_gib"]
    growth = ", ".join(
        f"{times} x the batch: {peak / peaks['1']:.2f} x the memory" for times, peak in peaks.items() if times != "1"
    )
    return [*lines, "", f"Accumulation, bytes alive by the dry run: {growth}.", ""]


def _compare_prediction(predicted: dict[str, dict[str, float]], name: str) -> str:
    row, plain = predicted[name], predicted["plain"]
    return f"{plain['seconds'] / row['seconds']:.2f} x, {format_saving(1 - row['gib'] / plain['gib'])}"


def render_states(measured: dict[str, Any]) -> list[str]:
    stages = measured["stages"]
    base = next(iter(stages.values()))
    lines = [
        f"## Sharded states: a 1B Llama in fp32, one row of 2,048 tokens per device, by the dry run ({measured['date']})",
        "",
        "Weights, gradients and optimizer states of one device, and its peak, which has activations too.",
        "",
        f"| | {' | '.join(f'{world} devices: states, peak' for world in base)} |",
        "|---|" + "---|" * len(base),
    ]
    for name, by_world in stages.items():
        cells = [
            ", ".join(f"{costs[key]:.1f} GiB ({base[world][key] / costs[key]:.1f} x less)" for key in ("kept", "peak"))
            for world, costs in by_world.items()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def render_quality(measured: dict[str, Any]) -> list[str]:
    base = measured["rows"][0]
    lines = [
        f"## Earlier losses at one learning rate: the demo, {measured['steps']} steps, {len(base['losses'])} seeds ({measured['date']})",
        "",
        "Muon at the demo's rate for all, so a model that wants another rate is at a disadvantage: no verdict is taken from these.",
        "",
        "| model | parameters | held-out loss | less the demo's, seed by seed |",
        "|---|---|---|---|",
    ]
    for row in measured["rows"]:
        losses, differences = row["losses"], [a - b for a, b in zip(row["losses"], base["losses"], strict=True)]
        against = f"{statistics.mean(differences):+.4f} ({min(differences):+.4f} to {max(differences):+.4f})"
        lines.append(
            f"| {row['name']} | {row['parameters']:,} | {statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}) "
            f"| {'' if row is base else against} |"
        )
    return [*lines, ""]


def render_rope(measured: dict[str, Any]) -> list[str]:
    lengths = sorted({row["length"] for row in measured["rows"]})
    cells = {(row["kind"], row["length"]): f"{row['perplexity']:.1f}" for row in measured["rows"]}
    lines = [
        f"## Rotary scaling: the demo trained at 128 tokens ({measured['steps']} steps), perplexity without further training ({measured['date']})",
        "",
        f"| scaling | {' | '.join(map(str, lengths))} |",
        "|---|" + "---|" * len(lengths),
    ]
    for kind in dict.fromkeys(row["kind"] for row in measured["rows"]):
        lines.append(f"| {kind} | {' | '.join(cells.get((kind, length), '') for length in lengths)} |")
    return [*lines, ""]
