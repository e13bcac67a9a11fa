"""Experts: tokens/s of a training step by how they are computed, and how evenly they are loaded by how they are balanced.

    python benchmarks/experts.py [--part speed|balance|all] [--repeats 7] [--steps 200] [--seeds 2] [--data FOLDER] [--out benchmarks/results/experts.md]

Speed: a small Qwen3-MoE in fp32 and under bf16 autocast; 8 experts, 2 for a token, and 64, 8 for a token, so that a token uses as many parameters. The very
same build computes its experts by ours (one grouped product), by transformers' eager loop and by its grouped_mm, in alternation; forward, backward and update.
Balance: TinyStories, from scratch, without balancing, with the loss, and with the bias at several rates; the load is the busiest expert's tokens over the mean
in the worst layer. Validation loss as a folder of the model has it, and for the bias also as if the folder could hold it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from preheat.core import Build
from preheat.data import Rows, evaluation_batches, prepare
from preheat.engine.builder import build
from preheat.engine.evaluate import evaluate
from preheat.engine.step import accumulate_gradients, update
from preheat.hardware.cpu_allocator import install_heap
from preheat.hardware.probe import probe
from preheat.inference.load import load_model
from preheat.models.moe import routers
from preheat.planning.phases import build_fake_batch
from preheat.recipe import Recipe, parse
from preheat.training.loop import train

WAYS = {"ours, grouped": "preheat", "transformers, eager": "eager", "transformers, grouped_mm": "grouped_mm"}
SIZES = {8: (2, 2.0), 64: (8, 0.5)}  # experts -> for a token, inner width of one, by the model's
BALANCINGS = {
    "none": "",
    "loss x 0.001": "{method: loss, coefficient: 0.001}",
    "loss x 0.01": "{method: loss, coefficient: 0.01}",
    "loss x 0.1": "{method: loss, coefficient: 0.1}",
    "bias, 0.001 a step": "{rate: 0.001}",
    "bias, 0.003 a step": "{rate: 0.003}",
    "bias, 0.01 a step": "{rate: 0.01}",
}


def format_sizes(experts: int, layers: int, width: int) -> str:
    chosen, inner = SIZES[experts]
    shape = f"num_layers: {layers}, hidden_size: {width}, num_heads: 4, num_kv_heads: 2, intermediate_size: {round(inner * width)}, num_experts: {experts}, num_experts_per_tok: {chosen}"
    return f"{{family: qwen3_moe, {shape}, vocab_size: 512, config: {{router_aux_loss_coef: 0}}}}"


# --- speed ----------------------------------------------------------------------------------------------------------


def prepare_build(experts: int, mode: str, rows: int, length: int) -> tuple[Build, Any]:
    text = f"model: {format_sizes(experts, 4, 256)}\nbatch: {{size: {rows}, seq_len: {length}}}\nstop: {{max_steps: 1}}\ntechniques: {{efficient_attention: {{}}, chunked_loss: {{}}, mixed_precision: {{mode: {mode}}}}}"
    recipe = parse(text)
    model_build = build(recipe, vocabulary=512, device=probe("cpu"))
    batch = build_fake_batch(recipe, rows)
    batch.tokens.random_(512, generator=torch.Generator().manual_seed(0))
    batch.labels.copy_(batch.tokens.roll(-1, dims=1))
    return model_build, batch


def time_once(model_build: Build, batch: Any, way: str) -> float:
    """Seconds of a step whose experts are computed so."""
    model: Any = model_build.trained[0]
    model.config._experts_implementation = WAYS[way]
    begun = time.perf_counter()
    accumulate_gradients(model_build, [batch], 1e-4)
    update(model_build, 1e-4)
    return time.perf_counter() - begun


def measure_speed(options: argparse.Namespace) -> list[str]:
    lines = ["| experts | precision | computed by | tokens/s | ours is |", "|---|---|---|---|---|"]
    for experts in options.experts:
        for mode in options.modes:
            model_build, batch = prepare_build(experts, mode, options.rows, options.length)
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(options.repeats + 1):
                for way in WAYS:
                    took = time_once(model_build, batch, way)
                    if turn:  # the first of each warms up
                        seconds[way].append(took)
            ours = seconds["ours, grouped"]
            for way, found in seconds.items():
                rates = sorted(batch.tokens.numel() / s for s in found)
                times = [theirs / own for theirs, own in zip(found, ours, strict=True)]
                summary = (
                    "" if found is ours else f"{statistics.median(times):.2f} x ({min(times):.2f} to {max(times):.2f})"
                )
                cells = f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})"
                lines.append(f"| {experts}, {SIZES[experts][0]} for a token | {mode} | {way} | {cells} | {summary} |")
                print(lines[-1], flush=True)
    return lines


# --- balance --------------------------------------------------------------------------------------------------------


def build_recipe(
    experts: int, balancing: str, source: Path, stories: Path, options: argparse.Namespace, seed: int
) -> Recipe:
    model, technique = format_sizes(experts, 3, 128), ""
    if how := BALANCINGS[balancing]:
        model, technique = model.replace(", config: {router_aux_loss_coef: 0}", ""), f", expert_balancing: {how}"
    return parse(
        f"name: experts\nseed: {seed}\nmodel: {model}\ndata: {{source: {source}, validation: 0.1, tokenizer: {stories}, preflight: {{encoding: warn}}}}\n"
        f"batch: {{size: 16, seq_len: 128}}\noptimizer: {{lr: 0.002}}\nstop: {{max_steps: {options.steps}}}\nevaluate: {{rows: 128, baselines: false}}\n"
        f"techniques: {{efficient_attention: {{}}, chunked_loss: {{}}{technique}}}"
    )


def evaluate_with_bias(run: Path, recipe: Recipe, stories: Path) -> float:
    """Validation loss as it were if evaluations routed by the bias."""
    data = prepare(recipe.data, length=recipe.batch.seq_len, seed=recipe.seed, tokenizer=str(stories))
    assert isinstance(data.validation, Rows)
    model_build = load_model(run).build
    for router in routers(model_build.trained[0]):
        router.train()
        router.train = lambda mode=True, router=router: router  # type: ignore[method-assign,assignment,misc]
    return evaluate(model_build, evaluation_batches(data.validation, micro=16, limit=128))[0]


def measure_balance(options: argparse.Namespace, folder: Path) -> list[str]:
    stories, source = options.data / "stories260K-hf", folder / "stories.jsonl"
    text = (options.data / "text/tinystories_train_excerpt.txt").read_text()
    source.write_text("\n".join(json.dumps({"text": part}) for part in re.split(r"\n(?=Once upon a time)", text)))
    lines = [
        "| experts | balancing | load, first 10 steps | load, last 20 steps | idle, last 20 | validation loss | with the bias |",
        "|---|---|---|---|---|---|---|",
    ]
    for experts in options.experts:
        for name in options.balancings:
            found: list[tuple[float, ...]] = []
            for seed in range(options.seeds):
                run = folder / re.sub(r"\W+", "-", f"{experts} {name} {seed}")
                recipe = build_recipe(experts, name, source, stories, options, seed)
                loss = float(train(recipe, out=run)["validation_loss"])
                steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                steps = [step for step in steps if "expert_load" in step]
                means = [
                    statistics.mean(s[key] for s in part)
                    for key, part in (
                        ("expert_load", steps[:10]),
                        ("expert_load", steps[-20:]),
                        ("experts_idle", steps[-20:]),
                    )
                ]
                found.append((*means, loss, evaluate_with_bias(run, recipe, stories) if "bias" in name else loss))
            cells = " | ".join(format_spread([f[n] for f in found], ".4f" if n > 2 else ".2f") for n in range(5))
            lines.append(f"| {experts} | {name} | {cells} |")
            print(lines[-1], flush=True)
    return lines


def format_spread(values: list[float], form: str) -> str:
    return f"{statistics.mean(values):{form}}" + (
        f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--part", choices=("all", "speed", "balance"), default="all")
    parser.add_argument("--experts", type=int, nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--balancings", nargs="+", choices=list(BALANCINGS), default=list(BALANCINGS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/experts.md"))
    options = parser.parse_args()
    install_heap()
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads."
    lines = ["# Experts", "", *(__doc__ or "").strip().splitlines()[4:], "", machine]
    if options.part != "balance":
        how = f"4 layers of width 256, steps of {options.rows} x {options.length} tokens; median (least to most) of {options.repeats}; ratios turn by turn."
        lines += ["", "## Speed", "", how, "", *measure_speed(options)]
    if options.part != "speed":
        how = f"{options.steps} steps of 16 x 128 tokens, 3 layers of width 128; mean (least to most) of {options.seeds} seeds. 1 is an even load."
        with tempfile.TemporaryDirectory() as temporary:
            lines += ["", "## Load", "", how, "", *measure_balance(options, Path(temporary))]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
