"""Models x accelerators: a recipe is searched for each pair, written, and given to `preheat train --dry-run` on that accelerator.

    python benchmarks/pairs.py [--models phi-3-mini ...] [--out benchmarks/results/pairs.json]

A pair for which the plan says that nothing fits must be refused by the dry run too (exit code 3); its recipe is written all the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# (model, accelerator, devices, method)
PAIRS = [
    *(("gpt2", gpu, 1, "full") for gpu in ("T4", "RTX-3090", "A10G-24GB")),
    *(("pythia-410m", gpu, 1, "full") for gpu in ("T4", "V100-32GB", "L40S")),
    *(("qwen3-0.6b", gpu, 1, "full") for gpu in ("RTX-4070Ti-SUPER", "RTX-4090", "A100-40GB")),
    *(("llama-3.2-1b", gpu, 1, "full") for gpu in ("A5000-24GB", "A100-80GB", "MI300X")),
    *(("gemma-3-1b", gpu, 1, "full") for gpu in ("RTX-4090", "H100-PCIe")),
    *(("phi-3-mini", gpu, 1, "lora") for gpu in ("RTX-3090", "L40S")),
    *(("qwen2.5-3b", gpu, 1, "lora") for gpu in ("RTX-4090", "A6000-48GB", "H100")),
    *(("qwen3-4b", gpu, 1, "qlora") for gpu in ("T4", "RTX-4070Ti-SUPER", "A10G-24GB")),
    *(("mistral-7b-v0.3", gpu, 1, "qlora") for gpu in ("RTX-3090", "A6000-Ada-48GB")),
    *(("llama-3.1-8b", gpu, 1, "lora") for gpu in ("RTX-4090", "A100-40GB", "H200")),
    ("llama-3.1-8b", "T4", 1, "full"),
    ("qwen3-8b", "RTX-3090", 1, "full"),
    *(("qwen3-8b", gpu, 8, "full") for gpu in ("H100", "A100-40GB")),
    *(("llama-2-13b", gpu, 8, "full") for gpu in ("A100-80GB", "MI250X")),
    ("gemma-2-9b", "B200", 1, "full"),
    ("phi-4", "H200", 1, "qlora"),
    ("qwen2.5-32b", "H100", 8, "lora"),
    ("llama-3.3-70b", "MI300X", 8, "lora"),
    ("llama-3.1-70b", "H100", 8, "full"),
    ("mixtral-8x7b", "H200", 8, "full"),
    ("qwen3-30b-a3b", "H100", 8, "full"),
    ("pythia-6.9b", "A100-40GB", 8, "full"),
]


def run_preheat(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, what it printed as JSON, its last words)."""
    command = [sys.executable, "-m", "preheat", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = (done.stderr.strip().splitlines() or [""])[-1]
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pairs.json"))
    parser.add_argument("--models", nargs="+", help="these alone; their rows take the place of those that the file has")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.models and options.out.exists():
        rows = [row for row in json.loads(options.out.read_text())["rows"] if row["model"] not in options.models]
    for model, gpu, count, method in PAIRS:
        if options.models and model not in options.models:
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/recipe.yaml"
            how = ("--gpu", gpu, "--count", str(count), "--method", method)
            code, planned, message = run_preheat("plan", model, *how, "--out", file)
            seconds = time.monotonic() - begun
            again, looked, refused = (
                run_preheat("train", file, "--dry-run", "--gpu", gpu) if Path(file).exists() else (code, {}, message)
            )
        row = {
            "model": model,
            "gpu": gpu,
            "devices": count,
            "method": method,
            "fits": planned.get("fits"),
            "dry_run": again,
            "agrees": (code, again) in ((0, 0), (3, 3)),
            "peak_gib": planned.get("peak_gib"),
            "dry_run_gib": looked.get("peak_gib"),
            "available_gib": planned.get("available_gib"),
            "tokens_per_second": planned.get("tokens_per_second"),
            "techniques": sorted(planned.get("recipe", {}).get("techniques", {})),
            "seconds": round(seconds, 1),
        }
        rows.append(row if row["agrees"] else {**row, "plan": code, "words": refused or message})
        print(
            f"{model:16s} {count} x {gpu:17s} {method:5s} plan {code}, {planned.get('peak_gib', 0):6.1f} GiB, {seconds:4.0f} s; dry run {again}, {looked.get('peak_gib', 0):6.1f} GiB {rows[-1].get('words', '')}",
            flush=True,
        )
    agreed = sum(row["agrees"] for row in rows)
    print(f"{agreed} of {len(rows)} agree, {sum(row['dry_run'] == 0 for row in rows)} accepted")
    options.out.write_text(json.dumps({"command": " ".join(["python", *sys.argv]), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
