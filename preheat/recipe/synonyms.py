"""Suggestions for unknown keys: the names that other trainers use, and keys at the wrong level. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence

from preheat.core import Recipe, registry
from preheat.errors import suggest_nearest
from preheat.sanitize import quote_value

__all__ = ["NAMES", "VALUES", "hint_recipe_key", "describe_unknown_key"]

# Names of axolotl, LLaMA-Factory, TRL and transformers' TrainingArguments, torchtune, torchtitan and litgpt.
NAMES: Mapping[str, str] = {
    key: ours
    for ours, keys in {
        "batch.seq_len": (
            "sequence_len max_length max_seq_length max_seq_len seq_len seq_length cutoff_len block_size "
            "model_max_length sequence_length max_sequence_length context_length packed_sequence_size n_ctx"
        ),
        "batch.size": (
            "global_batch_size train_batch_size total_batch_size batch_size local_batch_size effective_batch_size"
        ),
        "checkpoint.asynchronous": "async_mode async_save enable_async_checkpointing",
        "checkpoint.best": "load_best_model_at_end metric_for_best_model save_best_model monitor greater_is_better",
        "checkpoint.every": (
            "save_steps save_interval checkpoint_interval ckpt_freq saves_per_epoch ckpt_every_steps save_every "
            "save_strategy"
        ),
        "checkpoint.keep": "save_total_limit keep_latest_k max_checkpoints keep_last",
        "data.columns": "field_messages column_mapping message_property_mappings field_mapping",
        "data.image_pixels": "image_max_pixels max_pixels",
        "data.layout": "dataset_type data_format",
        "data.limit": "max_samples max_train_samples num_samples_limit",
        "data.packing": "sample_packing packing pack packed packed_sequence",
        "data.prefetch": "dataloader_prefetch_factor prefetch_factor",
        "data.source": (
            "datasets dataset dataset_name dataset_path train_data train_file data_files train_dataset "
            "data_path dataset_dir path_or_dataset path_or_dataset_id"
        ),
        "data.split": "dataset_split train_split",
        "data.streaming": "stream",
        "data.subset": "dataset_config_name config_name",
        "data.template": "chat_template prompt_template prompt_style conversation_template",
        "data.text": "dataset_text_field text_column text_field",
        "data.tokenizer": (
            "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_config hf_assets_path tokenizer_dir"
        ),
        "data.train_on": (
            "train_on_inputs train_on_prompt completion_only_loss assistant_only_loss mask_prompt roles_to_train"
        ),
        "data.validation": (
            "val_set_size val_size test_size eval_dataset val_split_fraction validation_dataset test_datasets "
            "validation_split val_split eval_split validation_file"
        ),
        "data.vocab_size": "vocab_size",
        "data.workers": (
            "dataloader_num_workers num_workers preprocessing_num_workers dataset_processes dataset_num_proc"
        ),
        "evaluate.every": (
            "eval_steps eval_interval evals_per_epoch eval_every val_interval val_every_steps run_val_every_n_steps "
            "eval_strategy evaluation_strategy"
        ),
        "evaluate.micro_batch_size": "per_device_eval_batch_size eval_batch_size",
        "evaluate.rows": "max_eval_samples max_iters eval_iters eval_samples limit_val_batches",
        "evaluate.tasks": "eval_tasks lm_eval_tasks",
        "hardware.device": "accelerator use_cpu no_cuda",
        "hardware.threads": "num_threads omp_num_threads",
        "model.add_tokens": "special_tokens additional_special_tokens added_tokens",
        "model.num_experts": "num_experts num_local_experts",
        "model.num_experts_per_tok": "num_experts_per_tok",
        "model.family": "model_type architecture arch",
        "model.intermediate_size": "intermediate_size ffn_dim ffn_hidden_size d_ff",
        "model.num_heads": "num_attention_heads n_heads n_head num_heads",
        "model.num_kv_heads": "num_key_value_heads n_kv_heads n_query_groups num_kv_heads",
        "model.num_layers": "num_hidden_layers n_layers n_layer num_layers",
        "model.path": (
            "base_model model_name_or_path model_name model_path pretrained_model_name_or_path checkpoint_dir "
            "base_model_config model_id pretrained"
        ),
        "model.max_positions": "max_position_embeddings",
        "model.tie_embeddings": "tie_word_embeddings",
        "model.trust_remote_code": "trust_remote",
        "model.hidden_size": "hidden_size n_embd d_model dim embed_dim hidden_dim model_dim",
        "name": "run_name experiment_name job_name",
        "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
        "optimizer.max_grad_norm": (
            "max_grad_norm max_norm grad_clip gradient_clip_val clip_grad_norm gradient_clip "
            "gradient_clipping clip_grad clip_norm"
        ),
        "optimizer.eps": "adam_epsilon epsilon adam_eps optimizer_eps",
        "optimizer.lr": "learning_rate max_lr peak_lr max_learning_rate base_lr",
        "optimizer.weight_decay": "wd",
        "parallel.devices": "num_gpus nproc_per_node num_processes gpus world_size n_gpus ngpus",
        "parallel.engine": "distributed_backend",
        "parallel.timeout": "ddp_timeout timeout_minutes",
        "parallel.zero_stage": "zero_stage stage",
        "sample.max_new_tokens": "max_new_tokens",
        "schedule.decay_ratio": "cooldown decay_steps lr_decay_steps decay_ratio",
        "schedule.min_lr_ratio": "min_lr_ratio min_lr cosine_min_lr_ratio lr_min",
        "schedule.kind": (
            "lr_scheduler lr_scheduler_type scheduler decay_type scheduler_type lr_schedule lr_decay_style"
        ),
        "schedule.warmup_ratio": (
            "warmup_ratio warmup_steps warmup num_warmup_steps lr_warmup_steps lr_warmup_fraction warmup_fraction"
        ),
        "seed": "random_seed manual_seed data_seed rng_seed",
        "stop.epochs": "num_epochs num_train_epochs max_epochs n_epochs epoch",
        "stop.hours": "max_time max_hours time_limit",
        "stop.max_steps": (
            "max_steps max_train_steps total_steps training_steps num_iterations iterations train_steps "
            "max_steps_per_epoch num_steps train_iters max_iterations"
        ),
        "stop.min_delta": "early_stopping_threshold early_stopping_min_delta",
        "stop.patience": "early_stopping_patience early_stopping",
        "stop.target_loss": "target_val_loss target_validation_loss target_eval_loss",
        "stop.tokens": "max_tokens train_tokens num_tokens total_tokens token_budget",
        "tracking.folder": "logging_dir",
        "tracking.name": "wandb_name wandb_run_name swanlab_run_name trackio_name",
        "tracking.project": (
            "wandb_project swanlab_project mlflow_experiment_name trackio_project comet_project_name project_name"
        ),
        "tracking.tags": "wandb_tags",
        "tracking.to": (
            "report_to use_wandb use_mlflow use_swanlab use_tensorboard use_trackio enable_wandb enable_tensorboard "
            "logger logging_backend metric_logger"
        ),
        "techniques.activation_checkpointing": (
            "gradient_checkpointing use_gradient_checkpointing enable_activation_checkpointing recompute "
            "gradient_checkpointing_kwargs"
        ),
        "techniques.activation_offload": "activation_offloading enable_activation_offloading",
        "techniques.chunked_loss": "chunked_cross_entropy cut_cross_entropy",
        "techniques.compile": "torch_compile use_compile",
        "techniques.context_parallel": "context_parallel_size context_parallel_degree cp_size sequence_parallel_degree",
        "techniques.data_parallel": "ddp ddp_backend dp_size data_parallel_size dp_replicate_size",
        "techniques.efficient_attention": (
            "flash_attention flash_attn flash_attention_2 attn_implementation sdp_attention "
            "xformers_attention use_flash_attn"
        ),
        "techniques.expert_parallel": "ep_size expert_parallel_size expert_model_parallel_size",
        "techniques.fsdp": "fsdp_config fsdp2 fsdp_version dp_shard_size",
        "techniques.gradient_accumulation.steps": (
            "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum_steps grad_accum"
        ),
        "techniques.liger": (
            "use_liger_kernel liger_kernel use_liger enable_liger_kernel liger_rope liger_rms_norm "
            "liger_glu_activation liger_fused_linear_cross_entropy"
        ),
        "techniques.lora": "adapter peft peft_config lora_target_linear finetuning_type lora_model_dir use_peft",
        "techniques.lora.alpha": "lora_alpha",
        "techniques.lora.dropout": "lora_dropout",
        "techniques.lora.rank": "lora_r lora_rank r",
        "techniques.lora.target_modules": "lora_target_modules lora_target target_modules lora_attn_modules",
        "techniques.mixed_precision": "bf16 fp16 bfloat16 precision dtype torch_dtype mixed_precision_dtype tf32 amp",
        "techniques.nf4": "load_in_4bit quantization_bit bnb_4bit_quant_type quantize load_in_8bit qlora",
        "techniques.pipeline_parallel": (
            "pipeline_parallel_size pipeline_parallel_degree pp_size pipeline_model_parallel_size"
        ),
        "techniques.preference": "rl dpo dpo_beta pref_beta pref_loss",
        "techniques.regularized_loss.label_smoothing": "label_smoothing_factor",
        "techniques.tensor_parallel": "tensor_parallel_size tensor_parallel_degree tp_size tensor_model_parallel_size",
    }.items()
    for key in keys.split()
}
"""Another trainer's name -> our key."""
# Settings of other trainers that are no keys of a recipe, with what to use in their place.
_FOLDER = "the folder is an option of the command: preheat train RECIPE --out FOLDER"
_RESUME = "it is an option of the command: preheat train RECIPE --out FOLDER --resume"
_MICRO = (
    "'batch.size' counts all sequences of a step, over devices and micro-batches; "
    "'techniques.gradient_accumulation.steps' says in how many micro-batches"
)
_DEEPSPEED = (
    "DeepSpeed's configuration is made from the recipe, not read from a file: set parallel.engine: deepspeed and "
    "parallel.zero_stage: 1, 2 or 3"
)
_PUSH = "a run is pushed to the hub when it is exported: preheat export RUN --push OWNER/NAME, and --private"
_LOGGING = "every step is logged, to metrics.jsonl in the run's folder and to the trackers of 'tracking.to'"
_ELSEWHERE = {
    **dict.fromkeys(("deepspeed", "deepspeed_config", "ds_config", "deepspeed_plugin"), _DEEPSPEED),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision"), _PUSH
    ),
    **dict.fromkeys(
        (
            "logging_steps",
            "logging_strategy",
            "logging_first_step",
            "log_every_n_steps",
            "log_interval",
            "log_freq",
        ),
        _LOGGING,
    ),
    **dict.fromkeys(("output_dir", "out_dir", "out", "dump_folder"), _FOLDER),
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints", "resume"), _RESUME),
    **dict.fromkeys(
        (
            "micro_batch_size",
            "per_device_train_batch_size",
            "per_device_batch_size",
            "device_batch_size",
            "micro_batch",
        ),
        _MICRO,
    ),
}
# Short names of our keys, within their sections.
_SHORT = {
    "batch.length": "batch.seq_len",
    "data.longer": "data.overlong",
    "data.vocabulary": "data.vocab_size",
    "evaluate.micro": "evaluate.micro_batch_size",
    "model.experts": "model.num_experts",
    "model.experts_per_token": "model.num_experts_per_tok",
    "model.feed_forward": "model.intermediate_size",
    "model.heads": "model.num_heads",
    "model.kv_heads": "model.num_kv_heads",
    "model.layers": "model.num_layers",
    "model.positions": "model.max_positions",
    "model.vocabulary": "model.vocab_size",
    "model.width": "model.hidden_size",
    "optimizer.clip": "optimizer.max_grad_norm",
    "parallel.zero": "parallel.zero_stage",
    "sample.draft": "sample.draft_model",
    "sample.lookup": "sample.prompt_lookup_tokens",
    "sample.tokens": "sample.max_new_tokens",
    "schedule.decay": "schedule.decay_ratio",
    "schedule.floor": "schedule.min_lr_ratio",
    "schedule.warmup": "schedule.warmup_ratio",
    "stop.steps": "stop.max_steps",
    "techniques.adafactor.clip": "techniques.adafactor.clip_threshold",
    "techniques.distillation.top": "techniques.distillation.top_k",
    "techniques.fsdp.reshard": "techniques.fsdp.reshard_after_forward",
    "techniques.grouped_queries.kv_heads": "techniques.grouped_queries.num_kv_heads",
    "techniques.lora.targets": "techniques.lora.target_modules",
    "techniques.low_bit_adamw.least": "techniques.low_bit_adamw.min_size",
    "techniques.muon.steps": "techniques.muon.ns_steps",
    "techniques.peft_adapter.targets": "techniques.peft_adapter.target_modules",
    "techniques.quantization_aware.group": "techniques.quantization_aware.group_size",
    "techniques.shifted_groups.group": "techniques.shifted_groups.group_size",
    "techniques.upcycling.chosen": "techniques.upcycling.num_experts_per_tok",
    "techniques.upcycling.experts": "techniques.upcycling.num_experts",
}
# Names that mean something else in these sections than alone.
_IN_SECTION = {
    **_SHORT,
    "checkpoint.limit": "checkpoint.keep",
    "checkpoint.steps": "checkpoint.every",
    "evaluate.batch_size": "evaluate.micro_batch_size",
    "evaluate.limit": "evaluate.rows",
    "evaluate.max_samples": "evaluate.rows",
    "evaluate.steps": "evaluate.every",
    "sample.length": "sample.max_new_tokens",
    "sample.max_length": "sample.max_new_tokens",
}
VALUES: Mapping[str, Mapping[str, str]] = {"techniques.preference.loss": {"apo_zero_unpaired": "apo_zero"}}
"""Our key -> another trainer's value -> ours, which a recipe may use as well."""
_ELSEWHERE_IN_SECTION = {"parallel.config": _DEEPSPEED}
# Keys whose names say nothing without their section: they are no hint for an unknown key of another section.
_GENERIC = {
    *("cache", "columns", "config", "decay", "every", "floor", "heads", "images", "keep", "kind", "layers", "layout"),
    *("length", "limit", "memory", "micro", "name", "part", "path", "positions", "prompt", "prompts", "rows", "shape"),
    *("size", "source", "split", "stop", "tasks", "text", "tokens", "weights", "width", "window", "zero"),
}


@functools.cache
def _index_keys() -> dict[str, list[str]]:
    """Returns the last component of every key, and its short names -> the dotted keys that end in it."""
    places: dict[str, list[str]] = {}
    for part in dataclasses.fields(Recipe):
        places.setdefault(part.name, []).append(part.name)
        if isinstance(part.default_factory, type) and dataclasses.is_dataclass(part.default_factory):
            for field in dataclasses.fields(part.default_factory):
                places.setdefault(field.name, []).append(f"{part.name}.{field.name}")
    for name, technique in registry().items():
        # First: the technique itself is meant rather than a key of that name in another one.
        places.setdefault(name, []).insert(0, f"techniques.{name}")
        for field in dataclasses.fields(technique):
            places.setdefault(field.name, []).append(f"techniques.{name}.{field.name}")
    for short, key in _SHORT.items():
        places.setdefault(short.rpartition(".")[2], []).append(key)
    return places


def describe_unknown_key(path: Sequence[str], known: Sequence[str], hints: Mapping[str, str] | None = None) -> str:
    """Returns the message for an unknown key, with the key that was probably meant.

    Args:
        path: the key, from the recipe's root.
        known: the valid keys at its level.
        hints: what to say about some unknown keys of a file that is not a recipe, whose keys never are a recipe's;
            None: of a recipe.

    Example:
        >>> describe_unknown_key(("learning_rate",), ["optimizer"])
        "unknown key 'learning_rate'; here it is 'optimizer.lr'"
        >>> describe_unknown_key(("batch", "steps"), ["size", "seq_len"])
        "unknown key 'batch.steps'; it belongs to stop: 'stop.max_steps'"
        >>> describe_unknown_key(("limit",), ["each", "seed"], {})
        "unknown key 'limit'; known: each, seed"
    """
    message = f"unknown key {quote_value('.'.join(path))}; "
    key, at = path[-1], tuple(path[:-1])
    word = key.lower().replace("-", "_")
    # No key is as long, and comparing long names is slow.
    if len(word) > 60:
        return message + suggest_nearest("", list(known))
    # Only the case or the hyphens differ.
    if word in known:
        return message + f"did you mean '{word}'?"
    if word in (hints or {}):
        return message + (hints or {})[word]
    # Exact names of other trainers before similar names of ours: `r` is lora_r, not a typing error.
    # Steps of a chain have techniques of their own, at a deeper path than in a recipe.
    section = ".".join(at[at.index("techniques") :] if "techniques" in at else at)
    ours = _IN_SECTION.get(f"{section}.{word}") or NAMES.get(word, "")
    elsewhere = _ELSEWHERE_IN_SECTION.get(f"{section}.{word}") or _ELSEWHERE.get(word)
    in_recipe = hints is None
    # A name of this section, or at the top of the recipe, which holds all sections.
    if ours and (ours.rpartition(".")[0] == section if section else in_recipe):
        return message + f"here it is '{ours}'"
    if in_recipe and elsewhere:
        return message + elsewhere
    # A misspelled short name is as close as a misspelled key; the message names the key.
    short = {name.removeprefix(f"{section}."): ours for name, ours in _SHORT.items() if name.startswith(f"{section}.")}
    names = {name: ours.rpartition(".")[2] for name, ours in short.items()} | {name: name for name in known}
    if close := difflib.get_close_matches(word, list(names), n=1, cutoff=0.75):
        return message + f"did you mean '{names[close[0]]}'?"
    # A key of another section.
    if in_recipe and (hint := f"here it is '{ours}'" if ours else _hint_other_section(word, at)):
        return message + hint
    return message + suggest_nearest(key, list(known))


def _hint_other_section(word: str, at: Sequence[str]) -> str:
    """Returns the hint for a key at `at` whose name belongs to another section, or ""."""
    if at and word in _GENERIC:
        return ""
    # Keys of the recipe come before those of techniques, many of which have common names.
    if places := _index_keys().get(word):
        of_recipe = [place for place in places if not place.startswith("techniques.")] or places
        if len(of_recipe) == 1 or not at:
            return f"it belongs to {of_recipe[0].rpartition('.')[0] or 'the top'}: '{of_recipe[0]}'"
        return "there is " + " and ".join(f"'{place}'" for place in of_recipe[:3])
    # Last and with a higher cutoff, since hundreds of names are compared.
    candidates = [name for name in (*NAMES, *_index_keys()) if not at or name not in _GENERIC]
    if alike := difflib.get_close_matches(word, candidates, n=1, cutoff=0.85):
        return f"did you mean '{NAMES.get(alike[0]) or _index_keys()[alike[0]][0]}'?"
    return ""


def hint_recipe_key(name: str) -> str:
    """Returns how to set the recipe key that an unknown option names, or "" if it names none.

    Example:
        >>> hint_recipe_key("--learning-rate")
        "a recipe's key is set by --set optimizer.lr=VALUE"
        >>> hint_recipe_key("--nonsense")
        ''
    """
    # Options may be dotted (--optimizer.lr) or another trainer's name (--learning-rate).
    path = name.lstrip("-").lower().replace("-", "_")
    word = path.rpartition(".")[2]
    if elsewhere := _ELSEWHERE_IN_SECTION.get(path) or _ELSEWHERE.get(word):
        return elsewhere
    # Other trainers' --config names the file that is an argument here, not the sizes of a model.
    places = [] if path == "config" else _index_keys().get(word, [])
    of_recipe = [place for place in places if not place.startswith("techniques.")] or places
    key = path if path in places else NAMES.get(word) or (of_recipe[0] if len(of_recipe) == 1 else "")
    if not key:
        return ""
    # A technique itself has no value: {} adds it with its defaults.
    value = "{}" if key.removeprefix("techniques.") in registry() else "VALUE"
    return f"a recipe's key is set by --set {key}={value}"
