"""ms-swift: YAML, JSON and command lines of `swift sft`, `swift pt` and `swift rlhf`: one table of keys.

Read from ms-swift 4.6 (swift/arguments, swift/trainers/arguments.py, swift/pipelines/train/tuner.py). A file does not
say which command it is for: `rlhf_type` means `swift rlhf`, and all others are read as `swift sft`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from preheat.interop.fsdp import FSDP, read_fsdp
from preheat.interop.hf_keys import (
    LOGGING,
    REWARDS,
    SAVING,
    VISION,
    read_attention,
    read_preference,
    read_target_modules,
    read_target_parameters,
    read_validation,
    read_variant,
)
from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, refuse, switch, take
from preheat.interop.reading import Format
from preheat.interop.settings import Settings
from preheat.interop.shell import ENVIRONMENT
from preheat.interop.trainer_defaults import MS_SWIFT as DEFAULTS
from preheat.interop.trainer_defaults import MS_SWIFT_PRETRAIN as PRETRAIN_DEFAULTS
from preheat.interop.trainer_defaults import MS_SWIFT_RLHF as RLHF_DEFAULTS
from preheat.interop.training_arguments import ARGUMENTS, add_prefix
from preheat.sanitize import quote_value

__all__ = ["FULL_RATE", "MEGATRON_KEYS", "MS_SWIFT", "MS_SWIFT_PRETRAIN", "MS_SWIFT_RLHF"]

_TEMPLATES = {
    **dict.fromkeys(("qwen", "qwen2_5"), "qwen"),
    **dict.fromkeys(("gemma", "gemma2"), "gemma"),
    "chatml": "chatml",
    "llama3": "llama3",
    "phi3": "phi3",
    "phi4": "phi4",
}
_LINE_ENDS = ("chatml", "qwen")  # ms-swift's end a turn by <|im_end|> and a line break: template/templates/utils.py
_METHODS = ("lora", "longlora", "full")
_OTHER_METHODS = (
    *("adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone", "ia3", "lora_llm", "dummy"),
    "unsloth_lora",
)
_REWARDED = ("grpo", "ppo", "gkd", "rm")
_LOSSES = {"dpo": "dpo", "orpo": "orpo", "simpo": "simpo", "cpo": "cpo", "kto": "kto"}
_PAIR_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "hinge": "hinge", "simpo": "simpo"}
_FLASH = ("flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")
_COSTS_THE_SAME = "plain cross entropy, which costs the same"
_ADAMW = "the plan takes AdamW, with two fp32 moments per trained weight"
_MEGATRON = "is of `megatron sft`, and this file or command is of `swift`; leave it out"
MEGATRON_KEYS = frozenset(
    (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
        *("micro_batch_size", "global_batch_size", "recompute_granularity", "train_iters", "mcore_model"),
        "use_distributed_optimizer",
    )
)
"""Keys by which a file is of `megatron sft`."""


def _read_method(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice(*_METHODS, *_OTHER_METHODS)
    if name in _OTHER_METHODS:
        raise entry.error(
            f"{name}: is not read from another trainer's file; write a recipe with techniques.peft_adapter"
        )
    settings.adapter = None if name == "full" else "lora"
    settings.shifted_groups = name == "longlora"
    return Takes(("adapter",) if name != "longlora" else ("adapter", "shifted_groups"))


def _read_targets(settings: Settings, entry: Entry) -> Outcome:
    settings.lora_targets = read_target_modules(entry.texts())
    return Takes(("lora_targets",))


def _read_dtype(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("bfloat16", "float16", "float32", "bf16", "fp16", "fp32")
    full = name in ("float32", "fp32")
    settings.half_weights, settings.frozen = not full, "fp32" if full else "auto"
    # As the trainer does: half precision is bf16 for weights in bf16, and fp16 for all others.
    settings.precision = "bf16" if name in ("bfloat16", "bf16") else "fp16"
    return Takes(("half_weights", "frozen", "precision"))


def _read_precision(name: str) -> Handler:
    def handle(settings: Settings, entry: Entry) -> Outcome:
        # With the dtype of the weights, in `_finish`.
        return Takes(("precision",)) if entry.truth() or settings.precision == name else NoEffect("switched off")

    return handle


def _read_attention(settings: Settings, entry: Entry) -> Outcome:
    outcome = read_attention(settings, entry)
    return Takes(("attention",)) if entry.text() in _FLASH else outcome


def _read_datasets(settings: Settings, entry: Entry) -> Outcome:
    """Reads `hf::NAME:SUBSET/SUBSET#ROWS`, of which all but the name may be missing."""
    settings.sources = []
    for text in entry.texts():
        name = text if Path(text).exists() else text.removeprefix("hf::").removeprefix("ms::").removeprefix("HF::")
        rows = ""
        if not Path(name).exists() and "#" in name:
            name, _, rows = name.rpartition("#")
            if not rows.isdigit() or int(rows) < 1:
                raise entry.error(f"{quote_value(text)}: must be NAME#ROWS with a whole number of rows above 0")
        subsets = [""]
        if not Path(name).exists() and ":" in name:
            name, _, stated = name.partition(":")
            subsets = [subset.strip() for subset in stated.split("/") if subset.strip()] or [""]
        for subset in subsets:
            source: dict[str, object] = {"source": name}
            source |= {"subset": subset} if subset else {}
            source |= {"limit": max(int(rows) // len(subsets), 1)} if rows else {}
            settings.sources.append(source)
    keys = {key for source in settings.sources for key in source} - {"source"}
    return Takes(("sources", *(f"sources.{key}" for key in sorted(keys))))


def _read_column(settings: Settings, entry: Entry) -> Outcome:
    return Takes(("sources.columns",)) if isinstance(entry.value, str) else Assumed("the column keeps its name")


def _read_columns(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Reads the names of columns, which are those of all datasets."""
    names = {"query": "prompt", "response": "chosen" if settings.preference else "completion"}
    names |= {"rejected_response": "rejected"}
    stated = [entry for entry in entries.values() if entry.path[0] == "columns" and isinstance(entry.value, str)]
    columns = {names.get(str(entry.value), str(entry.value)): entry.path[-1] for entry in stated}
    if settings.preference:  # of which all names are written, also those that need no mapping
        columns = {field: column for field, column in columns.items() if field != column}
    for source in settings.sources if columns else ():
        source["columns"] = dict(columns)


def _read_loss_scale(settings: Settings, entry: Entry) -> Outcome:
    base, *others = entry.text().split("+")
    trained = {"default": "assistant", "all": "all", "last_round": "last"}
    settings.train_on = trained.get(base, "assistant")
    if base not in trained or any(other not in ("ignore_empty_think",) for other in others):
        return Assumed(f"the tokens of data.train_on: {settings.train_on} are trained on, with one weight")
    return Takes(("train_on",))


def _read_template(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text()) in _TEMPLATES:
        settings.template = _TEMPLATES[name]
        return Takes(("template",))
    return Assumed("the tokenizer's own template is used")


def _read_chat_template(settings: Settings, entry: Entry) -> Outcome:
    return NoEffect("a recipe uses one too") if entry.truth() else Assumed("conversations are laid out by a template")


def _read_task(settings: Settings, entry: Entry) -> Outcome:
    if entry.text() == "causal_lm":
        return NoEffect("a causal language model")
    raise entry.error(f"{entry.shown}: has a head and a loss of its own; {REWARDS}")


def _read_quantization(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("bnb", "hqq", "eetq", "quanto", "fp8", "awq", "gptq", "gptq_v2")
    if name in ("bnb", "hqq", "quanto"):
        return NoEffect("quant_bits says how many bits") if name == "bnb" else Assumed("4 bits are planned as NF4")
    return Assumed("the base is in half precision, twice the memory of 8 bits")


def _read_bits(settings: Settings, entry: Entry) -> Outcome:
    if str(entry.value) != "4":
        return Assumed("the base is in half precision, twice the memory of 8 bits")
    settings.quantized = True
    return Takes(("quantized",))


def _read_fsdp(settings: Settings, entry: Entry) -> Outcome:
    if entry.value == "fsdp2":  # the trainer's own settings of that name
        settings.sharding, settings.checkpointing = "full", True
        return Takes(("sharding", "checkpointing"))
    if str(entry.value).endswith(".json"):
        settings.sharding = "full"
        return Assumed("weights, gradients and optimizer states are sharded; of this file no more is read")
    return read_fsdp(settings, entry)


def _read_deepspeed(settings: Settings, entry: Entry) -> Outcome:
    outcome = ARGUMENTS["deepspeed"](settings, entry)
    built_in = {f"zero{stage}{end}" for stage in range(4) for end in ("", "_offload")}
    return Takes(outcome.fields) if isinstance(outcome, Takes) and entry.value in built_in else outcome


def _read_padding_free(settings: Settings, entry: Entry) -> Outcome:
    return Assumed("rows are padded, which takes more memory") if entry.truth() else NoEffect("switched off")


def _read_optimizer(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    if name == "muon":
        settings.optimizer = "muon"
        return Takes(("optimizer",))
    return NoEffect("the one of optim") if name == "default" else Assumed(_ADAMW)


def _read_backend(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("peft", "unsloth", "swift")
    return Assumed("transformers' own layers, slower and with more memory") if name == "unsloth" else NoEffect("peft")


def _read_first_values(settings: Settings, entry: Entry) -> Outcome:
    name = str(entry.value).lower()
    if name.startswith("pissa"):
        settings.lora_variant = "pissa"
        return Takes(("lora_variant",))
    known = name in ("true", "false", "gaussian", "orthogonal")
    return NoEffect("the adapters' first values") if known else Assumed("plain LoRA values")


def _read_frozen(settings: Settings, entry: Entry) -> Outcome:
    if entry.truth():
        return NoEffect("only the text part is planned")
    return Assumed("only the text part is planned: of a model with images, that part is not trained")


def _read_rlhf_type(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice(*_LOSSES, *_REWARDED)
    if name in _REWARDED:
        raise entry.error(f"{name}: {REWARDS}")
    # The trainer of SimPO is CPO's: the likelihood of the preferred answer is in its loss too.
    stated = {"loss": _LOSSES[name]} | ({"nll": 1.0} if name in ("simpo", "cpo") else {})
    stated |= {"gamma": 1.0} if name == "simpo" else {}
    settings.preference = stated | {k: v for k, v in settings.preference.items() if k != "loss"}
    return Takes(("preference",))


def _read_pair_loss(settings: Settings, entry: Entry) -> Outcome:
    names = entry.texts()
    if len(names) != 1 or names[0] not in (*_PAIR_LOSSES, "kto"):
        return Assumed("the loss is that of rlhf_type, which costs the same")
    if names[0] != "kto" and settings.preference.get("loss", "dpo") == "dpo":
        settings.preference = settings.preference | {"loss": _PAIR_LOSSES[names[0]]}
    return Takes(("preference",))


def _names(text: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(text.split(), handler)


_TABLE: Mapping[str, Handler] = {
    **ARGUMENTS,
    # The model.
    "model": take("model", Entry.text),
    "torch_dtype": _read_dtype,
    "bf16": _read_precision("bf16"),
    "fp16": _read_precision("fp16"),
    "attn_impl": _read_attention,
    "experts_impl": ignore("which kernel multiplies the experts' matrices"),
    "new_special_tokens": take("add_tokens", Entry.texts),
    "rope_scaling": assume("positions are the model's own, which cost the same"),
    "rope_scaling.*": assume("positions are the model's own, which cost the same"),
    "max_model_len": assume("positions are the model's own, which cost the same"),
    "device_map": assume("each device has all layers, or its share of them by sharding"),
    "device_map.*": assume("each device has all layers, or its share of them by sharding"),
    "task_type": _read_task,
    **_names("num_labels problem_type mrl_dims", refuse(f"a classifier has a head of its own; {REWARDS}")),
    **_names(
        "model_type model_revision local_repo_path max_memory use_hf hub_token init_strategy load_args load_data_args "
        "check_model ignore_args_error enable_npu_model_patch download_mode",
        ignore("loading"),
    ),
    "external_plugins": assume("the plan is without the code of this file"),
    "model_kwargs": assume("the plan is without these variables"),
    "model_kwargs.*": assume("the plan is without these variables"),
    # Images.
    "max_pixels": refuse(VISION),
    "norm_bbox": refuse(VISION),
    "freeze_llm": refuse(VISION),
    **_names("freeze_vit freeze_aligner", _read_frozen),
    **_names("vit_gradient_checkpointing vit_lr aligner_lr", ignore("only the text part is planned")),
    **{f"env.{name}": refuse(VISION) for name in ("MAX_PIXELS", "VIDEO_MAX_PIXELS", "FPS_MAX_FRAMES")},
    # The data.
    "dataset": _read_datasets,
    "val_dataset": assume("nothing is held out"),
    **_names("cached_dataset cached_val_dataset", assume("the plan is without this dataset")),
    "split_dataset_ratio": read_validation,
    "streaming": switch("streaming"),
    "columns": assume("the columns are named as the layout names them"),
    "columns.*": _read_column,
    "interleave_prob": assume("datasets are mixed by their numbers of rows"),
    **_names(
        "dataset_shuffle val_dataset_shuffle train_dataloader_shuffle data_seed shuffle_buffer_size stopping_strategy "
        "load_from_cache_file strict model_name model_author custom_dataset_info lazy_tokenize "
        "disable_auto_column_mapping packing_num_proc add_version",
        ignore("preparing the data"),
    ),
    "packing": switch("packing"),
    "packing_length": take("length", Entry.whole),
    "packing_strategy": ignore("whole sequences are packed, in one order or another"),
    "padding_free": _read_padding_free,
    "group_by_length": assume("the plan takes padded sequences at their full length"),
    # The template.
    "template": _read_template,
    "system": assume("the template's own system message is used"),
    "use_chat_template": _read_chat_template,
    "max_length": take("length", Entry.whole),
    "truncation_strategy": ignore("what becomes of rows that are too long"),
    "loss_scale": _read_loss_scale,
    "sequence_parallel_size": take("context_parallel", Entry.whole),
    **_names(
        "agent_template padding_side template_backend response_prefix enable_thinking preserve_thinking "
        "add_non_thinking_prefix disable_ignore_empty_think is_binary_loss_scale",
        ignore("how rows become tokens"),
    ),
    # Adapters and quantization.
    "tuner_type": _read_method,
    "tuner_backend": _read_backend,
    "target_modules": _read_targets,
    "target_regex": _read_targets,
    "target_parameters": read_target_parameters,
    "modules_to_save": assume("embedding and head stay frozen"),
    "adapters": assume("training starts from a new adapter, which costs the same"),
    "lora_rank": take("lora_rank", Entry.whole),
    "lora_alpha": take("lora_alpha", Entry.number),
    "lora_dropout": take("lora_dropout", Entry.fraction),
    "lora_bias": lambda settings, entry: (
        NoEffect("no bias is trained") if entry.value == "none" else Assumed("no bias is trained")
    ),
    "lora_dtype": assume("adapters are in fp32"),
    "lorap_lr_ratio": assume("all adapters are taken to have one learning rate, which costs the same"),
    "use_rslora": read_variant("rslora"),
    "use_dora": read_variant("dora"),
    "init_weights": _read_first_values,
    "use_swift_lora": ignore("LoRA either way"),
    **_names(
        "lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale lora_ga_stable_gamma",
        ignore("belongs to init_weights: lora-ga"),
    ),
    **_names(
        "freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters "
        "trainable_parameters_regex",
        assume("all weights are trained, which takes more memory"),
    ),
    "quant_method": _read_quantization,
    "quant_bits": _read_bits,
    "bnb_4bit_use_double_quant": switch("double_quantization"),
    "bnb_4bit_quant_type": ignore("fp4 and nf4 cost the same"),
    "bnb_4bit_compute_dtype": ignore("matmuls are in the precision of torch_dtype"),
    "bnb_4bit_quant_storage": ignore("how the weights' bytes are kept"),
    "hqq_axis": ignore("belongs to quant_method: hqq"),
    # The optimizer, the loss, the schedule.
    "optimizer": _read_optimizer,
    "use_galore": assume(_ADAMW),
    **_names(
        "galore_target_modules galore_rank galore_update_proj_gap galore_scale galore_proj_type "
        "galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant galore_proj_bits "
        "galore_proj_group_size galore_cos_threshold galore_gamma_proj galore_queue_size",
        ignore("belongs to use_galore"),
    ),
    "lisa_activated_layers": assume("all layers are trained, which takes more memory"),
    "lisa_step_interval": ignore("belongs to lisa_activated_layers"),
    "lr_scheduler_kwargs.min_lr": take("min_lr", Entry.number),
    "lr_scheduler_kwargs": assume("the schedule falls to 0, which costs the same"),
    "enable_dft_loss": take("dft", Entry.truth),
    "loss_type": assume(_COSTS_THE_SAME),
    "enable_channel_loss": ignore(LOGGING),
    "acc_strategy": ignore("the accuracy that is logged"),
    "router_aux_loss_coef": assume("without a loss on the router, of little weight"),
    "use_logits_to_keep": assume("the logits of all tokens are planned"),
    "max_epochs": assume("the run goes to its end"),
    "early_stop_interval": assume("the run goes to its end"),
    "callbacks": assume("the plan is without these callbacks"),
    # Memory and devices.
    "gradient_checkpointing_kwargs": ignore("both kinds of checkpointing keep a layer's input only"),
    "deepspeed": _read_deepspeed,
    "zero_hpz_partition_size": assume("weights are sharded across all devices"),
    "deepspeed_autotp_size": take("tensor_parallel", Entry.whole),
    "ds3_gather_for_generation": ignore("generating"),
    "fsdp": _read_fsdp,
    "fsdp.fsdp": read_fsdp,
    **add_prefix("fsdp.fsdp_config", FSDP),
    "use_ray": assume("processes start without Ray"),
    **_names("ray_exp_name device_groups device_groups.*", ignore("belongs to use_ray")),
    **{f"ENV.{name}": handler for name, handler in ENVIRONMENT.items()},
    # Without effect.
    **_names(
        "create_checkpoint_symlink safe_serialization max_shard_size use_flash_ckpt resume_only_model", ignore(SAVING)
    ),
    **_names(
        "swanlab_token swanlab_exp_name swanlab_notification_method swanlab_webhook_url swanlab_secret "
        "swanlab_sender_email swanlab_receiver_email swanlab_smtp_server swanlab_smtp_port swanlab_email_language",
        ignore(LOGGING),
    ),
    **_names(
        "eval_metric eval_use_evalscope eval_dataset eval_dataset_args eval_dataset_args.* eval_limit "
        "eval_generation_config eval_generation_config.* extra_eval_args extra_eval_args.* max_new_tokens temperature "
        "top_k top_p repetition_penalty num_beams stream stop_words logprobs top_logprobs structured_outputs_regex",
        ignore("evaluation and generating"),
    ),
    # Of another command.
    **dict.fromkeys(MEGATRON_KEYS, refuse(_MEGATRON)),
    **_names(
        "reward_model reward_funcs reward_weights reward_adapters use_vllm num_generations teacher_model "
        "num_ppo_epochs center_rewards_coefficient",
        refuse(REWARDS),
    ),
}

_RLHF: Mapping[str, Handler] = {
    **_TABLE,
    "rlhf_type": _read_rlhf_type,
    "beta": read_preference("beta"),
    "label_smoothing": read_preference("label_smoothing"),
    "simpo_gamma": read_preference("gamma"),
    "cpo_alpha": read_preference("nll"),
    "rpo_alpha": read_preference("nll"),
    "loss_type": _read_pair_loss,
    "loss_weights": assume("one loss is planned, which costs the same"),
    "desirable_weight": read_preference("desirable_weight"),
    "undesirable_weight": read_preference("undesirable_weight"),
    **_names("ld_alpha discopop_tau", assume("the loss is that of rlhf_type, which costs the same")),
    **_names("ref_model ref_adapters", assume("the reference is the model before training")),
    **_names("ref_model_type ref_model_revision", ignore("loading")),
    **_names("max_completion_length response_length", ignore("generating")),
}

_RENAMED = {
    "train_type": "tuner_type",
    "custom_register_path": "external_plugins",
    # Those of versions before 3.
    "sft_type": "tuner_type",
    "model_id_or_path": "model",
    "dtype": "torch_dtype",
    "template_type": "template",
    "lora_target_modules": "target_modules",
    "lora_dropout_p": "lora_dropout",
    "quantization_bit": "quant_bits",
    "batch_size": "per_device_train_batch_size",
}


def _find(entries: Mapping[str, Entry], name: str) -> Entry | None:
    """Returns a key by its name today, also if the file has an older one."""
    names = (name, *(old for old, new in _RENAMED.items() if new == name))
    return next((entries[key] for key in names if key in entries), None)


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Applies ms-swift's own rules between keys."""
    _choose_precision(settings, entries)
    _read_columns(settings, entries)
    packing = entries.get("packing")
    if packing and settings.packing:
        attention = _find(entries, "attn_impl")
        if attention is None or attention.value not in _FLASH:
            raise packing.error("true: ms-swift packs with flash attention only; add attn_impl: flash_attn")
    if settings.packing and "packing_length" in entries:
        settings.length = entries["packing_length"].whole()
    elif "packing_length" in entries and "max_length" in entries:
        settings.length = entries["max_length"].whole()
    if "learning_rate" not in entries and settings.adapter is None:
        settings.learning_rate = FULL_RATE
    if "gradient_accumulation_steps" not in entries:
        settings.accumulation = max(math.ceil(_ROWS / settings.micro_batch / settings.world), 1)
    if settings.adapter is None and settings.quantized and (bits := _find(entries, "quant_bits")):
        raise bits.error("a quantized base is frozen, and there is no adapter to train; write tuner_type: lora")
    if settings.streaming and not settings.max_steps:
        raise entries["streaming"].error("a streamed dataset has no known length; add max_steps")
    return _describe(settings, entries)


_ROWS, FULL_RATE = 16, 1e-5
"""Sequences a step and learning rate of full training, if the file states neither: swift/trainers/arguments.py,
gradient_accumulation_steps, and swift/arguments/sft_args.py, _init_override."""


def _choose_precision(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Sets the precision of matmuls by bf16 and fp16, which override that of the weights."""
    for name in ("bf16", "fp16"):
        entry = entries.get(name)
        if entry is not None and entry.truth():
            settings.precision = name
        elif entry is not None and settings.precision == name and not settings.half_weights:
            settings.precision = "fp32"


def _describe(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Returns what is assumed where the file is silent or the plan differs."""
    notes = []
    if not {"max_length", "packing_length"} & entries.keys():
        notes.append(
            f"max_length is not stated, and no row is cut: sequences of {settings.length:,} tokens are planned (--set "
            "batch.seq_len=N)"
        )
    if "gradient_accumulation_steps" not in entries:
        notes.append(
            f"gradient_accumulation_steps is not stated: {settings.accumulation} make up {_ROWS} sequences a step"
        )
    if settings.train_on != "all" and not settings.chunked_loss and settings.context_parallel == 1:
        notes.append("ms-swift leaves out logits of tokens that are not trained on: the plan has all, and more memory")
    # Without a template, that of the model's family is taken.
    ends_lines = settings.template in _LINE_ENDS or (not settings.template and "qwen" in str(settings.model).lower())
    if settings.train_on != "all" and ends_lines and not settings.preference:
        notes.append("ms-swift also trains on the line break after each answer: here its end token is the last")
    if settings.streaming and len(settings.sources) > 1:
        settings.sources = settings.sources[:1]
        notes.append("one streamed dataset is planned; a mixture costs the same")
    if not settings.sources:
        notes.append("the file names no dataset")
    return notes


def _finish_sft(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    notes = _finish(settings, entries)
    if "command" not in entries and "loss_scale" not in entries:
        notes.append("no key tells the command: read as `swift sft` (--from ms-swift-pt: as `swift pt`)")
    return notes


def _finish_rlhf(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    loss = settings.preference["loss"]
    settings.preference = {"beta": 2.0 if loss == "simpo" else 0.1} | settings.preference
    settings.pairs = loss != "kto"
    notes = _finish(settings, entries)
    if settings.packing:
        raise entries["packing"].error("true: preferences are not planned packed; set it to false")
    for source in settings.sources:
        source["layout"] = "preference" if settings.pairs else "kto"
    return notes


_OWN = frozenset(
    (
        *(
            "tuner_type",
            "train_type",
            "sft_type",
            "torch_dtype",
            "attn_impl",
            "lora_rank",
            "target_modules",
            "loss_scale",
        ),
        *("split_dataset_ratio", "truncation_strategy", "use_hf", "tuner_backend", "freeze_vit", "quant_bits"),
    )
)

MS_SWIFT = Format(
    name="ms-swift",
    title="ms-swift",
    requires=frozenset({"model"}),
    unique=_OWN,
    without=frozenset({"rlhf_type", "base_model", "model_name_or_path"}) | MEGATRON_KEYS,
    defaults=DEFAULTS,
    finish=_finish_sft,
    renamed=_RENAMED,
    table=_TABLE,
)

MS_SWIFT_PRETRAIN = Format(
    name="ms-swift-pt",
    title="ms-swift",
    requires=frozenset({"model"}),
    # Its files have the keys of `swift sft`: the command or --from names it.
    unique=frozenset({"swift pt"}),
    defaults=PRETRAIN_DEFAULTS,
    finish=_finish,
    renamed=_RENAMED,
    table=_TABLE,
)

MS_SWIFT_RLHF = Format(
    name="ms-swift-rlhf",
    title="ms-swift",
    requires=frozenset({"model"}),
    unique=frozenset({"rlhf_type"}),
    without=MEGATRON_KEYS,
    defaults=RLHF_DEFAULTS,
    finish=_finish_rlhf,
    renamed=_RENAMED,
    table=_RLHF,
)
