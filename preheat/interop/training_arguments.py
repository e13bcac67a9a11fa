"""The arguments of transformers' Trainer and the calls of a training script, which TRL has too: one table of each.

Read from transformers 5.23 (training_args, modeling_utils), peft 0.21 (LoraConfig) and datasets (load_dataset).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from preheat.interop.fsdp import FSDP, read_fsdp
from preheat.interop.hf_keys import (
    ADAPTED,
    COMMON,
    LOGGING,
    REWARDS,
    SAVING,
    SCHEDULE_KWARGS,
    VISION,
    find_source,
    read_attention,
    read_epochs,
    read_kernel,
    read_of_source,
    read_optimizer,
    read_schedule,
    read_target_modules,
    read_target_parameters,
    read_variant,
)
from preheat.interop.keys import (
    Assumed,
    Entry,
    Handler,
    Ignore,
    NoEffect,
    Outcome,
    Takes,
    assume,
    ignore,
    refuse,
    switch,
    take,
)
from preheat.interop.settings import Settings
from preheat.interop.trainer_defaults import CHECKPOINT_WEIGHTS, PEFT, Default
from preheat.interop.trainer_defaults import TRANSFORMERS as DEFAULTS

__all__ = [
    "ARGUMENTS",
    "CALLS",
    "LOADING",
    "RUN_CLM",
    "RENAMED",
    "TRAINER_CALL",
    "VARIANTS",
    "add_prefix",
    "finish_run",
    "read_data_files",
    "read_dtype",
    "read_model_name",
    "read_targets",
    "read_path",
]

_BUILDERS = ("json", "csv", "parquet", "text", "arrow", "pandas")
_HELD_OUT = re.compile(r"(test|valid|eval|dev)", re.IGNORECASE)
_LOADED = "AutoModelForCausalLM.from_pretrained"
_OBJECT = "an object of the script"
_CLASSIFIER = f"a classifier has a head of its own; {REWARDS}"


def add_prefix(prefix: str, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """Returns the handlers of keys within a section."""
    return {f"{prefix}.{key}": handler for key, handler in handlers.items()}


def read_dtype(settings: Settings, entry: Entry) -> Outcome:
    """Reads the precision that weights are loaded in."""
    name = entry.choice("auto", "bfloat16", "float16", "float32")
    settings.half_weights = name != "float32"
    settings.frozen = "fp32" if name == "float32" else "auto"
    return Takes(("half_weights", "frozen"), "taken as bf16, as checkpoints are" if name == "auto" else "")


def read_path(settings: Settings, entry: Entry) -> Outcome:
    """Reads a dataset's name or folder; names of builders leave it to the files."""
    source, path = find_source(settings, entry), entry.text()
    if path in _BUILDERS:
        return NoEffect("how files are read, which data_files names")
    source["source"] = path
    return Takes(("sources",))


def read_data_files(settings: Settings, entry: Entry) -> Outcome:
    """Reads the files of a dataset: one of a builder is the source itself."""
    source, files = find_source(settings, entry), entry.texts()
    if not files or (source["source"] and not Path(files[0]).exists()):
        return Assumed("the rows of all files of the dataset are read")
    source["source"] = files[0]
    return Takes(("sources",)) if len(files) == 1 else Assumed(f"{files[0]} is planned in place of all files")


def read_model_name(settings: Settings, entry: Entry) -> Outcome:
    """Reads the model whose weights training starts from."""
    settings.model, settings.random_weights = entry.text(), False
    return Takes(("model",))


def _read_random(settings: Settings, entry: Entry) -> Outcome:
    settings.random_weights = True
    return Takes(("random_weights",))


def _read_from_config(settings: Settings, entry: Entry) -> Outcome:
    settings.model = settings.model or entry.text()
    return Takes(("model",))


def _read_sampling(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("random", "sequential", "group_by_length")
    if name == "group_by_length":
        return Assumed("the plan takes padded sequences at their full length")
    return NoEffect("the order of the rows")


def _read_bias(settings: Settings, entry: Entry) -> Outcome:
    return NoEffect("no bias is trained") if entry.value == "none" else Assumed("no bias is trained")


def read_targets(settings: Settings, entry: Entry) -> Outcome:
    """Reads the layers with adapters."""
    settings.lora_targets = read_target_modules(entry.texts())
    return Takes(("lora_targets",))


def _read_first_values(settings: Settings, entry: Entry) -> Outcome:
    if str(entry.value).startswith("pissa"):
        settings.lora_variant = "pissa"
        return Takes(("lora_variant",))
    known = isinstance(entry.value, bool) or entry.value in ("gaussian", "orthogonal")
    return NoEffect("the adapters' first values") if known else Assumed("plain LoRA values")


def _read_task_type(settings: Settings, entry: Entry) -> Outcome:
    if entry.value in ("SEQ_CLS", "TOKEN_CLS"):
        raise entry.error(f"{entry.value}: {_CLASSIFIER}")
    return NoEffect("a causal language model") if entry.value == "CAUSAL_LM" else Assumed("a causal language model")


def _read_double(settings: Settings, entry: Entry) -> Outcome:
    settings.double_quantization = entry.truth()
    return Takes(("double_quantization",))


def _names(text: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(text.split(), handler)


_QUANTIZATION: Mapping[str, Handler] = {
    "load_in_4bit": switch("quantized"),
    "load_in_8bit": assume("the base is in half precision, twice the memory of 8 bits"),
    "bnb_4bit_use_double_quant": _read_double,
    "bnb_4bit_quant_type": ignore("fp4 and nf4 cost the same"),
    "bnb_4bit_compute_dtype": ignore("matmuls are in the precision of bf16 or fp16"),
    "bnb_4bit_quant_storage": ignore("how the weights' bytes are kept"),
    **_names("llm_int8_threshold llm_int8_skip_modules llm_int8_has_fp16_weight", ignore("belongs to load_in_8bit")),
}

LOADING: Mapping[str, Handler] = {
    "dtype": read_dtype,
    "torch_dtype": read_dtype,
    "attn_implementation": read_attention,
    "load_in_4bit": switch("quantized"),
    "load_in_8bit": assume("the base is in half precision, twice the memory of 8 bits"),
    "quantization_config": ignore("the call of BitsAndBytesConfig is read"),
    **add_prefix("quantization_config", _QUANTIZATION),
    "use_kernels": ignore("kernels of the hub, which replace some operators"),
    "trust_remote_code": COMMON["trust_remote_code"],
    "rope_scaling": assume("positions are the model's own, which cost the same"),
    "config": ignore("the model's own configuration is read"),
    "device_map.*": ignore("loading"),
    **_names("revision token use_cache device_map low_cpu_mem_usage use_safetensors", ignore("loading")),
    **_names("cache_dir local_files_only max_memory offload_folder subfolder variant", ignore("loading")),
}
"""Arguments of `from_pretrained`."""

ARGUMENTS: Mapping[str, Handler] = {
    **COMMON,
    "per_device_train_batch_size": take("micro_batch", Entry.whole),
    "num_train_epochs": read_epochs,
    "lr_scheduler_type": read_schedule,
    **add_prefix("lr_scheduler_kwargs", SCHEDULE_KWARGS),
    "optim": read_optimizer,
    "optim_args": assume("the optimizer's settings are those that other keys state"),
    "optim_target_modules": assume("all trained weights have states of AdamW"),
    "gradient_checkpointing": switch("checkpointing"),
    "activation_checkpointing": switch("checkpointing"),
    "activation_checkpointing_kwargs.*": COMMON["gradient_checkpointing_kwargs.*"],
    "use_liger_kernel": read_kernel("fused_norm", "fused_gate", "chunked_loss"),
    "liger_kernel_config.*": assume("norm, gate and loss are fused"),
    "fsdp": read_fsdp,
    **add_prefix("fsdp_config", FSDP),
    "parallelism_config.tp_size": take("tensor_parallel", Entry.whole),
    "parallelism_config.cp_size": take("context_parallel", Entry.whole),
    "parallelism_config.dp_shard_size": take("shard_size", Entry.whole),
    "parallelism_config.dp_replicate_size": take("replicas", Entry.whole),
    "train_sampling_strategy": _read_sampling,
    "full_determinism": assume("operators may differ from run to run in rounding"),
    "use_cpu": ignore("the plan's device is the command's"),
    "use_mps_device": ignore("the plan's device is the command's"),
    "no_cuda": ignore("the plan's device is the command's"),
    **_names(
        "average_tokens_across_devices torch_empty_cache_steps use_cache prediction_loss_only past_index",
        ignore("of little weight"),
    ),
    "accelerator_config.*": ignore("when gradients are added across devices"),
    **_names("torch_compile_backend torch_compile_mode", ignore("belongs to torch_compile")),
    **_names("bf16_full_eval fp16_full_eval eval_delay eval_do_concat_batches", ignore("evaluation")),
    **_names("eval_use_gather_object include_for_metrics label_names jit_mode_eval", ignore("evaluation")),
    **_names(
        "log_on_each_node logging_nan_inf_filter log_level_replica trackio_bucket_id trackio_static_space_id debug "
        "skip_memory_metrics include_inputs_for_metrics push_to_hub_model_id push_to_hub_organization",
        ignore(LOGGING),
    ),
    **_names(
        "save_on_each_node enable_jit_checkpoint hub_token hub_private_repo hub_always_push ignore_data_skip "
        "restore_callback_states_from_checkpoint push_to_hub_token",
        ignore(SAVING),
    ),
    **_names("dataloader_multiprocessing_context dataloader_in_order length_column_name", ignore("preparing the data")),
    **_names("ddp_static_graph", ignore("how processes find and wait for each other")),
    "per_gpu_train_batch_size": take("micro_batch", Entry.whole),
    "tpu_num_cores": ignore("for TPUs"),
}
"""TrainingArguments."""

RENAMED = {"evaluation_strategy": "eval_strategy"}

RUN_CLM = frozenset(
    {"train_file", "block_size", "dataset_config_name", "config_name", "tokenizer_name", "validation_split_percentage"}
)
"""Keys that only run_clm.py has."""

_ROWS: Mapping[str, Handler] = {
    "path": read_path,
    "name": read_of_source("subset"),
    "split": read_of_source("split"),
    "data_files": read_data_files,
    "data_files.train": read_data_files,
    "data_files.*": ignore("rows that are not trained on"),
    "data_dir": assume("the rows of the whole dataset are read"),
    "streaming": switch("streaming"),
    "columns": ignore("columns that are read"),
    **_names("cache_dir num_proc trust_remote_code token revision keep_in_memory", ignore("preparing the data")),
    **_names("verification_mode download_mode features", ignore("preparing the data")),
}

TRAINER_CALL: Mapping[str, Handler] = {
    "model": Ignore("the model that the script loads", read_model_name),
    **_names(
        "args train_dataset processing_class tokenizer data_collator compute_metrics callbacks compute_loss_func "
        "optimizers preprocess_logits_for_metrics peft_config formatting_func quantization_config model_init",
        ignore(_OBJECT),
    ),
    "eval_dataset": ignore("evaluation"),
    "optimizer_cls_and_kwargs": assume("AdamW, with two fp32 moments per trained weight"),
    "ref_model": assume("the reference is the model before training"),
}

_LORA: Mapping[str, Handler] = {
    "r": take("lora_rank", Entry.whole),
    "lora_alpha": take("lora_alpha", Entry.number),
    "lora_dropout": take("lora_dropout", Entry.fraction),
    "target_modules": read_targets,
    "bias": _read_bias,
    "task_type": _read_task_type,
    "use_rslora": read_variant("rslora"),
    "use_dora": read_variant("dora"),
    "init_lora_weights": _read_first_values,
    "modules_to_save": assume("embedding and head stay frozen"),
    "target_parameters": read_target_parameters,
    "exclude_modules": assume("all layers of target_modules have adapters"),
    **_names("layers_to_transform layers_pattern", assume("all layers have adapters")),
    **_names("rank_pattern.* alpha_pattern.*", assume("all adapters have one rank")),
    **_names("inference_mode fan_in_fan_out base_model_name_or_path revision", ignore("loading")),
}

CALLS: Mapping[str, Handler] = {
    **add_prefix("TrainingArguments", ARGUMENTS),
    "TrainingArguments": ignore("all arguments have their defaults"),
    **add_prefix("Trainer", TRAINER_CALL),
    **add_prefix("LoraConfig", _LORA),
    "LoraConfig": ignore("all arguments have their defaults"),
    **add_prefix("BitsAndBytesConfig", _QUANTIZATION),
    **add_prefix(_LOADED, LOADING),
    f"{_LOADED}.pretrained_model_name_or_path": read_model_name,
    **add_prefix("AutoModelForCausalLM.from_config", LOADING),
    "AutoModelForCausalLM.from_config.config": Ignore("the configuration that the script loads", _read_random),
    "AutoConfig.from_pretrained.pretrained_model_name_or_path": _read_from_config,
    "AutoConfig.from_pretrained.*": assume("the model's own configuration is planned"),
    "AutoTokenizer.from_pretrained.*": ignore("the model's own tokenizer is read"),
    "AutoModelForSequenceClassification.from_pretrained.*": refuse(_CLASSIFIER),
    "AutoModelForImageTextToText.from_pretrained.*": refuse(VISION),
    **add_prefix("load_dataset.*", _ROWS),
    "prepare_model_for_kbit_training.model": ignore(_OBJECT),
    "prepare_model_for_kbit_training.use_gradient_checkpointing": switch("checkpointing"),
    "prepare_model_for_kbit_training.gradient_checkpointing_kwargs": COMMON["gradient_checkpointing_kwargs.*"],
}
"""Arguments of a script's calls."""

VARIANTS: Mapping[str, Mapping[str, Default]] = {"LoraConfig": PEFT, _LOADED: CHECKPOINT_WEIGHTS}


def finish_run(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Applies the rules between keys that a file and a script share; returns what is assumed."""
    calls = {entry.path[0] for entry in entries.values()}
    notes = []
    if settings.adapter == "lora" and settings.lora_targets is None:
        settings.lora_targets = read_target_modules(list(ADAPTED[DEFAULTS.adapts["lora"]]))
    if settings.quantized and settings.adapter is None:
        key = next(entry for entry in entries.values() if entry.path[-1] == "load_in_4bit")
        raise key.error("a base in 4 bits is frozen, and there is no adapter to train; add use_peft or LoraConfig")
    prepares = "prepare_model_for_kbit_training"
    if prepares in calls and settings.quantized:
        settings.fp32_rest = True
        notes.append(f"{prepares} casts embedding, norms and head to fp32, and hidden states follow")
    if prepares in calls and f"{prepares}.use_gradient_checkpointing" not in entries:
        settings.checkpointing = True
        notes.append(f"{prepares} switches activation checkpointing on")
    if "AutoModelForCausalLM.from_config" in calls:
        settings.random_weights = True
    if settings.precision == "fp32" and settings.half_weights:
        halves = (e.value for e in entries.values() if e.path[-1] in ("dtype", "torch_dtype"))
        settings.precision = "fp16" if "float16" in halves else "bf16"
        notes.append("without autocast, matmuls are in the weights' own precision")
    _drop_unused_sharding(settings, entries)
    notes += _finish_sources(settings, entries)
    return notes


def _drop_unused_sharding(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Leaves out what `fsdp_config` says without `fsdp`."""
    switches = ("fsdp", "deepspeed", "accelerate")
    on = (entry for entry in entries.values() if not entry.is_off)
    if not any(step in switches for entry in on for step in entry.path):
        settings.sharding, settings.offload = None, False


def _finish_sources(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    notes = []
    trained = [s for s in settings.sources if not _HELD_OUT.match(str(s.get("split", "")))] or settings.sources
    settings.sources = [source for source in trained if source["source"]]
    if not settings.sources:
        notes.append("the data is not named: its rows are not known")
    elif any(entry.path[0] == "load_dataset" for entry in entries.values()):
        notes.append("the rows are as load_dataset gives them: what the script makes of them is not read")
    if settings.streaming and not settings.max_steps:
        key = next(entry for entry in entries.values() if entry.path[-1] in ("streaming", "dataset_streaming"))
        raise key.error("a streamed dataset has no known length; add max_steps")
    if settings.streaming and len(settings.sources) > 1:
        settings.sources = settings.sources[:1]
        notes.append("one streamed dataset is planned; a mixture costs the same")
    return notes
