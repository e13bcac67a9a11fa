"""LLaMA-Factory's YAML with its dataset_info.json: one table of keys. Read from 0.9.5 (llamafactory/hparams)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from preheat.errors import RecipeError
from preheat.interop.fsdp import FSDP, read_fsdp
from preheat.interop.hf_keys import (
    ADAPTED,
    NO_PREAMBLE,
    REWARDS,
    SCHEDULE_KWARGS,
    VISION,
    read_attention,
    read_epochs,
    read_kernel,
    read_optimizer,
    read_preference,
    read_schedule,
    read_target_modules,
    read_validation,
    read_variant,
    switch,
)
from preheat.interop.hf_writing import (
    is_file,
    list_targets,
    write_batch,
    write_fsdp,
    write_kernels,
    write_optimizer,
    write_precision,
    write_saving,
    write_schedule,
)
from preheat.interop.keys import Assumed, Entry, NoEffect, Outcome, Takes, assume, ignore, refuse, take
from preheat.interop.reading import Format
from preheat.interop.settings import Settings
from preheat.interop.trainer_defaults import LLAMA_FACTORY as DEFAULTS
from preheat.interop.training_arguments import ARGUMENTS
from preheat.interop.writing import Draft, Written
from preheat.model_folder import read_object
from preheat.recipe import Recipe
from preheat.sanitize import quote_value

__all__ = ["LLAMA_FACTORY"]

_TEMPLATES = {
    **dict.fromkeys(("chatml", "qwen3", "qwen3_nothink"), "chatml"),  # unlike qwen without a system message
    "qwen": "qwen",
    **dict.fromkeys(("gemma", "gemma2"), "gemma"),
    **dict.fromkeys(("phi", "phi_small"), "phi3"),
    "alpaca": "alpaca",
    "llama3": "llama3",
    "mistral": "mistral",
    "phi4": "phi4",
}
_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_MEDIA = ("images", "videos", "audios")
_OPTIMIZERS = "the plan takes AdamW, with two fp32 moments per trained weight"


def _read_stage(settings: Settings, entry: Entry) -> Outcome:
    stage = entry.choice("pt", "sft", "dpo", "kto", "rm", "ppo")
    if stage in ("rm", "ppo"):
        raise entry.error(f"{stage}: {REWARDS}")
    if stage == "dpo":
        settings.preference = {"loss": "dpo"} | settings.preference
        settings.pairs = True
        return Takes(("preference",))
    if stage == "kto":
        settings.preference = settings.preference | {"loss": "kto"}
        return Takes(("preference",))
    return Takes(("packing",)) if stage == "pt" else NoEffect("supervised training")


def _read_method(settings: Settings, entry: Entry) -> Outcome:
    method = entry.choice("lora", "full", "freeze", "oft")
    if method == "oft":
        raise entry.error("oft: is not read from another trainer's file; write a recipe with techniques.peft_adapter")
    settings.adapter = "lora" if method == "lora" else None
    if method == "freeze":
        settings.freeze.setdefault("layers", 2)
        return Takes(("freeze",))
    return Takes(("adapter",))


def _read_frozen_layers(settings: Settings, entry: Entry) -> Outcome:
    count = int(entry.number())
    if count < 0:
        return Assumed("the last layers are trained, which cost less than the first")
    settings.freeze["layers"] = count
    return Takes(("freeze",))


def _read_targets(settings: Settings, entry: Entry) -> Outcome:
    names = entry.texts()
    settings.lora_targets = read_target_modules(["all-linear"] if names == ["all"] else names)
    return Takes(("lora_targets",))


def _read_bits(settings: Settings, entry: Entry) -> Outcome:
    if entry.whole() != 4:
        return Assumed("the base is in half precision, twice the memory of 8 bits")
    settings.quantized = True
    return Takes(("quantized",))


def _read_method_of_bits(settings: Settings, entry: Entry) -> Outcome:
    return NoEffect("4 bits are NF4") if entry.text() == "bnb" else Assumed("4 bits are planned as NF4")


def _read_pure(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    settings.precision, settings.half_weights = "bf16", True
    return Takes(("half_weights",))


def _read_recomputation(settings: Settings, entry: Entry) -> Outcome:
    settings.checkpointing = not entry.truth()
    return Takes(("checkpointing",))


def _read_loss(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    if name not in _LOSSES:
        raise entry.error(f"{quote_value(name)}: must be one of {', '.join(_LOSSES)}")
    settings.preference = settings.preference | {"loss": _LOSSES[name]}
    return Takes(("preference",))


def _read_template(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text()) in _TEMPLATES:
        settings.template = _TEMPLATES[name]
        return Takes(("template",), f"{NO_PREAMBLE}, and with the first token" if name == "alpaca" else "")
    return Assumed("the tokenizer's own template is used")


def _read_trained(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "all" if entry.truth() else settings.train_on
    return Takes(("train_on",))


def _read_history(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "last" if entry.truth() else settings.train_on
    return Takes(("train_on",))


def _read_limit(settings: Settings, entry: Entry) -> Outcome:
    settings.limit = entry.whole()
    return Takes(("sources.limit",))


def _read_datasets(settings: Settings, entry: Entry) -> Outcome:
    settings.sources = [{"source": name} for name in entry.texts()]
    return Takes(("sources",))


def _read_dataset_info(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Replaces names of datasets by what dataset_info.json says of them; returns what is assumed without it."""
    if "dataset" not in entries:
        return ["the file names no dataset"]
    stated = entries.get("dataset_dir")
    folder = stated.text() if stated else "data"
    file = next((f for f in (Path(folder, _INFO), settings.home / folder / _INFO) if f.is_file()), None)
    if file is None:
        return [f"{folder}/{_INFO} is not here: the datasets are named, and their rows not known"]
    info = read_object(file, f"{entries['dataset'].where}:{entries['dataset'].line}: dataset")
    settings.sources = [_read_dataset(source["source"], info, file, entries["dataset"]) for source in settings.sources]
    return []


_INFO = "dataset_info.json"


def _read_dataset(name: object, info: Mapping[str, object], file: Path, entry: Entry) -> dict[str, object]:
    """Returns a source of the recipe for a dataset of dataset_info.json."""
    facts = info.get(str(name))
    if not isinstance(facts, dict):
        raise entry.error(f"{quote_value(name)}: is not in {file}; known: {', '.join(list(info)[:5])}")
    columns, tags = facts.get("columns", {}), facts.get("tags", {})
    if not isinstance(columns, dict) or not isinstance(tags, dict):
        raise entry.error(f"{file}: {name}: columns and tags must be mappings")
    if media := next((kind for kind in _MEDIA if kind in columns), None):
        raise entry.error(f"{name}: its rows have {media}; {VISION}")
    hub, local = facts.get("hf_hub_url") or facts.get("ms_hub_url"), facts.get("file_name")
    # Such as data/../rows.jsonl, which is rows.jsonl.
    source: dict[str, object] = {"source": str(hub or os.path.normpath(file.parent / str(local or name)))}
    chats = facts.get("formatting", "alpaca") != "alpaca"
    if facts.get("ranking"):
        layout, roles = "preference", {"chosen": "chosen", "rejected": "rejected", "prompt": "instruction"}
    elif "kto_tag" in columns:
        layout, roles = "kto", {"label": str(columns["kto_tag"])}
    elif chats:
        by_role = tags.get("role_tag", "from") == "role" or facts.get("formatting") == "openai"
        layout, roles = ("messages", {"messages": "messages"}) if by_role else ("sharegpt", {})
    elif set(columns) == {"prompt"}:  # text to continue, for stage pt
        layout, roles = "text", {}
        source["text"] = str(columns["prompt"])
    else:
        layout, roles = "alpaca", {}
    theirs = {"instruction": "prompt", "input": "query", "output": "response", "conversations": "messages"}
    fields = {"alpaca": ("instruction", "input", "output"), "sharegpt": ("conversations",)}.get(layout, tuple(roles))
    named = {
        field: str(column)
        for field in fields
        if (column := columns.get(theirs.get(field, field))) is not None and column != field
    }
    named |= {"label": roles["label"]} if layout == "kto" and roles["label"] != "label" else {}
    for key, ours in (("subset", "subset"), ("split", "split"), ("num_samples", "limit")):
        if key in facts:
            source[ours] = facts[key]
    return source | {"layout": layout} | ({"columns": named} if named else {})


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies LLaMA-Factory's own rules between keys."""
    notes = _read_dataset_info(settings, entries)
    if "finetuning_type" not in entries or entries["finetuning_type"].value != "freeze":
        settings.freeze = {}
    stage = entries["stage"].text() if "stage" in entries else "sft"
    if settings.adapter == "lora" and settings.lora_targets is None:
        settings.lora_targets = read_target_modules(list(ADAPTED[DEFAULTS.adapts["lora"]]))
    if settings.quantized and settings.adapter is None:
        raise entries["quantization_bit"].error("a base in 4 bits is frozen; write finetuning_type: lora")
    if settings.adapter and not settings.quantized and settings.precision == "fp32":
        notes.append(
            "neither bf16 nor fp16 is on: a frozen base is planned in fp32, which LLaMA-Factory loads in bf16 on a GPU"
        )
    if "packing" not in entries:
        settings.packing = stage == "pt"
    if stage == "pt":
        settings.template = None
    if stage not in ("dpo", "kto"):
        settings.preference = {}
    if settings.limit:
        for source in settings.sources:
            source.setdefault("limit", settings.limit)
    if settings.streaming and not settings.max_steps:
        raise entries["streaming"].error("a streamed dataset has no known length; add max_steps")
    if settings.streaming and len(settings.sources) > 1:
        settings.sources = settings.sources[:1]
        notes.append("one streamed dataset is planned; a mixture costs the same")
    return notes


_OURS = {"qwen": "qwen", "gemma": "gemma", "phi3": "phi", "alpaca": "alpaca", "chatml": "chatml"}
_OURS |= {"llama3": "llama3", "mistral": "mistral", "phi4": "phi4"}
"""A recipe's template -> LLaMA-Factory's name of it."""
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_FACTS: Mapping[str, Mapping[str, object]] = {
    "messages": {
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": _TAGS | {"system_tag": "system"},
    },
    "sharegpt": {"formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "alpaca": {"columns": {"prompt": "instruction", "query": "input", "response": "output"}},
    "text": {"columns": {"prompt": "text"}},
    "preference": {"ranking": True, "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}},
}
"""A recipe's layout -> what dataset_info.json says of such rows."""
_THEIRS = {"instruction": "prompt", "input": "query", "output": "response", "conversations": "messages"}


def write_llama_factory(recipe: Recipe, folder: Path = Path()) -> Written:
    """Writes a recipe as LLaMA-Factory's YAML, with `dataset_info.json` beside it.

    Args:
        folder: of the files, from where the run is started.

    Raises:
        RecipeError: the recipe has no such form at all.
    """
    draft = Draft(recipe, "LLaMA-Factory", DEFAULTS.settings)
    settings = draft.settings
    draft.say("model_name_or_path", "model")
    if settings.random_weights:
        draft.say("train_from_scratch", "random_weights")
    if settings.add_tokens:
        draft.say("add_special_tokens", "add_tokens", value=",".join(settings.add_tokens))
    layouts = {str(source.get("layout", "auto")) for source in settings.sources}
    if "text" in layouts and layouts != {"text"}:
        raise RecipeError(
            "data.layout: text: LLaMA-Factory trains on plain text alone (stage pt), not together with conversations; "
            "leave one of them out"
        )
    draft.put("stage", "dpo" if settings.preference else "pt" if layouts == {"text"} else "sft")
    draft.put("do_train", True)
    if settings.preference:
        _write_preference(draft)
    _write_adapter(draft)
    _write_datasets(draft, folder)
    _write_rows(draft, layouts)
    draft.say("cutoff_len", "length", always=True)
    write_batch(draft)
    muon = settings.optimizer == "muon"
    write_optimizer(draft)
    if muon:
        draft.say("use_muon", "optimizer", value=True)
    if settings.apollo and settings.adapter is None:
        draft.say("use_apollo", "apollo")
    write_schedule(draft)
    write_precision(draft, ("pure_bf16", True))
    draft.explain(
        "techniques.mixed_precision.frozen", "LLaMA-Factory keeps a frozen base in half precision: frozen: auto"
    )
    draft.say("disable_gradient_checkpointing", "checkpointing", value=not settings.checkpointing)
    if not settings.attention:
        draft.say("flash_attn", "attention", value="disabled")
    for key, name in (("shift_attn", "shifted_groups"), ("fp8", "fp8")):
        if getattr(settings, name):
            draft.say(key, name)
    if settings.dft:
        draft.say("use_dft_loss", "dft")
    write_kernels(draft, "enable_liger_kernel")
    write_fsdp(draft)
    write_saving(draft)
    devices = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={settings.world} " if settings.world > 1 else ""
    draft.start.append(f"{devices}llamafactory-cli train {{file}}")
    return draft.finish()


def _write_preference(draft: Draft) -> None:
    losses = {ours: theirs for theirs, ours in _LOSSES.items()}
    preference = draft.settings.preference
    loss = str(preference["loss"])
    if loss not in losses:
        raise RecipeError(
            f"techniques.preference.loss: {loss}: LLaMA-Factory has {', '.join(losses)}; use one of these"
        )
    keys = {"beta": "pref_beta", "nll": "pref_ftx", "gamma": "simpo_gamma"}
    keys |= {"label_smoothing": "dpo_label_smoothing"} if loss == "dpo" else {}
    draft.put("pref_loss", losses[loss], default=loss == "dpo")
    for ours, theirs in keys.items():
        if ours in preference:
            draft.put(theirs, preference[ours])
    draft.agree("pairs")
    draft.said.preference = {"loss": loss} | {key: preference[key] for key in keys if key in preference}


def _write_adapter(draft: Draft) -> None:
    settings = draft.settings
    draft.say("finetuning_type", "adapter", value="full" if settings.adapter is None else "lora", always=True)
    if settings.adapter is None:
        return
    draft.say("lora_rank", "lora_rank", always=True)
    draft.say("lora_alpha", "lora_alpha", always=True)
    draft.say("lora_dropout", "lora_dropout")
    targets = list_targets(settings)
    if targets == ["all-linear"] or not isinstance(settings.lora_targets, str):
        draft.say("lora_target", "lora_targets", value="all" if targets == ["all-linear"] else ",".join(targets))
    if settings.lora_variant in ("rslora", "dora"):
        draft.say(f"use_{settings.lora_variant}", "lora_variant", value=True)
    elif settings.lora_variant == "pissa":
        draft.say("pissa_init", "lora_variant", value=True)
        if settings.pissa_iterations:
            draft.say("pissa_iter", "pissa_iterations")
    if settings.quantized:
        draft.say("quantization_bit", "quantized", value=4)
        draft.say("double_quantization", "double_quantization")


def _write_datasets(draft: Draft, folder: Path) -> None:
    """Writes the names of the datasets, and what they are to `dataset_info.json`."""
    info: dict[str, object] = {}
    written = []
    for source in draft.settings.sources:
        facts, kept = _write_source(draft, source, folder)
        name = re.sub(r"[^\w-]+", "_", Path(str(source["source"])).stem).strip("_") or "data"
        info[name if name not in info else f"{name}_{len(info)}"] = facts
        written.append(kept)
    draft.put("dataset", ",".join(info))
    draft.put("dataset_dir", str(folder))
    draft.beside[_INFO] = json.dumps(info, indent=2, ensure_ascii=False) + "\n"
    draft.said.sources = written


def _write_source(
    draft: Draft, source: Mapping[str, object], folder: Path
) -> tuple[dict[str, object], dict[str, object]]:
    """Returns what `dataset_info.json` says of a source, and what of the source it says."""
    name, layout = str(source["source"]), str(source.get("layout", "auto"))
    file = name if os.path.isabs(name) else os.path.relpath(name, folder)
    facts: dict[str, object] = {"file_name": file} if is_file(name) else {"hf_hub_url": name}
    written = {key: source[key] for key in ("source", "layout") if key in source}
    if layout not in _FACTS or (layout == "preference") != bool(draft.settings.preference):
        known = "preference" if draft.settings.preference else ", ".join(key for key in _FACTS if key != "preference")
        draft.refuse_layout(source, f"LLaMA-Factory needs the rows' format: write one of {known}, which it reads")
        return facts, written
    facts |= json.loads(json.dumps(_FACTS[layout]))
    columns, names = source.get("columns", {}), facts["columns"]
    assert isinstance(columns, Mapping)
    assert isinstance(names, dict)
    fields = {field: _THEIRS.get(field, field) for field in columns}
    if set(fields.values()) <= names.keys():
        names |= {theirs: columns[field] for field, theirs in fields.items()}
        written |= {"columns": columns} if columns else {}
    if layout == "text" and "text" in source:
        names["prompt"] = written["text"] = source["text"]
    for ours, theirs in (("subset", "subset"), ("split", "split"), ("limit", "num_samples")):
        if ours in source:
            facts[theirs] = written[ours] = source[ours]
    return facts, written


def _write_rows(draft: Draft, layouts: set[str]) -> None:
    """Writes the template, packing and the trained part of the rows."""
    settings = draft.settings
    if layouts != {"text"}:
        if settings.template in _OURS:
            draft.say("template", "template", value=_OURS[settings.template])
        elif settings.template is None:
            draft.note("template: is left out, so that LLaMA-Factory takes the tokenizer's own")
        if settings.train_on in ("all", "last"):
            key = "train_on_prompt" if settings.train_on == "all" else "mask_history"
            draft.say(key, "train_on", value=True)
    if not settings.preference:
        draft.say("packing", "packing", always=layouts == {"text"})
        if settings.packing and layouts != {"text"}:
            draft.put("neat_packing", True)  # no attention between the examples of a sequence
    if settings.streaming:
        draft.say("streaming", "streaming")
    if isinstance(settings.validation, float):
        draft.say("val_size", "validation")
    else:
        draft.explain("data.validation", "LLaMA-Factory holds a fraction out: --set data.validation=0.02")


_IMAGES = refuse(VISION)

LLAMA_FACTORY = Format(
    name="llamafactory",
    title="LLaMA-Factory",
    requires=frozenset({"model_name_or_path"}),
    unique=frozenset({"stage", "finetuning_type", "cutoff_len", "template", "lora_target"}),
    defaults=DEFAULTS,
    finish=_finish,
    write=write_llama_factory,
    renamed={
        "per_gpu_train_batch_size": "per_device_train_batch_size",
        "sft_packing": "packing",
        "max_length": "cutoff_len",
    },
    removed={
        "lora_modules": "write lora_target",
        "max_source_length": "write cutoff_len",
        "max_target_length": "write cutoff_len",
        "dpo_beta": "write pref_beta",
        "dpo_loss": "write pref_loss",
        "dpo_ftx": "write pref_ftx",
        "name_module_trainable": "write freeze_trainable_modules",
        "num_layer_trainable": "write freeze_trainable_layers",
        "quantization_device": "leave it out",
    },
    table={
        **ARGUMENTS,
        # The model.
        "model_name_or_path": take("model", Entry.text),
        "train_from_scratch": switch("random_weights"),
        "adapter_name_or_path": assume("training starts from a new adapter, which costs the same"),
        "resize_vocab": assume("the embedding keeps its size"),
        "add_tokens": take("add_tokens", Entry.texts),
        "add_special_tokens": take("add_tokens", Entry.texts),
        "rope_scaling": assume("positions are the model's own, which cost the same"),
        "mixture_of_depths": refuse("layers that leave tokens out are not planned"),
        "moe_aux_loss_coef": assume("without a loss on the router, of little weight"),
        "upcast_layernorm": assume("norms are in the weights' precision"),
        "upcast_lmhead_output": assume("the head's output is in the matmuls' precision"),
        "model_revision": ignore("loading"),
        "split_special_tokens": ignore("preparing the data"),
        # Images: their limits are in files for models that read images.
        **dict.fromkeys(
            ("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "media_dir", "video_fps"),
            _IMAGES,
        ),
        "freeze_vision_tower": ignore("only the text part is planned"),
        "freeze_multi_modal_projector": ignore("only the text part is planned"),
        "freeze_language_model": _IMAGES,
        # The task.
        "stage": _read_stage,
        "pref_loss": _read_loss,
        "pref_beta": read_preference("beta"),
        "pref_ftx": read_preference("nll"),
        "simpo_gamma": read_preference("gamma"),
        "dpo_label_smoothing": read_preference("label_smoothing"),
        "kto_chosen_weight": read_preference("desirable_weight"),
        "kto_rejected_weight": read_preference("undesirable_weight"),
        "ref_model": assume("the reference is the model before training"),
        "reward_model": refuse(REWARDS),
        "use_dft_loss": take("dft", Entry.truth),
        "use_asft_loss": assume("plain cross entropy, which costs the same"),
        "use_eaft_loss": assume("plain cross entropy, which costs the same but for the logits' entropy"),
        # The data.
        "dataset": _read_datasets,
        "dataset_dir": ignore("where dataset_info.json is"),
        "eval_dataset": assume("nothing is held out"),
        "template": _read_template,
        "default_system": assume("the template's own system message is used"),
        "cutoff_len": take("length", Entry.whole),
        "packing": switch("packing"),
        "neat_packing": switch("packing"),
        "train_on_prompt": _read_trained,
        "mask_history": _read_history,
        "streaming": switch("streaming"),
        "max_samples": _read_limit,
        "val_size": read_validation,
        **dict.fromkeys(
            (
                *("buffer_size", "mix_strategy", "interleave_probs", "preprocessing_batch_size", "tokenized_path"),
                *("tool_format", "enable_thinking", "preserve_thinking", "data_shared_file_system"),
                *("ignore_pad_token_for_loss", "disable_shuffling", "eval_on_each_dataset", "eval_num_beams"),
            ),
            ignore("preparing the data"),
        ),
        # Adapters and quantization.
        "finetuning_type": _read_method,
        "lora_rank": take("lora_rank", Entry.whole),
        "lora_alpha": take("lora_alpha", Entry.number),
        "lora_dropout": take("lora_dropout", Entry.fraction),
        "lora_target": _read_targets,
        "additional_target": assume("embedding and head stay frozen"),
        "use_rslora": read_variant("rslora"),
        "use_dora": read_variant("dora"),
        "pissa_init": read_variant("pissa"),
        "pissa_iter": take("pissa_iterations", lambda entry: max(int(entry.number()), 0)),
        "pissa_convert": ignore("saving"),
        "create_new_adapter": ignore("the adapters' first values"),
        "loraplus_lr_embedding": ignore("belongs to loraplus_lr_ratio"),
        "quantization_bit": _read_bits,
        "quantization_method": _read_method_of_bits,
        "quantization_type": ignore("fp4 and nf4 cost the same"),
        "double_quantization": switch("double_quantization"),
        "freeze_trainable_layers": _read_frozen_layers,
        "freeze_trainable_modules": assume("whole layers are trained, which takes more memory"),
        "freeze_extra_modules": assume("these stay frozen"),
        # The batch, the optimizer, the schedule.
        "per_device_train_batch_size": take("micro_batch", Entry.whole),
        "num_train_epochs": read_epochs,
        "lr_scheduler_type": read_schedule,
        **{f"lr_scheduler_kwargs.{key}": handler for key, handler in SCHEDULE_KWARGS.items()},
        "optim": read_optimizer,
        "use_muon": switch("optimizer", "muon"),
        "use_apollo": switch("apollo"),
        "use_galore": assume(_OPTIMIZERS),
        "use_badam": assume(_OPTIMIZERS),
        "use_adam_mini": assume(_OPTIMIZERS),
        **dict.fromkeys(
            ("galore_rank", "galore_target", "galore_scale", "galore_layerwise", "galore_update_interval"),
            ignore("belongs to use_galore"),
        ),
        **dict.fromkeys(
            ("apollo_rank", "apollo_target", "apollo_scale", "apollo_layerwise", "apollo_update_interval"),
            assume("APOLLO with a quarter of each matrix's rank"),
        ),
        **dict.fromkeys(
            ("badam_mode", "badam_switch_mode", "badam_switch_interval", "badam_verbose"),
            ignore("belongs to use_badam"),
        ),
        "early_stopping_steps": assume("the run goes to its end"),
        # Memory and kernels.
        "disable_gradient_checkpointing": _read_recomputation,
        "gradient_checkpointing": switch("checkpointing"),
        "flash_attn": read_attention,
        "shift_attn": switch("shifted_groups"),
        "enable_liger_kernel": read_kernel("fused_norm", "fused_gate", "chunked_loss"),
        "use_unsloth": assume("transformers' own layers, slower and with more memory"),
        "use_unsloth_gc": assume("checkpoints stay on the device"),
        "use_v1_kernels": assume("transformers' own layers"),
        "pure_bf16": _read_pure,
        "fp8": switch("fp8"),
        "fp8_backend": ignore("belongs to fp8"),
        "fp8_enable_fsdp_float8_all_gather": ignore("belongs to fp8"),
        # Devices; Megatron's names are those of mcore_adapter.
        "fsdp": read_fsdp,
        **{f"fsdp_config.{key}": handler for key, handler in FSDP.items()},
        "tensor_model_parallel_size": take("tensor_parallel", Entry.whole),
        "pipeline_model_parallel_size": take("pipeline_parallel", Entry.whole),
        "expert_model_parallel_size": take("expert_parallel", Entry.whole),
        "context_parallel_size": take("context_parallel", Entry.whole),
        "sequence_parallel": switch("sequence_parallel"),
        "use_distributed_optimizer": switch("sharding", "optimizer"),
        **dict.fromkeys(
            ("overlap_param_gather", "overlap_grad_reduce", "bias_activation_fusion", "apply_rope_fusion"),
            assume("kernels and communication of preheat's own"),
        ),
        "mixed_precision": ignore("bf16 says it"),
        "use_packed_sequences": switch("packing"),
        "export_hf_on_finish": ignore("saving"),
        **dict.fromkeys(
            (
                *(
                    "ray_num_workers",
                    "ray_run_name",
                    "ray_init_kwargs",
                    "master_addr",
                    "master_port",
                    "resources_per_worker",
                ),
                *("placement_strategy", "ray_storage_path", "infer_backend", "infer_dtype", "use_kv_cache"),
                *("print_param_status", "offload_folder", "ms_hub_token", "om_hub_token"),
            ),
            ignore("starting processes and loading"),
        ),
    },
)
