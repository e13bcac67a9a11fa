"""Writes the arguments of transformers' Trainer, which its descendants share. Names are those of transformers 5.23;
`Draft.spelling` has a trainer's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat.interop.recipe_settings import list_expert_stacks
from preheat.interop.settings import Settings
from preheat.interop.writing import Draft

__all__ = [
    "ZERO1",
    "is_file",
    "list_targets",
    "write_batch",
    "write_fsdp",
    "write_kernels",
    "write_optimizer",
    "write_precision",
    "write_saving",
    "write_schedule",
    "write_target_parameters",
    "write_warmup",
    "write_zero1",
]

_DATA_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".arrow")
_TRACKERS = ("trackio", "wandb", "mlflow", "tensorboard", "swanlab")
ZERO1: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1},
}
"""DeepSpeed's configuration for sharded optimizer states; `auto` is as the trainer's own keys say."""


def is_file(source: object) -> bool:
    """Returns True if a source is a file or folder, not a dataset of the hub.

    Example:
        >>> is_file("rows.jsonl"), is_file("owner/rows")
        (True, False)
    """
    name = str(source)
    plain = (
        name.startswith((".", "/", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or Path(name).suffix in _DATA_FILES
    )
    return plain or Path(name).exists()


def write_batch(draft: Draft) -> None:
    """Writes the micro-batch, accumulation and length of the run."""
    draft.say("per_device_train_batch_size", "micro_batch", always=True)
    draft.say("gradient_accumulation_steps", "accumulation", always=True)
    if draft.settings.max_steps:
        draft.say("max_steps", "max_steps")
        draft.explain("stop.epochs", "max_steps comes first in this trainer, which then reads no epochs")
    elif draft.settings.epochs:
        draft.say("num_train_epochs", "epochs", always=True)


def write_optimizer(draft: Draft, *, others: Mapping[str, str] | None = None) -> None:
    """Writes the optimizer and its numbers.

    Args:
        others: optimizers that the trainer has beside those of transformers -> their names there.
    """
    settings = draft.settings
    names = {"adamw_torch_fused": "adamw_torch_fused", "adafactor": "adafactor", "lion_32bit": "lion_32bit"}
    names |= {"adamw_torch_8bit": "adamw_torch_8bit", "adamw_torch_4bit": "adamw_torch_4bit"} | dict(others or {})
    if settings.optimizer in names and not settings.apollo:
        draft.say("optim", "optimizer", value=names[settings.optimizer])
    if draft.recipe.optimizer.lr != "auto":
        draft.say("learning_rate", "learning_rate", always=True)
    for key, number in (("adam_beta1", 0), ("adam_beta2", 1)):
        same = draft.said.betas[number] == settings.betas[number]
        draft.put(key, settings.betas[number], default=same)
    draft.agree("betas")
    draft.say("adam_epsilon", "eps")
    draft.say("weight_decay", "weight_decay")
    draft.say("max_grad_norm", "max_grad_norm")


def write_schedule(draft: Draft, *, fraction: str = "warmup_steps") -> None:
    """Writes the schedule of the learning rate.

    Args:
        fraction: the key of a warmup that is a fraction of the run; transformers 5 takes it in `warmup_steps`.
    """
    settings = draft.settings
    names = {"linear": "linear", "constant": "constant_with_warmup" if settings.warmup_ratio else "constant"}
    if settings.schedule == "cosine":
        name = "cosine_with_min_lr" if settings.min_lr_ratio else "cosine"
        draft.say("lr_scheduler_type", "schedule", value=name, always=bool(settings.min_lr_ratio))
        if settings.min_lr_ratio:
            draft.say("lr_scheduler_kwargs.min_lr_rate", "min_lr_ratio")
    elif settings.decay_steps:
        draft.say("lr_scheduler_type", "schedule", value="warmup_stable_decay")
        draft.say("lr_scheduler_kwargs.num_decay_steps", "decay_steps")
        draft.put("lr_scheduler_kwargs.decay_type", "linear")
        draft.say("lr_scheduler_kwargs.min_lr_ratio", "min_lr_ratio", always=True)
    elif settings.schedule == "wsd":
        draft.explain("schedule", "the decay of wsd is a whole number of steps of stop.max_steps, which is not so here")
    elif settings.schedule in names:
        draft.say("lr_scheduler_type", "schedule", value=names[settings.schedule])
    write_warmup(draft, fraction)


def write_warmup(draft: Draft, fraction: str) -> None:
    """Writes the warmup: in steps if the run's are known and it takes whole ones."""
    ratio, steps = draft.settings.warmup_ratio, draft.settings.max_steps
    draft.agree("warmup_steps")
    whole = round(ratio * steps) if steps else 0
    if steps and math.isclose(whole / steps, ratio):
        draft.say("warmup_steps", "warmup_ratio", value=whole)
    else:
        draft.say(fraction if ratio else "warmup_steps", "warmup_ratio", value=ratio or 0)


def write_precision(draft: Draft, pure: tuple[str, object] | None) -> None:
    """Writes the precision of matmuls and weights.

    Args:
        pure: the key and value for weights in bf16, if the trainer has one.
    """
    settings = draft.settings
    if settings.precision == "fp16":
        draft.say("fp16", "precision", value=True)
        draft.put("bf16", False)
    else:
        draft.say("bf16", "precision", value=settings.precision == "bf16")
    if settings.precision == "bf16" and pure is not None:
        if settings.half_weights and settings.adapter is None:
            draft.say(pure[0], "half_weights", value=pure[1])
        elif not draft.said.half_weights:
            draft.agree("half_weights")


def write_saving(draft: Draft, *, switches: bool = False) -> None:
    """Writes how often the run is saved and evaluated, and who follows it.

    Args:
        switches: trackers are switched on one by one (`use_wandb: true`), not by `report_to`.
    """
    settings, recipe = draft.settings, draft.recipe
    draft.put("output_dir", f"runs/{settings.name}")
    if settings.save_steps:
        draft.put("save_strategy", "steps", default=True)
        draft.say("save_steps", "save_steps", always=True)
        draft.say("save_total_limit", "save_limit", always=True)
    else:
        draft.put("save_strategy", "no")
        draft.agree("save_steps")
    if settings.validation:
        if settings.eval_steps:
            draft.put("eval_strategy", "steps")
            draft.say("eval_steps", "eval_steps")
        else:
            draft.put("eval_strategy", "epoch")  # also at the end of a run that is shorter than one
    trackers = [name for name in recipe.tracking.to if name in _TRACKERS]
    if switches:
        for name in trackers:
            draft.put(f"use_{name}", True)
    else:
        draft.put("report_to", trackers or "none")
    if trackers == list(recipe.tracking.to):
        draft.cover("tracking.to")
    if settings.workers != draft.said.workers:
        draft.say("dataloader_num_workers", "workers")
    draft.say("seed", "seed", always=True)


def write_fsdp(draft: Draft) -> None:
    """Writes FSDP, and sharded optimizer states by DeepSpeed."""
    settings = draft.settings
    if settings.sharding == "optimizer":
        write_zero1(draft)
    elif settings.sharding is not None:
        draft.put("fsdp", "full_shard")
        draft.put("fsdp_config.version", 2)
        draft.say("fsdp_config.reshard_after_forward", "sharding", value=settings.sharding == "full")
        if settings.offload:
            draft.say("fsdp_config.cpu_offload", "offload")
    for name in ("tensor_parallel", "context_parallel", "fsdp.replicate"):
        draft.explain(f"techniques.{name}", "accelerate's file says it: preheat convert RECIPE --to accelerate")


def write_zero1(draft: Draft) -> None:
    """Writes sharded optimizer states, by DeepSpeed."""
    draft.say("deepspeed", "sharding", value=dict(ZERO1))


def write_kernels(draft: Draft, liger: str) -> None:
    """Writes compilation and fused kernels.

    Args:
        liger: the key for Liger's kernels: norm, gate and the loss in chunks.
    """
    settings = draft.settings
    if settings.compiled:
        draft.say("torch_compile", "compiled")
    if settings.neftune:
        draft.say("neftune_noise_alpha", "neftune")
    if settings.label_smoothing:
        draft.say("label_smoothing_factor", "label_smoothing")
    if settings.fused_norm and settings.fused_gate and settings.chunked_loss:
        draft.say(liger, "fused_norm", "fused_gate", "chunked_loss", value=True)


def list_targets(settings: Settings) -> list[str]:
    """Returns the layers with adapters as a list."""
    targets = settings.lora_targets
    return [targets] if isinstance(targets, str) else list(targets or ())


def write_target_parameters(draft: Draft, key: str) -> None:
    """Writes the experts' matrices as parameters with adapters."""
    if not draft.settings.lora_experts:
        return
    draft.say(key, "lora_experts", value=list_expert_stacks(draft.recipe))
    draft.explain(
        "techniques.lora.expert_rank", f"experts get the rank of the other layers, {draft.settings.lora_rank}"
    )
