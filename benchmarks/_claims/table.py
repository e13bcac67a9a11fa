"""Writes claims.md from the stored measurements alone: one table of all claims, then their details."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _claims.arms import ARMS, SEEDS, ArmResult, ArmRun, load_arms
from _claims.cookbook_tables import (
    format_saving,
    join_verdicts,
    list_memory_rows,
    list_states_rows,
    render_memory,
    render_quality,
    render_rope,
    render_states,
)

__all__ = ["LOSS_CLAIMS", "LossClaim", "judge", "list_arms", "render"]

LITTLE = 0.02
"""Nats per token (2 % of the perplexity) that a claim of "no cost" allows: about the spread of an arm's seeds."""


@dataclass(frozen=True)
class LossClaim:
    """A claim that compares trained arms.

    Attributes:
        part: name for `--part`.
        pairs: (arm, the arm that it is compared with).
        direction: -1: the arm's figure is claimed to be lower; 1: higher; 0: at most LITTLE higher.
        figure: `loss`: held-out loss; `gap`: held-out loss less training loss; or a length, for the loss there.
    """

    part: str
    text: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    direction: int
    figure: str = "loss"


_ROPE = "Su et al. 2021 (arXiv:2104.09864)"
_DEEP = "Liu et al. 2024, MobileLLM (arXiv:2402.14905)"
_GROUPED = "Ainslie et al. 2023 (arXiv:2305.13245)"
_EPOCHS = ("several epochs, tied", "several epochs, untied")

LOSS_CLAIMS = (
    LossClaim(
        "positions",
        "RoPE has a lower loss than learned positions",
        _ROPE,
        (("rotary positions", "learned positions"),),
        -1,
    ),
    LossClaim(
        "positions",
        "RoPE copes better with 4 times the trained length",
        f"cookbooks, after {_ROPE}",
        (("rotary positions", "learned positions"),),
        -1,
        "512",
    ),
    LossClaim(
        "heads",
        "groups of four heads that share keys and values cost little, at any number of heads",
        _GROUPED,
        (
            ("4 heads, 1 shared", "base"),
            ("8 heads, 2 shared", "8 heads"),
            ("16 heads, 4 shared", "16 heads"),
            ("32 heads, 8 shared", "32 heads"),
        ),
        0,
    ),
    LossClaim(
        "depth",
        "deep and thin is better than shallow and wide",
        _DEEP,
        (("4 layers of 184", "base"), ("8 layers of 128", "base")),
        -1,
    ),
    LossClaim(
        "depth",
        "depth-scaled initialization helps a deep model",
        "Radford et al. 2019 (GPT-2)",
        (("8 layers of 128, depth-scaled", "8 layers of 128"),),
        -1,
    ),
    LossClaim(
        "tying",
        "tied embeddings overfit less over several epochs: smaller gap of held-out and training loss",
        "Press and Wolf 2017 (arXiv:1608.05859)",
        (_EPOCHS,),
        -1,
        "gap",
    ),
    LossClaim("tying", "tied embeddings cost nothing over several epochs", "cookbooks", (_EPOCHS,), 0),
    LossClaim(
        "difficulty",
        "easy sequences first: lower loss at equal tokens",
        "Platanios et al. 2019 (arXiv:1903.09848)",
        (("rare tokens last", "base"), ("long documents last", "base")),
        -1,
    ),
    LossClaim(
        "feed_forward",
        "SwiGLU is better than GELU and ReLU at equal parameters",
        "Shazeer 2020 (arXiv:2002.05202)",
        (("GELU", "base"), ("ReLU", "base")),
        1,
    ),
)


def list_arms(part: str) -> list[str]:
    """Returns the arms that the claims of a part compare, in the order of `ARMS`."""
    names = {arm for claim in LOSS_CLAIMS if claim.part == part for pair in claim.pairs for arm in pair}
    return [name for name in ARMS if name in names]


def judge(differences: Sequence[float], direction: int) -> str:
    """Returns if a claim on differences, one per seed, holds.

    Example:
        >>> judge([-0.03, -0.01, -0.02], -1), judge([-0.03, 0.01, -0.02], -1), judge([0.03, 0.01, 0.02], -1)
        ('yes', 'not shown', 'no')
        >>> judge([-0.03, 0.01, 0.015], 0), judge([0.03, 0.05, 0.04], 0), judge([0.01, 0.03, 0.04], 0)
        ('yes', 'no', 'not shown')
    """
    if direction == 0:
        return "yes" if max(differences) <= LITTLE else "no" if min(differences) > LITTLE else "not shown"
    signed = [difference * direction for difference in differences]
    return "yes" if min(signed) > 0 else "no" if max(signed) < 0 else "not shown"


def _read(run: ArmRun, figure: str) -> float:
    if figure == "loss":
        return run.loss
    return run.loss - run.training_loss if figure == "gap" else run.by_length[figure]


def _compare(results: dict[str, ArmResult], pair: tuple[str, str], figure: str) -> list[float] | None:
    """Returns the difference of two arms for each seed; None while one of them is not measured."""
    if not all(name in results and results[name].is_done() for name in pair):
        return None
    arm, other = ({run.seed: _read(run, figure) for run in results[name].runs} for name in pair)
    return [arm[seed] - other[seed] for seed in SEEDS]


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _read_json(folder: Path, part: str) -> dict[str, Any] | None:
    path = folder / f"claims-{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def render(folder: Path) -> str:
    """Returns the page."""
    results = load_arms(folder / "claims-arms.json")
    rows, missing = _list_loss_rows(results)
    details: list[str] = _render_arms(results)
    for part, list_rows, render_details in (
        ("precision", _list_precision_rows, _render_precision),
        ("attention", _list_attention_rows, _render_attention),
        ("zero", _list_zero_rows, _render_processes),
        ("together", _list_together_rows, _render_processes),
    ):
        measured = _read_json(folder, part)
        if measured is None:
            missing[part] = ["all of it"]
            continue
        rows += list_rows(measured)
        details += render_details(measured)
    for part, render_table in (
        ("memory", render_memory),
        ("states", render_states),
        ("quality", render_quality),
        ("rope", render_rope),
    ):
        measured = _read_json(folder, part)
        if measured is None:
            missing[part] = ["all of it"]
            continue
        if part in ("memory", "states"):
            rows += list_memory_rows(measured) if part == "memory" else list_states_rows(measured)
        details += render_table(measured)
    foot = ["Not measured yet:", "", *(f"- `--part {part}`: {'; '.join(names)}" for part, names in missing.items()), ""]
    return "\n".join(
        [
            "# Claims, and measurements of them",
            "",
            "A claim that does not hold at the size measured is a result for that size only. Losses are held-out, in nats per",
            f"token; a figure is a mean (lowest to highest), and differences are taken within a seed. `no cost` allows {LITTLE}.",
            "`python benchmarks/claims.py` measures; `--part` chooses, and `--table` writes this page from the stored figures.",
            "",
            "| claim | claimed by | measured | holds | at |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "`not shown`: the seeds, or the rounds, disagree.",
            "",
            *(foot if missing else []),
            *details,
        ]
    )


def _list_loss_rows(results: dict[str, ArmResult]) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the rows of the claims on losses, and the comparisons that are not measured, by part."""
    rows: list[str] = []
    missing: dict[str, list[str]] = {}
    for claim in LOSS_CLAIMS:
        compared = [(pair, _compare(results, pair, claim.figure)) for pair in claim.pairs]
        known = [(pair, differences) for pair, differences in compared if differences is not None]
        lacking = [f"{arm} against {other}" for (arm, other), differences in compared if differences is None]
        if lacking:
            missing[claim.part] = list(dict.fromkeys([*missing.get(claim.part, []), *lacking]))
        for (arm, other), differences in known:
            what = {"loss": "", "gap": ", gap"}.get(claim.figure, f", at {claim.figure} tokens")
            sizes = sorted({results[name].parameters for name in (arm, other)})
            size = " to ".join(f"{count / 1e6:.1f}M" for count in sizes)
            rows.append(
                f"| {claim.text} | {claim.source} | {arm} less {other}{what}: {_spread(differences, '+.3f')} "
                f"| {judge(differences, claim.direction)} | {size}, {len(differences)} seeds |"
            )
    return rows, missing


def _render_arms(results: dict[str, ArmResult]) -> list[str]:
    if not results:
        return []
    lines = [
        "## Trained arms",
        "",
        "Llama of 2 layers of 256, 2,048 tokens in the vocabulary, Python's standard library, 200 steps of 8 x 128 tokens, AdamW, fp32,",
        "if the name says nothing else. The rate is searched with a seed that is not compared: from the lowest loss of",
        "`train --find-lr` it is doubled or halved while the held-out loss falls. Training loss: last fifth of the steps.",
        "",
        "| arm | parameters | epochs | rate: range test, best | training loss | held-out loss | at 256, 512 tokens | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if not result.is_done():
            continue
        losses, training = ([getattr(run, key) for run in result.runs] for key in ("loss", "training_loss"))
        beyond = [
            _spread([run.by_length[length] for run in result.runs], ".3f")
            for length in ("256", "512")
            if length in result.runs[0].by_length
        ]
        lines.append(
            f"| {name} | {result.parameters:,} | {result.epochs:.1f} | {result.lowest:g}, {result.runs[0].lr:g} "
            f"| {_spread(training, '.3f')} | {_spread(losses, '.3f')} | {', '.join(beyond)} | {result.date} |"
        )
    return [*lines, ""]


def _list_precision_rows(measured: dict[str, Any]) -> list[str]:
    rows = []
    plain = {cost["tokens"]: cost for cost in measured["costs"] if cost["name"] == "fp32"}
    for cost in measured["costs"]:
        if cost["name"] == "fp32":
            continue
        base = plain[cost["tokens"]]
        saved = 1 - cost["peak_gib"] / base["peak_gib"]
        share = base["states_gib"] / base["peak_gib"]
        rows.append(
            f"| {cost['name']}: 30 to 50 % less memory | cookbooks, Micikevicius et al. 2018 (arXiv:1710.03740) "
            f"| {base['peak_gib']:.1f} to {cost['peak_gib']:.1f} GiB: {format_saving(saved)} | {'yes' if saved >= 0.3 else 'no'} "
            f"| 1B, {cost['tokens']:,} tokens, states {share:.0%} of fp32's peak; dry run |"
        )
    return rows


def _render_precision(measured: dict[str, Any]) -> list[str]:
    lines = [
        f"## Precision at 1B, by the dry run ({measured['date']})",
        "",
        "| | tokens | peak GiB | weights, gradients and states, GiB |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {cost['name']} | {cost['tokens']:,} | {cost['peak_gib']:.2f} | {cost['states_gib']:.2f} |"
        for cost in measured["costs"]
    ]
    return [
        *lines,
        "",
        "AdamW; one sequence with checkpointing, or eight without. `bf16` keeps weights, gradients and states in fp32; `bf16_weights` does not.",
        "",
    ]


def _list_attention_rows(measured: dict[str, Any]) -> list[str]:
    rows = []
    plain = {cost["length"]: cost["peak_mib"] for cost in measured["costs"] if cost["kernel"] == "plain"}
    for cost in measured["costs"]:
        if cost["kernel"] == "plain" or cost["length"] not in (512, 2048):
            continue
        speed, saved = statistics.median(cost["ratios"]), 1 - cost["peak_mib"] / plain[cost["length"]]
        rows.append(
            f"| fused attention alone ({cost['kernel']}): 1.3 to 2 times as fast, 30 to 60 % less memory | cookbooks, Dao et al. 2022 "
            f"(arXiv:2205.14135) | {speed:.2f} x ({min(cost['ratios']):.2f} to {max(cost['ratios']):.2f}), {format_saving(saved)} "
            f"| {join_verdicts(speed >= 1.3, saved >= 0.3)} | {cost['length']:,} tokens, fp32, CPU |"
        )
    return rows


def _render_attention(measured: dict[str, Any]) -> list[str]:
    lines = [
        f"## Attention alone, against its plain form ({measured['date']}, {measured['machine']})",
        "",
        "Forward and backward, causal, fp32. Time: 1 x 8 heads x length x 64, seconds of CPU, by turns. Memory: 2 heads, all that torch",
        "allocates.",
        "",
        "| kernel | length | times as fast as the plain form | peak MiB |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {cost['kernel']} | {cost['length']:,} | {statistics.median(cost['ratios']):.2f} ({min(cost['ratios']):.2f} to "
        f"{max(cost['ratios']):.2f}) | {cost['peak_mib']:.1f} |"
        for cost in measured["costs"]
    ]
    return [*lines, ""]


def _list_zero_rows(measured: dict[str, Any]) -> list[str]:
    base, *stages = measured["costs"]
    rows = []
    for cost in stages:
        times = [a / b for a, b in zip(base["peaks"], cost["peaks"], strict=True)]
        speeds = [a / b for a, b in zip(cost["speeds"], base["speeds"], strict=True)]
        rows.append(
            f"| {cost['name']}: 2 to 4 times less memory | cookbooks, Rajbhandari et al. 2020 (arXiv:1910.02054) "
            f"| {_spread(times, '.2f')} times less, {_spread(speeds, '.2f')} times the speed "
            f"| {'yes' if min(times) >= 2 else 'no' if max(times) < 2 else 'not shown'} | {measured['size']} |"
        )
    return rows


def _list_together_rows(measured: dict[str, Any]) -> list[str]:
    base, *others = measured["costs"]
    rows = []
    for cost in others:
        speeds = [a / b for a, b in zip(cost["speeds"], base["speeds"], strict=True)]
        saved = [1 - a / b for a, b in zip(cost["peaks"], base["peaks"], strict=True)]
        rows.append(
            f"| {cost['name']} together: up to 5 times as fast, up to 70 % less memory | cookbooks "
            f"| {_spread(speeds, '.2f')} x, {format_saving(statistics.mean(saved))} ({min(saved):.0%} to {max(saved):.0%}) "
            f"| {join_verdicts(max(speeds) >= 5, max(saved) >= 0.7)} | {measured['size']} |"
        )
    return rows


def _render_processes(measured: dict[str, Any]) -> list[str]:
    lines = [
        f"## {measured['title']} ({measured['date']}, {measured['machine']})",
        "",
        f"{measured['size']}. Median speed of the steps after the second; rounds in alternation, so compare ratios of a round.",
        "",
        "| | tokens/s | peak memory per process, GiB | loss of the last step |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {cost['name']} | {_spread(cost['speeds'], ',.0f')} | {_spread(cost['peaks'], '.3f')} | {cost['loss']:.5f} |"
        for cost in measured["costs"]
    ]
    return [*lines, ""]
