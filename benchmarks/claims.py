"""What cookbooks claim of techniques beside what is measured here, and what the dry run says for an A100 and an RTX 4090.

    python benchmarks/claims.py [--part memory states quality rope] [--out benchmarks/results]

memory   speed and peak memory of each technique alone and of all together on a 15M Llama at 512 tokens (preheat/bench), and the a
         1B Llama's as predicted for the two GPUs
states   GiB a device of a 1B Llama under each way of sharding weights, gradients and optimizer states, by the dry run
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
from preheat.bench.compare import Contender, run_bench
from preheat.core import Device
from preheat.files import to_plain_data
from preheat.hardware.catalogue import find_accelerator
from preheat.hardware.rates import LAYOUTS, MOVERS, AttentionRate, MatrixRate, MovedRate, Rates
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.planning.speed.step_time import estimate_step_seconds

GIB = 2**30
LLAMA = (
    "{num_layers: 6, hidden_size: 288, num_heads: 6, intermediate_size: 768, vocab_size: 32000, tie_embeddings: true}"
)
TECHNIQUES = {
    "mixed_precision bf16": "{mixed_precision: {mode: bf16}}",
    "mixed_precision bf16_weights": "{mixed_precision: {mode: bf16_weights}}",
    "efficient_attention": "{efficient_attention: {}}",
    "chunked_loss": "{chunked_loss: {}}",
    "activation_checkpointing": "{activation_checkpointing: {}}",
    "gradient_accumulation 8": "{gradient_accumulation: {steps: 8}}",
    "all of these": "{mixed_precision: {mode: bf16_weights}, efficient_attention: {}, chunked_loss: {}, activation_checkpointing: {}, gradient_accumulation: {steps: 8}}",
}
GPUS = {"A100-80GB": 16, "RTX-4090": 4}
"""Rows of 2,048 tokens that the two are given."""
LLAMA_1B = "{num_layers: 16, hidden_size: 2048, num_heads: 32, num_kv_heads: 8, intermediate_size: 8192, vocab_size: 128256, tie_embeddings: true}"


def build_recipe(name: str, model: str, rows: int, length: int, techniques: str = "{}") -> recipes.Recipe:
    return recipes.parse(
        f"name: {name}\nmodel: {model}\nbatch: {{size: {rows}, seq_len: {length}}}\nstop: {{max_steps: 8}}\ntechniques: {techniques}\nhardware: {{device: cpu}}"
    )


def measure_memory() -> dict[str, Any]:
    predicted = {gpu: _predict_memory(gpu, rows) for gpu, rows in GPUS.items()}
    plain = build_recipe("claims", LLAMA, 8, 512)
    contenders = [Contender("plain", plain)]
    contenders += [
        Contender(name, build_recipe("claims", LLAMA, 8, 512, techniques)) for name, techniques in TECHNIQUES.items()
    ]
    # Accumulation: the global batch grows, the micro-batch stays.
    batches = {}
    for times in (1, 2, 4, 8, 16):
        techniques = f"{{gradient_accumulation: {{steps: {times}}}}}" if times > 1 else "{}"
        seen = observe(
            Request(build_recipe("claims", LLAMA, 4 * times, 512, techniques), Device("cpu", "this", 64 * GIB))
        )
        batches[str(times)] = max(seen.peak.values()) / GIB
    with tempfile.TemporaryDirectory() as folder:
        result = run_bench(
            plain, contenders, steps=6, repeats=2, out=Path(folder), say=lambda *said: print(*said, flush=True)
        )
    rows = [
        {
            key: getattr(row, key, None)
            for key in ("name", "failed", "ratio", "ratio_spread", "peak_gib", "tokens_per_second")
        }
        for row in result.rows
    ]
    return {
        "machine": to_plain_data(result.machine),
        "rows": rows,
        "predicted": predicted,
        "accumulation_peak_gib": batches,
    }


def _predict_memory(gpu: str, rows: int) -> dict[str, dict[str, float]]:
    """GiB and seconds a step of a 1B Llama by the dry run. The device is called a CPU: without CUDA fake tensors cannot be on one, and sizes are the same."""
    rates = _build_data_sheet(gpu)
    found = {}
    for name, techniques in {"plain": "{}", **TECHNIQUES}.items():
        seen = observe(
            Request(build_recipe("claims", LLAMA_1B, max(rows, 8), 2048, techniques), Device("cpu", gpu, 999 * GIB))
        )
        found[name] = {"gib": max(seen.peak.values()) / GIB, "seconds": estimate_step_seconds(seen, rates)}
    return found


def _build_data_sheet(gpu: str) -> Rates:
    """A flat roofline: products at 0.72 of the matrix rate (fp32 without TF32), attention at half of it, all else at 0.85 of the bandwidth.

    Shares that others measured to be sustained; for ratios only.
    """
    known = find_accelerator(gpu)
    assert known.bf16
    assert known.fp32
    assert known.bandwidth
    flops, moved = {"bf16": 0.72 * known.bf16, "fp32": 0.72 * known.fp32}, 0.85 * known.bandwidth
    return Rates(
        hardware=known.name,
        torch="",
        threads=1,
        peak_matrix_rate=flops,
        bandwidth=moved,
        launch=5e-7,  # queued ahead of the device
        adamw={"bf16": 14 / moved, "fp32": 28 / moved},
        matrix=tuple(MatrixRate(d, layout, 1024, 1024, 1024, rate) for d, rate in flops.items() for layout in LAYOUTS),
        moved=tuple(MovedRate(name, d, 2**20, moved) for name in MOVERS for d in flops),
        attention=tuple(
            AttentionRate(d, way, 2048, 32, 64, rate / 2)
            for d, rate in flops.items()
            for way in ("forward", "backward")
        ),
        contended=False,
        seconds=0.0,
    )


SHARED = {
    "data_parallel: all have all": "{data_parallel: {}}",
    "zero1: states shared out": "{data_parallel: {}, zero1: {}}",
    "fsdp, reshard_after_forward: false: gradients too": "{fsdp: {reshard_after_forward: false}}",
    "fsdp: weights too": "{fsdp: {}}",
}


def measure_states() -> dict[str, Any]:
    """Peak bytes of a device, and of them what is there before the first step and in the update: weights, gradients, states."""
    found: dict[str, Any] = {}
    for name, techniques in SHARED.items():
        for world in (2, 4, 8):
            recipe = build_recipe("claims", LLAMA_1B, world, 2048, techniques)
            recipe = recipes.override(recipe, "techniques.chunked_loss={}", "techniques.activation_checkpointing={}")
            seen = observe(Request(recipe, Device("cpu", "any", 999 * GIB), world=world))
            kept = max(
                sum(phase.get(what, 0.0) for what in ("parameters", "gradients", "optimizer"))
                for phase in seen.categories.values()
            )
            found.setdefault(name, {})[str(world)] = {"peak": max(seen.peak.values()) / GIB, "kept": kept / GIB}
            print(name, world, found[name][str(world)], flush=True)
    return found


# At equal tokens. `model` keys over the demo's.
QUALITY: dict[str, list[str]] = {
    "the demo": [],
    "feed_forward gelu, equal parameters": ["techniques.feed_forward={activation: gelu}"],
    "feed_forward relu, equal parameters": ["techniques.feed_forward={activation: relu}"],
    "deep and thin: 6 layers of 160": [
        "model.num_layers=6",
        "model.hidden_size=160",
        "model.num_heads=5",
        "model.num_kv_heads=5",
        "model.intermediate_size=480",
    ],
    "untied embeddings": ["model.tie_embeddings=false"],
    "every head its own keys": ["model.num_kv_heads=4"],
    "one key-value head": ["model.num_kv_heads=1"],
}

# What is claimed of each against the demo (SwiGLU, tied, 2 of 4 key-value heads): a higher loss (+1), a lower one (-1), none that counts (0).
CLAIMED: dict[str, tuple[str, int]] = {
    "feed_forward gelu, equal parameters": ("SwiGLU is better", 1),
    "feed_forward relu, equal parameters": ("SwiGLU is better", 1),
    "deep and thin: 6 layers of 160": ("deeper is better", -1),
    "untied embeddings": ("tying costs nothing", 0),
    "every head its own keys": ("sharing keys costs nothing", 0),
    "one key-value head": ("sharing all costs little", 0),
}


def measure_quality(steps: int = 200, seeds: int = 3) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": steps, "rows": []}
    for name, settings in QUALITY.items():
        losses, run = [], {}
        for seed in range(1, seeds + 1):
            run = _train([*settings, f"seed={seed}", f"stop.max_steps={steps}"])
            losses.append(run["validation_loss"])
            print(name, seed, f"{losses[-1]:.4f}", flush=True)
        found["rows"].append({"name": name, "losses": losses, "parameters": run["parameters"]})
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


def measure_rope(steps: int = 430) -> dict[str, Any]:
    from preheat.compress.export.huggingface import write
    from preheat.data import evaluation_batches, prepare
    from preheat.engine.builder import build
    from preheat.engine.evaluate import evaluate

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run, model = Path(folder) / "run", Path(folder) / "model"
        _train([f"stop.max_steps={steps}", "batch={size: 16, seq_len: 128}"], run)
        write(run, model)
        settings = recipes.parse("name: rope\nmodel: {size: 1M}\nstop: {max_steps: 1}\ndata: {validation: 0.05}").data
        for length in (128, 256, 512, 1024):
            data = prepare(settings, length=length, seed=1, tokenizer=str(model))
            factor = length / 128
            for kind in ("none", "linear", "dynamic", "yarn") if factor > 1 else ("none",):
                techniques = "{}" if kind == "none" else f"{{rope_scaling: {{kind: {kind}, factor: {factor}}}}}"
                config = f", config: {{max_position_embeddings: {length}}}" if kind == "none" else ""
                made = recipes.parse(
                    f"name: rope\nmodel: {{path: {model}{config}}}\nbatch: {{size: 8, seq_len: {length}}}\nstop: {{max_steps: 1}}\n"
                    f"techniques: {techniques}\nhardware: {{device: cpu}}"
                )
                b = build(made, vocabulary=len(data.tokenizer), device=Device("cpu", "this", 64 * GIB))
                loss, _ = evaluate(b, evaluation_batches(data.validation, micro=4, limit=65536 // length))
                rows.append({"kind": kind, "length": length, "perplexity": math.exp(loss)})
                print(kind, length, f"{math.exp(loss):.1f}", flush=True)
    return {"steps": steps, "rows": rows}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "memory": measure_memory,
    "states": measure_states,
    "quality": measure_quality,
    "rope": measure_rope,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--table", action="store_true", help="measure nothing; write claims.md from what is there")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    for part in [] if options.table else options.part:
        made = PARTS[part]()
        (options.out / f"claims-{part}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    (options.out / "claims.md").write_text(render_table(options.out), encoding="utf-8")


def render_table(folder: Path) -> str:
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
        lines += _render_memory_table(found["memory"])
    if "states" in found:
        lines += _render_states_table(found["states"])
    if "quality" in found:
        lines += _render_quality_table(found["quality"])
    if "rope" in found:
        lines += _render_rope_table(found["rope"])
    return "\n".join(lines)


CLAIMS: dict[str, tuple[float, float, float, float]] = {  # least and most speed, least and most memory saved
    "mixed_precision bf16": (1.5, 3.0, 0.30, 0.50),
    "mixed_precision bf16_weights": (1.5, 3.0, 0.30, 0.50),
    "efficient_attention": (1.3, 2.0, 0.30, 0.60),
}


def _render_memory_table(found: dict[str, Any]) -> list[str]:
    machine = found["machine"]
    lines = [
        f"## Speed and memory: 15M Llama, 8 x 512, {machine['name']}, {machine['threads']} threads",
        "",
        "For the GPUs: the dry run of a 1B Llama (16 and 8 rows of 2,048 tokens), speed by a flat roofline over the data sheets' rates (fp32",
        "without TF32), memory without the CUDA context. Not measured on a GPU.",
        "",
        "| technique | claimed | speed here | memory here | "
        + " | ".join(f"predicted, {gpu}" for gpu in found["predicted"])
        + " | holds here |",
        "|---|---|---|---|" + "---|" * len(found["predicted"]) + "---|",
    ]
    plain = found["rows"][0]["peak_gib"]
    for row in found["rows"][1:]:
        if row["failed"]:
            lines.append(f"| {row['name']} | | {row['failed']} | | {'| ' * len(found['predicted'])}| |")
            continue
        saved = 1 - row["peak_gib"] / plain
        gpus = " | ".join(_format_against(seen[row["name"]], seen["plain"]) for seen in found["predicted"].values())
        claim, said = CLAIMS.get(row["name"]), "-"
        if claim:
            said = f"{claim[0]:g} to {claim[1]:g} x, {claim[2]:.0%} to {claim[3]:.0%} less"
        elif row["name"] == "all of these":
            said = "up to 5 x, up to 70% less"
        fast, small = (claim and row["ratio"] >= claim[0]), (claim and saved >= claim[2])
        verdict = (
            "" if not claim else "yes" if fast and small else "speed only" if fast else "memory only" if small else "no"
        )
        spread = f"{row['ratio_spread'][0]:.2f} to {row['ratio_spread'][1]:.2f}"
        lines.append(
            f"| {row['name']} | {said} | {row['ratio']:.2f} x ({spread}) | {_format_less(saved)} | {gpus} | {verdict} |"
        )
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


def _format_against(one: dict[str, float], plain: dict[str, float]) -> str:
    return f"{plain['seconds'] / one['seconds']:.2f} x, {_format_less(1 - one['gib'] / plain['gib'])}"


def _format_less(saved: float) -> str:
    return f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"


def _render_states_table(found: dict[str, Any]) -> list[str]:
    base = found[next(iter(found))]
    lines = [
        "## Sharded states: a 1B Llama in fp32, one row of 2,048 tokens a device, by the dry run",
        "",
        "Claimed: 2 to 4 x less memory. Weights, gradients and optimizer states of one device, and its peak, which has activations too.",
        "",
        "| | " + " | ".join(f"{n} devices: kept, peak" for n in base) + " |",
        "|---|" + "---|" * len(base),
    ]
    for name, by in found.items():
        cells = [
            f"{one['kept']:.1f} GiB ({base[n]['kept'] / one['kept']:.1f} x less), {one['peak']:.1f} GiB ({base[n]['peak'] / one['peak']:.1f} x less)"
            for n, one in by.items()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", "Measured on two processes: two_processes.md, and tests/distributed for the shares.", ""]


def _render_quality_table(found: dict[str, Any]) -> list[str]:
    base = found["rows"][0]
    lines = [
        f"## Quality: the demo's corpus, {found['steps']} steps, {len(base['losses'])} seeds, equal tokens",
        "",
        "| model | parameters | validation loss, mean | low to high | against the demo, seed by seed | claimed | holds here |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        losses, apart = row["losses"], [a - b for a, b in zip(row["losses"], base["losses"], strict=True)]
        against = "" if row is base else f"{statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})"
        claim, way = CLAIMED.get(row["name"], ("", 0))
        lines.append(
            f"| {row['name']} | {row['parameters']:,} | {statistics.mean(losses):.4f} | {min(losses):.4f} to {max(losses):.4f} | {against} "
            f"| {claim} | {_judge_claim(apart, way) if claim else ''} |"
        )
    return [
        *lines,
        "",
        "One learning rate for all, found with the demo: a model that wants another is at a disadvantage. `no`: all seeds say the contrary.",
        "",
    ]


def _judge_claim(apart: list[float], way: int) -> str:
    """Of a claim that losses are higher (1), lower (-1) or alike (0), by whether the seeds agree."""
    sign = 1 if min(apart) > 0 else -1 if max(apart) < 0 else 0
    if way == 0:
        return "yes, within the seeds' spread" if sign == 0 else f"no: {-statistics.mean(apart):+.3f} nats"
    return "yes" if sign == way else "no" if sign else "not seen: within the seeds' spread"


def _render_rope_table(found: dict[str, Any]) -> list[str]:
    lengths = sorted({row["length"] for row in found["rows"]})
    by = {(row["kind"], row["length"]): row["perplexity"] for row in found["rows"]}
    lines = [
        f"## Rotary scaling: trained at 128 tokens ({found['steps']} steps), perplexity without further training",
        "",
        "| scaling | " + " | ".join(map(str, lengths)) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for kind in dict.fromkeys(row["kind"] for row in found["rows"]):
        lines.append(
            f"| {kind} | " + " | ".join(f"{by[kind, n]:.1f}" if (kind, n) in by else "" for n in lengths) + " |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
