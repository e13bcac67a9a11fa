"""Handlers of keys that trainers on top of transformers' Trainer share: its arguments, and those of its trackers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from preheat.interop.accelerate import ACCELERATE
from preheat.interop.deepspeed import DEEPSPEED, read_deepspeed
from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, switch, take
from preheat.interop.settings import Settings

__all__ = [
    "ADAPTED",
    "COMMON",
    "LOGGING",
    "NO_PREAMBLE",
    "REWARDS",
    "SAVING",
    "SCHEDULE_KWARGS",
    "VISION",
    "find_source",
    "read_attention",
    "read_epochs",
    "read_kernel",
    "read_of_source",
    "read_optimizer",
    "read_preference",
    "read_schedule",
    "read_steps",
    "read_target_modules",
    "read_target_parameters",
    "read_validation",
    "read_variant",
    "switch",
]

_STACKS = "gate_up_proj|up_proj|down_proj"
LOGGING, SAVING = "logging and tracking", "saving"
REWARDS = "training of or on rewards is not planned; preheat plans supervised training and preferences (dpo, orpo, kto)"
VISION = "images and sound are not read from another trainer's file; write a recipe (model.part: whole) for images"
ADAPTED = {"q,v": ("q_proj", "v_proj"), "all": ("all-linear",)}
"""Layers with adapters, as `trainer_defaults` spells them -> their names; peft chooses queries and values by itself."""
NO_PREAMBLE = "without the sentence before each instruction (Below is an instruction ...)"
"""The difference between preheat's template and Alpaca's prompt in other trainers."""
_LOADING = "loading"
_DATA_WORK = "preparing the data"

_EIGHT_BIT = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit"),
    *("adamw_torch_4bit", "ao_adamw_4bit"),
)
_PLAIN = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw",
    "adamw_apex_fused",
    "paged_adamw",
    "paged_adamw_32bit",
)
_OTHERS = ("adafactor", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "lion", "muon")
_SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}


def read_optimizer(settings: Settings, entry: Entry) -> Outcome:
    """Reads an optimizer's name as transformers spells it."""
    name = entry.text()
    if name in _EIGHT_BIT or name in _PLAIN or name in _OTHERS:
        settings.optimizer = name
        return Takes(("optimizer",), "pages of its states may move to the host" if name.startswith("paged") else "")
    return Assumed("the plan takes AdamW, with two fp32 moments per trained weight")


def read_schedule(settings: Settings, entry: Entry) -> Outcome:
    """Reads a learning rate schedule's name."""
    if (name := entry.text()) in _SCHEDULES:
        settings.schedule = _SCHEDULES[name]
        return Takes(("schedule",))
    return Assumed("the plan takes a cosine, which costs the same")


def _read_decay(settings: Settings, entry: Entry) -> Outcome:
    if entry.value == "linear":
        return NoEffect("the rate falls linearly, as a recipe's")
    return Assumed("the rate falls linearly at the end, which costs the same")


def read_steps(name: str) -> Handler:
    """Returns a handler of a number of steps; a fraction of the run is left to the plan."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        if not entry.number() >= 1:
            return NoEffect("a fraction of the run, or none: it costs the same at another step")
        setattr(settings, name, entry.whole())
        return Takes((name,))

    return handle


def read_warmup(settings: Settings, entry: Entry) -> Outcome:
    """Reads the steps of the warmup; below 1 they are a fraction of the run, as in transformers 5."""
    if 0 <= entry.number() < 1:
        settings.warmup_ratio = entry.fraction()
        return Takes(("warmup_ratio",))
    settings.warmup_steps = entry.whole()
    return Takes(("warmup_steps",))


def read_max_steps(settings: Settings, entry: Entry) -> Outcome:
    """Reads the number of steps; -1 means that epochs decide."""
    if entry.number() < 1:
        return NoEffect("the epochs decide")
    settings.max_steps = entry.whole()
    return Takes(("max_steps",))


def read_beta(index: int) -> Handler:
    """Returns a handler of one of Adam's betas."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        betas = list(settings.betas)
        betas[index] = entry.fraction()
        settings.betas = (betas[0], betas[1])
        return Takes(("betas",))

    return handle


def read_bf16(settings: Settings, entry: Entry) -> Outcome:
    """Reads whether matmuls are in bf16; auto means yes, on a GPU that has it."""
    if entry.value == "auto" or entry.truth():
        settings.precision = "bf16"
        return Takes(("precision",))
    if settings.precision == "bf16":
        settings.precision = "fp32"
    return Takes(("precision",))


def read_fp16(settings: Settings, entry: Entry) -> Outcome:
    """Reads whether matmuls are in fp16."""
    if entry.truth():
        settings.precision = "fp16"
        return Takes(("precision",))
    return NoEffect("switched off")


def read_attention(settings: Settings, entry: Entry) -> Outcome:
    """Reads an attention implementation's name: all but eager are planned as the fastest fused kernel."""
    name = entry.text()
    settings.attention = name not in ("eager", "disabled")
    known = ("auto", "sdpa", "fa2", "flash_attention_2", "eager", "disabled")
    return Takes(("attention",), "" if name in known else "planned as the fastest fused kernel for the device")


def read_target_modules(targets: list[str]) -> str | list[str]:
    """Returns a recipe's layers with adapters; names of wrappers around the text part are left out of patterns.

    Example:
        >>> read_target_modules(["all-linear"]), read_target_modules(["model.language_model.layers.[0-9]+.mlp"])
        ('all-linear', 'model.layers.[0-9]+.mlp')
    """
    plain = [target.replace("language_model.", "") for target in targets]
    if len(plain) == 1 and (plain[0] == "all-linear" or re.search(r"[\[\]()*+|\\]", plain[0])):
        return plain[0]
    return plain


def read_target_parameters(settings: Settings, entry: Entry) -> Outcome:
    """Reads the parameters with adapters: preheat adapts all matrices of the experts in all layers, or none."""
    if entry.is_off:
        return NoEffect("switched off")
    names = entry.texts()
    stacks = {name.rpartition(".")[2] for name in names if re.fullmatch(rf"([a-z_]+\.)*experts\.({_STACKS})", name)}
    if len(stacks) < len(names) or not ({"gate_up_proj", "down_proj"} <= stacks or {"up_proj", "down_proj"} <= stacks):
        return Assumed("no parameters have adapters, but layers: preheat adapts all matrices of all experts or none")
    settings.lora_experts = True
    return Takes(("lora_experts",))


def read_remote_code(settings: Settings, entry: Entry) -> Outcome:
    """A file cannot allow code that comes with a model; the user does."""
    entry.truth()
    return NoEffect("code that comes with a model runs only if you allow it: --set model.trust_remote_code=true")


def read_epochs(settings: Settings, entry: Entry) -> Outcome:
    """Reads the number of epochs."""
    if entry.number() <= 0:
        raise entry.error(f"must be above 0, got {entry.value}")
    settings.epochs = entry.number()
    return Takes(("epochs",))


def read_compile(settings: Settings, entry: Entry) -> Outcome:
    """Reads whether the model is compiled."""
    settings.compiled = entry.value == "auto" or entry.truth()
    return Takes(("compiled",))


def read_kernel(*names: str) -> Handler:
    """Returns a handler of a fused kernel, which is planned as preheat's own, of the same memory."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        if not entry.truth():
            return NoEffect("switched off")
        for name in names:
            setattr(settings, name, True)
        return Takes(names, "planned as preheat's own kernel")

    return handle


def read_preference(name: str) -> Handler:
    """Returns a handler of a number among the settings of the preference loss."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        settings.preference = settings.preference | {name: entry.number()}
        return Takes(("preference",))

    return handle


def find_source(settings: Settings, entry: Entry) -> dict[str, object]:
    """Returns the source of the data that the key is of, in the recipe's terms."""
    while len(settings.sources) <= entry.index:
        settings.sources.append({"source": ""})
    return settings.sources[entry.index]


def read_of_source(key: str) -> Handler:
    """Returns a handler of a text of one source of the data."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        find_source(settings, entry)[key] = entry.text()
        return Takes((f"sources.{key}",))

    return handle


def read_validation(settings: Settings, entry: Entry) -> Outcome:
    """Reads the fraction of the rows that is held out."""
    if entry.number() >= 1:
        return Assumed("nothing is held out")
    settings.validation = entry.fraction()
    return Takes(("validation",))


def read_lora_plus(settings: Settings, entry: Entry) -> Outcome:
    """Reads LoRA+'s ratio of learning rates: the matrices B's to A's."""
    settings.lr_scales["lora_B"] = entry.number()
    return Takes(("lr_scales",))


def read_variant(name: str) -> Handler:
    """Returns a handler that switches a variant of LoRA on."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        if not entry.truth():
            return NoEffect("switched off")
        settings.lora_variant = name
        return Takes(("lora_variant",))

    return handle


def _names(text: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(text.split(), handler)


SCHEDULE_KWARGS: Mapping[str, Handler] = {
    **dict.fromkeys(("min_lr_rate", "min_lr_ratio"), take("min_lr_ratio", lambda entry: min(entry.number(), 0.999))),
    "num_decay_steps": take("decay_steps", Entry.whole),
    "decay_type": _read_decay,
    "*": assume("the schedule falls to 0, which costs the same"),
}
"""Keys of `lr_scheduler_kwargs`."""

COMMON: Mapping[str, Handler] = {
    # Batch, optimizer and schedule.
    "gradient_accumulation_steps": take("accumulation", Entry.whole),
    "learning_rate": take("learning_rate", Entry.number),
    "weight_decay": take("weight_decay", Entry.number),
    "max_grad_norm": take("max_grad_norm", Entry.number),
    "adam_beta1": read_beta(0),
    "adam_beta2": read_beta(1),
    "adam_epsilon": take("eps", Entry.number),
    "warmup_ratio": take("warmup_ratio", Entry.fraction),
    "warmup_steps": read_warmup,
    "max_steps": read_max_steps,
    "seed": take("seed", lambda entry: int(entry.number())),
    "label_smoothing_factor": take("label_smoothing", Entry.fraction),
    "neftune_noise_alpha": take("neftune", Entry.number),
    # Precision, kernels, devices.
    "bf16": read_bf16,
    "fp16": read_fp16,
    "torch_compile": read_compile,
    "gradient_checkpointing_kwargs.*": ignore("both kinds of checkpointing keep a layer's input only"),
    "deepspeed": read_deepspeed,
    **{f"deepspeed.{key}": handler for key, handler in DEEPSPEED.items()},
    **{f"accelerate.{key}": handler for key, handler in ACCELERATE.items()},
    "dataloader_num_workers": take("workers", lambda entry: int(entry.number())),
    "save_total_limit": take("save_limit", Entry.whole),
    "save_steps": read_steps("save_steps"),
    "eval_steps": read_steps("eval_steps"),
    "trust_remote_code": read_remote_code,
    "loraplus_lr_ratio": read_lora_plus,
    "tf32": ignore("matmuls are in half precision; of the rest the plan times fp32"),
    # Names, logging, tracking, saving.
    **_names(
        "output_dir overwrite_output_dir save_only_model save_safetensors save_strategy resume_from_checkpoint "
        "load_best_model_at_end metric_for_best_model greater_is_better hub_model_id hub_strategy push_to_hub "
        "save_first_step hub_revision",
        ignore(SAVING),
    ),
    **_names(
        "logging_steps logging_dir logging_strategy logging_first_step report_to run_name use_wandb wandb_project "
        "wandb_entity wandb_watch wandb_name wandb_log_model wandb_mode wandb_run_id use_mlflow mlflow_tracking_uri "
        "mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_tensorboard use_comet comet_api_key "
        "comet_workspace comet_project_name use_swanlab swanlab_project swanlab_experiment_name swanlab_description "
        "swanlab_mode swanlab_workspace swanlab_run_name swanlab_api_key swanlab_logdir swanlab_log_completions "
        "swanlab_completion_log_interval swanlab_completion_max_buffer use_trackio trackio_project_name "
        "trackio_run_name trackio_space_id plot_loss include_tokens_per_second include_num_input_tokens_seen "
        "disable_tqdm log_level use_otel_metrics otel_metrics_host otel_metrics_port include_tkps project "
        "include_effective_tokens_per_second",
        ignore(LOGGING),
    ),
    **_names(
        "eval_strategy evaluation_strategy per_device_eval_batch_size eval_batch_size eval_accumulation_steps "
        "eval_table_size eval_max_new_tokens predict_with_generate compute_accuracy do_eval do_predict eval_on_start "
        "batch_eval_metrics",
        ignore("evaluation: the plan has it at the end, with a training micro-batch"),
    ),
    **_names(
        "remove_unused_columns dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last "
        "preprocessing_num_workers dataset_num_proc dataset_processes overwrite_cache data_seed "
        "dataloader_persistent_workers",
        ignore(_DATA_WORK),
    ),
    **_names("low_cpu_mem_usage cache_dir use_fast_tokenizer hf_hub_token local_rank do_train", ignore(_LOADING)),
    **_names(
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend",
        ignore("how processes find and wait for each other"),
    ),
    "group_by_length": assume("the plan takes padded sequences at their full length"),
    "auto_find_batch_size": assume("the plan takes the micro-batch as stated"),
    "use_reentrant_gc": ignore("both kinds of checkpointing keep a layer's input only"),
    **_names("fsdp_transformer_layer_cls_to_wrap", ignore("layers are found in the model")),
}
"""Arguments of transformers' Trainer, which its descendants spell alike."""
