"""accelerate's YAML beside a trainer's file: one table of its keys. Read from accelerate 1.15 (commands/config).

It states the devices and how they share the work; the model, the data and the batch are in the trainer's file.
"""

from __future__ import annotations

from collections.abc import Mapping

from preheat.interop.deepspeed import read_deepspeed, read_device, read_stage
from preheat.interop.fsdp import FSDP
from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, refuse, take
from preheat.interop.settings import Settings

__all__ = ["ACCELERATE"]

_STARTING = ignore("how processes start and find each other")


def _read_type(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text().upper()
    if name == "FSDP":
        settings.sharding = settings.sharding or "full"
        return Takes(("sharding",))
    if name in ("NO", "MULTI_GPU", "DEEPSPEED", "MULTI_CPU"):
        return NoEffect("num_processes and the sections below say it")
    return Assumed("data parallelism, without sharding")


def _read_processes(settings: Settings, entry: Entry) -> Outcome:
    if entry.number() == -1:
        return NoEffect("the command that starts the run says it")
    number = entry.whole()
    if settings.devices is not None:
        return NoEffect(f"the plan is for {settings.devices} devices")
    settings.devices = number
    return Takes(("devices",))


def _read_precision(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("no", "bf16", "fp16", "fp8") if entry.value is not False else "no"
    if name == "no" or settings.precision != "fp32":
        return NoEffect("the trainer's own bf16 or fp16 decides")
    if name == "fp8":
        settings.precision, settings.fp8 = "bf16", True
        return Takes(("fp8", "precision"))
    settings.precision = name
    return Takes(("precision",))


def _read_backend(settings: Settings, entry: Entry) -> Outcome:
    settings.compiled = settings.compiled or entry.text().upper() != "NO"
    return Takes(("compiled",), "by torch's compiler")


def _read_degree(name: str) -> Handler:
    handler = take(name, Entry.whole)
    return lambda settings, entry: handler(settings, entry) if entry.number() != 1 else NoEffect("1 device")


ACCELERATE: Mapping[str, Handler] = {
    "distributed_type": _read_type,
    "num_processes": _read_processes,
    "num_machines": ignore("num_processes counts the devices of all machines"),
    "mixed_precision": _read_precision,
    **{f"fsdp_config.{key}": handler for key, handler in FSDP.items()},
    "deepspeed_config.zero_stage": read_stage,
    "deepspeed_config.offload_optimizer_device": read_device,
    "deepspeed_config.offload_param_device": read_device,
    "deepspeed_config.deepspeed_config_file": read_deepspeed,
    "deepspeed_config.gradient_accumulation_steps": ignore("the trainer's own gradient_accumulation_steps decides"),
    "deepspeed_config.gradient_clipping": ignore("the trainer's max_grad_norm decides"),
    **{
        f"deepspeed_config.{key}": ignore("loading, saving and starting")
        for key in (
            *("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher", "deepspeed_hostfile"),
            *("deepspeed_moe_layer_cls_names", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
        )
    },
    "dynamo_config.dynamo_backend": _read_backend,
    "dynamo_config.*": ignore("belongs to dynamo_backend"),
    "parallelism_config.parallelism_config_tp_size": _read_degree("tensor_parallel"),
    "parallelism_config.parallelism_config_cp_size": _read_degree("context_parallel"),
    "parallelism_config.parallelism_config_dp_shard_size": _read_degree("shard_size"),
    "parallelism_config.parallelism_config_dp_replicate_size": _read_degree("replicas"),
    "parallelism_config.*": assume("the degrees of parallelism that are taken over are planned"),
    "fp8_config.*": assume("fp8 with preheat's own scales"),
    "megatron_lm_config.*": refuse("Megatron-LM's layers are not planned from accelerate's file"),
    "use_cpu": ignore("the plan's device is the command's"),
    "downcast_bf16": ignore("for TPUs"),
    "debug": ignore("logging"),
    **dict.fromkeys(
        (
            *("compute_environment", "machine_rank", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
            *("same_network", "main_training_function", "enable_cpu_affinity", "tpu_env", "tpu_use_cluster"),
            *("tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_vm", "commands", "command_file", "mpirun_config"),
            "deepspeed_fields_from_accelerate_config",
        ),
        _STARTING,
    ),
    "mpirun_config.*": _STARTING,
}
"""Keys of accelerate's YAML."""
