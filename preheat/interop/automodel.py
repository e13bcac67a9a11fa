"""NeMo AutoModel's YAML: one table of its keys. Read from nemo_automodel 0.7 (recipes, components, _transformers)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from preheat.interop.hf_keys import (
    LOGGING,
    SAVING,
    VISION,
    read_attention,
    read_epochs,
    read_kernel,
    read_remote_code,
    switch,
)
from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, take
from preheat.interop.reading import Format
from preheat.interop.settings import Settings
from preheat.interop.torch_keys import last_name, read_betas, read_optimizer_class, read_warmup, split_global_batch
from preheat.interop.trainer_defaults import AUTOMODEL as DEFAULTS
from preheat.sanitize import quote_value

__all__ = ["AUTOMODEL"]

_RECIPES = ("TrainFinetuneRecipeForNextTokenPrediction", "BenchmarkingRecipeForNextTokenPrediction")
_MODELS = ("NeMoAutoModelForCausalLM", "NeMoAutoModelForSeq2SeqLM")
_AUTO = ("none", "None", "auto")
"""Sizes that AutoModel infers, as its example files spell them."""
_CHATS = ("ChatDataset", "make_chat_dataset")
_INSTRUCTIONS = ("ColumnMappedTextInstructionDataset", "ColumnMappedTextInstructionIterableDataset")
_TOKENS = ("NanogptDataset", "MegatronPretraining")
_LONGEST = {"HellaSwag": 256, "make_squad_dataset": 1024}
"""Dataset with rows of known length -> its longest rows in tokens, rounded up to a power of 2."""
_COLUMNS = {"question": "instruction", "context": "input", "answer": "output"}
_FLOATS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16"}
_SINGLE = ("fp32", "float32", "float")
_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zbv"}
_DECAYS = ("cosine", "linear", "constant")
_SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("moe_intermediate_size", "num_experts", "num_experts_per_tok", "vocab_size", "max_position_embeddings"),
    *("tie_word_embeddings", "rms_norm_eps"),
)
_FAMILIES = {
    "LlamaConfig": "llama",
    "Qwen3Config": "qwen3",
    "GPT2Config": "gpt2",
    "Qwen3MoeConfig": "qwen3_moe",
    "MixtralConfig": "mixtral",
}
"""Class of a configuration whose sizes the file may state -> our family."""
_EXPERT_FAMILIES = ("qwen3_moe", "mixtral")


def _switch_on(name: str) -> Handler:
    """Returns a handler of a section that switches a field of `Settings` on by being there."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        setattr(settings, name, True)
        return Takes((name,))

    return handle


def _read_recipe(settings: Settings, entry: Entry) -> Outcome:
    if last_name(entry) not in _RECIPES:
        raise entry.error(
            f"{entry.shown}: preheat plans next-token training ({_RECIPES[0]}), not this; distillation, drafting, "
            "classification, retrieval and images need a recipe"
        )
    return NoEffect("next-token training, which a recipe does too")


def _read_model_target(settings: Settings, entry: Entry) -> Outcome:
    kind, _, method = entry.text().rpartition(".")
    if kind.rpartition(".")[2] not in _MODELS:
        raise entry.error(f"{entry.shown}: only language models ({_MODELS[0]}) are planned; {VISION}")
    settings.random_weights = method == "from_config"
    return Takes(("random_weights",))


def _read_model(settings: Settings, entry: Entry) -> Outcome:
    if settings.model is not None:
        return NoEffect("the model is named already")
    settings.model = entry.text()
    return Takes(("model",))


def _read_base(settings: Settings, entry: Entry) -> Outcome:
    settings.random_weights = not entry.truth()
    return Takes(("random_weights",))


def _read_config_target(settings: Settings, entry: Entry) -> Outcome:
    name = last_name(entry)
    if name == "from_pretrained":
        return NoEffect("the configuration of the named model")
    if name not in _FAMILIES:
        raise entry.error(
            f"{entry.shown}: sizes of a new model are read for {', '.join(_FAMILIES)}; or name one to read them from: "
            "transformers.AutoConfig.from_pretrained"
        )
    settings.family = _FAMILIES[name]
    return Takes(("family",))


def _read_size(settings: Settings, entry: Entry) -> Outcome:
    name = entry.path[-1]
    reads = {"tie_word_embeddings": entry.truth, "rms_norm_eps": entry.number}
    settings.architecture[name] = reads.get(name, entry.whole)()
    return Takes(("architecture",))


def _read_dtype(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text().removeprefix("torch.")
    if name == "auto":
        return NoEffect("the checkpoint's own, taken to be bf16")
    if name in _SINGLE:  # FSDP casts them for the matmuls
        settings.half_weights, settings.frozen = False, "fp32"
        return Takes(("half_weights", "frozen"))
    if name not in _FLOATS:
        raise entry.error(f"must be auto, float32, bfloat16 or float16, got {quote_value(name)}")
    settings.precision, settings.half_weights = _FLOATS[name], True
    return Takes(("precision", "half_weights"))


def _read_norm(settings: Settings, entry: Entry) -> Outcome:
    settings.fused_norm = entry.text() in ("te", "quack")
    return Takes(("fused_norm",), "planned as preheat's own kernel" if settings.fused_norm else "")


def _read_loss(settings: Settings, entry: Entry) -> Outcome:
    name = last_name(entry)
    settings.chunked_loss = name == "FusedLinearCrossEntropy"
    if settings.chunked_loss:
        return Takes(("chunked_loss",), "planned as preheat's own kernel")
    if name in ("MaskedCrossEntropy", "TEParallelCrossEntropy", "ChunkedCrossEntropy"):
        return Takes(("chunked_loss",), "" if name == "MaskedCrossEntropy" else "planned as torch's cross entropy")
    return Assumed("plain cross entropy")


def _read_upcast(settings: Settings, entry: Entry) -> Outcome:
    if entry.truth():
        return NoEffect("the loss is computed in fp32, as in preheat")
    return Assumed("the loss is computed in fp32, which takes more memory")


def _source(settings: Settings) -> dict[str, object]:
    if not settings.sources:
        settings.sources.append({})
    return settings.sources[0]


def _read_dataset(settings: Settings, entry: Entry) -> Outcome:
    name = last_name(entry)
    if name.startswith("Mock"):
        settings.packing = True  # every row is full
        return Assumed("text in place of random tokens, which costs the same")
    if name in _CHATS:
        _source(settings)["layout"] = "messages"
        return Takes(("sources.layout",))
    if name in _INSTRUCTIONS:
        _source(settings).setdefault("layout", "alpaca")
        return Takes(("sources.layout",))
    if name in _TOKENS:
        _source(settings)["layout"] = "text"
        settings.packing, settings.train_on = True, "all"
        return Takes(("sources.layout", "packing", "train_on"), "its text, not yet in tokens")
    return Assumed("the rows' fields are recognized by their names: that class lays them out by its own code")


def _read_path(settings: Settings, entry: Entry) -> Outcome:
    paths = entry.texts()
    if not paths:
        raise entry.error("names no data")
    _source(settings)["source"] = paths[0]
    if len(paths) > 1:
        return Takes(("sources",), "the first of them; a mixture costs the same")
    return Takes(("sources",))


def _read_of_source(key: str) -> Handler:
    def handle(settings: Settings, entry: Entry) -> Outcome:
        _source(settings)[key] = entry.whole() if key == "limit" else entry.text()
        return Takes((f"sources.{key}",))

    return handle


def _read_split(settings: Settings, entry: Entry) -> Outcome:
    if re.match(r"[\d., ]+$", entry.text()):  # shares of training, validation and test, of Megatron's
        return Assumed("all of the data is trained on")
    return _read_of_source("split")(settings, entry)


def _read_column(settings: Settings, entry: Entry) -> Outcome:
    field = _COLUMNS[entry.path[-1]]
    if (name := entry.text()) != field:
        columns = _source(settings).setdefault("columns", {})
        assert isinstance(columns, dict)
        columns[field] = name
    return Takes(("sources.columns",))


def _read_answers(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "assistant" if entry.truth() else "all"
    return Takes(("train_on",))


def _read_history(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "last" if entry.truth() else settings.train_on
    return Takes(("train_on",))


def _read_packed(settings: Settings, entry: Entry) -> Outcome:
    if entry.is_off:
        return NoEffect("switched off")
    settings.packing = True
    settings.length = entry.whole()
    return Takes(("packing", "length"))


def _read_targets(settings: Settings, entry: Entry) -> Outcome:
    patterns = entry.texts()
    if "*" in patterns:
        settings.lora_targets = "all-linear"
        return Takes(("lora_targets",), "but for stacked experts and the head")
    if not any("*" in pattern for pattern in patterns):
        settings.lora_targets = patterns
    else:
        settings.lora_targets = "|".join(_translate(pattern) for pattern in patterns)
    return Takes(("lora_targets",))


def _translate(pattern: str) -> str:
    """Returns AutoModel's pattern of module names as a regular expression of whole names.

    Example:
        >>> _translate("*_proj"), _translate("*.layers.0.*.q_proj"), _translate("q_proj")
        ('.*_proj', '.*\\\\.layers\\\\.0\\\\..*\\\\.q_proj', '(.*\\\\.)?q_proj')
    """
    text = re.escape(pattern).replace(r"\*", ".*")
    return text if "*" in pattern or "." in pattern else rf"(.*\.)?{text}"


def _read_all_linear(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    settings.lora_targets = "all-linear"
    return Takes(("lora_targets",), "but for the head")


def _read_excluded(settings: Settings, entry: Entry) -> Outcome:
    if not entry.texts():
        return NoEffect("switched off")
    settings.lora_targets = "all-linear"
    return Assumed("all linear layers have adapters, these too")


def _read_dora(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    settings.lora_variant = "dora"
    return Takes(("lora_variant",))


def _read_scales(settings: Settings, entry: Entry) -> Outcome:
    return (
        NoEffect("one scale per tensor, as planned")
        if entry.text() == "tensorwise"
        else Assumed("one scale per tensor")
    )


def _read_strategy(settings: Settings, entry: Entry) -> Outcome:
    settings.sharding = {"fsdp2": "full", "megatron_fsdp": "full", "ddp": None}[
        entry.choice("fsdp2", "megatron_fsdp", "ddp")
    ]
    return Takes(("sharding",), "planned as FSDP2" if entry.value == "megatron_fsdp" else "")


def _read_manager(settings: Settings, entry: Entry) -> Outcome:
    if last_name(entry).startswith("DDP"):
        settings.sharding = None
    return Takes(("sharding",))


def _read_zero(settings: Settings, entry: Entry) -> Outcome:
    stage = int(entry.number())
    if stage not in range(4):
        raise entry.error(f"must be 0, 1, 2 or 3, got {quote_value(entry.value)}")
    settings.sharding = (None, "optimizer", "gradients", "full")[stage]
    return Takes(("sharding",))


def _read_degree(name: str) -> Handler:
    def handle(settings: Settings, entry: Entry) -> Outcome:
        if entry.value in _AUTO or entry.is_off:
            return NoEffect("as many as there are devices for")
        setattr(settings, name, entry.whole())
        return Takes((name,))

    return handle


def _read_reshard(settings: Settings, entry: Entry) -> Outcome:
    settings.sharding = "full" if entry.truth() else "gradients"
    return Takes(("sharding",))


def _read_expert_reshard(settings: Settings, entry: Entry) -> Outcome:
    if settings.expert_parallel == 1:
        return NoEffect("belongs to ep_size above 1")
    return _read_reshard(settings, entry)


def _read_checkpointing(settings: Settings, entry: Entry) -> Outcome:
    name = str(entry.value).lower()
    settings.checkpointing = name in ("full", "selective") or entry.truth()
    if name == "selective":
        settings.checkpointing_mode = "selective"
        return Takes(("checkpointing", "checkpointing_mode"))
    return Takes(("checkpointing",))


def _read_schedule(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text().lower().replace("_", "")
    if name not in _SCHEDULES:
        return Assumed("the pipeline runs 1f1b")
    settings.pipeline_schedule = _SCHEDULES[name]
    return Takes(("pipeline_schedule",))


def _read_pipeline_batch(settings: Settings, entry: Entry) -> Outcome:
    if settings.pipeline_parallel == 1:
        return NoEffect("belongs to pp_size above 1")
    entry.whole()
    return Takes(("micro_batch",))


def _read_decay(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text()) in _DECAYS:
        settings.schedule = name
        return Takes(("schedule",))
    settings.schedule = "cosine"
    return Assumed("the plan takes a cosine, which costs the same")


def _read_masters(settings: Settings, entry: Entry) -> Outcome:
    settings.half_weights = not entry.truth()
    return Takes(("half_weights",))


def _read_tokenizer(settings: Settings, entry: Entry) -> Outcome:
    settings.tokenizer = entry.text()
    return Takes(("tokenizer",))


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies AutoModel's own rules between keys."""
    notes: list[str] = []
    _finish_model(settings, entries)
    if settings.tokenizer == settings.model:
        settings.tokenizer = None
    if any(name.startswith("peft.") for name in entries):
        settings.adapter = "lora"
        settings.lora_targets = settings.lora_targets or _translate("*_proj")
    elif settings.quantized:
        raise entries["quantization.load_in_4bit"].error(
            "a base in 4 bits is frozen, and there is no adapter; add peft"
        )
    _finish_adapter_kernels(settings)
    _finish_schedule(settings, entries)
    optimizer = entries.get("optimizer._target_")
    if optimizer is not None and last_name(optimizer) == "FusedAdam" and "optimizer.master_weights" not in entries:
        settings.half_weights = False  # its masters are on by default
    # Degrees: dp_size counts the copies of hybrid sharding too.
    if settings.shard_size is not None:
        settings.shard_size = max(settings.shard_size // settings.replicas, 1)
    stated = _first(entries, "distributed.reshard_after_forward", "distributed.moe.reshard_after_forward")
    if stated is not None and settings.expert_parallel > 1:  # ep_size may be before or after it
        _read_reshard(settings, stated)
    if stated is None and settings.sharding == "full" and max(settings.pipeline_parallel, settings.expert_parallel) > 1:
        settings.sharding = "gradients"
        notes.append("with pp_size or ep_size above 1, AutoModel keeps gathered weights until the backward pass")
    if settings.pipeline_parallel > 1:
        size = _first(entries, "distributed.pipeline.pp_microbatch_size", "autopipeline.pp_microbatch_size")
        settings.micro_batch = size.whole() if size else 1
        notes.append(
            "all micro-batches of a step pass through the pipeline at once, where AutoModel empties it after each "
            "local_batch_size, which takes longer"
        )
    notes += split_global_batch(
        settings, entries, "step_scheduler.global_batch_size", "step_scheduler.local_batch_size"
    )
    notes += _finish_data(settings, entries)
    return notes


def _finish_model(settings: Settings, entries: Mapping[str, Entry]) -> None:
    if settings.model is not None:
        settings.family = None
        return
    section = next((entry for name, entry in entries.items() if name.startswith("model.")), None)
    if settings.family is None:
        blamed = section or next(iter(entries.values()))
        raise blamed.error("names no model; add model.pretrained_model_name_or_path")
    if settings.family in _EXPERT_FAMILIES and "moe_intermediate_size" in settings.architecture:
        settings.architecture["intermediate_size"] = settings.architecture.pop("moe_intermediate_size")
    settings.random_weights = False  # a model of sizes has no others


def _finish_adapter_kernels(settings: Settings) -> None:
    """Sets the fused operators of adapted layers: AutoModel has them on, and leaves them out where they cannot run."""
    split = max(settings.tensor_parallel, settings.expert_parallel) > 1
    plain = settings.adapter == settings.lora_variant == "lora" and not settings.lora_dropout and not settings.quantized
    settings.adapter_kernels = settings.adapter_kernels and plain and not split
    settings.fused_gate = settings.fused_gate or settings.adapter_kernels


def _finish_schedule(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Fills in what lr_scheduler leaves out: a cosine, a tenth of warmup, and a fall to 1 %."""
    if not any(name.startswith("lr_scheduler.") for name in entries):
        return
    if "lr_scheduler.lr_decay_style" not in entries:
        settings.schedule = "cosine"
    if "lr_scheduler.lr_warmup_steps" not in entries:
        settings.warmup_ratio = 0.1
    if settings.min_lr is None:
        settings.min_lr_ratio = 0.01


def _finish_data(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Sets length, packing and layout; returns what is assumed of them."""
    notes = []
    packed = entries.get("packed_sequence.packed_sequence_size")
    if packed is not None and not packed.is_off:
        settings.length = packed.whole()
    elif _first(entries, "dataset.seq_length", "dataset.seq_len") is None:
        dataset = entries.get("dataset._target_")
        settings.length = _LONGEST.get(last_name(dataset) if dataset else "", settings.length)
        notes.append(
            f"the longest row of a micro-batch decides its length: planned at {settings.length:,} tokens; "
            "--set batch.seq_len=N plans another"
        )
    if settings.sources and not settings.sources[0].get("source"):
        raise next(entry for name, entry in entries.items() if name.startswith("dataset.")).error(
            "names no data; add dataset.path_or_dataset_id"
        )
    if settings.sources and settings.sources[0].get("layout") == "alpaca":
        source = settings.sources[0]
        columns = source.get("columns", {})
        assert isinstance(columns, dict)
        if "dataset.column_mapping.context" not in entries:
            # A question and its answer alone are a prompt and its completion.
            source.pop("columns", None)
            source |= {
                "layout": "prompt",
                "prompt": columns.get("instruction", "instruction"),
                "completion": columns.get("output", "output"),
            }
    return notes


def _first(entries: Mapping[str, Entry], *names: str) -> Entry | None:
    return next((entries[name] for name in names if name in entries and entries[name].value is not None), None)


_EVALUATION = ignore("evaluation: the plan has it at the end, with a training micro-batch")
_OTHER_DATA = ignore("belongs to validation_dataset")
_DATA_WORK = ignore("preparing the data")
_EXPERTS = ignore("the kernel of the experts: the plan takes a grouped product, and even load")
_OWN_KERNEL = ignore("a kernel of little weight")
_MICRO = ignore("belongs to the pipeline")

_DATA: Mapping[str, Handler] = {
    "_target_": _read_dataset,
    **dict.fromkeys(("path_or_dataset", "path_or_dataset_id", "dataset_name", "paths", "file_pattern"), _read_path),
    "split": _read_split,
    "name": _read_of_source("subset"),
    "limit_dataset_samples": _read_of_source("limit"),
    "num_samples_limit": _read_of_source("limit"),
    **{f"column_mapping.{name}": _read_column for name in _COLUMNS},
    "answer_only_loss_mask": _read_answers,
    "mask_history": _read_history,
    "mask_reasoning_content": assume("all of the answer is trained on"),
    "use_hf_chat_template": assume("rows are laid out without the tokenizer's template"),
    "chat_template": assume("the tokenizer's own template is used"),
    "seq_length": take("length", Entry.whole),
    "seq_len": take("length", Entry.whole),
    "tokenizer.pretrained_model_name_or_path": _read_tokenizer,
    "tokenizer.trust_remote_code": read_remote_code,
    "tokenizer.*": ignore("loading"),
    **dict.fromkeys(
        (
            *("padding", "truncation", "pad_to_max_length", "shuffle_seed", "shuffle_files", "splits_to_build"),
            *("index_mapping_dir", "num_samples", "vocab_size", "batch_size", "filter_no_assistant", "seed"),
            *("filter_overlong", "trim_incomplete_last_turn", "truncate_history", "start_of_turn_token"),
            *("align_to_bos", "unshifted", "skip_invalid_samples", "num_blocks", "create_attention_mask"),
        ),
        _DATA_WORK,
    ),
    "revision": assume("the newest revision is read"),
}
_PIPELINE: Mapping[str, Handler] = {
    "_target_": _MICRO,
    "pp_schedule": _read_schedule,
    "pp_microbatch_size": _read_pipeline_batch,
    "layers_per_stage": assume("with an interleaved schedule, two stages a device"),
    **dict.fromkeys(
        (
            *("round_virtual_stages_to_pp_multiple", "patch_inner_model", "patch_causal_lm_model", "pp_seq_len"),
            *("scale_grads_in_schedule", "dtype"),
        ),
        _MICRO,
    ),
}

AUTOMODEL = Format(
    name="automodel",
    title="NeMo AutoModel",
    requires=frozenset({"model", "step_scheduler"}),
    unique=frozenset({"step_scheduler"}),
    defaults=DEFAULTS,
    finish=_finish,
    table={
        "recipe": _read_recipe,
        "seed": take("seed", lambda entry: int(entry.number())),
        "rng.seed": take("seed", lambda entry: int(entry.number())),
        "rng.*": ignore("how random numbers are drawn"),
        # The batch.
        "step_scheduler.global_batch_size": take("global_batch", Entry.whole),
        "step_scheduler.local_batch_size": take("micro_batch", Entry.whole),
        "step_scheduler.max_steps": take("max_steps", Entry.whole),
        "step_scheduler.num_epochs": read_epochs,
        "step_scheduler.ckpt_every_steps": take("save_steps", Entry.whole),
        "step_scheduler.val_every_steps": _EVALUATION,
        "step_scheduler.save_checkpoint_every_epoch": ignore(SAVING),
        "step_scheduler.validate_on_checkpoint": _EVALUATION,
        **dict.fromkeys(
            (
                "step_scheduler.gc_every_steps",
                "step_scheduler.log_remote_every_steps",
                "step_scheduler.loss_average_window_steps",
                "step_scheduler.preemption_signal",
            ),
            ignore("watching the run"),
        ),
        # The model.
        "model._target_": _read_model_target,
        "model.pretrained_model_name_or_path": _read_model,
        "model.config": _read_model,
        "model.config._target_": _read_config_target,
        "model.config.pretrained_model_name_or_path": _read_model,
        "model.config.name_or_path": _read_model,
        **{f"model.config.{name}": _read_size for name in _SIZES},
        "model.config.trust_remote_code": read_remote_code,
        "model.config._attn_implementation": read_attention,
        **{
            f"model.config.{name}": ignore("belongs to the model's sizes, or its tokens")
            for name in (
                *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache"),
                *("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "hidden_act"),
            )
        },
        "model.config.router_aux_loss_coef": assume(
            "the router's loss has the model's own weight, which costs the same"
        ),
        "model.config.rope_theta": assume("positions are the family's own, which cost the same"),
        "model.config.*": assume("the model's own configuration is planned"),
        "model.load_base_model": _read_base,
        "model.torch_dtype": _read_dtype,
        "model.dtype": _read_dtype,
        "model.trust_remote_code": read_remote_code,
        "model.attn_implementation": read_attention,
        "model.use_liger_kernel": read_kernel("fused_norm", "fused_gate"),
        "model.use_sdpa_patching": ignore("the fastest fused attention is planned"),
        "model.output_hidden_states": ignore("belongs to loss_fn"),
        "model.force_hf": ignore("transformers' layers are planned in any case"),
        "model.num_nextn_predict_layers": assume("no layers that predict further tokens, which take more memory"),
        "model.mtp_loss_scaling_factor": ignore("belongs to num_nextn_predict_layers"),
        "model.mtp_use_repeated_layer": ignore("belongs to num_nextn_predict_layers"),
        "model.kda_mode": _OWN_KERNEL,
        "model.backend.attn": read_attention,
        "model.backend.rms_norm": _read_norm,
        "model.backend.te_fp8._target_": _switch_on("fp8"),
        "model.backend.te_fp8.recipe": _switch_on("fp8"),
        "model.backend._target_": ignore("a name"),
        "model.backend.linear": ignore("the same products, by another library"),
        "model.backend.compile_attn": assume("attention's operators are not compiled"),
        **{
            f"model.backend.{name}": _EXPERTS
            for name in ("experts", "dispatcher", "dispatcher_num_sms", "fake_balanced_gate", "gate_precision")
        },
        **{f"model.backend.{name}": _OWN_KERNEL for name in ("rope", "rope_fusion")},
        "model.backend.enable_fsdp_optimizations": ignore("when experts are gathered and reduced"),
        "model.backend.enable_hf_state_dict_adapter": ignore("loading and saving"),
        "tokenizer._target_": ignore("a name"),
        "tokenizer.pretrained_model_name_or_path": _read_tokenizer,
        "tokenizer.trust_remote_code": read_remote_code,
        "tokenizer.*": ignore("tokens at the ends of rows"),
        # The loss and what is added to it.
        "loss_fn._target_": _read_loss,
        "loss_fn.fp32_upcast": _read_upcast,
        "loss_fn.*": ignore("belongs to loss_fn"),
        "neftune.noise_alpha": take("neftune", Entry.number),
        # The data.
        **{f"dataset.{name}": handler for name, handler in _DATA.items()},
        "packed_sequence.packed_sequence_size": _read_packed,
        **dict.fromkeys(
            (
                *("packed_sequence.packing_strategy", "packed_sequence.num_proc", "packed_sequence.max_packs"),
                *("packed_sequence.drop_long_samples", "packed_sequence.prepacked"),
            ),
            _DATA_WORK,
        ),
        "packed_sequence.split_across_pack": assume("no example is split across sequences"),
        "dataloader.num_workers": take("workers", lambda entry: int(entry.number())),
        "dataloader.*": _DATA_WORK,
        "validation_dataset": assume("nothing is held out"),
        "validation_dataset._target_": assume("nothing is held out"),
        "validation_dataset.*": _OTHER_DATA,
        "validation_dataloader": _OTHER_DATA,
        "validation_dataloader.*": _OTHER_DATA,
        "_validation_dataset.*": ignore("a name that starts with an underscore is not read"),
        "_validation_dataloader.*": ignore("a name that starts with an underscore is not read"),
        # Optimizer and schedule.
        "optimizer._target_": read_optimizer_class,
        "optimizer.lr": take("learning_rate", Entry.number),
        "optimizer.betas": read_betas,
        "optimizer.eps": take("eps", Entry.number),
        "optimizer.epsilon": take("eps", Entry.number),
        "optimizer.weight_decay": take("weight_decay", Entry.number),
        "optimizer.master_weights": _read_masters,
        **{
            f"optimizer.{name}": ignore("how the update is computed")
            for name in (
                *("foreach", "fused", "adam_w_mode", "bias_correction", "store_param_remainders", "flatten"),
                *("use_triton", "adjust_lr", "nesterov"),
            )
        },
        "optimizer.exp_avg_dtype": ignore("fp32, as planned"),
        "optimizer.exp_avg_sq_dtype": ignore("fp32, as planned"),
        "optimizer.mu": assume("Muon with a momentum of 0.95, which costs the same"),
        **{
            f"optimizer.{name}": assume("one learning rate for all weights, which costs the same")
            for name in ("scalar_opt", "scalar_betas", "scalar_eps", "scalar_lr", "embed_lr", "lm_head_lr")
        },
        "clip_grad_norm.max_norm": take("max_grad_norm", Entry.number),
        "lr_scheduler.lr_decay_style": _read_decay,
        "lr_scheduler.lr_warmup_steps": read_warmup,
        "lr_scheduler.min_lr": take("min_lr", Entry.number),
        "lr_scheduler.lr_decay_steps": assume("the rate falls to the end of the run, which costs the same"),
        "lr_scheduler.*": assume("the rate rises from 0, and the weight decay is constant; it costs the same"),
        # Adapters and quantization.
        "peft._target_": ignore("LoRA"),
        "peft.dim": take("lora_rank", Entry.whole),
        "peft.alpha": take("lora_alpha", Entry.number),
        "peft.dropout": take(
            "lora_dropout", Entry.fraction, "on the adapters' input, which takes more memory than on their output"
        ),
        "peft.target_modules": _read_targets,
        "peft.exclude_modules": _read_excluded,
        "peft.match_all_linear": _read_all_linear,
        "peft.use_dora": _read_dora,
        "peft.use_triton": ignore("the kernel of the adapters"),
        "peft.use_memory_efficient_lora": switch("adapter_kernels"),
        "peft.moe_rank_scaling": assume("experts have no adapters"),
        "peft.lora_A_init": ignore("the adapters' first values"),
        "peft.lora_dtype": ignore("the precision of the adapters, of little weight"),
        "peft.dropout_position": assume("dropout is on the adapters' input"),
        "quantization.load_in_4bit": switch("quantized"),
        "quantization.load_in_8bit": assume("the base is in half precision, twice the memory of 8 bits"),
        "quantization.bnb_4bit_use_double_quant": switch("double_quantization"),
        "quantization.bnb_4bit_quant_type": ignore("fp4 and nf4 cost the same"),
        "quantization.bnb_4bit_compute_dtype": ignore("the matmuls' precision"),
        "quantization.bnb_4bit_quant_storage": ignore("how 4-bit weights are stored"),
        "qat.*": assume("weights are not rounded during training"),
        # Precision and kernels.
        "fp8.enabled": switch("fp8"),
        "fp8.recipe_name": _read_scales,
        "fp8.*": ignore("belongs to fp8.enabled"),
        "compile.enabled": switch("compiled"),
        "compile.*": ignore("belongs to compile.enabled"),
        "sdpa_method": ignore("the fastest fused attention is planned"),
        "freeze_config.*": assume("all weights are trained, which takes more memory"),
        # Devices.
        "distributed._target_": _read_manager,
        "distributed.strategy": _read_strategy,
        "distributed.zero_dp_strategy": _read_zero,
        "distributed.dp_size": _read_degree("shard_size"),
        "distributed.dp_replicate_size": _read_degree("replicas"),
        "distributed.tp_size": _read_degree("tensor_parallel"),
        "distributed.pp_size": _read_degree("pipeline_parallel"),
        "distributed.cp_size": _read_degree("context_parallel"),
        "distributed.ep_size": _read_degree("expert_parallel"),
        "distributed.sequence_parallel": switch("sequence_parallel"),
        "distributed.activation_checkpointing": _read_checkpointing,
        "distributed.reshard_after_forward": _read_reshard,
        "distributed.moe.reshard_after_forward": _read_expert_reshard,
        "distributed.defer_fsdp_grad_sync": switch("deferred_reduction"),
        "distributed.enable_compile": switch("compiled"),
        "distributed.offload_policy._target_": _switch_on("offload"),
        "distributed.offload_policy.*": ignore("how shards are kept on the host"),
        "distributed.mp_policy.*": ignore("matmuls in bf16, sums of gradients in fp32"),
        "distributed.moe": ignore("the trainer's own"),
        "distributed.moe.lm_head_precision": assume("the head computes in the matmuls' precision"),
        "distributed.moe.*": ignore("how experts are wrapped"),
        **{
            f"distributed.{name}": ignore("when shards are sent")
            for name in (
                *("enable_async_tensor_parallel", "enable_fsdp2_prefetch", "fsdp2_backward_prefetch_depth"),
                *("fsdp2_forward_prefetch_depth", "overlap_grad_reduce", "overlap_param_gather"),
            )
        },
        "distributed.patch_is_packed_sequence": ignore("a check of packed sequences"),
        **{f"distributed.pipeline.{name}": handler for name, handler in _PIPELINE.items()},
        **{f"autopipeline.{name}": handler for name, handler in _PIPELINE.items()},
        "parallelizer.activation_checkpointing": _read_checkpointing,
        "parallelizer.reshard_after_forward": _read_reshard,
        "parallelizer._target_": ignore("a name"),
        "distributed_config._target_": ignore("a name"),
        "dist_env.*": ignore("how processes find and wait for each other"),
        # Without effect.
        "checkpoint.*": ignore("loading and saving"),
        "ci.*": ignore("the trainer's own tests"),
        "benchmark.*": ignore("measuring the run"),
        "wandb.*": ignore(LOGGING),
        "mlflow.*": ignore(LOGGING),
        "comet.*": ignore(LOGGING),
        "nvtx": ignore(LOGGING),
        "mfu.*": ignore(LOGGING),
        "moe_metrics.*": ignore(LOGGING),
        "prewarm.*": ignore("kernels are chosen before the first step"),
        "embedding_row_repair.*": ignore("rows of the embedding that were never trained"),
    },
)
