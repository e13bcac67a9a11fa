"""axolotl's YAML: one table of its keys. Read from axolotl 0.19 (axolotl/utils/schemas, loaders, core/builders)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from preheat.errors import RecipeError
from preheat.interop.fsdp import FSDP, read_fsdp, read_fsdp_version
from preheat.interop.hf_keys import (
    ADAPTED,
    COMMON,
    NO_PREAMBLE,
    REWARDS,
    SCHEDULE_KWARGS,
    VISION,
    find_source,
    read_attention,
    read_epochs,
    read_kernel,
    read_of_source,
    read_optimizer,
    read_preference,
    read_schedule,
    read_target_modules,
    read_target_parameters,
    read_validation,
    read_variant,
    switch,
)
from preheat.interop.hf_writing import (
    is_file,
    write_batch,
    write_optimizer,
    write_precision,
    write_saving,
    write_schedule,
    write_target_parameters,
    write_warmup,
    write_zero1,
)
from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, refuse, take
from preheat.interop.reading import Format
from preheat.interop.settings import Settings
from preheat.interop.trainer_defaults import AXOLOTL as DEFAULTS
from preheat.interop.writing import Draft, Written
from preheat.recipe import Recipe

__all__ = ["AXOLOTL"]

_LOSSES = {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
_TEMPLATES = {
    "chatml": "chatml",
    "alpaca": "alpaca",
    "llama3": "llama3",
    "gemma": "gemma",
    "phi_3": "phi3",
    "qwen_25": "qwen",
    "mistral_v1": "mistral",
}
_LAYOUTS = {
    "alpaca": "alpaca",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "sharegpt": "sharegpt",
}
_PREFERENCES = ("chatml", "llama3", "chat_template", "passthrough", "user_defined", "mistral")
_ROLES = {"from": "sharegpt", "value": "sharegpt"}


_NAMES = {
    *("model", "layers", "self_attn", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    *("down_proj", "input_layernorm", "post_attention_layernorm", "norm", "weight", "bias", "lm_head", "embed_tokens"),
}
"""Parts of weights' names that all versions of transformers have in common."""


def _read_unfrozen(settings: Settings, entry: Entry) -> Outcome:
    """Reads the patterns of the weights that are trained; all others are frozen."""
    patterns = entry.texts()
    names = {name for pattern in patterns for name in re.findall(r"[a-z_]{2,}", pattern)}
    # Head and embeddings may be one weight, which only the model tells; rows of a weight are not trained alone.
    alone = len(names & {"lm_head", "embed_tokens"}) == 1 or any("[:" in pattern for pattern in patterns)
    if alone or not names <= _NAMES:
        return Assumed("all weights are trained, which takes more memory")
    settings.freeze = {"layers": 0, "train": patterns}
    return Takes(("freeze",))


def _read_adapter(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("lora", "qlora", "llama-adapter", "none", "")
    if name == "llama-adapter":
        raise entry.error("llama-adapter: is not one of preheat's methods; use lora")
    settings.adapter = "lora" if name in ("lora", "qlora") else None
    settings.quantized = settings.quantized or name == "qlora"
    return Takes(("adapter",))


def _read_targets(settings: Settings, entry: Entry) -> Outcome:
    settings.lora_targets = read_target_modules(entry.texts())
    return Takes(("lora_targets",), "the text part's layers" if "language_model." in str(entry.value) else "")


def _read_linear(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    settings.lora_targets = "all-linear"
    return Takes(("lora_targets",))


def _read_plugins(settings: Settings, entry: Entry) -> Outcome:
    names = entry.texts()
    if any("diffusion" in name.lower() for name in names):
        raise entry.error("a diffusion language model has another loss, which is not planned")
    if any(name.endswith("CutCrossEntropyPlugin") for name in names):
        settings.chunked_loss = True
        return Takes(("chunked_loss",))
    return NoEffect("loads code, which other keys switch on")


def _read_checkpointing(settings: Settings, entry: Entry) -> Outcome:
    offloads = entry.value in ("offload", "offload_disk")
    settings.checkpointing = offloads or entry.truth()
    settings.activation_offload = settings.activation_offload or offloads
    return Takes(("checkpointing", "activation_offload") if offloads else ("checkpointing",))


def _read_offloading(settings: Settings, entry: Entry) -> Outcome:
    modes = ("legacy", "disk", "hidden_states")
    settings.activation_offload = entry.value in modes or entry.truth()
    return Takes(("activation_offload",), "to the host" if entry.value == "disk" else "")


def _read_template(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    if name in ("tokenizer_default", "jinja"):
        return NoEffect("the tokenizer's own template, which a recipe takes too")
    if name in _TEMPLATES:
        settings.template = _TEMPLATES[name]
        return Takes(("template",))
    return Assumed("the tokenizer's own template is used")


def _read_task(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    if name not in _LOSSES:
        raise entry.error(f"{name}: {REWARDS}")
    settings.preference = settings.preference | {"loss": _LOSSES[name]}
    settings.pairs = name != "kto"
    return Takes(("preference",))


def _read_path(settings: Settings, entry: Entry) -> Outcome:
    source, path = find_source(settings, entry), entry.text()
    if not source["source"] or not Path(path).suffix:
        source["source"] = path
    return Takes(("sources",))


def _read_data_files(settings: Settings, entry: Entry) -> Outcome:
    files, source = entry.texts(), find_source(settings, entry)
    if len(files) == 1 and Path(files[0]).exists():
        source["source"] = files[0]
        return Takes(("sources",))
    return Assumed("the rows of all files of the dataset are read")


def _read_type(settings: Settings, entry: Entry) -> Outcome:
    source, name = find_source(settings, entry), entry.text()
    kind = name.partition(".")[0].partition(":")[0]
    if name.startswith(("rwd.", "ebft", "stepwise", "bradley_terry")):
        return Assumed("the rows' fields are recognized by their names")
    if kind in _PREFERENCES and name != "chat_template":
        source["layout"] = "preference"
    elif kind in _LAYOUTS:
        source.setdefault("layout", _LAYOUTS[kind])
    else:
        return Assumed("the rows' fields are recognized by their names")
    return Takes(("sources.layout",), NO_PREAMBLE if kind == "alpaca" else "")


def _read_column(field: str) -> Handler:
    def handle(settings: Settings, entry: Entry) -> Outcome:
        if (name := entry.text()) != field:
            source = find_source(settings, entry)
            columns = source.setdefault("columns", {})
            assert isinstance(columns, dict)
            columns[field] = name
        return Takes(("sources.columns",))

    return handle


def _read_text_column(settings: Settings, entry: Entry) -> Outcome:
    find_source(settings, entry)["text"] = entry.text()
    return Takes(("sources.text",))


def _read_mapping(settings: Settings, entry: Entry) -> Outcome:
    if entry.text() in _ROLES:
        find_source(settings, entry)["layout"] = _ROLES[entry.text()]
        return Takes(("sources.layout",))
    if entry.text() == entry.path[-1]:
        return Takes(("sources.layout",))
    return Assumed("roles and contents are recognized by their names")


def _read_trained(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "all" if entry.truth() else "assistant"
    return Takes(("train_on",))


def _read_roles(settings: Settings, entry: Entry) -> Outcome:
    roles = entry.texts()
    if set(roles) <= {"assistant", "gpt"}:
        settings.train_on = "assistant"
        return Takes(("train_on",))
    return Assumed("the assistant's turns are trained on")


_OLD_ATTENTION = (
    *("flash_attention", "sdp_attention", "flex_attention", "xformers_attention", "sage_attention"),
    "eager_attention",
)


def _read_old_attention(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    settings.attention = entry.path[-1] != "eager_attention"
    return Takes(("attention",), f"axolotl {DEFAULTS.version} calls it attn_implementation")


def _read_initialization(settings: Settings, entry: Entry) -> Outcome:
    if entry.value == "pissa":
        settings.lora_variant = "pissa"
        return Takes(("lora_variant",))
    return NoEffect("the adapters' first values") if isinstance(entry.value, bool) else Assumed("plain LoRA values")


def _read_qat(settings: Settings, entry: Entry) -> Outcome:
    settings.qat = True
    if entry.value in ("int4",):
        return Takes(("qat",))
    return Assumed("weights are rounded to 4-bit integers, which costs the same")


def _read_streaming(settings: Settings, entry: Entry) -> Outcome:
    settings.streaming = entry.truth()
    return Takes(("streaming",))


def _read_double(settings: Settings, entry: Entry) -> Outcome:
    settings.double_quantization = entry.truth()
    return Takes(("double_quantization",))


def _read_degree(name: str) -> Handler:
    return take(name, Entry.whole)


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies axolotl's own rules between keys."""
    if settings.adapter is None and settings.quantized:
        key = entries.get("load_in_4bit") or entries["adapter"]
        raise key.error("a base in 4 bits is frozen, and there is no adapter to train; add adapter: qlora")
    if any(entry.name == "lora_target_linear" and not entry.is_off and entry.truth() for entry in entries.values()):
        settings.lora_targets = "all-linear"  # besides those that lora_target_modules names
    if settings.sources and all(source.get("layout") == "alpaca" for source in settings.sources):
        settings.template = settings.template or "alpaca"
    if settings.adapter == "lora" and settings.lora_targets is None:
        settings.lora_targets = read_target_modules(list(ADAPTED[DEFAULTS.adapts["lora"]]))
    if settings.adapter:
        settings.freeze = {}  # the base is frozen under an adapter
    if settings.preference and settings.packing:
        raise entries["sample_packing"].error("true: axolotl does not pack preferences; set it to false")
    for source in settings.sources:
        columns = source.get("columns")
        if source.get("layout") == "sharegpt" and isinstance(columns, dict) and "messages" in columns:
            name = columns.pop("messages")
            columns |= {} if name == "conversations" else {"conversations": name}
            if not columns:
                del source["columns"]
    if settings.preference or any(source.get("layout") == "preference" for source in settings.sources):
        settings.packing = False
        for source in settings.sources:
            if source.get("layout") in ("messages", "alpaca", "sharegpt"):
                source["layout"] = "kto" if not settings.pairs else "preference"
    notes = []
    pretraining = [entry for name, entry in entries.items() if name.startswith("pretraining_dataset.")]
    if pretraining:
        settings.streaming = True
        settings.packing = True
        if settings.validation:
            settings.validation = 0.0
    if settings.streaming and not settings.max_steps:
        key = entries.get("streaming") or pretraining[0]
        raise key.error("a streamed dataset has no known length; add max_steps")
    if settings.streaming and len(settings.sources) > 1:
        settings.sources = settings.sources[:1]
        notes.append("one streamed dataset is planned; a mixture costs the same")
    if not settings.sources:
        notes.append("the file names no dataset")
    if settings.accumulation > 1 and not settings.preference:  # core/trainers/base.py: model_accepts_loss_kwargs
        notes.append("axolotl weighs each micro-batch of a step the same: here each token weighs the same")
    backends = {"attn_implementation", *_OLD_ATTENTION}
    if (
        "sample_packing" in entries
        and settings.packing
        and not any(name in backends and not entry.is_off for name, entry in entries.items())
    ):
        notes.append(
            "without attn_implementation, rows that axolotl packs into one sequence see each other: here they never do"
        )
    return notes


_SPELLING = {
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}
"""Arguments of transformers' Trainer that axolotl names otherwise."""


def write_axolotl(recipe: Recipe, folder: Path = Path()) -> Written:
    """Writes a recipe as axolotl's YAML.

    Args:
        folder: of the file, from where the run is started.

    Raises:
        RecipeError: the recipe has no such form at all.
    """
    draft = Draft(recipe, "axolotl", DEFAULTS.settings, spelling=_SPELLING)
    settings = draft.settings
    draft.say("base_model", "model")
    for key, name in (
        ("tokenizer_config", "tokenizer"),
        ("tokens", "add_tokens"),
        ("reinit_weights", "random_weights"),
    ):
        if getattr(settings, name):
            draft.say(key, name)
    if not settings.attention:
        draft.say("attn_implementation", "attention", value="eager")
    elif settings.packing:  # without it, the rows of a packed sequence see each other
        draft.put("attn_implementation", "flash_attention_2" if settings.context_parallel > 1 else "sdpa")
    if settings.preference:
        _write_preference(draft)
    _write_data(draft)
    _write_adapter(draft)
    draft.say("sequence_len", "length", always=True)
    if not settings.preference:
        draft.say("sample_packing", "packing")
    write_batch(draft)
    write_optimizer(draft, others={"muon": "muon"})
    if settings.schedule == "cosine":
        draft.say("lr_scheduler_type", "schedule")
        draft.say("cosine_min_lr_ratio", "min_lr_ratio")
        write_warmup(draft, "warmup_ratio")
    else:
        write_schedule(draft, fraction="warmup_ratio")
    write_precision(draft, None)
    draft.explain("techniques.mixed_precision.frozen", "axolotl keeps a frozen base in half precision: frozen: auto")
    draft.explain("techniques.mixed_precision.mode", "axolotl keeps trained weights in bf16: mode: bf16_pure")
    _write_memory(draft)
    _write_devices(draft)
    write_saving(draft, switches=True)
    draft.start.append("axolotl train {file}" + (f"   (on {settings.world} devices)" if settings.world > 1 else ""))
    return draft.finish()


def _write_preference(draft: Draft) -> None:
    losses = {ours: theirs for theirs, ours in _LOSSES.items() if theirs != "kto"}
    preference = draft.settings.preference
    loss = str(preference["loss"])
    if loss not in losses:
        raise RecipeError(f"techniques.preference.loss: {loss}: axolotl has {', '.join(losses)}; use one of these")
    keys = {"beta": "orpo_alpha" if loss == "orpo" else "rl_beta", "gamma": "simpo_gamma"}
    keys |= {"label_smoothing": "dpo_label_smoothing"} if loss == "dpo" else {}
    draft.put("rl", losses[loss])
    for ours, theirs in keys.items():
        if ours in preference:
            draft.put(theirs, preference[ours])
    draft.agree("pairs")
    draft.said.preference = {"loss": loss} | {key: preference[key] for key in keys if key in preference}


_TYPES = {"alpaca": "alpaca", "messages": "chat_template", "sharegpt": "chat_template", "text": "completion"}
_COLUMNS = {"messages": "field_messages", "conversations": "field_messages", "chosen": "field_chosen"}
_COLUMNS |= {"rejected": "field_rejected", "prompt": "field_prompt"}


def _write_data(draft: Draft) -> None:
    settings = draft.settings
    pairs = [_write_source(draft, source) for source in settings.sources]
    layouts = {str(source.get("layout", "auto")) for source in settings.sources}
    # Streamed text is split at the ends of sequences.
    if settings.streaming and settings.max_steps and not settings.validation and layouts == {"text"}:
        for theirs, _ in pairs:
            theirs["type"] = "pretrain"
            if "field" in theirs:
                theirs["text_column"] = theirs.pop("field")
        draft.put("pretraining_dataset", [theirs for theirs, _ in pairs])
    else:
        draft.put("datasets", [theirs for theirs, _ in pairs])
    draft.said.sources = [said for _, said in pairs]
    if settings.streaming:
        draft.say("streaming", "streaming")
    if settings.template is not None:
        names = {ours: theirs for theirs, ours in _TEMPLATES.items()}
        if settings.template in names:
            draft.say("chat_template", "template", value=names[settings.template])
    if settings.train_on == "all" and not layouts <= {"text", "preference"}:
        draft.say("train_on_inputs", "train_on", value=True)
    if isinstance(settings.validation, float):
        draft.say("val_set_size", "validation")
    else:
        draft.explain("data.validation", "axolotl holds a fraction out: --set data.validation=0.02")


def _write_source(draft: Draft, source: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Returns a source in axolotl's keys, and what of it they say."""
    layout = str(source.get("layout", "auto"))
    theirs: dict[str, object] = {"path": source["source"]}
    if is_file(source["source"]) and (suffix := Path(str(source["source"])).suffix.removeprefix(".")):
        theirs["ds_type"] = {"jsonl": "json", "txt": "text"}.get(suffix, suffix)
    written = {key: source[key] for key in ("source", "layout") if key in source}
    if draft.settings.preference and layout == "preference":
        theirs["type"] = "chat_template.default"
        draft.note("chat_template.default reads the prompt as a list `messages`, and both answers as one message each")
    elif layout in _TYPES and not draft.settings.preference:
        theirs["type"] = _TYPES[layout]
    else:
        known = "preference" if draft.settings.preference else ", ".join(_TYPES)
        draft.refuse_layout(source, f"axolotl needs the rows' format: write one of {known}, which it reads")
    if layout == "sharegpt":
        theirs["field_messages"] = "conversations"
        theirs["message_property_mappings"] = {"role": "from", "content": "value"}
    columns = source.get("columns", {})
    assert isinstance(columns, Mapping)
    if columns and columns.keys() <= _COLUMNS.keys():
        theirs |= {_COLUMNS[field]: name for field, name in columns.items()}
        written["columns"] = columns
    if layout == "text" and "text" in source:
        theirs["field"] = written["text"] = source["text"]
    for key, name in (("subset", "name"), ("split", "split")):
        if key in source:
            theirs[name] = written[key] = source[key]
    return theirs, written


def _write_adapter(draft: Draft) -> None:
    settings = draft.settings
    if settings.adapter is None:
        return
    draft.say("adapter", "adapter", value="qlora" if settings.quantized else "lora")
    if settings.quantized:
        draft.say("load_in_4bit", "quantized")
        if settings.quantized_experts:
            draft.say("quantize_moe_experts", "quantized_experts")
        if not settings.double_quantization:
            draft.say("bnb_config_kwargs.bnb_4bit_use_double_quant", "double_quantization")
    draft.say("lora_r", "lora_rank", always=True)
    draft.say("lora_alpha", "lora_alpha", always=True)
    draft.say("lora_dropout", "lora_dropout", always=True)
    if settings.lora_targets == "all-linear":
        draft.say("lora_target_linear", "lora_targets", value=True)
    else:
        draft.say("lora_target_modules", "lora_targets")
    write_target_parameters(draft, "lora_target_parameters")
    if settings.lora_variant in ("rslora", "dora"):
        draft.say(f"peft_use_{settings.lora_variant}", "lora_variant", value=True)
    elif settings.lora_variant == "pissa":
        draft.say("peft_init_lora_weights", "lora_variant", value="pissa")


def _write_memory(draft: Draft) -> None:
    settings = draft.settings
    if settings.activation_offload and settings.checkpointing:
        draft.say("gradient_checkpointing", "checkpointing", "activation_offload", value="offload")
    else:
        draft.say("gradient_checkpointing", "checkpointing")
        if settings.activation_offload:
            draft.say("activation_offloading", "activation_offload")
    if settings.chunked_loss:
        draft.say("chunked_cross_entropy", "chunked_loss")
    for key, name in (("torch_compile", "compiled"), ("neftune_noise_alpha", "neftune"), ("fp8", "fp8")):
        if getattr(settings, name):
            draft.say(key, name)
    if settings.label_smoothing:
        draft.say("label_smoothing_factor", "label_smoothing")
    if settings.compiled or not (settings.fused_norm or settings.fused_gate):
        return
    draft.put("plugins", ["axolotl.integrations.liger.LigerPlugin"])
    for key, name in (("liger_rms_norm", "fused_norm"), ("liger_glu_activation", "fused_gate")):
        if getattr(settings, name):
            draft.say(key, name)


def _write_devices(draft: Draft) -> None:
    settings = draft.settings
    if settings.sharding == "optimizer":
        write_zero1(draft)
    elif settings.sharding is not None:
        draft.say("fsdp_version", "sharding", value=2)
        draft.put("fsdp_config.reshard_after_forward", settings.sharding == "full")
        draft.say("fsdp_config.offload_params", "offload")
        draft.put("fsdp_config.auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        draft.put("fsdp_config.state_dict_type", "FULL_STATE_DICT")
    for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
        if getattr(settings, name) > 1:
            draft.say(f"{name}_size", name)
    if settings.replicas > 1:
        draft.say("dp_replicate_size", "replicas")
    if settings.sharding in ("full", "gradients") and (settings.replicas > 1 or settings.model_parallel > 1):
        draft.put("dp_shard_size", max(settings.ranks // settings.replicas, 1))


_IMAGES = refuse(VISION)

AXOLOTL = Format(
    name="axolotl",
    title="axolotl",
    requires=frozenset({"base_model"}),
    unique=frozenset(),
    defaults=DEFAULTS,
    finish=_finish,
    write=write_axolotl,
    renamed={
        "sequence_parallel_degree": "context_parallel_size",
        "dpo_beta": "rl_beta",
        "noisy_embedding_alpha": "neftune_noise_alpha",
        "dataset_processes": "dataset_num_proc",
        "pretrain_multipack_buffer_size": "streaming_multipack_buffer_size",
        "evaluation_strategy": "eval_strategy",
        "model_revision": "revision_of_model",
    },
    removed={
        "max_packed_sequence_len": "write sequence_len, and sample_packing: true",
        "rope_scaling": "write it under overrides_of_model_config",
        "s2_attention": "leave it out",
        "flash_attn_rms_norm": "leave it out",
        "rpo_alpha": "leave it out",
        "dpo_norm_loss": "leave it out",
        "dpo_use_logits_to_keep": "leave it out",
        "dpo_generate_during_eval": "leave it out",
    },
    table={
        **COMMON,
        # The model.
        "base_model": take("model", Entry.text),
        "base_model_config": ignore("the model's own configuration is read"),
        "tokenizer_config": take("tokenizer", Entry.text),
        "reinit_weights": switch("random_weights"),
        "processor_type": _IMAGES,
        "freeze_mm_modules": _IMAGES,
        "image_size": _IMAGES,
        "image_resize_algorithm": _IMAGES,
        "tokens": take("add_tokens", Entry.texts),
        "special_tokens.additional_special_tokens": take("add_tokens", Entry.texts),
        "special_tokens.*": ignore("tokens that the tokenizer has"),
        "eot_tokens": ignore("tokens that end a turn"),
        "overrides_of_model_config.*": assume("the model's own configuration is planned"),
        "model_config.*": assume("the model's own configuration is planned"),
        "cls_model_config": ignore("the class of the model's configuration"),
        "resize_token_embeddings_to_32x": assume("the embedding keeps its size"),
        "bnb_config_kwargs.bnb_4bit_use_double_quant": _read_double,
        "bnb_config_kwargs.*": assume("the base is quantized to NF4"),
        "model_quantization_config": assume("the base is in half precision"),
        "model_quantization_config_kwargs.*": assume("the base is in half precision"),
        # The task.
        "rl": _read_task,
        "rl_beta": read_preference("beta"),
        "orpo_alpha": read_preference("beta"),
        "simpo_gamma": read_preference("gamma"),
        "dpo_label_smoothing": read_preference("label_smoothing"),
        "kto_desirable_weight": read_preference("desirable_weight"),
        "kto_undesirable_weight": read_preference("undesirable_weight"),
        "reward_model": refuse(f"a reward model has a head of its own; {REWARDS}"),
        "process_reward_model": refuse(f"a reward model has a head of its own; {REWARDS}"),
        "num_labels": refuse(f"a classifier has a head of its own; {REWARDS}"),
        "trl.*": refuse(REWARDS),
        "vllm.*": refuse(REWARDS),
        "ebft.*": refuse(REWARDS),
        "diffusion.*": refuse("a diffusion language model has another loss, which is not planned"),
        "use_eaft": assume("plain cross entropy, which costs the same but for the logits' entropy"),
        "eaft_alpha": ignore("belongs to use_eaft"),
        "eaft_k": ignore("belongs to use_eaft"),
        # The data.
        **{
            f"{section}.*.{key}": handler
            for section in ("datasets", "pretraining_dataset")
            for key, handler in {
                "path": _read_path,
                "data_files": _read_data_files,
                "type": _read_type,
                "name": read_of_source("subset"),
                "split": read_of_source("split"),
                "field": _read_text_column,
                "text_column": _read_text_column,
                "field_messages": _read_column("messages"),
                "field_chosen": _read_column("chosen"),
                "field_rejected": _read_column("rejected"),
                "field_prompt": _read_column("prompt"),
                "message_property_mappings.role": _read_mapping,
                "message_property_mappings.content": _read_mapping,
                "message_field_role": _read_mapping,
                "message_field_content": _read_mapping,
                "roles_to_train": _read_roles,
                "ds_type": ignore("the file's suffix says it"),
                "trust_remote_code": ignore("no code of a dataset is run"),
                "revision": assume("the newest revision is read"),
                "chat_template": assume("one template lays out all rows"),
                "train_on_eos": assume("the end of each trained turn is trained on"),
                "roles.*": assume("roles are recognized by their names"),
            }.items()
        },
        "test_datasets.*": assume("nothing is held out"),
        "val_set_size": read_validation,
        "streaming": _read_streaming,
        "chat_template": _read_template,
        "chat_template_jinja": assume("the tokenizer's own template is used"),
        "default_system_message": assume("the template's own system message is used"),
        "train_on_inputs": _read_trained,
        "dataset_prepared_path": ignore("preparing the data"),
        "shuffle_merged_datasets": ignore("the order of the rows"),
        "skip_prepare_dataset": ignore("preparing the data"),
        "dataset_num_proc": ignore("preparing the data"),
        "streaming_multipack_buffer_size": ignore("preparing the data"),
        "min_sample_len": ignore("leaves short rows out"),
        "excess_length_strategy": ignore("what becomes of rows that are too long"),
        # The batch.
        "sequence_len": take("length", Entry.whole),
        "micro_batch_size": take("micro_batch", Entry.whole),
        "batch_size": assume("the global batch follows from micro-batch, accumulation and devices"),
        "num_epochs": read_epochs,
        "sample_packing": switch("packing"),
        "pretrain_multipack_attn": ignore("documents of a sequence never see each other"),
        "eval_sample_packing": ignore("evaluation packs like training"),
        "sample_packing_bin_size": ignore("preparing the data"),
        "sample_packing_group_size": ignore("preparing the data"),
        "sample_packing_sequentially": ignore("the order of the rows"),
        "pad_to_sequence_len": ignore("every sequence is planned at its full length"),
        # Optimizer and schedule.
        "optimizer": read_optimizer,
        "lr_scheduler": read_schedule,
        "cosine_min_lr_ratio": take("min_lr_ratio", lambda entry: min(entry.number(), 0.999)),
        **{f"lr_scheduler_kwargs.{key}": handler for key, handler in SCHEDULE_KWARGS.items()},
        "cosine_constant_lr_ratio": assume("the cosine falls to the end of the run"),
        "eta_min": assume("the rate falls to 0"),
        "evals_per_epoch": ignore("evaluation: it costs the same at another step"),
        "saves_per_epoch": ignore("saving"),
        "early_stopping_patience": assume("the run goes to its end"),
        # Adapters.
        "adapter": _read_adapter,
        "load_in_4bit": switch("quantized"),
        "load_in_8bit": assume("the base is in half precision, twice the memory of 8 bits"),
        "lora_r": take("lora_rank", Entry.whole),
        "lora_alpha": take("lora_alpha", Entry.number),
        "lora_dropout": take("lora_dropout", Entry.fraction),
        "lora_target_modules": _read_targets,
        "lora_target_linear": _read_linear,
        "lora_target_parameters": read_target_parameters,
        "lora_modules_to_save": assume("embedding and head stay frozen"),
        "lora_fan_in_fan_out": ignore("the layout of weights"),
        "lora_model_dir": assume("training starts from a new adapter, which costs the same"),
        "lora_mlp_kernel": read_kernel("fused_gate", "adapter_kernels"),
        "lora_qkv_kernel": read_kernel("adapter_kernels"),
        "lora_o_kernel": read_kernel("adapter_kernels"),
        "lora_embedding_kernel": read_kernel("adapter_kernels"),
        "peft_use_dora": read_variant("dora"),
        "peft_use_rslora": read_variant("rslora"),
        "peft_init_lora_weights": _read_initialization,
        "peft.loftq_config.loftq_bits": ignore("the adapters' first values"),
        "quantize_moe_experts": switch("quantized_experts"),
        "unfrozen_parameters": _read_unfrozen,
        "full_finetune": ignore("no adapter says so"),
        "qat.weight_dtype": _read_qat,
        "qat.*": ignore("belongs to qat.weight_dtype"),
        # Memory and kernels.
        "gradient_checkpointing": _read_checkpointing,
        "activation_offloading": _read_offloading,
        "attn_implementation": read_attention,
        **dict.fromkeys(_OLD_ATTENTION, _read_old_attention),
        "fused_attn_kernel": assume("the norms and rotary embedding of attention are separate kernels"),
        "flex_attn_compile_kwargs.*": ignore("belongs to flex attention"),
        "flash_attn_cross_entropy": assume("torch's cross entropy"),
        "flash_attn_fuse_mlp": assume("the feed-forward is separate kernels"),
        "gemma4_hybrid_attn_impl": ignore("the fastest kernel of each layer is planned"),
        "plugins": _read_plugins,
        "cut_cross_entropy": read_kernel("chunked_loss"),
        "chunked_cross_entropy": switch("chunked_loss"),
        "chunked_cross_entropy_num_chunks": ignore("belongs to chunked_cross_entropy"),
        "liger_rms_norm": read_kernel("fused_norm"),
        "liger_rope": ignore("a kernel of little weight"),
        "liger_glu_activation": read_kernel("fused_gate"),
        "liger_swiglu": read_kernel("fused_gate"),
        "liger_fused_linear_cross_entropy": read_kernel("chunked_loss"),
        "liger_layer_norm": ignore("a kernel of models with LayerNorm, of little weight"),
        "liger_rms_norm_gated": ignore("a kernel of recurrent layers, of little weight"),
        "liger_cross_entropy": assume("torch's cross entropy"),
        "tiled_mlp": assume("the feed-forward computes all positions at once, which takes more memory"),
        "torch_compile_mode": ignore("belongs to torch_compile"),
        "torch_compile_backend": ignore("belongs to torch_compile"),
        "use_kernels": ignore("kernels of the hub, which replace some operators"),
        **dict.fromkeys(
            ("use_scattermoe", "use_sonicmoe", "experts_implementation", "llama4_linearized_experts"),
            ignore("the kernel of the experts: the plan takes a grouped product"),
        ),
        **dict.fromkeys(
            ("use_dsv4_kernels", "dsv4_fp4_grouped_mode", "use_glm_dsa_kernels"),
            assume("torch's operators in half precision"),
        ),
        "use_onebitllms": assume("weights are in half precision, not ternary"),
        "fp8": switch("fp8"),
        "bfloat16": switch("half_weights"),
        "float16": switch("precision", "fp16"),
        "torch_dtype": ignore("the base's precision follows from bf16 and fp16"),
        "embeddings_skip_upcast": ignore("the embedding is planned in the weights' precision"),
        # Devices.
        "fsdp": read_fsdp,
        "fsdp_version": read_fsdp_version,
        **{f"fsdp_config.{key}": handler for key, handler in FSDP.items()},
        "fsdp_final_state_dict_type": ignore("saving"),
        "dp_shard_size": _read_degree("shard_size"),
        "dp_replicate_size": _read_degree("replicas"),
        "tensor_parallel_size": _read_degree("tensor_parallel"),
        "context_parallel_size": _read_degree("context_parallel"),
        "expert_parallel_size": _read_degree("expert_parallel"),
        "expert_parallel_num_nvl_bytes": ignore("belongs to expert_parallel_size"),
        "expert_parallel_token_capacity": ignore("belongs to expert_parallel_size"),
        "heads_k_stride": ignore("belongs to context_parallel_size"),
        "ring_attn_func": ignore("belongs to context_parallel_size"),
        "accelerator_config.*": ignore("when gradients are added across devices"),
        "device_map.*": ignore("loading"),
        "ddp": ignore("data parallelism, with more than one device"),
        "lisa_n_layers": assume("all layers are trained at each step, which takes more memory"),
        "lisa_step_interval": ignore("belongs to lisa_n_layers"),
        "lisa_layers_attribute": ignore("belongs to lisa_n_layers"),
        # Without effect.
        **dict.fromkeys(
            (
                *("type_of_model", "model_type", "tokenizer_type", "revision_of_model", "tokenizer_use_fast"),
                *("tokenizer_legacy", "tokenizer_use_mistral_common", "strict", "experimental_skip_move_to_device"),
                *("is_llama_derived_model", "is_mistral_derived_model", "is_falcon_derived_model", "debug"),
                *("is_qwen_derived_model", "tokenizer_save_jinja_files", "axolotl_config_path"),
            ),
            ignore("loading"),
        ),
        **dict.fromkeys(
            ("loss_watchdog_threshold", "loss_watchdog_patience", "gc_steps", "profiler_steps", "profiler_steps_start"),
            ignore("watching the run"),
        ),
        **dict.fromkeys(
            ("do_causal_lm_eval", "eval_causal_lm_metrics", "generate_samples", "num_generation_samples"),
            ignore("evaluation: the plan has it at the end, with a training micro-batch"),
        ),
    },
)
