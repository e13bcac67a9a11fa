"""DeepSpeed's JSON beside a trainer's file: one table of its keys. Read from transformers 5.23 (integrations/deepspeed)
and DeepSpeed 0.19.8 (runtime/config.py, runtime/constants.py, runtime/zero/config.py).

transformers fills in `auto` from the trainer's own arguments, and refuses values that differ from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, take
from preheat.interop.settings import Settings

__all__ = ["DEEPSPEED", "add_masters", "find_file", "keep_masters", "read_deepspeed", "read_device", "read_stage"]

_STAGES = (None, "optimizer", "gradients", "full")
"""State that each stage of ZeRO shards beyond the stage before, as in `Settings.sharding`."""
_AUTO = "auto: as the trainer's own keys say"
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZERS = {"Adam": "adamw_torch_fused", "AdamW": "adamw_torch_fused", "Lion": "lion", "Muon": "muon"}


def find_file(name: str, home: Path) -> Path | None:
    """Returns a file that a configuration names, from the working directory or the configuration's folder, if it is
    here.
    """
    try:
        return next((path for path in (Path(name), home / name) if path.is_file()), None)
    except (OSError, ValueError):  # too long, or holds NUL
        return None


def read_deepspeed(settings: Settings, entry: Entry) -> Outcome:
    """Reads the name of DeepSpeed's file, and its stage from that name if the file is not here."""
    if entry.is_off:
        return NoEffect("switched off")
    name = entry.text()
    if find_file(name, settings.home) is not None:
        return NoEffect("its keys are read, as deepspeed.KEY")
    match = re.search(r"(?:zero|ds_z|z)_?([0-3])", name)
    if match is None:
        return Assumed("the file is not here: the plan takes data parallelism without sharding")
    settings.sharding = _STAGES[int(match[1])]
    settings.offload = "offload" in name
    return Takes(("sharding", "offload"), f"the file is not here: stage {match[1]} by its name")


def keep_masters(settings: Settings, entries: Iterable[Entry]) -> list[str]:
    """Gives trained weights in half precision their fp32 copies if DeepSpeed trains them; returns what is assumed."""
    sections = ("deepspeed", "deepspeed_config")
    on = any(not entry.is_off and set(entry.path) & set(sections) for entry in entries)
    return ["DeepSpeed keeps fp32 copies of the trained weights"] if on and add_masters(settings) else []


def add_masters(settings: Settings) -> bool:
    """Gives trained weights in half precision fp32 copies, as DeepSpeed does; False if there are none.

    Its optimizers have them at every stage, whatever precision the trainer loads weights in.
    """
    if not settings.half_weights or settings.adapter is not None or settings.precision == "fp32":
        return False
    settings.masters = True
    return True


def read_stage(settings: Settings, entry: Entry) -> Outcome:
    """Reads the stage of ZeRO."""
    if (number := entry.number()) not in range(len(_STAGES)):
        raise entry.error(f"must be 0, 1, 2 or 3, got {entry.value}")
    settings.sharding = _STAGES[int(number)]
    return Takes(("sharding",))


def read_device(settings: Settings, entry: Entry) -> Outcome:
    """Reads where optimizer states or weights are: on the device, the host or a disk."""
    if entry.value in ("none", None):
        return NoEffect("on the device")
    name = entry.choice("cpu", "nvme", "none")
    settings.offload = True
    return Takes(("offload",), "to the host" if name == "nvme" else "")


def _read_old_offload(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    settings.offload = True
    name = "offload_param" if entry.path[-1].endswith("param") else "offload_optimizer"
    return Takes(("offload",), f"DeepSpeed calls it {name} today")


def _match(name: str, theirs: str, read: Callable[[Entry], object]) -> Handler:
    """Returns a handler of a key that must agree with one of the trainer's, which is a field of `Settings`."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        if entry.value == "auto":
            return NoEffect(_AUTO)
        value, stated = read(entry), getattr(settings, name)
        if value != stated:
            raise entry.error(f"{entry.shown}: the trainer has {theirs}: {stated}; set both alike, or write auto here")
        return Takes((name,))

    return handle


def _match_precision(name: str) -> Handler:
    def handle(settings: Settings, entry: Entry) -> Outcome:
        if entry.value == "auto":
            return NoEffect(_AUTO)
        if entry.truth() != (settings.precision == name):
            raise entry.error(
                f"{entry.shown}: the trainer computes in {settings.precision}; set {name} alike in both, or write auto "
                "here"
            )
        return Takes(("precision",))

    return handle


def _read_betas(entry: Entry) -> tuple[float, ...]:
    values = entry.value
    if not isinstance(values, list) or len(values) != 2 or not all(isinstance(b, int | float) for b in values):
        raise entry.error(f"must be two numbers, got {entry.shown}")
    return tuple(float(beta) for beta in values)


def _read_optimizer(settings: Settings, entry: Entry) -> Outcome:
    if (name := _OPTIMIZERS.get(entry.text())) is None:
        return Assumed("the plan takes AdamW, with two fp32 moments per trained weight")
    settings.optimizer = name
    return Takes(("optimizer",))


def _read_schedule(settings: Settings, entry: Entry) -> Outcome:
    if (name := _SCHEDULES.get(entry.text())) is None:
        return Assumed("the plan takes the trainer's schedule, which costs the same")
    settings.schedule = name
    return Takes(("schedule",))


def _read_warmup(settings: Settings, entry: Entry) -> Outcome:
    if entry.value == "auto":
        return NoEffect(_AUTO)
    settings.warmup_steps = entry.whole() if entry.number() else 0
    return Takes(("warmup_steps",))


def _unless_auto(handler: Handler) -> Handler:
    return lambda settings, entry: NoEffect(_AUTO) if entry.value == "auto" else handler(settings, entry)


def _names(text: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(text.split(), handler)


_ZERO = "zero_optimization"
DEEPSPEED: Mapping[str, Handler] = {
    # Batch, optimizer and schedule.
    "train_micro_batch_size_per_gpu": _match("micro_batch", "the micro-batch", Entry.whole),
    "gradient_accumulation_steps": _match("accumulation", "gradient_accumulation_steps", Entry.whole),
    "train_batch_size": ignore("follows from micro-batch, accumulation and devices"),
    "gradient_clipping": _match("max_grad_norm", "max_grad_norm", Entry.number),
    "optimizer.type": _read_optimizer,
    "optimizer.params.lr": _match("learning_rate", "learning_rate", Entry.number),
    "optimizer.params.betas": _match("betas", "betas", _read_betas),
    "optimizer.params.eps": _match("eps", "adam_epsilon", Entry.number),
    "optimizer.params.weight_decay": _match("weight_decay", "weight_decay", Entry.number),
    **_names("optimizer.params.torch_adam optimizer.params.adam_w_mode", ignore("AdamW, by another kernel")),
    "scheduler.type": _read_schedule,
    "scheduler.params.warmup_num_steps": _read_warmup,
    "scheduler.params.warmup_max_lr": _match("learning_rate", "learning_rate", Entry.number),
    **_names(
        "scheduler.params.warmup_min_lr scheduler.params.warmup_type scheduler.params.total_num_steps "
        "scheduler.params.warmup_min_ratio scheduler.params.cos_min_ratio",
        _unless_auto(assume("the schedule ends with the run at 0, and costs the same")),
    ),
    # Precision.
    "bf16.enabled": _match_precision("bf16"),
    "bfloat16.enabled": _match_precision("bf16"),
    **_names(
        "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states fp16.fp16_master_weights_and_grads",
        assume("trained weights and their states are in fp32, which takes more memory"),
    ),
    **_names("bf16.check_overflow bf16.immediate_grad_update", ignore("of little weight")),
    "fp16.enabled": _match_precision("fp16"),
    **_names(
        "fp16.loss_scale fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale "
        "fp16.consecutive_hysteresis fp16.auto_cast",
        ignore("the loss scale"),
    ),
    "communication_data_type": assume("gradients are added in the weights' precision"),
    "grad_accum_dtype": assume("gradients are added up in the precision of the trained weights"),
    "data_types.grad_accum_dtype": assume("gradients are added up in the precision of the trained weights"),
    # Sharding.
    f"{_ZERO}.stage": read_stage,
    f"{_ZERO}.offload_optimizer.device": read_device,
    f"{_ZERO}.offload_param.device": read_device,
    **{
        f"{_ZERO}.{part}.{key}": ignore("how states are kept on the host")
        for part in ("offload_optimizer", "offload_param")
        for key in (
            "pin_memory",
            "buffer_count",
            "buffer_size",
            "fast_init",
            "max_in_cpu",
            "pipeline_read",
            "pipeline_write",
        )
    },
    f"{_ZERO}.offload_optimizer.ratio": assume("all optimizer states are on the host"),
    f"{_ZERO}.offload_optimizer.nvme_path": ignore("where the disk is"),
    f"{_ZERO}.offload_param.nvme_path": ignore("where the disk is"),
    # DeepSpeed replaces these by offload_optimizer and offload_param.
    f"{_ZERO}.cpu_offload": _read_old_offload,
    f"{_ZERO}.cpu_offload_param": _read_old_offload,
    f"{_ZERO}.cpu_offload_use_pin_memory": ignore("how states are kept on the host"),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": ignore("saving"),
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": ignore("saving"),
    **{
        f"{_ZERO}.{key}": ignore("how shards are gathered and reduced")
        for key in (
            *("overlap_comm", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size", "sub_group_size"),
            *("allgather_partitions", "reduce_scatter", "round_robin_gradients", "stage3_prefetch_bucket_size"),
            *("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
            *("stage3_module_granularity_threshold", "ignore_unused_parameters", "load_from_fp32_weights"),
            *("stage3_model_persistence_threshold", "stage3_use_all_reduce_for_fetch_params", "elastic_checkpoint"),
            *("stage3_allgather_sequential", "use_multi_rank_bucket_allreduce", "pipeline_loading_checkpoint"),
        )
    },
    **{
        f"{_ZERO}.{key}": assume("weights are sharded across all devices, and sent in their own precision")
        for key in (
            *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size"),
            *("mics_hierarchical_params_gather", "zero_quantized_nontrainable_weights", "zeropp_loco_param"),
        )
    },
    "tensor_parallel.autotp_size": take("tensor_parallel", Entry.whole),
    # Without effect.
    **_names("steps_per_print wall_clock_breakdown dump_state memory_breakdown", ignore("logging")),
    **{
        f"{section}.*": ignore("logging")
        for section in ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "monitor")
    },
    "checkpoint.*": ignore("saving"),
    "activation_checkpointing.*": ignore(
        "settings of DeepSpeed's own function, which models of transformers do not call"
    ),
    "aio.*": ignore("how a disk is read"),
    **_names(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients", ignore("of little weight")
    ),
}
"""Keys of DeepSpeed's JSON."""
