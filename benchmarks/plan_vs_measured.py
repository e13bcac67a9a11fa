"""Predicted against measured peak memory and speed of real runs on this machine.

    python benchmarks/plan_vs_measured.py [--drawn 30 --seed 1] [--out benchmarks/results/plan_vs_measured.json]
    PREHEAT_DATA=FOLDER python benchmarks/plan_vs_measured.py --methods --out FILE

Each recipe is trained for a few steps by the command line in a process of its own, in a temporary folder; predicted and
measured are the run's own figures. Peak memory is the process's high-water mark less what it held before the build. With
several processes it is that of the one with the most, as plans have it.

A run beside other work is repeated, by default twice, each time after waiting for the cores to be free. If it still had
not the machine to itself, its speed is left out of the summary; its memory counts, which others do not change.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drawn import draw_settings
from drawn import format_settings as arguments
from method_cases import Case, list_methods

from preheat.hardware.machine_use import UseMeter

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

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 16384,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_expand": 2}
_LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1}
# kind of token mixer -> model type, the kind of all layers but the last, and what else the configuration has
MIXERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "softmax attention": ("qwen3", "", {}),
    "sliding windows": ("gemma3_text", "sliding_attention", {"sliding_window": 64}),
    "sinks, experts": (
        "gpt_oss",
        "sliding_attention",
        {"sliding_window": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} | _LOCAL,
    ),
    "latent attention, experts": ("glm4_moe_lite", "", _LATENT | _ROUTED),
    "gated delta net": ("qwen3_5_text", "linear_attention", _DELTA),
    "gated delta net, experts": ("qwen3_5_moe_text", "linear_attention", _DELTA | _EXPERTS),
    "Mamba 2": ("mamba2", "", {"num_heads": 12, "head_dim": 64, "n_groups": 1, "state_size": 64, "expand": 2}),
    "Mamba 2 and attention": ("falcon_h1", "", _MAMBA | {"mamba_d_ssm": 768}),
    "Mamba 1": ("jamba", "", {"mamba_dt_rank": 24, "num_experts": 1, "attn_layer_period": 4, "attn_layer_offset": 3}),
    "short convolution": ("lfm2", "conv", {}),
    "lightning attention": ("minimax", "linear_attention", _LOCAL),
    "chunked attention": (
        "llama4_text",
        "chunked_attention",
        {"attention_chunk_size": 64, "moe_layers": [], "intermediate_size_mlp": 1024},
    ),
    "Kimi delta attention": (
        "kimi_linear",
        "linear_attention",
        _LATENT
        | _LOCAL
        | {"moe_intermediate_size": 256, "q_lora_rank": None, "linear_head_dim": 64, "linear_num_heads": 6},
    ),
}


def list_mixers(folder: Path) -> list[tuple[str, list[str]]]:
    """A recipe of each kind of token mixer, name and settings; its configuration is written below the folder."""
    from transformers import AutoConfig

    recipes = []
    for name, (kind, mixer, more) in MIXERS.items():
        types = {"layer_types": [mixer] * 3 + ["full_attention"]} if mixer else {}
        AutoConfig.for_model(kind, **(_SIZES | types | more)).save_pretrained(folder / kind)
        settings = ["stop.max_steps=4", "evaluate={rows: 8}", "checkpoint={}", "sample={}"]
        settings += ["batch={size: 16, seq_len: 256}", "techniques={efficient_attention: {}, chunked_loss: {}}"]
        recipes.append((f"{name} ({kind})", [*settings, f"model={{path: {folder / kind}, weights: random}}"]))
    return recipes


# Of tests/architectures: models so small that most of a run's memory is overhead of the process.
TINY = ("llama", "qwen3", "gpt2", "nemotron_h", "jamba", "qwen3_next", "mamba2", "lfm2")


def list_tiny(folder: Path) -> list[tuple[str, list[str]]]:
    """A recipe of each kind of tiny model, name and settings; its configuration is written below the folder."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.architectures.tiny import tiny_config

    recipes = []
    for name in TINY:
        tiny_config(name, vocab_size=4096).save_pretrained(folder / name)
        settings = ["stop.max_steps=4", "evaluate={rows: 8}", "checkpoint={}", "sample={}"]
        settings += ["batch={size: 4, seq_len: 64}", "techniques={efficient_attention: {}, chunked_loss: {}}"]
        recipes.append((name, [*settings, f"model={{path: {folder / name}, weights: random}}"]))
    return recipes


def list_recipes() -> list[tuple[str, list[str]]]:
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


def wait_until_quiet(most: float) -> None:
    """Waits until other processes leave all cores free for two seconds, for `most` seconds at most."""
    end = time.monotonic() + most
    while True:
        meter = UseMeter()
        time.sleep(2)
        if meter.use(os.cpu_count() or 1).alone is not False or time.monotonic() > end:
            return


def run(settings: list[str], processes: int) -> tuple[dict[str, Any] | None, str]:
    """Trains a recipe; returns its summary, or None with the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = [sys.executable, *launcher, __file__, "--rank-in", folder]
            command += [part for setting in settings for part in ("--set", setting)]
        else:
            command = [sys.executable, "-m", "preheat", "train", "demo", "--json", "--force", "--out", f"{folder}/run"]
            command += arguments(settings)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        if done.returncode:
            # With torchrun, the first error is that of a rank; the last one says that a rank has failed.
            errors = [line for line in done.stderr.splitlines() if re.search(r"Error: \S|^error", line)]
            return None, errors[0] if errors else done.stderr.strip().splitlines()[-1]
        if processes > 1:
            summaries = [json.loads(file.read_text()) for file in Path(folder).glob("rank-*.json")]
            assert len(summaries) == processes
            summary = max(summaries, key=lambda one: one["peak_gib"])
            summary["ranks"] = sorted(one["peak_gib"] for one in summaries)
        else:
            summary = json.loads(done.stdout)
        plan = json.loads(Path(folder, "run", "plan.json").read_text())
        keys = ("peak_gib", "tokens_per_second")
        return summary | {"intervals": {key: plan[f"{key}_interval"] for key in keys}}, ""


def train_rank(folder: Path, settings: list[str]) -> None:
    """Trains as one of the processes that torchrun started, and writes the summary with this process's memory."""
    from preheat import load_recipe, train

    summary = train(load_recipe("demo", settings), out=folder / "run", force=True)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(summary))


def build_row(name: str, settings: list[str], summary: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "settings": settings, "machine": summary.get("machine")}
    if "ranks" in summary:
        row["measured_of_each_process"] = [round(peak, 4) for peak in summary["ranks"]]
    for key, (low, high) in summary["intervals"].items():
        predicted, measured = summary["predicted"][key], summary[key]
        row[key] = {
            "predicted": round(predicted, 4),
            "measured": round(measured, 4),
            "error": round(predicted / measured - 1, 4),
            "interval": [round(low, 4), round(high, 4)],
            "within": low <= measured <= high,
        }
    return row


def select_counted(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Returns the figures of the rows that count: of speeds only those of runs that had the machine to themselves."""
    return [
        row[key]
        for row in rows
        if key in row and not (key == "tokens_per_second" and (row["machine"] or {}).get("alone") is False)
    ]


def compute_coverage(rows: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Returns errors, and how many measurements lie in the plan's interval; None without a row that counts."""
    figures = select_counted(rows, key)
    if not figures:
        return None
    errors = sorted(abs(figure["error"]) for figure in figures)
    return {
        "rows": len(figures),
        "within_interval": sum(figure["within"] for figure in figures),
        "asked": 0.9,
        "median_error": statistics.median(errors),
        "nine_in_ten_within": errors[math.ceil(0.9 * len(errors)) - 1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_vs_measured.json"))
    parser.add_argument("--drawn", type=int, default=0, help="so many recipes drawn at random, instead of the list")
    parser.add_argument("--seed", type=int, default=1, help="which are drawn")
    parser.add_argument(
        "--mixers", action="store_true", help="a recipe of each kind of token mixer, instead of the list"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, dense and recurrent, instead of the list")
    parser.add_argument("--methods", action="store_true", help="a recipe of each training method, instead of the list")
    parser.add_argument("--only", nargs="*", help="only recipes with one of these texts in their names")
    parser.add_argument("--repeats", type=int, default=2, help="how often a run beside other work is repeated")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for free cores before each run")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_in is not None:
        train_rank(options.rank_in, options.set)
        return
    configurations = tempfile.TemporaryDirectory()
    folder = Path(configurations.name)
    chosen = list_tiny(folder) if options.tiny else list_mixers(folder) if options.mixers else list_recipes()
    cases = list_methods(folder) if options.methods else [Case(name, settings) for name, settings in chosen]
    if options.drawn:
        more = draw_settings(options.drawn, options.seed)
        cases = [Case(f"drawn {n}", [*settings, "stop.max_steps=6"]) for n, settings in enumerate(more, 1)]
    rows: list[dict[str, Any]] = []
    for name, settings, processes in cases:
        if options.only and not any(text in name for text in options.only):
            continue
        summary, failure = None, ""
        for _ in range(options.repeats + 1):
            wait_until_quiet(options.wait)
            summary, failure = run(settings, processes)
            if summary is None or (summary.get("machine") or {}).get("alone") is not False:
                break
        if summary is None:
            print(f"{name}: {failure}", flush=True)
            rows.append({"name": name, "settings": settings, "failed": failure})
            continue
        row = build_row(name, settings, summary)
        rows.append(row)
        memory, speed = row["peak_gib"], row["tokens_per_second"]
        beside = "" if select_counted([row], "tokens_per_second") else "   beside other work, not counted"
        print(
            f"{name:32s} memory {memory['predicted']:7.3f} / {memory['measured']:7.3f} GiB ({memory['error']:+.0%})   "
            f"speed {speed['predicted']:8,.0f} / {speed['measured']:8,.0f} tokens/s ({speed['error']:+.0%}){beside}",
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
    covered = {key: compute_coverage(rows, key) for key in ("peak_gib", "tokens_per_second")}
    for key, figures in covered.items():
        if figures is None:
            print(f"{key}: no run counts")
            continue
        print(
            f"{key}: median error {figures['median_error']:.1%}, nine in ten within "
            f"{figures['nine_in_ten_within']:.1%}; {figures['within_interval']} of {figures['rows']} in the plan's "
            f"interval (asked: {figures['asked']:.0%})"
        )
    left_out = sum("peak_gib" in row for row in rows) - len(select_counted(rows, "tokens_per_second"))
    if left_out:
        print(f"speeds of {left_out} runs beside other work are left out")
    options.out.write_text(
        json.dumps(
            {
                "command": " ".join(["python", *sys.argv]),
                "processor": cpu,
                "cores": os.cpu_count(),
                "coverage": covered,
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
