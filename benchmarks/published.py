"""Predicted against published: memory and speed of training runs that others measured, from their settings alone.

    python benchmarks/published.py --runs IN.csv --gpus GPUS.csv --out OUT.csv [--jobs 2]

Each row becomes a recipe (model by its sizes, mesh, micro-batch, precision, techniques), planned for its accelerator as `preheat plan` does.
What a row leaves open is filled in by the rules below, the same for all; no row, source or note is looked at. Writes
`id,predicted_gib,low_gib,high_gib,predicted_tok_s,low_tok_s,high_tok_s,seconds,reason` (tokens a second of each accelerator; empty where it
cannot be said, with the reason) and prints errors by source.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import re
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
COLUMNS = ("id", "predicted_gib", "low_gib", "high_gib", "predicted_tok_s", "low_tok_s", "high_tok_s", "seconds", "reason")
LENGTH, VOCABULARY = 2048, 50304  # where a row states none


class Open(ValueError):
    """A row does not say enough, or asks for what cannot be planned."""


def number(row: Row, key: str) -> float | None:
    return float(row[key]) if row.get(key, "").strip() else None


def whole(row: Row, key: str, default: int = 1) -> int:
    value = number(row, key)
    return default if value is None else int(value)


def model_of(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """`model` of a recipe and the techniques that give it its feed-forward block.

    Two matrices or three, and a tied head or not: what comes closest to the number of parameters.
    """
    from preheat.models import presets

    unit = 128 * whole(row, "tp") if whole(row, "tp") > 1 else 1  # rows of the vocabulary are shared out in equal parts
    vocabulary = -(-whole(row, "vocab", VOCABULARY) // unit) * unit
    name = re.sub(r"[^a-z0-9]", "", row["model"].lower())
    known = [preset for preset in presets.PRESETS if name and re.sub(r"[^a-z0-9]", "", preset) == name]
    if number(row, "hidden") is None or number(row, "layers") is None:
        if known:
            return {"preset": known[0]}, {}
        size = re.search(r"(\d+(?:\.\d+)?)\s*([BbM])\b", row["model"])
        if size is None:
            raise Open("neither the model's sizes nor a name that is known")
        return {"size": f"{size[1]}{size[2].upper()}", "vocabulary": vocabulary}, {}
    width, layers = whole(row, "hidden"), whole(row, "layers")
    heads = whole(row, "heads", max(1, width // 128))
    kv_heads = whole(row, "kv_heads", heads)
    inner = whole(row, "ffn", 4 * width)
    total = number(row, "params_b")
    attention = 2 * width * width + 2 * width * width * kv_heads // heads

    def parameters(matrices: int, ends: int) -> float:
        return (layers * (attention + matrices * width * inner) + ends * vocabulary * width) / 1e9

    matrices, ends = min(
        ((m, e) for m in (3, 2) for e in (2, 1)),
        key=lambda pair: abs(parameters(*pair) - total) if total else pair != (3, 2),
    )
    if known and total and not 0.8 < parameters(matrices, ends) / total < 1.25:  # experts
        return {"preset": known[0]}, {}
    if total and not 0.8 < parameters(matrices, ends) / total < 1.25:
        raise Open(f"{total} billion parameters, and its sizes make {parameters(matrices, ends):.1f}: of another family")
    made = {
        "family": "llama",
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "feed_forward": inner if matrices == 3 else inner * 2 // 3,
        "vocabulary": vocabulary,
        "tie_embeddings": ends == 1,
        "positions": max(whole(row, "seq_len", LENGTH), LENGTH),
    }
    if width % heads:
        raise Open(f"{heads} heads do not divide a width of {width}")
    return made, {"feed_forward": {"activation": "gelu"}} if matrices == 2 else {}


def mesh_of(row: Row) -> tuple[dict[str, Any], int, int]:
    """Techniques that spread the run, devices, and devices that share out rows."""
    tensor, pipeline, context = (whole(row, key) for key in ("tp", "pp", "cp"))
    devices = whole(row, "n_gpus", whole(row, "dp_replicate") * whole(row, "dp_shard") * tensor * pipeline * context)
    replicate, shard = whole(row, "dp_replicate"), whole(row, "dp_shard")
    stage = whole(row, "zero_stage", 3 if shard > 1 else 0)
    rest = devices // (tensor * pipeline * context)
    if rest * tensor * pipeline * context != devices:
        raise Open(f"tensor {tensor} x pipeline {pipeline} x context {context} does not divide {devices} devices")
    made: dict[str, Any] = {}
    if rest > 1 or context > 1:
        if stage >= 2 and (shard > 1 or replicate == 1):
            made["fsdp"] = {"reshard": stage == 3, "gather": "bf16", "reduce": "last" if pipeline > 1 else "each"}
            if replicate > 1 and shard > 1:
                made["fsdp"]["replicate"] = replicate
            if row["cpu_offload"] == "params":
                made["fsdp"]["offload"] = True
        else:
            made["data_parallel"] = {}
            if stage == 1 or (number(row, "zero_stage") is None and tensor * pipeline > 1):
                made["zero1"] = {}
    if tensor > 1:
        made["tensor_parallel"] = {"degree": tensor, "sequence_parallel": row["sequence_parallel"] != "no"}
    if pipeline > 1:
        layers = whole(row, "layers", 10**6)
        stages = next(n for n in range(whole(row, "vpp"), 0, -1) if n * pipeline <= layers)
        made["pipeline_parallel"] = {"degree": pipeline, "schedule": "interleaved" if stages > 1 else "1f1b"}
        if stages > 1:
            made["pipeline_parallel"]["stages"] = stages
    if context > 1:
        made["context_parallel"] = {"degree": context}
    if whole(row, "ep") > 1:
        made["expert_parallel"] = {"degree": whole(row, "ep")}
    return made, devices, rest


def precision_of(row: Row, sharded: bool) -> dict[str, Any]:
    """fp8 and fp4 are of products alone. Weights that are sharded are fp32 and gathered in bf16; others are bf16 with fp32 masters."""
    said, adapts = row["precision"], row["method"] in ("lora", "qlora")
    made: dict[str, Any] = {}
    if "pure" in said or "true" in said:
        mode = "bf16_pure"
    elif said.startswith("fp16"):
        mode = "fp16_master"
    else:
        mode = "bf16" if sharded or whole(row, "n_gpus") == 1 else "bf16_master"
    if adapts:
        mode = "bf16_weights"
    made["mixed_precision"] = {"mode": mode}
    if said.startswith(("fp8", "mxfp8", "nvfp4")):
        made["fp8"] = {"recipe": "rowwise" if "row" in said else "tensorwise"}
    return made


def techniques_of(row: Row) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "unfused" not in row["attention"] and "eager" not in row["attention"]:
        made["efficient_attention"] = {}
    recompute = {
        "full": {},
        "selective": {"mode": "selective", "products": 2},
        "op": {"mode": "selective", "products": 2},
    }.get(row["activation_checkpointing"])
    if recompute is not None:
        made["activation_checkpointing"] = recompute
    if row["compile"] == "yes":
        made["compile"] = {}
    if "chunk" in row["fused_or_chunked_ce"] or "fused linear" in row["fused_or_chunked_ce"]:
        made["chunked_loss"] = {}
    if row["cpu_offload"] == "activations":
        made["activation_offload"] = {}
    optimizer = row["optimizer"]
    if "8bit" in optimizer or "8-bit" in optimizer:
        made["low_bit_adamw"] = {"bits": 8}
    elif "in backward" in optimizer:
        made["optimizer_in_backward"] = {}
    elif "muon" in optimizer:
        made["muon"] = {}
    elif "int8-weights" in optimizer:
        raise Open("weights of 8 bits that are trained: no technique has them")
    if row["method"] in ("lora", "qlora"):
        made["lora"] = {"rank": whole(row, "lora_rank", 16)}
    if row["method"] == "qlora":
        made["nf4"] = {}
    return made


def recipe_of(row: Row) -> Any:
    """The row as a recipe."""
    from preheat import recipe as recipes

    model, techniques = model_of(row)
    spread, devices, shares = mesh_of(row)
    micro = whole(row, "micro_batch")
    rows = whole(row, "global_batch_seqs", micro * shares * (4 * whole(row, "pp") if whole(row, "pp") > 1 else 1))
    steps = max(1, round(rows / (micro * shares)))
    techniques |= techniques_of(row) | spread | precision_of(row, "fsdp" in spread)
    if "pipeline_parallel" in techniques:
        techniques["pipeline_parallel"]["micro_batches"] = max(steps, 2)
        steps = max(steps, 2)
    elif steps > 1:
        techniques["gradient_accumulation"] = {"steps": steps}
    if "mixed_precision" in techniques and {"low_bit_adamw", "muon"} & techniques.keys():
        if techniques["mixed_precision"]["mode"] == "bf16_master":
            techniques["mixed_precision"]["mode"] = "bf16"
    values = {
        "name": "published",
        "model": model,
        "batch": {"size": micro * shares * steps, "length": whole(row, "seq_len", LENGTH)},
        "stop": {"steps": 1},
        "optimizer": {"clip": 0.0 if "optimizer_in_backward" in techniques else 1.0},
        "parallel": {"devices": devices},
        "techniques": techniques,
    }
    return recipes.parse(json.dumps(values))  # JSON is YAML


# What a plan refuses together is left out in this order, until the rest can be planned: each changes less than what stands behind it.
LESS = ("compile", "fp8", "chunked_loss", "zero1", "optimizer_in_backward", "low_bit_adamw", "activation_offload", "efficient_attention", "gradient_accumulation")


def planned(recipe: Any, roofline: Any) -> tuple[dict[str, Any], Any]:
    """A plan of the recipe, or of the nearest that is not refused."""
    from dataclasses import replace

    from preheat.engine.build import context_of
    from preheat.models import adapter
    from preheat.planning.plan import plan
    from preheat.technique import conflicts_of

    device = roofline.as_device
    vocabulary = None
    config = adapter.configure(recipe, vocabulary)
    for name in (None, *LESS):
        if name is not None:
            if name not in recipe.techniques:
                continue
            recipe = replace(recipe, techniques={k: t for k, t in recipe.techniques.items() if k != name})
        context = context_of(recipe, config, device)
        problems = conflicts_of(recipe.techniques.values(), context)
        if not problems:
            return plan(recipe, vocabulary=vocabulary, device=device, rates=roofline), recipe
    raise Open("; ".join(f"{name}: {words}" for name, words in problems))


def roofline_of(name: str, gpus: Mapping[str, Row]) -> tuple[Any, bool]:
    """An accelerator of the catalogue, else of the table of GPUS, else one of which the memory alone is known: (it, whether its speed is known)."""
    from dataclasses import replace

    from preheat.errors import RecipeError
    from preheat.hardware.catalogue import Accelerator, accelerator, accelerators
    from preheat.planning.roofline import Roofline

    try:
        return Roofline.of(name), True
    except RecipeError:
        sized = re.search(r"(\d+) ?GB", name)
        if name in gpus:
            row = gpus[name]

            def rate(key: str, unit: float) -> float | None:
                value = number(row, key)
                return None if value is None else value * unit

            bf16, achieved = rate("bf16_dense_tflops_peak", 1e12), rate("achieved_matmul_tflops", 1e12)
            made = Accelerator(
                name=name,
                memory=int(float(row["mem_gib"])) * 2**30 if row["mem_gib"] else None,
                bandwidth=rate("hbm_gb_s", 1e9),
                bf16=bf16,
                fp16=bf16,
                fp32=None,
                fp8=rate("fp8_dense_tflops_peak", 1e12),
                achieved_bf16=achieved,
                achieved_fp8=rate("achieved_fp8_matmul_tflops", 1e12),
                link=rate("nvlink_gb_s", 1e9),
                network=None,
            )
            kin = [a for a in accelerators().values() if name.startswith(a.name)]  # "H100-SXM-96GB" is kin of what begins like it
            if kin:
                made = replace(made, units=kin[-1].units, generation=kin[-1].generation, network=kin[-1].network, fp32=kin[-1].fp32)
            if made.memory and made.bandwidth and made.bf16:
                return Roofline(made), True
        if sized is None:
            raise
        return Roofline(replace(accelerator("RTX-3090"), name=name, memory=int(sized[1]) * 2**30)), False


def answer(row: Row, gpus: Mapping[str, Row]) -> dict[str, Any]:
    from dataclasses import replace

    from preheat.errors import PreheatError

    begun = time.monotonic()
    out: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"id": row["id"]}
    try:
        roofline, timed = roofline_of(row["gpu"], gpus)
        recipe = recipe_of(row)
        made, used = planned(recipe, roofline)
        if not row["activation_checkpointing"] and made["allocated_gib"] > made["available_gib"]:
            full = replace(recipe, techniques={**recipe.techniques, "activation_checkpointing": _full()})
            made, used = planned(full, roofline)
        out["predicted_gib"] = made["reserved_gib"]
        if timed:
            out["predicted_tok_s"] = made["tokens_per_second"] / recipe.parallel.devices
        out["made"], out["used"] = made, sorted(used.techniques)
    except (PreheatError, ValueError) as error:
        out["reason"] = str(error).replace("\n", "; ")
    out["seconds"] = round(time.monotonic() - begun, 2)
    return out


def _full() -> Any:
    from preheat.technique import registry

    return registry()["activation_checkpointing"]()
