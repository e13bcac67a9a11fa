"""A row of published runs as a recipe: the model by its sizes, mesh, micro-batch, precision, techniques.

What a row leaves open is what its trainer does (trainers.py), else what these rules say, the same for all rows.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from trainers import Row, find_trainer

__all__ = [
    "LENGTH",
    "Open",
    "add_time_settings",
    "is_compiled",
    "fill_defaults",
    "is_kept_as_transformers",
    "is_by_transformer_engine",
    "is_underspecified",
    "build_mesh",
    "count_micro_batches",
    "parse_number",
    "build_recipe",
    "parse_integer",
]

LENGTH, VOCABULARY = 2048, 50304  # where a row states none
_SHORTER = r"variable|shorter|not \d+ tokens"

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
    "RTX-4070Ti-SUPER",
    "RTX-4080-SUPER",
    "RTX-50",
)  # rented since, with tools of that time


class Open(ValueError):
    """A row does not say enough, or asks for what cannot be planned."""


def parse_number(row: Row, key: str) -> float | None:
    return float(row[key]) if row.get(key, "").strip() else None


def parse_integer(row: Row, key: str, default: int = 1) -> int:
    value = parse_number(row, key)
    return default if value is None else int(value)


def fill_defaults(row: Row) -> Row:
    """Returns the row with what its trainer does by default, and with what its notes say against its columns.

    Alpaca's rows, one by one, are cut at 512 tokens by its publishers (stanford_alpaca's train.py): one row, +132 % without it.
    litgpt's script for pretraining has four sequences and bf16 throughout (see trainers.py): two rows, -27 % without it.
    """
    trainer = find_trainer(row)
    changes: dict[str, str] = {}
    if row["method"] == "pretrain" and not any(
        row[key] for key in ("micro_batch", "seq_len", "global_batch_seqs", "precision")
    ):
        changes |= {"micro_batch": "4", "precision": "bf16 (true)"}
    stages, rows = parse_integer(row, "pp"), parse_number(row, "global_batch_seqs")
    if trainer.one_micro_batch_per_stage and stages > 1 and not row["micro_batch"] and rows:
        changes["micro_batch"] = str(max(1, round(rows / (build_mesh(row)[2] * stages))))
    if "Alpaca" in row["notes"] and row["seq_len"] and re.search(_SHORTER, row["notes"]):
        changes["seq_len"] = str(min(parse_integer(row, "seq_len"), 512))
    if not row["activation_checkpointing"]:
        if "no checkpointing" in row["notes"]:
            changes["activation_checkpointing"] = "none"
        elif row["method"] in trainer.recomputes:
            changes["activation_checkpointing"] = "full"
    return {**row, **changes}


def build_model(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """`model` of a recipe and the techniques that give it its feed-forward block.

    Two matrices or three, and a tied head or not: what comes closest to the number of parameters.
    """
    from preheat.models import presets

    unit = (
        128 * parse_integer(row, "tp") if parse_integer(row, "tp") > 1 else 1
    )  # rows of the vocabulary are split evenly
    vocabulary = -(-parse_integer(row, "vocab", VOCABULARY) // unit) * unit
    # Presets of a family of one size are named without it: DeepSeek-V3-671B.
    names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in (row["model"], re.sub(r"-\d+B$", "", row["model"]))]
    known = [preset for preset in presets.PRESETS if re.sub(r"[^a-z0-9]", "", preset) in names]
    if parse_number(row, "hidden") is None or parse_number(row, "layers") is None:
        if known:
            return {"preset": known[0]}, {}
        size = re.search(r"(\d+(?:\.\d+)?)\s*([BbM])\b", re.sub(r"(\d)b(\d)\b", r"\1.\2b", row["model"]))  # 7b1: 7.1b
        if size is None:
            raise Open("neither the model's sizes nor a name that is known")
        return {"size": f"{size[1]}{size[2].upper()}", "vocab_size": vocabulary}, {}
    width, layers = parse_integer(row, "hidden"), parse_integer(row, "layers")
    heads = parse_integer(row, "heads", max(1, width // 128))
    kv_heads = parse_integer(row, "kv_heads", heads)
    inner = parse_integer(row, "ffn", 4 * width)
    total = parse_number(row, "params_b")
    attention = 2 * width * width + 2 * width * width * kv_heads // heads

    def parse_parameters(matrices: int, ends: int) -> float:
        return (layers * (attention + matrices * width * inner) + ends * vocabulary * width) / 1e9

    matrices, ends = min(
        ((m, e) for m in (3, 2) for e in (2, 1)),
        key=lambda pair: abs(parse_parameters(*pair) - total) if total else pair != (3, 2),
    )
    if known and total and not 0.8 < parse_parameters(matrices, ends) / total < 1.25:  # experts
        return {"preset": known[0]}, {}
    if total and not 0.8 < parse_parameters(matrices, ends) / total < 1.25:
        raise Open(
            f"{total} billion parameters, and its sizes make {parse_parameters(matrices, ends):.1f}: of another family"
        )
    made = {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": inner if matrices == 3 else inner * 2 // 3,
        "vocab_size": vocabulary,
        "tie_embeddings": ends == 1,
        "max_positions": max(parse_integer(row, "seq_len", LENGTH), LENGTH),
    }
    if width % heads:
        raise Open(f"{heads} heads do not divide a width of {width}")
    return made, {"feed_forward": {"activation": "gelu"}} if matrices == 2 else {}


def build_mesh(row: Row) -> tuple[dict[str, Any], int, int]:
    """Returns the techniques that spread the run, its devices, and its data-parallel devices."""
    tensor, pipeline, context = (parse_integer(row, key) for key in ("tp", "pp", "cp"))
    shares = parse_integer(row, "dp_replicate", 8 if tensor * pipeline > 1 else 1) * parse_integer(row, "dp_shard")
    devices = parse_integer(row, "n_gpus", shares * tensor * pipeline * context)
    replicate, shard = parse_integer(row, "dp_replicate"), parse_integer(row, "dp_shard")
    stage = parse_integer(row, "zero_stage", 3 if shard > 1 else 0)
    rest = devices // (tensor * pipeline * context)
    if rest * tensor * pipeline * context != devices:
        raise Open(f"tensor {tensor} x pipeline {pipeline} x context {context} does not divide {devices} devices")
    made: dict[str, Any] = {}
    if rest > 1 or context > 1:
        if stage >= 2 and (shard > 1 or replicate == 1):
            made["fsdp"] = {
                "reshard_after_forward": stage == 3,
                "gather": "bf16",
                "reduce": "last" if pipeline > 1 else "each",
            }
            if replicate > 1 and shard > 1:
                made["fsdp"]["replicate"] = replicate
            if row["cpu_offload"] == "params" or (
                row["cpu_offload"] == "optimizer" and find_trainer(row).host_optimizer
            ):
                made["fsdp"]["offload"] = True
        else:
            made["data_parallel"] = {}
            if (
                stage == 1 or parse_number(row, "zero_stage") is None
            ):  # who trains at such sizes shares out the optimizer's states at least
                made["zero1"] = {}
    if tensor > 1:
        made["tensor_parallel"] = {"degree": tensor, "sequence_parallel": row["sequence_parallel"] != "no"}
        again = row["activation_checkpointing"] in ("", "none") and row["method"] not in ("lora", "qlora")
        made["tensor_parallel"]["regather"] = (
            again and find_trainer(row).gathers_again and row["sequence_parallel"] == "yes"
        )
        if "chunk" not in row["fused_or_chunked_ce"]:
            made["tensor_parallel"]["rows"] = parse_integer(row, "micro_batch") * parse_integer(row, "seq_len", LENGTH)
    if pipeline > 1:  # of several stages a device, one: as many layers are held, and `answer` shortens the bubble
        made["pipeline_parallel"] = {"degree": pipeline}
    if context > 1:
        made["context_parallel"] = {"degree": context}
    if parse_integer(row, "ep") > 1:
        made["expert_parallel"] = {"degree": parse_integer(row, "ep")}
    return made, devices, rest


def build_precision(row: Row, sharded: bool, devices: int) -> dict[str, Any]:
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
    if row["method"] == "qlora" and find_trainer(row).upcasts_rest and not said.startswith("fp16"):
        made["mixed_precision"] = {"mode": "bf16", "frozen": "fp32"}
    if is_in_eights(row) and not is_by_transformer_engine(row):
        made["fp8"] = {"recipe": "rowwise" if "row" in said else "tensorwise"}
    return made


def is_in_eights(row: Row) -> bool:
    return row["precision"].startswith(("fp8", "mxfp8", "nvfp4"))


def is_by_transformer_engine(row: Row) -> bool:
    """8 bits with no word of a compiler: casts are part of handwritten matmuls and norms, and attention is handwritten too."""
    return is_in_eights(row) and find_trainer(row).transformer_engine and not row["compile"]


def is_compiled(row: Row) -> bool:
    """Casts to 8 bits are fused wherever they are worth it."""
    return row["compile"] == "yes" or (is_in_eights(row) and row["compile"] != "no")


def add_time_settings(row: Row, recipe: Any) -> Any:
    """Returns the recipe with what costs time and no memory.

    These are transformers' norms, gate and rotary embedding, which stay torch's operators if layers are recomputed, and
    the mean length of padded rows, of which the longest decide the memory.
    """
    trainer, techniques = find_trainer(row), dict(recipe.techniques)
    by_operators = row["method"] != "pretrain" and not trainer.fused_norms and not is_compiled(row)
    if by_operators and "fused" not in row["fused_or_chunked_ce"]:
        techniques.pop("fused_operators", None)
    batch = recipe.batch
    if trainer.mean_length and re.search(_SHORTER, row["notes"]):
        batch = replace(batch, seq_len=trainer.mean_length)
    return replace(recipe, techniques=techniques, batch=batch)


def is_kept_as_transformers(row: Row) -> bool:
    """Who tunes without a compiler and recomputes nothing has transformers' own norms and, with adapters, dropout: both keep copies.

    Else norms are one operator: in tools for pretraining, and what a compiler fuses keeps as little (tests/unit/techniques/test_compile.py).
    """
    tunes = row["method"] != "pretrain" and not find_trainer(row).fused_norms
    return tunes and not is_compiled(row) and row["activation_checkpointing"] != "full"


def build_techniques(row: Row, layer_norm: bool) -> dict[str, Any]:
    """Returns the techniques of one device; `layer_norm`: norms are torch's LayerNorm, which is one operator everywhere."""
    said, tunes, keeps = row["fused_or_chunked_ce"], row["method"] != "pretrain", is_kept_as_transformers(row)
    trainer = find_trainer(row)
    made: dict[str, Any] = {}
    if "fused" in said or (row["compile"] != "no" and (layer_norm or not keeps)):
        made["fused_operators"] = {"gate": is_compiled(row)}
    if "unfused" not in row["attention"] and "eager" not in row["attention"]:
        # cuDNN's attention is torch's choice on Hopper since 2.9, later than these runs.
        made["efficient_attention"] = {"kernel": "flash"}
    recompute = {
        "full": {},
        "selective": {"mode": "selective", "products": 2},
        "op": {"mode": "selective", "products": 2},
    }.get(row["activation_checkpointing"])
    if recompute is not None:
        made["activation_checkpointing"] = recompute
    at_once = max(1, parse_integer(row, "micro_batch") * parse_integer(row, "seq_len", LENGTH))
    to_host = "chunk" in said and row["cpu_offload"] == "activations"  # what of logits is kept goes too
    if "fused linear" in said or to_host:
        made["chunked_loss"] = {"rows": 512}
    elif tunes and not said and trainer.loss_rows:
        made["chunked_loss"] = {"rows": trainer.loss_rows}
    elif "chunk" in said or (
        not said and parse_integer(row, "tp") == 1 and (trainer.loss_in_place or (tunes and trainer.chunks_logits))
    ):
        made["chunked_loss"] = {"rows": at_once}  # and more, see `loss_of_others`
    elif is_compiled(row) and not said and row["gpu"].startswith(SINCE_2024):
        # Their compilers fuse the loss too: logits and their gradients in half precision, about what ours takes for all rows at once.
        made["chunked_loss"] = {"rows": at_once}
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
        made["lora"] = {"rank": parse_integer(row, "lora_rank", 16)} | find_adapted_layers(row)
    if row["method"] == "qlora":
        made["nf4"] = {}
    if "lora" in made and keeps and trainer.adapter_dropout:
        made["lora"]["dropout"] = trainer.adapter_dropout
    return made


def is_underspecified(row: Row) -> bool:
    """Whether rows, lengths, optimizer or devices are not said, or are said to be fewer than the row's columns have them."""
    said = all(row[key] for key in ("micro_batch", "seq_len", "optimizer", "n_gpus"))
    return not said or bool(re.search(_SHORTER, row["notes"]))


_MAPS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "mlp": r"mlp\.\w+_proj|mlp\.fc\d"}


def find_adapted_layers(row: Row) -> dict[str, str]:
    """Returns the layers that adapters act on: those of the row's notes ("LoRA on q,v"), else the trainer's."""
    trainer, adapted = find_trainer(row), re.search(r"LoRA on (all|[a-z]+(?:,[a-z]+)*)\b", row["notes"])
    default = "all" if row["model"].startswith(trainer.adapts_all) else trainer.adapts[row["method"]]
    layers = adapted[1] if adapted else default
    patterns = [_MAPS[layer] for layer in layers.split(",") if layer in _MAPS]
    return {"target_modules": rf".*\.({'|'.join(patterns)})"} if patterns else {}


def count_micro_batches(row: Row, shares: int) -> int:
    """Returns the micro-batches of a step on each of so many data-parallel devices."""
    micro = parse_integer(row, "micro_batch")
    rows = parse_integer(
        row, "global_batch_seqs", micro * shares * (4 * parse_integer(row, "pp") if parse_integer(row, "pp") > 1 else 1)
    )
    return max(1, round(rows / (micro * shares)))


def build_recipe(row: Row, *, kept_sums: bool = True) -> Any:
    """Returns the row as a recipe.

    Trainers that do not shard weights keep sums of gradients in buffers from one step to the next. Ours are there from the second micro-batch, so
    `kept_sums` adds one to a step that has a single one: right for memory, not for speed.
    """
    from preheat import recipe as recipes

    model, techniques = build_model(row)
    spread, devices, shares = build_mesh(row)
    micro = parse_integer(row, "micro_batch")
    steps = count_micro_batches(row, shares)
    techniques |= (
        build_techniques(row, "feed_forward" in techniques) | spread | build_precision(row, "fsdp" in spread, devices)
    )
    if "data_parallel" in spread and row["method"] not in ("lora", "qlora") and kept_sums:
        steps = max(steps, 1 + parse_integer(row, "pp"))  # beside what a pipeline has on its way
    if "pipeline_parallel" in techniques:
        steps = max(steps, 2)
        techniques["pipeline_parallel"]["micro_batches"] = steps
    elif steps > 1:
        techniques["gradient_accumulation"] = {"steps": steps}
    if {"low_bit_adamw", "muon"} & techniques.keys() and techniques["mixed_precision"]["mode"] == "bf16_master":
        techniques["mixed_precision"]["mode"] = "bf16"  # they bring an optimizer of their own
    values = {
        "name": "published",
        "model": model,
        "batch": {"size": micro * shares * steps, "seq_len": parse_integer(row, "seq_len", LENGTH)},
        "stop": {"max_steps": 1},
        "optimizer": {"max_grad_norm": 0.0 if "optimizer_in_backward" in techniques else 1.0},
        "parallel": {"devices": devices},
        "techniques": techniques,
    }
    return recipes.parse(json.dumps(values))  # JSON is YAML
