"""A student of half its teacher's parameters: distilled, and trained on the labels alone for as many tokens.

    python benchmarks/distillation.py [--data FOLDER] [--steps 600] [--seeds 3] [--out benchmarks/results/distillation.md]

Teacher: stories260K. Student: two of its five layers, or half its width, drawn new. Both arms of a seed begin with the same weights
and read the same rows in the same order. Held-out TinyStories, nats a token; the interval is Student's t of the differences, 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from preheat.inference.load import load_model
from preheat.recipe import Recipe, parse
from preheat.training.loop import train

LENGTH, ROWS, BATCH = 128, 256, 16
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantiles of Student's t at 97.5 %, by degrees of freedom."""

STUDENTS = {
    "shallow": {"num_hidden_layers": 2},
    "narrow": {
        "hidden_size": 44,
        "intermediate_size": 120,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 11,
    },
}
ARMS = {
    "labels alone": "",
    "half teacher": "mixture: 0.5",
    "teacher alone": "mixture: 1.0",
    "teacher alone, temperature 2": "mixture: 1.0, temperature: 2.0",
    "reverse": "mixture: 0.5, divergence: reverse",
    "hidden states too": "mixture: 0.5, hidden: 0.5",
    "from disk, top 32": "mixture: 0.5, cache: {cache}",
}


def build_recipe(
    model: str, source: Path, technique: str, *, steps: int, lr: float, tokenizer: Path, seed: int
) -> Recipe:
    return parse(
        f"name: distil\nseed: {seed}\nmodel: {model}\ndata: {{source: {source}, validation: 0.1, tokenizer: {tokenizer}, preflight: {{encoding: warn}}}}\n"
        f"batch: {{size: {BATCH}, seq_len: {LENGTH}}}\noptimizer: {{lr: {lr}}}\nstop: {{max_steps: {steps}}}\nevaluate: {{rows: {ROWS}}}\n"
        f"techniques: {{efficient_attention: {{}}, chunked_loss: {{}}{technique}}}"
    )


def format_interval(values: list[float]) -> str:
    """Mean and 95 % interval of a few values."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:+.4f}"
    half = T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--student", choices=STUDENTS, default="shallow")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    stories, arms = options.data / "stories260K-hf", dict.fromkeys(["labels alone", *options.arms])
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "stories.jsonl"
        text = (options.data / "text/tinystories_train_excerpt.txt").read_text()
        source.write_text("\n".join(json.dumps({"text": part}) for part in re.split(r"\n(?=Once upon a time)", text)))
        model = f"{{path: {stories}, weights: random, config: {json.dumps(STUDENTS[options.student])}}}"
        for seed in range(options.seeds):
            for name in arms:
                settings = ARMS[name].format(cache=folder / "kept")
                technique = f", distillation: {{teacher: {stories}, {settings}}}" if settings else ""
                recipe = build_recipe(
                    model, source, technique, steps=options.steps, lr=options.lr, tokenizer=stories, seed=seed
                )
                out = folder / f"{seed}-{name.replace(' ', '-')}"
                summary = train(recipe, out=out)
                if math.isnan(summary["validation_loss"]):
                    raise SystemExit(f"{name}: was stopped before its end")
                found[name].append(summary)
                print(f"seed {seed} {name}: {summary['validation_loss']:.4f}", flush=True)
        student = sum(p.numel() for p in load_model(out).build.trained[0].parameters())
        told = parse(
            f"name: teacher\nmodel: {{path: {stories}}}\ndata: {{source: {source}, validation: 0.1, preflight: {{encoding: warn}}}}\n"
            f"batch: {{size: {BATCH}, seq_len: {LENGTH}}}\noptimizer: {{lr: 1.0e-9}}\nstop: {{max_steps: 1}}\nevaluate: {{rows: {ROWS}}}"
        )
        teacher = float(train(told, out=folder / "teacher")["validation_loss"])
    plain = [s["validation_loss"] for s in found["labels alone"]]
    lines = [
        "# Distillation against training on labels alone",
        "",
        f"`python benchmarks/distillation.py --student {options.student} --steps {options.steps} --seeds {options.seeds} --lr {options.lr:g}`: "
        f"teacher stories260K (260,032 parameters, held-out loss {teacher:.4f}); student {options.student}, {student:,} parameters "
        f"({student / 260_032:.0%}), drawn new; {options.steps} steps of {BATCH} rows of {LENGTH} TinyStories tokens "
        f"({options.steps * BATCH * LENGTH:,} tokens in each arm); {ROWS} held-out rows, nats a token. torch {torch.__version__}.",
        "",
        "| arm | held-out loss, by seed | less than labels alone (95 % interval) |",
        "|---|---|---|",
    ]
    for name, summaries in found.items():
        losses = [s["validation_loss"] for s in summaries]
        less = "" if name == "labels alone" else format_interval([b - a for a, b in zip(losses, plain, strict=True)])
        lines.append(f"| {name} | {', '.join(f'{loss:.4f}' for loss in losses)} | {less} |")
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
