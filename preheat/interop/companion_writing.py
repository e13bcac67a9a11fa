"""Writes the files that are used beside a trainer's: DeepSpeed's JSON and accelerate's YAML.

They say how the work is split across devices, the precision, the batch (DeepSpeed) and what is offloaded; the model,
the data and the optimizer are in the trainer's file. Names are those of accelerate 1.15 and DeepSpeed 0.19.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from preheat.interop.settings import Settings
from preheat.interop.writing import Draft, Written
from preheat.recipe import Recipe

__all__ = ["ACCELERATE_VERSION", "DEEPSPEED_VERSION", "write_accelerate", "write_deepspeed"]

ACCELERATE_VERSION, DEEPSPEED_VERSION = "1.15", "0.19"
_STAGES = {None: 0, "optimizer": 1, "gradients": 2, "full": 3}
_DEVICES_PER_HOST = 8
_SPLIT = (
    *("sharding", "offload", "replicas", "deferred_reduction", "half_reduction", "tensor_parallel", "context_parallel"),
    *("pipeline_parallel", "pipeline_schedule", "expert_parallel", "sequence_parallel"),
)
_BATCH = ("micro_batch", "accumulation", "max_grad_norm")
_PARALLELISM = (
    *("parallel", "techniques.fsdp", "techniques.data_parallel", "techniques.zero1", "techniques.tensor_parallel"),
    *("techniques.context_parallel", "techniques.pipeline_parallel", "techniques.expert_parallel"),
)
_REST = (
    "the model, the data, the optimizer and all other keys are in the trainer's file: preheat convert RECIPE --to trl"
)


def _begin(recipe: Recipe, title: str, names: tuple[str, ...]) -> Draft:
    """Returns a draft in which only these fields of the settings are the file's own."""
    draft = Draft(recipe, title, {}, companion=True)
    draft.agree(*(field.name for field in dataclasses.fields(Settings) if field.name not in names))
    draft.note(_REST)
    return draft


def write_deepspeed(recipe: Recipe, folder: Path = Path()) -> Written:
    """Writes DeepSpeed's JSON: batch, precision, ZeRO and offloading.

    Args:
        folder: of the file, from where the run is started.

    Raises:
        RecipeError: the batch of one device is not known.
    """
    draft = _begin(recipe, "DeepSpeed", (*_SPLIT, *_BATCH))
    settings = draft.settings
    draft.say("train_micro_batch_size_per_gpu", "micro_batch", always=True)
    draft.say("gradient_accumulation_steps", "accumulation", always=True)
    draft.say("gradient_clipping", "max_grad_norm", always=True)
    for name in ("bf16", "fp16"):
        if settings.precision == name:
            draft.put(f"{name}.enabled", True)
    draft.say("zero_optimization.stage", "sharding", value=_STAGES[settings.sharding], always=True)
    if settings.offload:
        draft.say("zero_optimization.offload_optimizer.device", "offload", value="cpu")
        if settings.sharding == "full":
            draft.put("zero_optimization.offload_param.device", "cpu")
    if settings.tensor_parallel > 1:
        draft.say("tensor_parallel.autotp_size", "tensor_parallel")
    draft.start.append("preheat plan TRAINER.yaml --deepspeed {file}, or deepspeed: {file} in the trainer's file")
    return draft.finish(
        (*_PARALLELISM, "batch.size", "optimizer.max_grad_norm", "techniques.gradient_accumulation.steps")
    )


def write_accelerate(recipe: Recipe, folder: Path = Path()) -> Written:
    """Writes accelerate's YAML: the devices, how they share the work, and the precision.

    Args:
        folder: of the file, from where the run is started.

    Raises:
        RecipeError: the number of devices is not known.
    """
    draft = _begin(recipe, "accelerate", _SPLIT)
    settings, world = draft.settings, draft.settings.world
    draft.put("compute_environment", "LOCAL_MACHINE")
    fsdp = settings.sharding in ("full", "gradients")
    degrees = _list_degrees(settings)
    kind = "FSDP" if fsdp else "DEEPSPEED" if settings.sharding else "MULTI_GPU" if world > 1 else "NO"
    draft.put("distributed_type", kind)
    if fsdp:
        draft.put("fsdp_config.fsdp_version", 2)
        draft.put("fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        draft.say("fsdp_config.fsdp_reshard_after_forward", "sharding", value=settings.sharding == "full")
        draft.say("fsdp_config.fsdp_offload_params", "offload", always=True)
        draft.put("fsdp_config.fsdp_state_dict_type", "FULL_STATE_DICT")
    elif settings.sharding:
        draft.say("deepspeed_config.zero_stage", "sharding", value=1)
    for name, (key, degree) in degrees.items() if fsdp else ():  # accelerate has them beside FSDP only
        draft.put(f"parallelism_config.parallelism_config_{key}_size", degree)
        if name in _SPLIT:
            draft.agree(name)
    if not fsdp:
        for name in ("tensor_parallel", "context_parallel"):
            draft.explain(f"techniques.{name}", "accelerate has it beside FSDP only: add techniques.fsdp")
    draft.put("mixed_precision", settings.precision if settings.precision != "fp32" else "no")
    draft.put("num_machines", max(math.ceil(world / _DEVICES_PER_HOST), 1))
    draft.put("machine_rank", 0)
    draft.put("num_processes", world)
    draft.start.append("accelerate launch --config_file {file} SCRIPT, or trl sft --accelerate_config {file} ...")
    return draft.finish(_PARALLELISM)


def _list_degrees(settings: Settings) -> dict[str, tuple[str, Any]]:
    """Returns the degrees above 1: field of the settings -> accelerate's name of it, and the degree."""
    degrees = {
        "tensor_parallel": ("tp", settings.tensor_parallel),
        "context_parallel": ("cp", settings.context_parallel),
        "replicas": ("dp_replicate", settings.replicas),
    }
    degrees = {name: pair for name, pair in degrees.items() if pair[1] > 1}
    if degrees and settings.sharding in ("full", "gradients"):
        degrees["shards"] = ("dp_shard", max(settings.ranks // settings.replicas, 1))
    return degrees
