"""Speed and memory of techniques, sharded states by the dry run, and rotary scaling: measurements of cookbooks' claims."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.bench.compare import Contender, run_bench
from preheat.core import Device
from preheat.files import to_plain_data
from preheat.hardware.catalogue import find_accelerator
from preheat.hardware.child_processes import tie_to_parent
from preheat.hardware.rates import LAYOUTS, MOVERS, AttentionRate, MatrixRate, MovedRate, Rates
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.planning.speed.step_time import estimate_step_seconds

__all__ = ["GIB", "LLAMA_1B", "build_recipe", "measure_memory", "measure_rope", "measure_states"]

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
"""Rows of 2,048 tokens on each."""
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
        observation = observe(
            Request(build_recipe("claims", LLAMA, 4 * times, 512, techniques), Device("cpu", "this", 64 * GIB))
        )
        batches[str(times)] = max(observation.peak.values()) / GIB
    with tempfile.TemporaryDirectory() as folder:
        result = run_bench(
            plain, contenders, steps=6, repeats=2, out=Path(folder), say=lambda *progress: print(*progress, flush=True)
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
    """GiB and seconds per step of a 1B Llama by the dry run. Its fake device is a CPU, since fake CUDA tensors need CUDA; sizes are the same."""
    rates = _build_data_sheet(gpu)
    predicted = {}
    for name, techniques in {"plain": "{}", **TECHNIQUES}.items():
        observation = observe(
            Request(build_recipe("claims", LLAMA_1B, max(rows, 8), 2048, techniques), Device("cpu", gpu, 999 * GIB))
        )
        predicted[name] = {
            "gib": max(observation.peak.values()) / GIB,
            "seconds": estimate_step_seconds(observation, rates),
        }
    return predicted


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
    "data_parallel: everything on each device": "{data_parallel: {}}",
    "zero1: states sharded": "{data_parallel: {}, zero1: {}}",
    "fsdp, reshard_after_forward: false: gradients too": "{fsdp: {reshard_after_forward: false}}",
    "fsdp: weights too": "{fsdp: {}}",
}


def measure_states() -> dict[str, Any]:
    """Peak bytes of a device, and of them what is there before the first step and in the update: weights, gradients, states."""
    states: dict[str, Any] = {}
    for name, techniques in SHARED.items():
        for world in (2, 4, 8):
            recipe = build_recipe("claims", LLAMA_1B, world, 2048, techniques)
            recipe = recipes.override(recipe, "techniques.chunked_loss={}", "techniques.activation_checkpointing={}")
            observation = observe(Request(recipe, Device("cpu", "any", 999 * GIB), world=world))
            stored = max(
                sum(phase.get(what, 0.0) for what in ("parameters", "gradients", "optimizer"))
                for phase in observation.categories.values()
            )
            states.setdefault(name, {})[str(world)] = {
                "peak": max(observation.peak.values()) / GIB,
                "kept": stored / GIB,
            }
            print(name, world, states[name][str(world)], flush=True)
    return states


def _train(settings: list[str], out: Path | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = out or Path(folder) / "run"
        command = [sys.executable, "-m", "preheat", "train", "demo", "--json", "--force", "--out", str(run)]
        for setting in ["evaluate={rows: 256}", "checkpoint={}", "sample={}", *settings]:
            command += ["--set", setting]
        process = subprocess.run(tie_to_parent(command), capture_output=True, text=True, check=False)
        if process.returncode:
            raise SystemExit(process.stderr)
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        return {**json.loads(process.stdout), "parameters": plan["parameters"]["total"]}


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
                recipe = recipes.parse(
                    f"name: rope\nmodel: {{path: {model}{config}}}\nbatch: {{size: 8, seq_len: {length}}}\nstop: {{max_steps: 1}}\n"
                    f"techniques: {techniques}\nhardware: {{device: cpu}}"
                )
                built = build(recipe, vocabulary=len(data.tokenizer), device=Device("cpu", "this", 64 * GIB))
                loss, _ = evaluate(built, evaluation_batches(data.validation, micro=4, limit=65536 // length))
                rows.append({"kind": kind, "length": length, "perplexity": math.exp(loss)})
                print(kind, length, f"{math.exp(loss):.1f}", flush=True)
    return {"steps": steps, "rows": rows}
