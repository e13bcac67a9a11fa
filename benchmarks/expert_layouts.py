"""Plans of models with experts on H100s, for each way to split them: a table of memory and speed, or the reason of a refusal.

    python benchmarks/expert_layouts.py --out benchmarks/results/expert_layouts.md [--models mixtral-8x7b ...]

Each cell plans one recipe as it is (`preheat plan RECIPE --gpu H100 --count 8 --nodes N`): 4,096 tokens, 8 sequences on each data-parallel replica in
micro-batches of 1, bf16, checkpointing of each layer, fsdp over what the layout leaves. Nothing is trained.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

MODELS = {"qwen3-30b-a3b": 16, "mixtral-8x7b": 16, "gpt-oss-20b": 16, "glm-4.5-air": 64, "deepseek-v3": 256}
"""Presets, and the number of H100s to plan for."""
OUTCOMES = {"fits": "fit", "too large": "do not fit", "refused": "are refused"}
# (tensor, pipeline, context, expert) parallel
LAYOUTS = (
    (1, 1, 1, 1), (1, 1, 1, 8), (2, 1, 1, 1), (4, 1, 1, 1), (8, 1, 1, 1), (2, 1, 1, 4), (4, 1, 1, 2), (1, 2, 1, 1), (1, 4, 1, 1),
    (1, 2, 1, 4), (1, 4, 1, 4), (1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 2, 4), (2, 2, 1, 1), (2, 2, 1, 4), (2, 2, 2, 1),
)  # fmt: skip


def build_recipe(model: str, devices: int, layout: tuple[int, int, int, int]) -> dict[str, object]:
    tensor, pipeline, context, expert = layout
    replicas = devices // (tensor * pipeline * context)
    techniques: dict[str, object] = {
        "mixed_precision": {"mode": "bf16_master"},
        "efficient_attention": {},
        "activation_checkpointing": {},
        "fsdp": {},
        "gradient_accumulation": {"steps": 8},
    }
    if tensor > 1:
        techniques["tensor_parallel"] = {"degree": tensor, "sequence_parallel": True}
    if pipeline > 1:
        techniques["pipeline_parallel"] = {"degree": pipeline, "micro_batches": 8}
        techniques["fsdp"] = {"reduce": "last"}
        del techniques["gradient_accumulation"]
    if context > 1:
        techniques["context_parallel"] = {"degree": context}
    if expert > 1:
        techniques["expert_parallel"] = {"degree": expert}
    return {
        "name": "cell",
        "model": {"preset": model},
        "batch": {"size": 8 * replicas, "seq_len": 4096},
        "stop": {"max_steps": 100},
        "parallel": {"devices": devices},
        "techniques": techniques,
    }


def plan(model: str, devices: int, layout: tuple[int, int, int, int], folder: Path) -> tuple[str, str]:
    """Returns the outcome of a cell (`fits`, `too large` or `refused`), and its figures or the reason."""
    import json

    file = folder / "cell.yaml"
    file.write_text(yaml.safe_dump(build_recipe(model, devices, layout)))
    nodes = devices // 8
    command = [
        "plan",
        str(file),
        "--gpu",
        "H100",
        "--count",
        "8",
        *(["--nodes", str(nodes)] if nodes > 1 else []),
        "--json",
    ]
    done = subprocess.run([sys.executable, "-m", "preheat", *command], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2, 3):  # a crash is no refusal
        raise SystemExit(done.stderr)
    if done.returncode == 2:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("error", "- "))]
        reason = " ".join(lines or done.stderr.strip().splitlines()[-1:]).replace(str(file), "").replace("error:", "")
        return "refused", reason.strip()
    result = json.loads(done.stdout)
    figures = f"{result['peak_gib']:.1f} GiB, {result['tokens_per_second'] / devices:,.0f} tokens/s a device"
    return ("fits" if done.returncode == 0 else "too large"), figures


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    rows: dict[str, list[str]] = {model: [] for model in options.models}
    counts = dict[str, int]()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            for model in options.models:
                outcome, text = plan(model, MODELS[model], layout, Path(folder))
                counts[outcome] = counts.get(outcome, 0) + 1
                rows[model].append(f"| {' | '.join(map(str, layout))} | {outcome} | {text} |")
                print(model, layout, outcome, text, f"{time.monotonic() - began:.0f} s", flush=True)
                # After each cell, since all take an hour.
                options.out.write_text(render(rows, counts, options.out), encoding="utf-8")


def render(rows: Mapping[str, Sequence[str]], counts: Mapping[str, int], out: Path) -> str:
    """Returns the page: the counts of outcomes, and a table of each model."""
    total = ", ".join(f"{counts.get(outcome, 0)} {verb}" for outcome, verb in OUTCOMES.items())
    wanted = len(LAYOUTS) * len(rows)
    lines = [
        "# Layouts of models with experts, planned",
        "",
        f"**Of {sum(counts.values())} layouts {total}.** {wanted} are to be planned. tp, pp, cp, ep: tensor, pipeline, context and "
        "expert parallel; fsdp over the rest.",
        "",
        f"Command: `python benchmarks/expert_layouts.py --out {out}`. {__doc__.split(chr(10) * 2, 2)[2].strip()}",
    ]
    for model, cells in rows.items():
        lines += [
            "",
            f"## {model} on {MODELS[model]} H100",
            "",
            "| tp | pp | cp | ep | | |",
            "|---|---|---|---|---|---|",
        ]
        lines += cells
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
