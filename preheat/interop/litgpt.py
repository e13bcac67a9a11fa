"""litgpt's YAML: one table of its keys. Read from litgpt 0.5.13 (litgpt/finetune, pretrain.py, args.py, data)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from preheat.interop.hf_keys import LOGGING, SAVING, read_epochs
from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, refuse, take
from preheat.interop.reading import Format
from preheat.interop.settings import Settings
from preheat.interop.torch_keys import last_name, read_betas, read_optimizer_class, read_warmup, split_global_batch
from preheat.interop.trainer_defaults import LITGPT as DEFAULTS
from preheat.interop.trainer_defaults import LITGPT_PRETRAIN as PRETRAIN_DEFAULTS

__all__ = ["LITGPT", "LITGPT_PRETRAIN"]

_INSTRUCTIONS = {
    "Alpaca": ("tatsu-lab/alpaca", "alpaca", 0.03865),
    "Alpaca2k": ("mhenrichsen/alpaca_2k_test", "alpaca", 0.05),
    "AlpacaGPT4": ("vicgalle/alpaca-gpt4", "alpaca", 0.03847),
    "Deita": ("HuggingFaceH4/deita-10k-v0-sft", "messages", 0.0),
    "FLAN": ("Muennighoff/flan", "auto", 0.0),
    "LIMA": ("GAIR/lima", "auto", 0.1),
    "LongForm": ("akoksal/LongForm", "auto", 0.0),
    "JSON": ("", "alpaca", 0.05),
}
"""Data module of instructions -> its dataset, the layout of its rows, and the fraction that it holds out."""
_TEXTS = {
    "LitData": "data",
    "MicroLlama": "cerebras/SlimPajama-627B",
    "OpenWebText": "openwebtext",
    "TextFiles": "",
    "TinyLlama": "cerebras/SlimPajama-627B",
    "TinyStories": "roneneldan/TinyStories",
}
"""Data module of plain text -> its dataset."""
_TEMPLATES = {"alpaca": "alpaca", "gemma": "gemma", "llama3": "llama3", "phi-3": "phi3", "qwen2.5": "qwen"}
_SIZES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_query_groups": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "padded_vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "head_size": "head_dim",
    "norm_eps": "rms_norm_eps",
}
"""Size of a model_config -> its name in transformers' configurations."""
_LLAMA = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "attn_bias": False,
    "scale_embeddings": False,
    "norm_qk": False,
    "n_expert": 0,
    "post_attention_norm": False,
    "post_mlp_norm": False,
}
"""Llama's blocks in the terms of a model_config."""
_NOT_LLAMA = {"norm_class_name", "mlp_class_name", "rotary_percentage", "parallel_residual", "bias"}
"""Those of `_LLAMA` that differ in litgpt if the file leaves them out."""
_ATTENTION = {"lora_query": "q_proj", "lora_key": "k_proj", "lora_value": "v_proj", "lora_projection": "o_proj"}
"""Key of a projection of attention -> its name in most families of transformers."""
_LAYERS = (*_ATTENTION, "lora_mlp")
_DEFAULT_LAYERS = {"lora_query", "lora_value"}


def _read_checkpoint(settings: Settings, entry: Entry) -> Outcome:
    """Reads a folder of litgpt's checkpoints/OWNER/NAME, or a name of the hub, which litgpt downloads."""
    name = entry.text()
    parts = PurePosixPath(name).parts
    # A folder with transformers' configuration can be read as it is.
    if not Path(name, "config.json").is_file() and len(parts) > 2:
        settings.model = "/".join(parts[-2:])
        return Takes(("model",), "planned by the name of the checkpoint on the hub")
    settings.model = name
    return Takes(("model",))


def _read_name(settings: Settings, entry: Entry) -> Outcome:
    settings.model = entry.text()
    return Takes(("model",))


def _read_initial(settings: Settings, entry: Entry) -> Outcome:
    entry.text()
    return Takes(("model",), "in place of model_name")


def _read_tying(settings: Settings, entry: Entry) -> Outcome:
    settings.architecture["tie_word_embeddings"] = entry.truth()
    return Takes(("architecture",))


def _read_tokenizer(settings: Settings, entry: Entry) -> Outcome:
    parts = PurePosixPath(entry.text()).parts
    settings.tokenizer = entry.text() if Path(entry.text()).exists() else "/".join(parts[-2:])
    return Takes(("tokenizer",))


def _read_size(settings: Settings, entry: Entry) -> Outcome:
    name = _SIZES[entry.path[-1]]
    settings.architecture[name] = entry.number() if name == "rms_norm_eps" else entry.whole()
    settings.family = "llama"
    return Takes(("architecture",))


def _read_block(settings: Settings, entry: Entry) -> Outcome:
    if entry.value != _LLAMA[entry.path[-1]]:
        raise entry.error(
            f"{entry.shown}: only models of Llama's blocks are planned from their sizes; name the model in model_name"
        )
    return NoEffect("as in Llama's blocks")


def _read_precision(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("bf16-true", "bf16-mixed", "16-true", "16-mixed", "32-true", "bf16", "16", "32")
    settings.precision = {"bf": "bf16", "16": "fp16", "32": "fp32"}[name[:2]]
    settings.half_weights = name.endswith("-true")
    settings.frozen = "auto" if settings.half_weights else "fp32"
    return Takes(("precision", "half_weights", "frozen"))


def _read_quantization(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    if name.removeprefix("bnb.") in ("nf4", "nf4-dq", "fp4", "fp4-dq"):
        settings.quantized = True
        settings.double_quantization = name.endswith("-dq")
        return Takes(
            ("quantized", "double_quantization"), "planned as NF4, of the same memory" if "fp4" in name else ""
        )
    return Assumed("the base is in half precision, twice the memory of 8 bits")


def _read_devices(settings: Settings, entry: Entry) -> Outcome:
    if entry.value != "auto":
        entry.whole()
    return Takes(("devices",), "" if entry.value != "auto" else "as many as --count says, or one")


def _read_layers(settings: Settings, entry: Entry) -> Outcome:
    entry.truth()
    return Takes(("lora_targets",))


def _read_module(settings: Settings, entry: Entry) -> Outcome:
    """Reads the data module, whose arguments may have been read before."""
    name = last_name(entry)
    source = _source(settings)
    if name in _INSTRUCTIONS:
        dataset, layout, held_out = _INSTRUCTIONS[name]
        settings.validation = held_out
        source.setdefault("source", dataset)
        source["layout"] = layout
        return Takes(("sources",), "its copy on the hub" if dataset else "")
    if name in _TEXTS:
        source.setdefault("source", _TEXTS[name])
        source["layout"] = "text"
        settings.packing = True
        return Takes(("sources",), "its text, not yet in tokens" if _TEXTS[name] else "")
    return Assumed(f"rows of {name} are not known: recognized by their names")


def _source(settings: Settings) -> dict[str, object]:
    if not settings.sources:
        settings.sources.append({})
    return settings.sources[0]


def _read_data_path(settings: Settings, entry: Entry) -> Outcome:
    _source(settings)["source"] = entry.text()
    return Takes(("sources",))


def _read_masking(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "assistant" if entry.truth() else "all"
    return Takes(("train_on",))


def _read_style(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text()) in _TEMPLATES:
        settings.template = _TEMPLATES[name]
        return Takes(("template",))
    return Assumed("the tokenizer's own template is used")


def _read_tokens(settings: Settings, entry: Entry) -> Outcome:
    entry.whole()
    return Takes(("max_steps",), "its tokens in steps")


def _unsupported(command: str) -> Handler:
    return refuse(f"litgpt {command} does not support it; leave it out")


def _count_devices(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Sets the devices: those of the command, else those of the file."""
    nodes = entries["num_nodes"].whole() if "num_nodes" in entries else 1
    stated = entries.get("devices")
    if settings.devices is None and stated is not None and stated.value != "auto":
        settings.devices = stated.whole() * nodes


def _finish_batch(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Sets the devices, the global batch and the length; returns what is assumed of them."""
    _count_devices(settings, entries)
    if settings.sources and not settings.sources[0].get("source"):
        raise entries.get("data.class_path", entries.get("data", next(iter(entries.values())))).error(
            "names no data; add its path under data.init_args"
        )
    notes = split_global_batch(settings, entries, "train.global_batch_size", "train.micro_batch_size")
    length = entries.get("train.max_seq_length")
    if length is None or length.value is None:
        context = settings.architecture.get("max_position_embeddings")
        if isinstance(context, int):
            settings.length = context
        else:
            notes.append(
                f"the file states no train.max_seq_length: planned at {settings.length:,} tokens a sequence; "
                "--set batch.seq_len=N plans another"
            )
    return notes


def _has_adapters(key: str, entries: Mapping[str, Entry]) -> bool:
    entry = entries.get(key)
    return key in _DEFAULT_LAYERS if entry is None or entry.value is None else entry.truth()


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies the rules of litgpt's finetuning between keys."""
    lora = [key for key in entries if key.startswith("lora_")]
    settings.adapter = "lora" if lora else None
    notes = _finish_batch(settings, entries)
    if settings.quantized and not lora:
        raise entries["quantize"].error("a base in 4 bits is frozen: only finetune_lora is planned; add lora_r")
    if lora:
        on = {key for key in _LAYERS if _has_adapters(key, entries)}
        attention = ["attention"] if on.issuperset(_ATTENTION) else [_ATTENTION[key] for key in _ATTENTION if key in on]
        settings.lora_targets = attention + (["feed-forward"] if "lora_mlp" in on else [])
        if not settings.lora_targets:
            raise entries[lora[0]].error("no kind of layer has adapters; set lora_query: true")
    if settings.quantized and settings.world > 1:
        raise entries["quantize"].error("litgpt quantizes on one device only; set devices: 1, or leave quantize out")
    # Several devices recompute their blocks, one does not.
    settings.checkpointing = settings.world > 1
    settings.sharding = "full"
    if not settings.sources:
        notes.append("the file names no data: litgpt reads Alpaca")
        settings.sources, settings.validation = [{"source": "tatsu-lab/alpaca", "layout": "alpaca"}], 0.03865
    return notes


def _finish_pretraining(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies the rules of litgpt's pretraining between keys."""
    notes = _finish_batch(settings, entries)
    if settings.family is not None:
        settings.architecture.setdefault("tie_word_embeddings", False)
        missing = {"n_layer", "n_embd", "n_head"} - {
            key.rpartition(".")[2] for key in entries if "model_config." in key
        }
        others = {f"model_config.{key}" for key in _NOT_LLAMA} - set(entries)
        blamed = next(entry for key, entry in entries.items() if key.startswith("model_config."))
        if missing or others:
            names = ", ".join(sorted({f"model_config.{key}" for key in missing} | others))
            raise blamed.error(f"only models of Llama's blocks are planned from their sizes; add {names}")
        settings.model = None
    elif (initial := entries.get("initial_checkpoint_dir")) and initial.value is not None:
        _read_checkpoint(settings, initial)
    else:
        settings.random_weights = True
        settings.model = _find_owner(settings)
    if settings.tokenizer == settings.model:
        settings.tokenizer = None
    settings.sharding = "full"
    # Hybrid: weights are sharded within a node, and copied across nodes.
    settings.replicas = entries["num_nodes"].whole() if "num_nodes" in entries else 1
    tokens = entries.get("train.max_tokens")
    total = tokens.whole() if tokens is not None and tokens.value is not None else 3_000_000_000_000
    rows = settings.micro_batch * settings.accumulation * settings.ranks
    steps = max(total // (rows * settings.length), 1)
    settings.max_steps = min(settings.max_steps or steps, steps)
    return notes


def _find_owner(settings: Settings) -> str | None:
    """Returns the model's name on the hub: litgpt's have no owner, but the tokenizer's folder may state it."""
    name, folder = settings.model, settings.tokenizer
    if name and folder and "/" not in name and folder.rpartition("/")[2] == name:
        return folder
    return name


_LATER = ignore("evaluation: the plan has it at the end, with a training micro-batch")
_DATA_WORK = ignore("preparing the data")

_TABLE: Mapping[str, Handler] = {
    "precision": _read_precision,
    "devices": _read_devices,
    "num_nodes": _read_devices,
    "seed": take("seed", lambda entry: int(entry.number())),
    # The data.
    "data": _read_module,
    "data.class_path": _read_module,
    **dict.fromkeys(
        ("data.init_args.json_path", "data.init_args.train_data_path", "data.init_args.data_path"), _read_data_path
    ),
    "data.init_args.mask_prompt": _read_masking,
    "data.init_args.prompt_style": _read_style,
    "data.init_args.val_split_fraction": take("validation", Entry.fraction),
    "data.init_args.num_workers": take("workers", lambda entry: int(entry.number())),
    "data.init_args.include_multiturn_conversations": assume("the first turns of a conversation are trained on"),
    "data.init_args.val_data_path": assume("nothing is held out"),
    "data.init_args.split_names": assume("all folders of the data are read"),
    "data.init_args.subsets": assume("all subsets are read"),
    **dict.fromkeys(
        ("data.init_args.seed", "data.init_args.ignore_index", "data.init_args.download_dir", "data.init_args.repo_id"),
        _DATA_WORK,
    ),
    **dict.fromkeys(("data.init_args.file_url", "data.init_args.file_name", "data.init_args.access_token"), _DATA_WORK),
    # The batch, the optimizer, the schedule.
    "train.global_batch_size": take("global_batch", Entry.whole),
    "train.micro_batch_size": take("micro_batch", Entry.whole),
    "train.max_seq_length": take("length", Entry.whole),
    "train.max_steps": take("max_steps", Entry.whole),
    "train.max_time": assume("the run is not cut off after a time"),
    "train.lr_warmup_steps": read_warmup,
    "optimizer": read_optimizer_class,
    "optimizer.class_path": read_optimizer_class,
    "optimizer.init_args.lr": take("learning_rate", Entry.number),
    "optimizer.init_args.weight_decay": take("weight_decay", Entry.number),
    "optimizer.init_args.betas": read_betas,
    "optimizer.init_args.eps": take("eps", Entry.number),
    "optimizer.init_args.fused": ignore("how AdamW's update is computed"),
    "optimizer.init_args.foreach": ignore("how AdamW's update is computed"),
    # Evaluation, logging, saving.
    "eval.interval": _LATER,
    "eval.max_new_tokens": _LATER,
    "eval.max_iters": _LATER,
    "eval.initial_validation": _LATER,
    "eval.final_validation": _LATER,
    "eval.evaluate_example": _LATER,
    "train.save_interval": take("save_steps", Entry.whole),
    "train.log_interval": ignore(LOGGING),
    "logger_name": ignore(LOGGING),
    "log.*": ignore(LOGGING),
    "out_dir": ignore(SAVING),
    "resume": assume("the run starts anew"),
}

LITGPT = Format(
    name="litgpt",
    title="litgpt",
    requires=frozenset({"checkpoint_dir"}),
    unique=frozenset(),
    defaults=DEFAULTS,
    finish=_finish,
    table={
        **_TABLE,
        "checkpoint_dir": _read_checkpoint,
        "quantize": _read_quantization,
        "lora_r": take("lora_rank", Entry.whole),
        "lora_alpha": take("lora_alpha", Entry.number),
        "lora_dropout": take("lora_dropout", Entry.fraction),
        **dict.fromkeys(_LAYERS, _read_layers),
        "lora_head": assume("the head has no adapter"),
        "train.epochs": read_epochs,
        "train.min_lr": ignore("litgpt's finetuning falls to 0, whatever it says"),
        **dict.fromkeys(
            ("train.max_tokens", "train.max_norm", "train.tie_embeddings", "train.lr_warmup_fraction"),
            _unsupported("finetune"),
        ),
        "access_token": ignore("loading"),
    },
)
"""Files of `litgpt finetune_lora` and `finetune_full`, which differ in the keys of adapters (`lora_*`)."""

LITGPT_PRETRAIN = Format(
    name="litgpt-pretrain",
    title="litgpt's pretraining",
    requires=frozenset({"model_name", "train"}),
    unique=frozenset({"model_name"}),
    defaults=PRETRAIN_DEFAULTS,
    finish=_finish_pretraining,
    table={
        **_TABLE,
        "model_name": _read_name,
        **{f"model_config.{key}": _read_size for key in _SIZES},
        **{f"model_config.{key}": _read_block for key in _LLAMA},
        "model_config.rope_base": assume("positions are Llama's own, which cost the same"),
        "model_config.*": refuse("is not one of the sizes that are read; name the model in model_name"),
        "model_config.name": ignore("a name"),
        "model_config.hf_config.*": ignore("a name"),
        "model_config.hf_config": ignore("a name"),
        "model_config.vocab_size": ignore("padded_vocab_size counts"),
        "model_config.padding_multiple": ignore("padded_vocab_size counts"),
        "initial_checkpoint_dir": _read_initial,
        "tokenizer_dir": _read_tokenizer,
        "train.max_tokens": _read_tokens,
        "train.max_norm": take("max_grad_norm", Entry.number),
        "train.min_lr": take("min_lr", Entry.number),
        "train.tie_embeddings": _read_tying,
        "train.lr_warmup_fraction": assume("no warmup, which costs the same"),
        "train.epochs": _unsupported("pretrain"),
    },
)
"""Files of `litgpt pretrain`."""
