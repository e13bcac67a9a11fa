"""The demo with rows that grow from short to full against the demo as it is: speed, and validation loss at equal tokens.

    python benchmarks/curriculum.py [--steps 430] [--length 256] [--rows 8] [--seeds 3] [--until 0.5]

Both read the same rows of the data in the same order with the same learning rates; only how long a row is while it is trained on
differs. Each run is a process of its own; contenders take turns, and each seed begins with the next. Validation rows are full rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONTENDERS = {
    "fixed": "{}",
    "steps": "{until: UNTIL}",
    "linear": "{until: UNTIL, schedule: linear}",
}


def run(name: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run: real tokens a second over all steps but the first, over the steps before the last length, and the losses."""
    out = folder / f"{name}-{seed}"
    settings = {
        "seed": seed,
        "stop.max_steps": options.steps,
        "batch.seq_len": options.length,
        "batch.size": options.rows,
        "evaluate.every": 0,
        "evaluate.baselines": "false",
        "checkpoint.every": 0,
        "sample.prompts": "[]",
    }
    if name != "fixed":
        settings["techniques.length_curriculum"] = CONTENDERS[name].replace("UNTIL", str(options.until))
    command = [sys.executable, "-m", "preheat", "train", "demo", "--out", str(out), "--json"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr.strip().splitlines()[-1]}")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "loss" in step][1:]  # the first one warms up
    real = options.rows * options.length  # padding at the end of a step is not counted
    early = [step["seconds"] for step in steps if step["step"] <= options.until * options.steps]
    summary = json.loads(done.stdout)
    return {
        "speed": real * len(steps) / sum(step["seconds"] for step in steps),
        "early": real * len(early) / sum(early),
        "loss": summary["validation_loss"],
        "peak": summary["peak_gib"],
    }


def format_spread(values: list[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=430)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--until", type=float, default=0.5)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/curriculum.md"))
    options = parser.parse_args()
    names = list(dict.fromkeys(["fixed", *options.contenders]))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, options.seeds + 1):
            for turn in range(len(names)):
                name = names[(turn + seed) % len(names)]
                found[name].append(run(name, seed, options, Path(folder)))
                print(seed, name, found[name][-1], flush=True)
    import torch

    said = " ".join(["python benchmarks/curriculum.py", *sys.argv[1:]])
    lines = [
        "# Length curriculum on the demo",
        "",
        f"`{said}`: {options.seeds} seeds, {options.steps} steps of {options.rows} x {options.length} tokens, full rows from {options.until:.0%} of the",
        f"run on; mean (least to most) over the seeds. torch {torch.__version__}, {torch.get_num_threads()} threads. Ratios and differences are taken within a seed.",
        "",
        "| rows | tokens/s | to fixed | tokens/s while short, to fixed | validation loss, nats | less fixed | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        pairs = list(zip(found[name], found["fixed"], strict=True))
        lines.append(
            f"| {name} | {format_spread([a['speed'] for a in found[name]], ',.0f')} | {format_spread([a['speed'] / b['speed'] for a, b in pairs], '.3f')} "
            f"| {format_spread([a['early'] / b['early'] for a, b in pairs], '.3f')} | {format_spread([a['loss'] for a in found[name]], '.4f')} "
            f"| {format_spread([a['loss'] - b['loss'] for a, b in pairs], '+.4f')} | {format_spread([a['peak'] for a in found[name]], '.2f')} |"
        )
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
