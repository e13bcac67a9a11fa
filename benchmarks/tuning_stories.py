"""Full tuning, LoRA, DoRA and QLoRA of a really pretrained small model: what each learns, forgets, holds in memory and takes in time.

    python benchmarks/tuning_stories.py [--data FOLDER] [--steps 400] [--seeds 1] [--out benchmarks/results/tuning_stories.md]

stories260K on Shakespeare (another kind of text) and on questions with their answers (GSM8K, answers trained only). Each method at the
learning rate that `RATES` names, the best of those tried by validation loss; equal rows and steps. Loss in nats a token on held-out text
before and after, on TinyStories (which the base was trained on) before and after: what was forgotten. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

METHODS = {
    "full": "{}",
    "lora": "{lora: {rank: 4, alpha: 16}}",
    "lora-embedding": "{lora: {rank: 4, alpha: 32, embedding_rank: 9}}",
    "dora": "{lora: {rank: 4, alpha: 16, variant: dora}}",
    "qlora": "{nf4: {}, lora: {rank: 4, alpha: 16}}",
    "qlora-embedding": "{nf4: {}, lora: {rank: 4, alpha: 32, embedding_rank: 9}}",
}
RATES = {
    "shakespeare": dict.fromkeys(METHODS, 3e-2) | {"full": 6e-3, "lora-embedding": 1.2e-2, "qlora-embedding": 1.2e-2},
    "questions": dict.fromkeys(METHODS, 1e-2) | {"full": 4e-3},
}
QUESTIONS = 3000


def run_preheat(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "preheat", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"preheat {' '.join(arguments)}\n{done.stderr}")
    return dict(json.loads(done.stdout))


def run(
    method: str, source: dict[str, str], model: Path, seed: int, options: argparse.Namespace, folder: Path, rate: float
) -> dict[str, Any]:
    """Trains, and reads what became of it: {after, forgotten, share, peak, speed}."""
    out = folder / f"{method}-{seed}"
    values = {
        "name": f"tune-{method}",
        "seed": seed,
        "model": {"path": str(model)},
        "data": source,
        "batch": {"size": 16, "seq_len": 256},
        "optimizer": {"lr": rate, "weight_decay": 0.0},
        "schedule": {"warmup_ratio": 0.05, "min_lr_ratio": 0.02},
        "stop": {"max_steps": options.steps},
        "evaluate": {"rows": 128},
    }
    recipe = folder / f"{method}-{seed}.yaml"
    techniques = f"techniques.efficient_attention={{}};techniques.chunked_loss={{}};{_format_keys(METHODS[method])}"
    recipe.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    settings = [part for setting in techniques.split(";") if setting for part in ("--set", setting)]
    summary = run_preheat("train", str(recipe), "--out", str(out), *settings)
    plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))["parameters"]
    stories = run_preheat("eval", str(out), "--data", str(folder / "stories.txt"), "--rows", "128", "--length", "256")
    return {
        "after": summary["validation_loss"],
        "forgotten": stories["loss"],
        "share": plan["trained"] / plan["total"],
        "peak": summary["peak_gib"] * 1024,
        "speed": summary["tokens_per_second"],
    }


def _format_keys(techniques: str) -> str:
    import yaml

    return ";".join(f"techniques.{name}={json.dumps(value)}" for name, value in yaml.safe_load(techniques).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--texts", nargs="+", choices=("shakespeare", "questions"), default=["shakespeare", "questions"]
    )
    parser.add_argument("--lr", type=float, help="for all methods, to try a rate; RATES when not given")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tuning_stories.md"))
    options = parser.parse_args()
    model = options.data / "stories260K-hf"
    lines = [
        "# Tuning stories260K: full, LoRA, with a pair on the embedding, DoRA, QLoRA",
        "",
        f"`python benchmarks/tuning_stories.py --steps {options.steps} --seeds {options.seeds}`: {options.steps} steps of 16 rows of 256 tokens, rates "
        + "; ".join(
            f"{text}: " + ", ".join(f"{method} {options.lr or RATES[text][method]:g}" for method in options.methods)
            for text in options.texts
        )
        + "; losses in nats per token. Gain: the decrease of the held-out loss, relative to that of full tuning. Forgotten: the increase of the loss on TinyStories.",
        "",
        "| text | method | trained share | before | after | gain | TinyStories before | after | forgotten | peak MiB | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stories = (options.data / "text/tinystories_train_excerpt.txt").read_text(encoding="utf-8")
        (folder / "stories.txt").write_text(stories[:400_000], encoding="utf-8")
        with (options.data / "math/gsm8k_train.jsonl").open(encoding="utf-8") as file:
            (folder / "questions.jsonl").write_text("".join(itertools.islice(file, QUESTIONS)), encoding="utf-8")
        known = run_preheat(
            "eval", str(model), "--data", str(folder / "stories.txt"), "--rows", "128", "--length", "256"
        )["loss"]
        sources: dict[str, dict[str, Any]] = {
            "shakespeare": {
                "source": str(options.data / "text/tinyshakespeare.txt"),
                "validation": 0.05,
                "preflight": {"truncated": "warn"},
            },
            "questions": {
                "source": str(folder / "questions.jsonl"),
                "prompt": "question",
                "completion": "answer",
                "validation": 0.05,
                "preflight": {"truncated": "warn"},
            },
        }
        for text in options.texts:
            where = folder / text
            where.mkdir()
            (where / "stories.txt").symlink_to(folder / "stories.txt")
            found = {
                method: [
                    run(method, sources[text], model, seed, options, where, options.lr or RATES[text][method])
                    for seed in range(1, options.seeds + 1)
                ]
                for method in options.methods
            }
            before = _evaluate_base(model, sources[text], where)
            fall = before - statistics.mean(one["after"] for one in found[options.methods[0]])
            for method, runs in found.items():
                mean = {key: statistics.mean(one[key] for one in runs) for key in runs[0]}
                lines.append(
                    f"| {text} | {method} | {mean['share']:.1%} | {before:.3f} | {mean['after']:.3f} | {(before - mean['after']) / fall:.0%} "
                    f"| {known:.3f} | {mean['forgotten']:.3f} | {mean['forgotten'] - known:+.3f} | {mean['peak']:.0f} | {mean['speed']:,.0f} |"
                )
                print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _evaluate_base(model: Path, source: dict[str, Any], folder: Path) -> float:
    """Loss of the base on the same validation rows: a run of one step at no rate to speak of."""
    recipe = folder / "before.yaml"
    values = {
        "name": "before",
        "model": {"path": str(model)},
        "data": source,
        "batch": {"size": 16, "seq_len": 256},
        "optimizer": {"lr": 1e-12, "weight_decay": 0.0},
        "stop": {"max_steps": 1},
        "evaluate": {"rows": 128},
    }
    recipe.write_text(json.dumps(values), encoding="utf-8")
    return float(run_preheat("train", str(recipe), "--out", str(folder / "before"))["validation_loss"])


if __name__ == "__main__":
    main()
