"""What cookbooks claim of techniques beside what is measured here, and what the dry run says for an A100 and an RTX 4090.

    python benchmarks/claims.py [--part memory quality rope] [--out benchmarks/results]

memory   speed and peak memory of each technique alone and of all together on a 15M Llama at 512 tokens (preheat/bench), and the same
         recipe's memory as observed for the two GPUs
quality  validation loss on the demo's corpus at equal tokens, three seeds: feed-forward kinds at equal parameters, deep and thin,
         tied embeddings, grouped queries
rope     trained at 128 tokens, perplexity at 256, 512 and 1,024 by each rotary scaling
Writes claims-PART.json; `--table` alone makes claims.md of what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.bench.compare import Contender, bench
from preheat.planning.observe import observe
from preheat.technique import Device

GIB = 2**30
LLAMA = "{layers: 6, width: 288, heads: 6, feed_forward: 768, vocabulary: 32000, tie_embeddings: true}"
TECHNIQUES = {
    "mixed_precision bf16": "{mixed_precision: {mode: bf16}}",
    "mixed_precision bf16_weights": "{mixed_precision: {mode: bf16_weights}}",
    "efficient_attention": "{efficient_attention: {}}",
    "chunked_loss": "{chunked_loss: {}}",
    "activation_checkpointing": "{activation_checkpointing: {}}",
    "gradient_accumulation 8": "{gradient_accumulation: {steps: 8}}",
    "all of these": "{mixed_precision: {mode: bf16_weights}, efficient_attention: {}, chunked_loss: {}, activation_checkpointing: {}, gradient_accumulation: {steps: 8}}",
}
GPUS = {
    "A100-80GB": (Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0)), 16),
    "RTX 4090": (Device("cuda", "NVIDIA GeForce RTX 4090", 24 * GIB, (8, 9)), 4),
}
LLAMA_1B = "{layers: 16, width: 2048, heads: 32, kv_heads: 8, feed_forward: 8192, vocabulary: 128256, tie_embeddings: true}"


def recipe(name: str, model: str, rows: int, length: int, techniques: str = "{}") -> recipes.Recipe:
    return recipes.parse(
        f"name: {name}\nmodel: {model}\nbatch: {{size: {rows}, length: {length}}}\nstop: {{steps: 8}}\ntechniques: {techniques}\nhardware: {{device: cpu}}"
    )


def memory() -> dict[str, Any]:
    plain = recipe("claims", LLAMA, 8, 512)
    contenders = [Contender("plain", plain)]
    contenders += [Contender(name, recipe("claims", LLAMA, 8, 512, techniques)) for name, techniques in TECHNIQUES.items()]
    with tempfile.TemporaryDirectory() as folder:
        made = bench(plain, contenders, steps=6, repeats=2, out=Path(folder), say=lambda *said: print(*said, flush=True))
    observed: dict[str, dict[str, float]] = {}
    for gpu, (device, rows) in GPUS.items():
        observed[gpu] = {}
        for name, techniques in {"plain": "{}", **TECHNIQUES}.items():
            seen = observe(recipe("claims", LLAMA_1B, max(rows, 8), 2048, techniques), vocabulary=None, device=device)
            observed[gpu][name] = max(seen.peak.values()) / GIB
    # Accumulation: the global batch grows, the micro-batch stays.
    batches = {}
    for times in (1, 2, 4, 8, 16):
        techniques = f"{{gradient_accumulation: {{steps: {times}}}}}" if times > 1 else "{}"
        seen = observe(
            recipe("claims", LLAMA, 4 * times, 512, techniques), vocabulary=None, device=Device("cpu", "this", 64 * GIB)
        )
        batches[times] = max(seen.peak.values()) / GIB
    rows = [
        {k: r.get(k) for k in ("name", "failed", "ratio", "ratio_spread", "peak_gib", "tokens_per_second")}
        for r in made["rows"]
    ]
    return {"machine": made["machine"], "rows": rows, "observed": observed, "accumulation_peak_gib": batches}


# At equal tokens. `model` keys over the demo's.
QUALITY: dict[str, list[str]] = {
    "the demo": [],
    "feed_forward gelu, equal parameters": ["techniques.feed_forward={activation: gelu}"],
    "feed_forward relu, equal parameters": ["techniques.feed_forward={activation: relu}"],
    "deep and thin: 5 layers of 160": [
        "model.layers=5",
        "model.width=160",
        "model.heads=5",
        "model.kv_heads=5",
        "model.feed_forward=480",
    ],
    "untied embeddings": ["model.tie_embeddings=false"],
    "every head its own keys": ["model.kv_heads=4"],
    "one key-value head": ["model.kv_heads=1"],
}


def quality(steps: int = 200, seeds: int = 3) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": steps, "rows": []}
    for name, settings in QUALITY.items():
        losses, made = [], {}
        for seed in range(1, seeds + 1):
            made = _train([*settings, f"seed={seed}", f"stop.steps={steps}"])
            losses.append(made["validation_loss"])
            print(name, seed, f"{losses[-1]:.4f}", flush=True)
        found["rows"].append({"name": name, "losses": losses, "parameters": made["parameters"]})
    return found


def _train(settings: list[str], out: Path | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = out or Path(folder) / "run"
        command = [sys.executable, "-m", "preheat", "train", "demo", "--json", "--force", "--out", str(run)]
        for setting in ["evaluate={rows: 256}", "checkpoint={}", "sample={}", *settings]:
            command += ["--set", setting]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        return {**json.loads(done.stdout), "parameters": plan["parameters"]["total"]}


def rope(steps: int = 430) -> dict[str, Any]:
    from preheat.compress.export.huggingface import write
    from preheat.data import evaluation_batches, prepare
    from preheat.engine.build import build
    from preheat.engine.evaluate import evaluate

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run, model = Path(folder) / "run", Path(folder) / "model"
        _train([f"stop.steps={steps}", "batch={size: 16, length: 128}"], run)
        write(run, model)
        settings = recipes.parse("name: rope\nmodel: {size: 1M}\nstop: {steps: 1}\ndata: {validation: 0.05}").data
        for length in (128, 256, 512, 1024):
            data = prepare(settings, length=length, seed=1, tokenizer=str(model))
            factor = length / 128
            for kind in ("none", "linear", "dynamic", "yarn") if factor > 1 else ("none",):
                techniques = "{}" if kind == "none" else f"{{rope_scaling: {{kind: {kind}, factor: {factor}}}}}"
                config = f", config: {{max_position_embeddings: {length}}}" if kind == "none" else ""
                made = recipes.parse(
                    f"name: rope\nmodel: {{path: {model}{config}}}\nbatch: {{size: 8, length: {length}}}\nstop: {{steps: 1}}\n"
                    f"techniques: {techniques}\nhardware: {{device: cpu}}"
                )
                b = build(made, vocabulary=len(data.tokenizer), device=Device("cpu", "this", 64 * GIB))
                loss, _ = evaluate(b, evaluation_batches(data.validation, micro=4, limit=65536 // length))
                rows.append({"kind": kind, "length": length, "perplexity": math.exp(loss)})
                print(kind, length, f"{math.exp(loss):.1f}", flush=True)
    return {"steps": steps, "rows": rows}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"memory": memory, "quality": quality, "rope": rope}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--table", action="store_true", help="measure nothing; write claims.md from what is there")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    for part in [] if options.table else options.part:
        made = PARTS[part]()
        (options.out / f"claims-{part}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    (options.out / "claims.md").write_text(table(options.out), encoding="utf-8")


def table(folder: Path) -> str:
    found = {
        part: json.loads(path.read_text(encoding="utf-8"))
        for part in PARTS
        if (path := folder / f"claims-{part}.json").exists()
    }
    lines = [
        "# Claimed, and measured here",
        "",
        "`python benchmarks/claims.py`; a claim that does not hold is said not to hold.",
        "",
    ]
    if "memory" in found:
        lines += _memory_table(found["memory"])
    if "quality" in found:
        lines += _quality_table(found["quality"])
    if "rope" in found:
        lines += _rope_table(found["rope"])
    return "\n".join(lines)


CLAIMS: dict[str, tuple[float, float, float, float]] = {  # least and most speed, least and most memory saved
    "mixed_precision bf16": (1.5, 3.0, 0.30, 0.50),
    "mixed_precision bf16_weights": (1.5, 3.0, 0.30, 0.50),
    "efficient_attention": (1.3, 2.0, 0.30, 0.60),
    "all of these": (1.0, 5.0, 0.0, 0.70),
}


def _memory_table(found: dict[str, Any]) -> list[str]:
    machine = found["machine"]
    lines = [
        f"## Speed and memory: 15M Llama, 8 x 512, {machine['name']}, {machine['threads']} threads",
        "",
        "Memory for the GPUs is observed by the dry run of a 1B Llama (8 or 16 rows of 2,048), without the CUDA context.",
        "",
        "| technique | claimed | speed here | memory here | "
        + " | ".join(f"memory, {gpu}" for gpu in found["observed"])
        + " | holds here |",
        "|---|---|---|---|" + "---|" * len(found["observed"]) + "---|",
    ]
    plain = found["rows"][0]["peak_gib"]
    for row in found["rows"][1:]:
        if row["failed"]:
            lines.append(f"| {row['name']} | | {row['failed']} | | {'| ' * len(found['observed'])}| |")
            continue
        saved = 1 - row["peak_gib"] / plain
        gpus = " | ".join(f"{1 - seen[row['name']] / seen['plain']:+.0%} less" for seen in found["observed"].values())
        claim, said = CLAIMS.get(row["name"]), "-"
        if claim:
            said = f"{claim[0]:g} to {claim[1]:g} x, {claim[2]:.0%} to {claim[3]:.0%} less"
        fast, small = (claim and row["ratio"] >= claim[0]), (claim and saved >= claim[2])
        verdict = "" if not claim else "yes" if fast and small else "speed only" if fast else "memory only" if small else "no"
        spread = f"{row['ratio_spread'][0]:.2f} to {row['ratio_spread'][1]:.2f}"
        lines.append(f"| {row['name']} | {said} | {row['ratio']:.2f} x ({spread}) | {saved:.0%} less | {gpus} | {verdict} |")
    peaks = found["accumulation_peak_gib"]
    grown = ", ".join(
        f"{times} x the batch: {peak / peaks['1']:.2f} x the memory" for times, peak in peaks.items() if times != "1"
    )
    return [
        *lines,
        "",
        f"Accumulation, claimed: 2 to 16 x the batch in the same memory. Bytes alive by the dry run: {grown}.",
        "",
    ]


def _quality_table(found: dict[str, Any]) -> list[str]:
    base = found["rows"][0]
    lines = [
        f"## Quality: the demo's corpus, {found['steps']} steps, {len(base['losses'])} seeds, equal tokens",
        "",
        "| model | parameters | validation loss, mean | low to high | against the demo, seed by seed |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        losses, apart = row["losses"], [a - b for a, b in zip(row["losses"], base["losses"], strict=True)]
        against = "" if row is base else f"{statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})"
        lines.append(
            f"| {row['name']} | {row['parameters']:,} | {statistics.mean(losses):.4f} | {min(losses):.4f} to {max(losses):.4f} | {against} |"
        )
    return [*lines, ""]


def _rope_table(found: dict[str, Any]) -> list[str]:
    lengths = sorted({row["length"] for row in found["rows"]})
    by = {(row["kind"], row["length"]): row["perplexity"] for row in found["rows"]}
    lines = [
        f"## Rotary scaling: trained at 128 tokens ({found['steps']} steps), perplexity without further training",
        "",
        "| scaling | " + " | ".join(map(str, lengths)) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for kind in dict.fromkeys(row["kind"] for row in found["rows"]):
        lines.append(f"| {kind} | " + " | ".join(f"{by[kind, n]:.1f}" if (kind, n) in by else "" for n in lengths) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
