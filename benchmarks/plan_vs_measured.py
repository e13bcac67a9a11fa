"""Predicted against measured peak memory and speed of real runs on this machine.

    python benchmarks/plan_vs_measured.py [--drawn 30 --seed 1] [--out benchmarks/results/plan_vs_measured.json]

Each recipe is trained for a few steps by the command line in a process of its own, in a temporary folder; predicted and
measured are the run's own figures. Peak memory is the process's high-water mark less what it held before the build.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drawn import drawn
from drawn import settings as arguments

LLAMA_15M = (
    "{num_layers: 6, hidden_size: 288, num_heads: 6, intermediate_size: 768, vocab_size: 32000, tie_embeddings: true}"
)
LLAMA_110M = "{num_layers: 12, hidden_size: 768, num_heads: 12, intermediate_size: 2048, vocab_size: 32000, tie_embeddings: true}"
GPT2_124M = "{family: gpt2, num_layers: 12, hidden_size: 768, num_heads: 12, vocab_size: 50304}"
LEAN = "mixed_precision: {mode: bf16_weights}, chunked_loss: {}, efficient_attention: {}"

# name, model, rows, length, techniques, steps
RECIPES = [
    ("demo", None, 8, 256, None, 40),
    ("15M plain fp32", LLAMA_15M, 16, 256, "{}", 5),
    ("15M lean, 64 rows", LLAMA_15M, 64, 256, f"{{{LEAN}}}", 4),
    ("110M lean, accumulated", LLAMA_110M, 4, 512, f"{{{LEAN}, gradient_accumulation: {{steps: 2}}}}", 4),
    ("110M plain fp32", LLAMA_110M, 4, 512, "{}", 3),
    (
        "110M bf16, checkpointed",
        LLAMA_110M,
        8,
        512,
        "{mixed_precision: {}, activation_checkpointing: {}, efficient_attention: {}}",
        3,
    ),
    ("110M LoRA", LLAMA_110M, 4, 512, f"{{{LEAN}, lora: {{}}}}", 3),
    ("gpt2 124M plain fp32, 8 rows", GPT2_124M, 8, 512, "{}", 3),
    (
        "qwen3 60M bf16, selective",
        "{family: qwen3, num_layers: 10, hidden_size: 512, num_heads: 8, num_kv_heads: 4, intermediate_size: 1536, vocab_size: 32000, tie_embeddings: true}",
        16,
        256,
        "{mixed_precision: {}, activation_checkpointing: {mode: selective}, efficient_attention: {}, chunked_loss: {}}",
        4,
    ),
    ("gpt2 124M lean", GPT2_124M, 8, 512, f"{{{LEAN}}}", 3),
    (
        "llama 50M, 1,024 tokens, bf16",
        "{num_layers: 8, hidden_size: 640, num_heads: 10, vocab_size: 16384}",
        4,
        1024,
        "{mixed_precision: {}, efficient_attention: {}}",
        4,
    ),
]


def listed() -> list[tuple[str, list[str]]]:
    """The recipes above: name and settings."""
    made = []
    for name, model, size, length, techniques, steps in RECIPES:
        settings = [
            f"stop.max_steps={steps}",
            "evaluate={rows: 8}",
            "checkpoint={}",
            "sample={}",
            f"batch={{size: {size}, seq_len: {length}}}",
        ]
        settings += [f"model={model}"] if model else []
        settings += [f"techniques={techniques}"] if techniques else []
        made.append((name, settings))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_vs_measured.json"))
    parser.add_argument("--drawn", type=int, default=0, help="so many recipes drawn at random, instead of the list")
    parser.add_argument("--seed", type=int, default=1, help="which are drawn")
    options = parser.parse_args()
    chosen = listed()
    if options.drawn:
        more = drawn(options.drawn, options.seed)
        chosen = [(f"drawn {n}", [*settings, "stop.max_steps=6"]) for n, settings in enumerate(more, 1)]
    rows: list[dict[str, Any]] = []
    for name, settings in chosen:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "preheat", "train", "demo", "--json", "--force", "--out", f"{folder}/run"]
            done = subprocess.run(
                [*command, *arguments(settings)], capture_output=True, text=True, check=False, env=os.environ
            )
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
            rows.append({"name": name, "settings": settings, "failed": done.stderr.strip().splitlines()[-1]})
            continue
        made = json.loads(done.stdout)
        p = made["predicted"]
        row: dict[str, Any] = {"name": name, "settings": settings}
        for key in ("peak_gib", "tokens_per_second"):
            row[key] = {
                "predicted": round(p[key], 4),
                "measured": round(made[key], 4),
                "error": round(p[key] / made[key] - 1, 4),
            }
        rows.append(row)
        print(
            f"{name:32s} memory {p['peak_gib']:6.2f} / {made['peak_gib']:6.2f} GiB ({row['peak_gib']['error']:+.0%})   speed {p['tokens_per_second']:8,.0f} / {made['tokens_per_second']:8,.0f} tokens/s ({row['tokens_per_second']['error']:+.0%})",
            flush=True,
        )
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    for key in ("peak_gib", "tokens_per_second"):
        sizes = sorted(abs(row[key]["error"]) for row in rows if key in row)
        ninth = sizes[math.ceil(0.9 * len(sizes)) - 1]
        print(f"{key}: median error {statistics.median(sizes):.1%}, nine in ten within {ninth:.1%}, of {len(sizes)}")
    options.out.write_text(
        json.dumps(
            {"command": " ".join(["python", *sys.argv]), "processor": cpu, "cores": os.cpu_count(), "rows": rows},
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
