"""unsloth: scripts and notebooks with its fast classes, and the YAML of `unsloth train`: one table of keys.

Read from unsloth 2026.10.9 and unsloth_zoo 2026.10.9 (unsloth/models/{loader,llama,vision,rl}.py, unsloth/trainer.py,
unsloth_cli/config.py, studio/backend/core/training/trainer.py) on TRL 1.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from preheat.interop.hf_keys import (
    ADAPTED,
    COMMON,
    LOGGING,
    REWARDS,
    SAVING,
    VISION,
    find_source,
    read_epochs,
    read_max_steps,
    read_steps,
    read_target_modules,
    read_target_parameters,
    read_variant,
    read_warmup,
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
from preheat.interop.reading import Format
from preheat.interop.script import FAST_CALLS, FAST_CLASSES
from preheat.interop.settings import Settings
from preheat.interop.torchtitan import TORCHTITAN
from preheat.interop.trainer_defaults import UNSLOTH as DEFAULTS
from preheat.interop.trainer_defaults import (
    UNSLOTH_ADAPTER,
    UNSLOTH_ARGUMENTS,
    UNSLOTH_CLI,
    UNSLOTH_DPO,
    UNSLOTH_LOADING,
    UNSLOTH_TRAINING,
)
from preheat.interop.training_arguments import (
    CALLS,
    LOADING,
    TRAINER_CALL,
    VARIANTS,
    add_prefix,
    finish_run,
    read_model_name,
)
from preheat.interop.trl import DPO_ARGUMENTS, REFUSALS, SFT_ARGUMENTS

__all__ = ["UNSLOTH"]

_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
_ENDS = {"embed_tokens", "lm_head"}
_SHORT = 512
"""Shorter sequences are not offloaded (unsloth/models/_utils.py, apply_unsloth_gradient_checkpointing)."""
_FOUR_BIT_NAME = re.compile(r"(-unsloth)?-bnb-4bit$", re.IGNORECASE)
_TEMPLATES = {
    "chatml": "chatml",
    "alpaca": "alpaca",
    "llama-3": "llama3",
    "llama3": "llama3",
    "phi-3": "phi3",
    "phi-35": "phi3",
    "phi-3.5": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma",
    "mistral": "mistral",
    "qwen-2.5": "qwen",
    "qwen-25": "qwen",
    "qwen25": "qwen",
    "qwen2.5": "qwen",
}
_FORMATS = {"alpaca": "alpaca", "chatml": "messages", "sharegpt": "sharegpt", "raw": "text"}
_LOADS = tuple(f"{name}.from_pretrained" for name in FAST_CLASSES)
_ADDS = tuple(f"{name}.get_peft_model" for name in FAST_CLASSES)
_CLI_SECTIONS = ("training", "lora")
_OBJECT = "an object of the script"


def _read_checkpointing(settings: Settings, entry: Entry) -> Outcome:
    name = str(entry.value).strip().lower()
    offloads = name in ("unsloth", "")
    settings.checkpointing = offloads or (name != "none" and entry.truth())
    settings.activation_offload = offloads
    return Takes(("checkpointing", "activation_offload"))


def _read_trainers_checkpointing(settings: Settings, entry: Entry) -> Outcome:
    """The trainer switches checkpointing on, and leaves it to the model otherwise."""
    if not entry.truth():
        return NoEffect("the model's use_gradient_checkpointing decides")
    settings.checkpointing = True
    return Takes(("checkpointing",))


def _read_dtype(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("auto", "bfloat16", "float16", "float32")
    settings.half_weights = name != "float32"
    settings.frozen = "fp32" if name == "float32" else "auto"
    if name == "float16":
        settings.precision = "fp16"
    return Takes(("half_weights", "frozen", "precision"))


def _read_full(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    settings.adapter, settings.quantized = None, False
    return Takes(("adapter", "quantized"))


def _read_mixed(settings: Settings, entry: Entry) -> Outcome:
    settings.half_weights = not entry.truth()
    return Takes(("half_weights",))


def _read_targets(settings: Settings, entry: Entry) -> Outcome:
    names = entry.texts()
    layers = [name for name in names if name not in _ENDS]
    # These are all linear layers of the families that have them; of others, unsloth splits the joint ones.
    settings.lora_targets = ADAPTED["all"][0] if set(layers) >= _LAYERS else read_target_modules(layers)
    ends = sorted(set(names) & _ENDS)
    return Takes(("lora_targets",), f"{' and '.join(ends)} stay frozen, which take less memory" if ends else "")


def _read_bias(settings: Settings, entry: Entry) -> Outcome:
    if entry.value == "none":
        return NoEffect("no bias is trained")
    _drop_kernels(settings)
    return Assumed("no bias is trained; as in unsloth, adapted layers are then separate operators")


def _read_dora(settings: Settings, entry: Entry) -> Outcome:
    outcome = read_variant("dora")(settings, entry)
    if settings.lora_variant == "dora":
        _drop_kernels(settings)
    return outcome


def _drop_kernels(settings: Settings) -> None:
    """Leaves out the kernels of adapted layers (unsloth/models/llama.py, patch_peft_model)."""
    settings.adapter_kernels = settings.fused_gate = False


def _read_first_values(settings: Settings, entry: Entry) -> Outcome:
    known = isinstance(entry.value, bool) or entry.value in ("gaussian", "orthogonal")
    return NoEffect("the adapters' first values") if known else Assumed("plain LoRA values")


def _read_template(settings: Settings, entry: Entry) -> Outcome:
    if entry.value in _TEMPLATES:
        settings.template = _TEMPLATES[entry.text()]
        return Takes(("template",))
    return Assumed("the tokenizer's own template is used")


def _read_responses(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "assistant"
    return Takes(("train_on",))


def _read_completions(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "assistant" if entry.truth() else "all"
    return Takes(("train_on",))


def _read_type(settings: Settings, entry: Entry) -> Outcome:
    full = entry.text().strip().lower() == "full"
    if not full:
        entry.choice("lora", "full")
    settings.adapter = None if full else "lora"
    settings.quantized = settings.quantized and not full
    return Takes(("adapter", "quantized"))


def _read_dataset(settings: Settings, entry: Entry) -> Outcome:
    find_source(settings, entry)["source"] = entry.text()
    return Takes(("sources",))


def _read_files(settings: Settings, entry: Entry) -> Outcome:
    settings.sources = [{**source, "source": ""} for source in settings.sources if not source["source"]]
    layout = settings.sources[0] if settings.sources else {}
    settings.sources = [{**layout, "source": file} for file in entry.texts()]
    return Takes(("sources",))


def _read_format(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("auto", "alpaca", "chatml", "sharegpt", "conversational", "raw")
    if name not in _FORMATS:
        return NoEffect("the rows' fields are recognized by their names")
    find_source(settings, entry)
    for source in settings.sources:
        source["layout"] = _FORMATS[name]
    return Takes(("sources.layout",))


def _names(text: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(text.split(), handler)


_LOAD: Mapping[str, Handler] = {
    **LOADING,
    "model_name": read_model_name,
    "max_seq_length": take("length", Entry.whole),
    "dtype": _read_dtype,
    "load_in_4bit": switch("quantized"),
    "load_in_16bit": switch("quantized", False),
    "load_in_fp8": assume("the base is in half precision, twice the memory of 8 bits"),
    "full_finetuning": _read_full,
    "float32_mixed_precision": _read_mixed,
    "use_gradient_checkpointing": _read_checkpointing,
    "offload_embedding": assume("the embedding stays on the device"),
    "unsloth_tiled_mlp": assume("feed-forward layers are computed at once, which takes more memory"),
    "qat_scheme": assume("without fake quantization, which costs less"),
    "fast_inference": assume("no server of vLLM shares the device"),
    "resize_model_vocab": assume("the vocabulary keeps its size"),
    **_names("gpu_memory_utilization float8_kv_cache max_lora_rank disable_log_stats", ignore("belongs to vLLM")),
    **_names("fix_tokenizer use_exact_model_name random_state text_only auto_model", ignore("loading")),
    "num_labels": refuse(f"a classifier has a head of its own; {REWARDS}"),
    **_names("id2label.* label2id.*", ignore("names of the labels")),
    **_names("whisper_language whisper_task", refuse(VISION)),
    **_names("return_logits fullgraph unsloth_force_compile", ignore("what is compiled")),
}
_PARTS = "finetune_language_layers finetune_attention_modules finetune_mlp_modules"
_ADAPT: Mapping[str, Handler] = {
    "model": ignore(_OBJECT),
    "r": take("lora_rank", Entry.whole),
    "lora_alpha": take("lora_alpha", Entry.number),
    "lora_dropout": take("lora_dropout", Entry.fraction),
    "target_modules": _read_targets,
    "bias": _read_bias,
    "use_gradient_checkpointing": _read_checkpointing,
    "use_rslora": read_variant("rslora"),
    "use_dora": _read_dora,
    "init_lora_weights": _read_first_values,
    "loftq_config": assume("plain LoRA values"),
    "loftq_config.*": assume("plain LoRA values"),
    "modules_to_save": assume("embedding and head stay frozen"),
    "target_parameters": read_target_parameters,
    "qat_scheme": assume("without fake quantization, which costs less"),
    "offload_layers": assume("all layers stay on the device"),
    "checkpoint_skip_layers": assume("all layers are recomputed"),
    **_names("layers_to_transform layers_pattern finetune_last_n_layers", assume("all layers have adapters")),
    **_names("finetune_vision_layers finetune_audio_layers", assume("the text part alone has adapters")),
    **_names(_PARTS, ignore("on by default: the layers of target_modules have adapters")),
    **_names("random_state max_seq_length task_type temporary_location ensure_weight_tying", ignore("loading")),
}
_RUN: Mapping[str, Handler] = {
    "max_seq_length": take("length", Entry.whole),
    "gradient_checkpointing": _read_trainers_checkpointing,
    "embedding_learning_rate": assume("embedding and head stay frozen"),
    "q_galore_config": assume("all trained weights have states of AdamW"),
    "loraplus_lr_ratio": COMMON["loraplus_lr_ratio"],
    "context_parallel_size": take("context_parallel", Entry.whole),
    **_names("context_parallel_backend context_parallel_rotate_method", ignore("how keys and values are exchanged")),
}
_CLI: Mapping[str, Handler] = {
    "model": read_model_name,
    "data.dataset": _read_dataset,
    "data.local_dataset": _read_files,
    "data.format_type": _read_format,
    "training.training_type": _read_type,
    "training.max_seq_length": take("length", Entry.whole),
    "training.load_in_4bit": switch("quantized"),
    "training.output_dir": ignore(SAVING),
    "training.num_epochs": read_epochs,
    "training.learning_rate": take("learning_rate", Entry.number),
    "training.batch_size": take("micro_batch", Entry.whole),
    "training.gradient_accumulation_steps": take("accumulation", Entry.whole),
    "training.warmup_steps": read_warmup,
    "training.max_steps": read_max_steps,
    "training.save_steps": read_steps("save_steps"),
    "training.weight_decay": take("weight_decay", Entry.number),
    "training.random_seed": COMMON["seed"],
    "training.packing": switch("packing"),
    "training.train_on_completions": _read_completions,
    "training.gradient_checkpointing": _read_checkpointing,
    "lora.lora_r": take("lora_rank", Entry.whole),
    "lora.lora_alpha": take("lora_alpha", Entry.number),
    "lora.lora_dropout": take("lora_dropout", Entry.fraction),
    "lora.target_modules": _read_targets,
    "lora.use_rslora": read_variant("rslora"),
    "lora.use_dora": _read_dora,
    "lora.use_loftq": assume("plain LoRA values"),
    **add_prefix("lora", _names(f"finetune_vision_layers vision_all_linear {_PARTS}", ignore("for models of images"))),
    "logging.*": ignore(LOGGING),
}


def _repeat(sections: Iterable[str], handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """Returns the handlers of keys within each of several sections."""
    plain: Handler = ignore("all arguments have their defaults")
    return {
        key: handler
        for section in sections
        for key, handler in {section: plain, **add_prefix(section, handlers)}.items()
    }


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies unsloth's own rules between keys."""
    notes = _choose_weights(settings, entries)
    if settings.precision == "fp32" and settings.half_weights:
        settings.precision = "bf16"
        notes.append("weights in half precision are trained under autocast in any case, taken as bf16")
    calls = {entry.path[0] for entry in entries.values()}
    if any(call.startswith("train_on_responses_only") for call in calls):
        settings.train_on = "assistant"
    if settings.adapter and settings.lora_targets is None:
        settings.lora_targets = ADAPTED[DEFAULTS.adapts["lora"]][0]
    settings.length = min([settings.length, *_list_limits(entries)])
    if settings.activation_offload and settings.length < _SHORT:
        settings.activation_offload = False
        notes.append(f"sequences below {_SHORT} tokens are recomputed without offloading")
    settings.padding_free = settings.padding_free and not settings.packing
    settings.activation_offload = settings.activation_offload and settings.checkpointing
    for source in settings.sources:
        _name_text_column(source, entries)
    notes += finish_run(settings, entries)
    if settings.preference:
        settings.pairs, settings.packing = True, False
        for source in settings.sources:
            source["layout"] = "preference"
    return notes


def _choose_weights(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Says what is trained, and takes the 16-bit copy of a checkpoint in 4 bits if the base is not to be in 4 bits."""
    notes = []
    full = [entry for name, entry in entries.items() if name.endswith(".full_finetuning") and entry.value is True]
    if full:
        settings.adapter, settings.quantized = None, False
    elif settings.adapter is None and settings.quantized:
        loads = [entry for entry in entries.values() if entry.path[0] in _LOADS]
        key = next((entry for entry in loads if entry.path[-1] == "load_in_4bit"), loads[0])
        raise key.error(
            "a base in 4 bits is frozen, and there is no adapter to train; call get_peft_model, or load it with "
            "full_finetuning=True"
        )
    if settings.model and not settings.quantized and _FOUR_BIT_NAME.search(settings.model):
        plain = _FOUR_BIT_NAME.sub("", settings.model)
        notes.append(f"the base is not in 4 bits: unsloth loads {plain} in place of {settings.model}")
        settings.model = plain
    elif settings.quantized:
        notes.append("all linear layers of the base are in 4 bits; unsloth's dynamic checkpoints keep a few in 16")
    return notes


def _list_limits(entries: Mapping[str, Entry]) -> list[int]:
    """Returns the lengths that the model was loaded for, which no trainer exceeds."""
    keys = [f"{call}.max_seq_length" for call in _LOADS]
    return [entries[key].whole() for key in keys if key in entries and isinstance(entries[key].value, int)]


def _name_text_column(source: dict[str, object], entries: Mapping[str, Entry]) -> None:
    text = next((entry.value for entry in entries.values() if entry.path[-1] == "dataset_text_field"), None)
    if isinstance(text, str) and text != "text":
        source["text"] = text


_SFT = {**SFT_ARGUMENTS, **_RUN}
_DPO = {**DPO_ARGUMENTS, **_RUN}

UNSLOTH = Format(
    name="unsloth",
    title="unsloth",
    requires=frozenset(),
    unique=FAST_CALLS | {"training", "lora"},
    # torchtitan's files have a section `training` too.
    without=TORCHTITAN.unique | {"optimizer", "base_model", "model_name_or_path"},
    sections=frozenset({"data"}),
    defaults=DEFAULTS,
    variants={
        **VARIANTS,
        **dict.fromkeys(_CLI_SECTIONS, UNSLOTH_CLI),
        **dict.fromkeys(_LOADS, UNSLOTH_LOADING),
        **dict.fromkeys(_ADDS, UNSLOTH_ADAPTER),
        "TrainingArguments": UNSLOTH_ARGUMENTS,
        "UnslothTrainingArguments": UNSLOTH_TRAINING,
        **dict.fromkeys(("DPOConfig", "DPOTrainer"), UNSLOTH_DPO),
    },
    finish=_finish,
    renamed={},
    table={
        **REFUSALS,
        **CALLS,
        **_repeat(("SFTConfig", "TrainingArguments", "UnslothTrainingArguments"), _SFT),
        **_repeat(("SFTTrainer", "UnslothTrainer"), {**TRAINER_CALL, **_SFT}),
        **_repeat(("DPOConfig",), _DPO),
        **_repeat(("DPOTrainer",), {**TRAINER_CALL, **_DPO}),
        **_repeat(_LOADS, _LOAD),
        **_repeat(_ADDS, _ADAPT),
        **{f"FastVisionModel.{verb}": refuse(VISION) for verb in ("from_pretrained.*", "get_peft_model.*")},
        "FastVisionModel.from_pretrained.model_name": refuse(VISION),
        "FastSentenceTransformer.from_pretrained.model_name": refuse("a model of embeddings has another loss"),
        "get_chat_template.chat_template": _read_template,
        "get_chat_template.*": ignore("the names of the rows' fields"),
        "train_on_responses_only.trainer": Ignore(_OBJECT),
        "train_on_responses_only.*": _read_responses,
        **_CLI,
    },
)
