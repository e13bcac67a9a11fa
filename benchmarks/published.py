"""Predicted against published: memory and speed of training runs that others measured, from their settings alone.

    python benchmarks/published.py --runs IN.csv --gpus GPUS.csv --out OUT.csv [--jobs 2]

Each row becomes a recipe (model by its sizes, mesh, micro-batch, precision, techniques), planned for its accelerator as `preheat plan` does.
What a row leaves open is filled in by the rules below, the same for all: no row, note or source is looked at. Writes
`id,predicted_gib,low_gib,high_gib,predicted_tok_s,low_tok_s,high_tok_s,seconds,reason` (tokens a second of each accelerator; empty where it
cannot be said, with the reason) and prints errors by source.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import re
import statistics
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
COLUMNS = ("id", "predicted_gib", "low_gib", "high_gib", "predicted_tok_s", "low_tok_s", "high_tok_s", "seconds", "reason")
LENGTH, VOCABULARY = 2048, 50304  # where a row states none

SINCE_2024 = (
    "H200",
    "GH200",
    "B200",
    "GB200",
    "B300",
    "GB300",
    "MI300",
    "MI325",
    "MI355",
)  # rented since, with tools of that time


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
    shares = whole(row, "dp_replicate", 8 if tensor * pipeline > 1 else 1) * whole(row, "dp_shard")
    devices = whole(row, "n_gpus", shares * tensor * pipeline * context)
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
            if (
                stage == 1 or number(row, "zero_stage") is None
            ):  # who trains at such sizes shares out the optimizer's states at least
                made["zero1"] = {}
    if tensor > 1:
        made["tensor_parallel"] = {"degree": tensor, "sequence_parallel": row["sequence_parallel"] != "no"}
        if "chunk" not in row["fused_or_chunked_ce"]:
            made["tensor_parallel"]["rows"] = whole(row, "micro_batch") * whole(row, "seq_len", LENGTH)
    if pipeline > 1:  # of several stages a device, one: as many layers are held, and `answer` shortens the bubble
        made["pipeline_parallel"] = {"degree": pipeline}
    if context > 1:
        made["context_parallel"] = {"degree": context}
    if whole(row, "ep") > 1:
        made["expert_parallel"] = {"degree": whole(row, "ep")}
    return made, devices, rest


def precision_of(row: Row, sharded: bool, devices: int) -> dict[str, Any]:
    """fp8 and fp4 are of products alone. Weights that are sharded are fp32 and gathered in bf16; others are bf16 with fp32 masters."""
    said, adapts = row["precision"], row["method"] in ("lora", "qlora")
    made: dict[str, Any] = {}
    if "pure" in said or "true" in said:
        mode = "bf16_pure"
    elif said.startswith("fp16"):
        mode = "fp16_master"
    else:
        mode = "bf16" if sharded or devices == 1 else "bf16_master"
    if adapts:
        mode = "bf16_weights"
    made["mixed_precision"] = {"mode": mode}
    if in_eights(row) and not kernels_of_their_own(row):
        made["fp8"] = {"recipe": "rowwise" if "row" in said else "tensorwise"}
    return made


def in_eights(row: Row) -> bool:
    return row["precision"].startswith(("fp8", "mxfp8", "nvfp4"))


def kernels_of_their_own(row: Row) -> bool:
    """8 bits with no word of a compiler: what makes the casts is written by hand, within products and norms, and so is attention."""
    return in_eights(row) and not row["compile"]


def compiled(row: Row) -> bool:
    """Casts to 8 bits are fused wherever they are worth it."""
    return row["compile"] == "yes" or (in_eights(row) and row["compile"] != "no")


def techniques_of(row: Row) -> dict[str, Any]:
    said, tunes = row["fused_or_chunked_ce"], row["method"] != "pretrain"
    made: dict[str, Any] = {}
    # Who tunes without a compiler and recomputes nothing has transformers' own norms and, in QLoRA, its authors' dropout: both keep copies. Else norms
    # are one operator: in tools for pretraining, and what a compiler fuses keeps as little (tests/unit/test_compile.py).
    keeps = not compiled(row) and tunes and row["activation_checkpointing"] != "full"
    if "fused" in said or not (keeps or row["compile"] == "no"):
        made["fused_operators"] = {"gate": compiled(row)}
    if "unfused" not in row["attention"] and "eager" not in row["attention"]:
        made["efficient_attention"] = {}
    recompute = {
        "full": {},
        "selective": {"mode": "selective", "products": 2},
        "op": {"mode": "selective", "products": 2},
    }.get(row["activation_checkpointing"])
    if recompute is not None:
        made["activation_checkpointing"] = recompute
    if "chunk" in said or "fused linear" in said or (not said and tunes and not keeps and whole(row, "n_gpus") == 1):
        # Who tunes on one device with memory in mind has the loss in chunks unless it is said otherwise.
        made["chunked_loss"] = {}
    elif compiled(row) and not said and row["gpu"].startswith(SINCE_2024):
        # Their compilers fuse the loss too: logits and their gradients in half precision, about what ours takes for all rows at once.
        made["chunked_loss"] = {"rows": max(1, whole(row, "micro_batch") * whole(row, "seq_len", LENGTH))}
    if row["cpu_offload"] == "activations":
        made["activation_offload"] = {}
    optimizer = row["optimizer"]
    if "paged" in optimizer:  # its states move to the host when the device has no room for them
        made["optimizer_offload"] = {}
    elif "8bit" in optimizer or "8-bit" in optimizer:
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
        if keeps:
            made["lora"]["dropout"] = 0.05
    return made


def recipe_of(row: Row) -> Any:
    """The row as a recipe."""
    from preheat import recipe as recipes

    model, techniques = model_of(row)
    spread, devices, shares = mesh_of(row)
    micro = whole(row, "micro_batch")
    rows = whole(row, "global_batch_seqs", micro * shares * (4 * whole(row, "pp") if whole(row, "pp") > 1 else 1))
    steps = max(1, round(rows / (micro * shares)))
    techniques |= techniques_of(row) | spread | precision_of(row, "fsdp" in spread, devices)
    if "data_parallel" in spread and row["method"] not in ("lora", "qlora"):
        steps = max(steps, 2)  # whoever does not shard weights keeps fp32 gradients in buffers, from one step to the next
    if "pipeline_parallel" in techniques:
        techniques["pipeline_parallel"]["micro_batches"] = max(steps, 2)
        steps = max(steps, 2)
    elif steps > 1:
        techniques["gradient_accumulation"] = {"steps": steps}
    if {"low_bit_adamw", "muon"} & techniques.keys() and techniques["mixed_precision"]["mode"] == "bf16_master":
        techniques["mixed_precision"]["mode"] = "bf16"  # they bring an optimizer of their own
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
LESS = (
    "fused_operators",
    "fp8",
    "chunked_loss",
    "zero1",
    "optimizer_in_backward",
    "low_bit_adamw",
    "activation_offload",
    "efficient_attention",
    "gradient_accumulation",
)
# A run that was measured had room: what a row does not say and what frees memory, in the order in which it is tried.
MORE = (
    {"activation_checkpointing": "{}"},
    {"optimizer_offload": "{}"},
    {"optimizer_in_backward": "{}", "gradient_accumulation": None},
)


def planned(row: Row, recipe: Any, roofline: Any) -> tuple[dict[str, Any], Any]:
    """A plan of the recipe, or of the nearest that is not refused."""
    from dataclasses import replace

    from preheat.engine.build import context_of
    from preheat.models import adapter
    from preheat.planning.layers import observe_few
    from preheat.planning.plan import describe
    from preheat.technique import conflicts_of

    config, by_hand = adapter.configure(recipe, None), kernels_of_their_own(row)
    eights, bits = by_hand, 4 if row["precision"].startswith("nvfp4") else 8
    device = roofline.as_device
    for name in ("", *LESS):
        if name and name not in recipe.techniques:
            continue
        recipe = replace(recipe, techniques={k: t for k, t in recipe.techniques.items() if k != name})
        if name == "fp8":
            eights = True
        problems = conflicts_of(recipe.techniques.values(), context_of(recipe, config, device))
        if not problems:
            seen = observe_few(recipe, vocabulary=None, device=device)
            if eights:
                seen = replace(seen, kernels=Counter({_in_bits(k, bits): n for k, n in seen.kernels.items()}))
            if by_hand and roofline.device.generation == "hopper":
                seen = replace(seen, kernels=Counter({_by_cudnn(k): n for k, n in seen.kernels.items()}))
            seen = replace(seen, idle=seen.idle / whole(row, "vpp"), compiled=compiled(row))
            return describe(recipe, seen, device=device, rates=roofline, rows=None, in_use=0), recipe
    raise Open("; ".join(f"{name}: {words}" for name, words in problems))


def _in_bits(kernel: Any, bits: int) -> Any:
    """A matrix product in fp8, where what computes it so was left out, or in fp4, of which data sheets have twice as many; anything else as it is."""
    from dataclasses import replace

    if not kernel.flops or "attention" in kernel.operator:
        return kernel
    return replace(kernel, dtype="float8", flops=kernel.flops * bits // 8)


def _by_cudnn(kernel: Any) -> Any:
    """Attention on Hopper, which plans have at FlashAttention 2's rate, at 1.5 times that: the least that FlashAttention 3 says of itself (arXiv:2407.08608); cuDNN's is taken to be near."""
    from dataclasses import replace

    return replace(kernel, flops=int(kernel.flops / 1.5)) if "attention" in kernel.operator else kernel


def gib_of(made: Mapping[str, Any], recipe: Any) -> float:
    """What tools report: reserved memory where weights are sharded, which keeps pools a stream, or a pipeline keeps activations of many sizes; else what tensors take."""
    return float(made["reserved_gib"] if {"fsdp", "pipeline_parallel"} & recipe.techniques.keys() else made["allocated_gib"])


def loss_of_others(row: Row, made: Mapping[str, Any], recipe: Any) -> float:
    """GiB by which the peak is higher where the loss over shares of the vocabulary is not ours.

    Ours holds a share's logits in half precision and their chances in fp32. Torch's `loss_parallel` has the logits cast, their log-softmax and
    its gradient in fp32 at once, Megatron-LM's the cast with the gradient in half precision: 10 to 14 bytes a logit, where ours has 6.
    """
    from preheat.models import adapter

    tensor = recipe.techniques.get("tensor_parallel")
    if tensor is None or tensor.rows < whole(row, "micro_batch") * whole(row, "seq_len", LENGTH):
        return 0.0
    vocabulary = adapter.configure(recipe, None).get_text_config().vocab_size
    logits = tensor.rows * vocabulary / tensor.degree / whole(row, "cp")
    return max(made["phases"].get("head and loss", 0.0) + 6 * logits / 2**30 - made["peak_gib"], 0.0)


def second_copy(made: Mapping[str, Any], recipe: Any) -> float:
    """GiB of the copy that torch's `replicate` computes with, where weights are in half precision already: other tools' data parallel has none."""
    kept_half = recipe.techniques["mixed_precision"].mode.endswith("_master") and "data_parallel" in recipe.techniques
    return float(made["overhead"].get("gathered weights", 0.0)) if kept_half else 0.0


def memory_of(row: Row, made: Mapping[str, Any], recipe: Any) -> tuple[float, float, float]:
    """GiB that a row's tool would report: the least, the prediction, the most."""
    gib = gib_of(made, recipe) + loss_of_others(row, made, recipe) - second_copy(made, recipe)
    low, high = (edge / made["peak_gib"] * gib for edge in made["peak_gib_interval"])
    return low, gib, high


def has_room(row: Row, made: Mapping[str, Any], recipe: Any, roofline: Any) -> bool:
    """Whether a device may have held it.

    Where products are in 8 bits by hand so is what they keep, and buffers are made once: there the least of the interval counts, of what tensors take.
    """
    least = made["peak_gib_interval"][0] / made["peak_gib"] * (made["allocated_gib"] - second_copy(made, recipe))
    return made["fits"] or (kernels_of_their_own(row) and least <= roofline.device.memory / 2**30)


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
            kin = [
                a for a in accelerators().values() if name.startswith(a.name)
            ]  # "H100-SXM-96GB" is kin of what begins like it
            if kin:
                made = replace(
                    made, units=kin[-1].units, generation=kin[-1].generation, network=kin[-1].network, fp32=kin[-1].fp32
                )
            if made.memory and made.bandwidth and made.bf16:
                return Roofline(made), True
        if sized is None:
            raise
        return Roofline(replace(accelerator("RTX-3090"), name=name, memory=int(sized[1]) * 2**30)), False


def answer(row: Row, gpus: Mapping[str, Row]) -> dict[str, Any]:
    from dataclasses import replace

    from preheat.errors import PreheatError
    from preheat.recipe import override

    begun = time.monotonic()
    out: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"id": row["id"]}
    try:
        roofline, timed = roofline_of(row["gpu"], gpus)
        recipe = recipe_of(row)
        made, used = planned(row, recipe, roofline)
        for more in MORE:
            if has_room(row, made, used, roofline):
                break
            if more.keys() & recipe.techniques.keys() - {"gradient_accumulation"}:
                continue
            clip = ["optimizer.clip=0"] if "optimizer_in_backward" in more else []
            recipe = override(recipe, *clip, *(f"techniques.{name}={value}" for name, value in more.items() if value))
            recipe = replace(recipe, techniques={k: t for k, t in recipe.techniques.items() if more.get(k, "") is not None})
            with contextlib.suppress(Open):
                made, used = planned(row, recipe, roofline)
        low, gib, high = (min(edge, roofline.device.memory / 2**30) for edge in memory_of(row, made, used))  # it had room
        out |= {"predicted_gib": gib, "low_gib": low, "high_gib": high}
        if timed:
            low, high = (edge / recipe.parallel.devices for edge in made["tokens_per_second_interval"])
            speed = made["tokens_per_second"] / recipe.parallel.devices
            out |= {"predicted_tok_s": speed, "low_tok_s": low, "high_tok_s": high}
        out["made"], out["used"] = made, sorted(used.techniques)
    except (PreheatError, ValueError) as error:
        out["reason"] = str(error).replace("\n", "; ")
    except Exception as error:  # noqa: BLE001 - ours, or a library's, to be mended; a row must not take the others with it
        traceback.print_exc()
        out["reason"] = f"failed: {type(error).__name__}: {error}".replace("\n", "; ")
    out["seconds"] = round(time.monotonic() - begun, 2)
    return out


def errors(rows: Sequence[Row], answers: Mapping[str, Mapping[str, Any]], said: str, measured: str) -> dict[str, list[float]]:
    """Source -> predicted over measured, less one, of the rows that were measured and answered."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        value, held = answers[row["id"]][said], number(row, measured)
        if value != "" and held:
            found[row["source_repo"]].append(float(value) / held - 1)
    return found


def table(rows: Sequence[Row], answers: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, said, measured in (
        ("memory", "predicted_gib", "peak_mem_gib"),
        ("speed", "predicted_tok_s", "tokens_per_s_per_gpu"),
    ):
        found = errors(rows, answers, said, measured)
        asked = sum(number(row, measured) is not None for row in rows)
        every = [e for source in found.values() for e in source]
        if not every:
            continue
        lines += [f"| {name} | rows | median error | nine in ten within | more than 5 % below |", "|---|---|---|---|---|"]
        for source, values in [*sorted(found.items()), (f"**all, of {asked} measured**", every)]:
            size = sorted(abs(e) for e in values)
            lines.append(
                f"| {source} | {len(values)} | {statistics.median(size):.1%} | {size[int(0.9 * (len(size) - 1) + 0.5)]:.0%} | "
                f"{sum(e < -0.05 for e in values)} |"
            )
        lines.append("")
    return "\n".join(lines)


def _work(job: tuple[Row, Mapping[str, Row]]) -> dict[str, Any]:
    return answer(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--gpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with options.runs.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with options.gpus.open(encoding="utf-8") as file:
        gpus = {row["gpu"]: row for row in csv.DictReader(file)}
    answers: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool, options.out.open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for made in pool.imap(_work, [(row, gpus) for row in rows]):
            answers[made["id"]] = made
            writer.writerow(made)
            file.flush()
    print(table(rows, answers))


if __name__ == "__main__":
    main()
