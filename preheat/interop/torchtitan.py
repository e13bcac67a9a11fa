"""torchtitan's TOML and its registry of Python: one table of keys. Read from torchtitan 0.3 and, for TOML, 0.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from preheat.interop.hf_keys import LOGGING, SAVING, VISION
from preheat.interop.keys import (
    Assumed,
    Computed,
    Entry,
    Handler,
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
from preheat.interop.settings import Settings, split_experts
from preheat.interop.torch_keys import adapt_to_planner, read_betas, read_optimizer_class, split_global_batch
from preheat.interop.trainer_defaults import TORCHTITAN as DEFAULTS
from preheat.interop.trainer_defaults import TORCHTITAN_REGISTRY
from preheat.sanitize import quote_value

__all__ = ["TORCHTITAN"]

_CHECKPOINTS = {
    ("llama2", "7B"): "meta-llama/Llama-2-7b-hf",
    ("llama2", "13B"): "meta-llama/Llama-2-13b-hf",
    ("llama2", "70B"): "meta-llama/Llama-2-70b-hf",
    ("llama3", "1B"): "meta-llama/Llama-3.2-1B",
    ("llama3", "3B"): "meta-llama/Llama-3.2-3B",
    ("llama3", "8B"): "meta-llama/Llama-3.1-8B",
    ("llama3", "70B"): "meta-llama/Llama-3.1-70B",
    ("llama3", "405B"): "meta-llama/Llama-3.1-405B",
    ("llama4", "17bx16e"): "meta-llama/Llama-4-Scout-17B-16E",
    ("llama4", "17bx128e"): "meta-llama/Llama-4-Maverick-17B-128E",
    **{("qwen3", size): f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{("qwen3", size): f"Qwen/Qwen3-{size}" for size in ("30B-A3B", "235B-A22B")},
    ("deepseek_v3", "671B"): "deepseek-ai/DeepSeek-V3-Base",
    ("gpt_oss", "20b"): "openai/gpt-oss-20b",
    ("gpt_oss", "120b"): "openai/gpt-oss-120b",
}
"""Model and flavor (torchtitan/models/*/__init__.py) -> the checkpoint of the hub with these sizes."""
_DEBUG = {"hidden_size": 256, "vocab_size": 2048, "num_attention_heads": 16}
_SIZES: Mapping[tuple[str, str], tuple[str, Mapping[str, object]]] = {
    ("llama3", "debugmodel"): ("llama", {**_DEBUG, "num_hidden_layers": 6, "intermediate_size": 768}),
    ("llama2", "debugmodel"): ("llama", {**_DEBUG, "num_hidden_layers": 8, "intermediate_size": 768}),
    ("qwen3", "debugmodel"): (
        "qwen3",
        {**_DEBUG, "num_hidden_layers": 8, "num_key_value_heads": 8, "intermediate_size": 3072, "head_dim": 128},
    ),
    ("qwen3", "debugmodel_moe"): (
        "qwen3_moe",
        {
            **_DEBUG,
            "num_hidden_layers": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 768,
            "head_dim": 128,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
}
"""Model and flavor of sizes of torchtitan's own -> our family, and the sizes."""


def _describe_deepseek(
    width: int,
    inner: int,
    expert: int,
    layers: int,
    heads: int,
    *,
    experts: int,
    top: int,
    rank: int | None,
    groups: int,
) -> Mapping[str, object]:
    """Returns the sizes of a flavor with two shared experts, of which the first layer is dense."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "moe_intermediate_size": expert,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": top,
        "q_lora_rank": rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": groups,
        "topk_group": 3 if groups > 1 else 1,
        "vocab_size": 102400,
    }


_DERIVED: Mapping[tuple[str, str], Mapping[str, object]] = {
    ("deepseek_v3", "debugmodel"): {
        **_describe_deepseek(256, 1024, 256, 6, 16, experts=8, top=3, rank=None, groups=1),
        "vocab_size": 2048,
    },
    ("deepseek_v3", "16B"): _describe_deepseek(2048, 10944, 1408, 27, 16, experts=64, top=6, rank=None, groups=1),
    ("deepseek_v3", "236B"): _describe_deepseek(5120, 12288, 1536, 60, 128, experts=160, top=6, rank=1536, groups=8),
}
"""Model and flavor with the blocks of DeepSeek-V3 -> the sizes that differ."""
_CHUNKS = 8
"""Chunks of a loss that the file does not state (torchtitan/components/loss.py)."""
_MODELS = {model for model, _ in (*_CHECKPOINTS, *_SIZES, *_DERIVED)}
_VARIANTS = ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope", "_non_fused_qkv")
"""Ends of flavors of the same sizes."""
_DATASETS = {"c4": "allenai/c4", "c4_test": "tests/assets/c4_test", "c4_validation": "allenai/c4"}
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zbv",
}
_LINEARS = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
"""Linear layer of torchtitan's decoders -> its name in transformers."""
_FUSED_LINEARS = {"wkv": ("wk", "wv"), "wqkv": ("wq", "wk", "wv")}


def _read_part(settings: Settings, entry: Entry) -> Outcome:
    entry.text()
    return Takes(("model", "family"))


def _read_dataset(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    _source(settings).setdefault("source", _DATASETS.get(name, name))
    return Takes(("sources",))


def _read_dataset_path(settings: Settings, entry: Entry) -> Outcome:
    _source(settings)["source"] = entry.text()
    return Takes(("sources",))


def _read_data_file(settings: Settings, entry: Entry) -> Outcome:
    _source(settings)["source"] = entry.texts()[0]
    return Takes(("sources",))


def _read_split(settings: Settings, entry: Entry) -> Outcome:
    _source(settings)["split"] = entry.text()
    return Takes(("sources.split",))


def _read_loader(settings: Settings, entry: Entry) -> Outcome:
    if entry.text().startswith("Chat"):
        _source(settings)["layout"] = "messages"
        settings.train_on = "assistant"
        return Takes(("sources.layout", "train_on"), "packed, and recognized by their names")
    return Takes(("sources.layout",), "text, packed")


def _source(settings: Settings) -> dict[str, object]:
    if not settings.sources:
        settings.sources.append({})
    return settings.sources[0]


def _read_tokenizer(settings: Settings, entry: Entry) -> Outcome:
    if not Path(entry.text()).is_dir():
        return NoEffect("tokenizer and weights, which are not here")
    settings.tokenizer = entry.text()
    return Takes(("tokenizer",))


def _read_global_batch(settings: Settings, entry: Entry) -> Outcome:
    if entry.number() == -1:
        return NoEffect("one micro-batch on each device")
    settings.global_batch = entry.whole()
    return Takes(("global_batch",))


def _read_step_tokens(settings: Settings, entry: Entry) -> Outcome:
    if entry.number() != -1:
        entry.whole()
    return Takes(("global_batch",))


def _read_micro_tokens(settings: Settings, entry: Entry) -> Outcome:
    entry.whole()
    return Takes(("micro_batch",), "its tokens in sequences")


def _read_dtype(settings: Settings, entry: Entry) -> Outcome:
    settings.half_weights = entry.choice(*_DTYPES) == "bfloat16"
    settings.frozen = "auto" if settings.half_weights else "fp32"
    return Takes(("half_weights", "frozen"))


def _read_precision(settings: Settings, entry: Entry) -> Outcome:
    settings.precision = _DTYPES[entry.choice(*_DTYPES)]
    return Takes(("precision",))


def _read_warmup(settings: Settings, entry: Entry) -> Outcome:
    if not entry.number():
        settings.warmup_steps = 0
    else:
        settings.warmup_steps = entry.whole()
    return Takes(("warmup_steps",))


def _read_decay(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("linear", "sqrt", "cosine")
    return Takes(("schedule",), "" if name == "linear" else "planned as linear, which costs the same")


def _read_shards(settings: Settings, entry: Entry) -> Outcome:
    if entry.number() == -1:
        return NoEffect("across all devices that are left")
    settings.shard_size = entry.whole()
    return Takes(("shard_size",))


def _read_reshard(settings: Settings, entry: Entry) -> Outcome:
    settings.sharding = {"always": "full", "never": "gradients", "default": "full"}[
        entry.choice("default", "always", "never")
    ]
    return Takes(("sharding",))


def _read_pipeline(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text().lower()) not in _SCHEDULES:
        return Assumed("the pipeline runs 1f1b")
    settings.pipeline_schedule = _SCHEDULES[name]
    return Takes(("pipeline_schedule",))


def _read_pipeline_batch(settings: Settings, entry: Entry) -> Outcome:
    entry.whole()
    return Takes(("micro_batch",), "in a pipeline")


def _read_reduction(settings: Settings, entry: Entry) -> Outcome:
    if entry.text() != "bfloat16":
        return NoEffect("gradients are summed in fp32, as planned")
    settings.half_reduction = True
    return Takes(("half_reduction",))


def _read_loss_parallel(settings: Settings, entry: Entry) -> Outcome:
    settings.loss_parallel = not entry.truth()
    return Takes(("loss_parallel",))


def _read_checkpointing(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    mode = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}.get(name, name)
    if mode not in ("none", "full", "selective", "memory_budget"):
        raise entry.error(f"must be none, selective, full or memory_budget, got {quote_value(name)}")
    settings.checkpointing = mode != "none"
    if mode == "memory_budget":
        return Assumed("every second matmul is computed again; a budget of memory is not planned")
    return Takes(("checkpointing", "checkpointing_mode"))


def _read_selection(settings: Settings, entry: Entry) -> Outcome:
    if (name := str(entry.value)) == "op":
        return Takes(("kept_products",), "attention and every second matmul are kept")
    if not name.isdigit():
        raise entry.error(f"must be op, or a number of layers, got {quote_value(entry.value)}")
    return Takes(("checkpointed_layers",), "every n-th layer keeps its input only")


def _read_components(settings: Settings, entry: Entry) -> Outcome:
    entry.texts()
    return Takes(("compiled",))


def _read_converters(settings: Settings, entry: Entry) -> Outcome:
    names = [name for text in entry.texts() for name in text.split(",") if name]
    if any("float8" in name for name in names if "grouped" not in name):
        settings.fp8 = True
    if others := [name for name in names if "float8" not in name or "grouped" in name]:
        return Assumed(f"{', '.join(others)}: matmuls are in bf16")
    return Takes(("fp8",)) if names else NoEffect("switched off")


def _read_converter(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    if name == "Float8LinearConverter":
        settings.fp8 = True
        return Takes(("fp8",))
    if name == "LoRAConverter":
        settings.adapter = "lora"
        settings.lora_targets = settings.lora_targets or "all-linear"
        return Takes(("adapter",))
    return Assumed("matmuls are in bf16, and the model is as its flavor says")


def _read_scaling(settings: Settings, entry: Entry) -> Outcome:
    settings.fp8_recipe = "rowwise" if entry.text().startswith("rowwise") else "tensorwise"
    return Takes(("fp8_recipe",))


def _read_float8(settings: Settings, entry: Entry) -> Outcome:
    settings.fp8 = settings.fp8 or entry.truth()
    return Takes(("fp8",))


def _read_targets(settings: Settings, entry: Entry) -> Outcome:
    names = [single for name in entry.texts() for single in _FUSED_LINEARS.get(name, (name,))]
    settings.lora_targets = list(dict.fromkeys(_LINEARS.get(name, name) for name in names))
    return Takes(("lora_targets",))


def _read_initial(settings: Settings, entry: Entry) -> Outcome:
    settings.random_weights = not entry.truth()
    return Takes(("random_weights",))


def _read_initial_path(settings: Settings, entry: Entry) -> Outcome:
    if not entry.text():
        return NoEffect("switched off")
    settings.random_weights = False
    return Takes(("random_weights",), "weights of the flavor's checkpoint, which are of the same size")


def _read_loss(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    settings.chunked_loss = name == "ChunkedLossWrapper"
    if name in ("ChunkedLossWrapper", "CrossEntropyLoss"):
        return Takes(("chunked_loss",))
    return Assumed("plain cross entropy")


def _read_implementation(settings: Settings, entry: Entry) -> Outcome:
    entry.choice("for-loop", "foreach", "fused", "fused_opt_states_bf16")
    if entry.value == "fused_opt_states_bf16":
        return Assumed("moments of AdamW are in fp32, twice the memory")
    return NoEffect("how AdamW's update is computed")


def _read_early_step(settings: Settings, entry: Entry) -> Outcome:
    if entry.truth():
        return Assumed("the update comes after the whole backward pass, which holds all gradients")
    return NoEffect("switched off")


def _read_beta(settings: Settings, entry: Entry) -> Outcome:
    first, second = settings.betas
    settings.betas = (entry.fraction(), second) if entry.path[-1] == "beta1" else (first, entry.fraction())
    return Takes(("betas",))


def _read_group(settings: Settings, entry: Entry) -> Outcome:
    """Reads the optimizer of a group of weights; the first group is planned for all."""
    if entry.index:
        return Assumed("all weights are updated as the first group is")
    handler = _ADAMW.get(entry.path[-1])
    return NoEffect("which weights the group has") if handler is None else handler(settings, entry)


def _read_transformers_model(settings: Settings, entry: Entry) -> Outcome:
    settings.model = entry.text()
    return Takes(("model",))


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies torchtitan's own rules between keys."""
    registry = any(name.startswith("model_spec") for name in entries)
    _finish_model(settings, entries)
    source = _source(settings)
    source.setdefault("source", _DATASETS["c4_test"])
    if source.setdefault("layout", "text") == "text":
        settings.train_on = "all"
    _finish_length(settings, entries)
    _finish_compiler(settings, entries)
    _finish_checkpointing(settings, entries)
    notes = _finish_degrees(settings, entries)
    if settings.expert_parallel > 1:  # otherwise the tensor axis splits the matrices of experts
        notes += split_experts(settings, default=1)
    if settings.pipeline_parallel > 1:
        notes += _finish_pipeline(settings, entries)
    if settings.tensor_parallel > 1 and not settings.chunked_loss:
        settings.loss_rows = 0
    if settings.tensor_parallel > 1 or settings.pipeline_parallel > 1:
        settings.chunked_loss = False  # the loss over a split vocabulary has chunks of its own, as that of a pipeline
    key = "training.global_batch_size"
    if settings.global_batch is None:
        settings.global_batch = settings.micro_batch * settings.accumulation * settings.ranks
    notes += split_global_batch(settings, entries, key, "training.local_batch_size")
    if registry and settings.adapter == "lora" and settings.random_weights:
        settings.random_weights = False
        notes.append("the base of adapters is taken to be trained: torchtitan would draw new weights here")
    return [*notes, *adapt_to_planner(settings)]


def _find_assets(entries: Mapping[str, Entry]) -> str | None:
    """Returns the checkpoint that `hf_assets_path` holds, by the name of the folder; None if it is not known."""
    entry = _find(entries, "hf_assets_path")
    known = {checkpoint.rpartition("/")[2]: checkpoint for checkpoint in _CHECKPOINTS.values()}
    return None if entry is None else known.get(Path(entry.text()).name)


def _finish_model(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Sets the model from its name and flavor.

    Raises:
        RecipeError: preheat does not know the sizes of the flavor.
    """
    if settings.model is not None:
        return
    named = entries.get("model.name") or entries.get("model_spec.name")
    flavored = entries.get("model.flavor") or entries.get("model_spec.flavor")
    # A copy of the registry in another folder does not say which package it is of; its assets do.
    known = named is not None and not isinstance(named.value, Computed) and named.value in _MODELS
    if named is not None and not known and (assets := _find_assets(entries)) is not None:
        settings.model = assets
        return
    computed = next(
        (e for e in (entries.get("model_spec"), named, flavored) if e and isinstance(e.value, Computed)), None
    )
    if computed is not None:
        raise computed.error(
            f"the script computes it ({computed.shown}), and is not run; --set model.path=PATH names one"
        )
    name = named.text() if named else "llama3"
    flavor = flavored.text() if flavored else "debugmodel"
    for end in _VARIANTS:
        flavor = flavor.removesuffix(end)
    key = (name, flavor)
    if key in _SIZES:
        settings.family, sizes = _SIZES[key]
        settings.architecture |= sizes
        settings.random_weights = False  # a model of sizes has no others
        return
    settings.model = _CHECKPOINTS["deepseek_v3", "671B"] if key in _DERIVED else _CHECKPOINTS.get(key)
    settings.architecture |= _DERIVED.get(key, {})
    if settings.model is None:
        flavors = ", ".join(f"{model} {size}" for model, size in (*_CHECKPOINTS, *_SIZES, *_DERIVED) if model == name)
        others = flavors or ", ".join(sorted(_MODELS))
        blamed = flavored or named or next(iter(entries.values()))
        raise blamed.error(f"sizes of {quote_value(f'{name} {flavor}')} are not known; known: {others}")


def _finish_length(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Sets micro-batch and global batch from tokens, as versions after 0.3 state them."""
    for name, field in (
        ("training.num_tokens_per_microbatch_per_dp_rank", "micro_batch"),
        ("training.num_tokens_per_train_step", "global_batch"),
    ):
        entry = _find(entries, name)
        if entry is None or entry.number() == -1:
            continue
        if entry.whole() % settings.length:
            raise entry.error(f"is no multiple of the {settings.length:,} tokens of a sequence; use one")
        setattr(settings, field, entry.whole() // settings.length)


def _finish_compiler(settings: Settings, entries: Mapping[str, Entry]) -> None:
    # Of the parts that are compiled, the layers count: a compiled loss keeps logits in fp32 all the same.
    components = _find(entries, "compile.components")
    settings.compiled = settings.compiled and (components is None or "model" in components.texts())
    chunks = _find(entries, "loss.num_chunks")
    if settings.chunked_loss and "loss.class" in entries:
        settings.loss_rows = max(settings.micro_batch * settings.length // (chunks.whole() if chunks else _CHUNKS), 1)


def _finish_checkpointing(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Sets what selective checkpointing keeps, whichever of its keys comes first."""
    mode = _find(entries, "activation_checkpoint.mode", "activation_checkpoint", "activation_checkpoint.class")
    if mode is None or not settings.checkpointing or mode.value == "memory_budget":
        return
    settings.checkpointing_mode, settings.checkpointed_layers, settings.kept_products = "full", 1, 1
    if mode.value == "SelectiveAC":
        settings.checkpointing_mode, settings.kept_products = "selective", 2
    if mode.value != "selective":
        return
    option = _find(entries, "activation_checkpoint.selective_ac_option")
    name = "2" if option is None else str(option.value)
    if name == "op":
        settings.checkpointing_mode, settings.kept_products = "selective", 2
    else:
        settings.checkpointed_layers = max(int(name), 1)


def _find(entries: Mapping[str, Entry], *names: str) -> Entry | None:
    """Returns the first of the keys that the file gives a value that is not computed."""
    known = (entries[name] for name in names if name in entries)
    return next((entry for entry in known if entry.value is not None and not isinstance(entry.value, Computed)), None)


def _finish_degrees(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Checks the data-parallel degrees; without shards weights are replicated."""
    stated = entries.get("parallelism.data_parallel_shard_degree")
    if settings.shard_size is None or stated is None:
        return []
    if settings.shard_size == 1:
        settings.sharding = None
    needed = settings.shard_size * settings.replicas * settings.model_parallel
    if needed != settings.world:
        raise stated.error(
            f"{settings.shard_size} shards x {settings.replicas} replicas x {settings.model_parallel} devices that "
            f"read the same rows are {needed} devices, not {settings.world}; use -1, for as many as there are"
        )
    return []


def _finish_pipeline(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Cuts the rows of a device into the pipeline's micro-batches; weights stay gathered."""
    size = _find(entries, "parallelism.pipeline_parallel_microbatch_size")
    each = 1 if size is None else size.whole()
    if settings.micro_batch % each:
        assert size is not None
        raise size.error(f"does not divide the {settings.micro_batch} sequences of training.local_batch_size")
    settings.accumulation, settings.micro_batch = settings.micro_batch // each, each
    settings.deferred_reduction = True
    policy = entries.get("parallelism.fsdp_reshard_after_forward")
    if settings.sharding == "full" and (policy is None or policy.value == "default"):
        settings.sharding = "gradients"
        return ["with a pipeline, torchtitan keeps gathered weights until the backward pass"]
    return []


_DATA_WORK = ignore("preparing the data")
_LOADING = ignore("loading and saving")
_WATCHING = ignore("watching the run")
_LATER = ignore("evaluation: the plan has it at the end, with a training micro-batch")
_EARLIER_SECTION = {
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "training.max_context_length": "training.seq_len",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "optimizer.fused": "optimizer.implementation",
    "float8.enable_float8_linear": "float8.enable",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
}
"""Key of an earlier version -> that of 0.2."""
_ADAMW: Mapping[str, Handler] = {
    "name": read_optimizer_class,
    "optimizer_name": read_optimizer_class,
    "lr": take("learning_rate", Entry.number),
    "beta1": _read_beta,
    "beta2": _read_beta,
    "betas": read_betas,
    "eps": take("eps", Entry.number),
    "weight_decay": take("weight_decay", Entry.number),
    "implementation": _read_implementation,
    "early_step_in_backward": _read_early_step,
}
_FLOAT8: Mapping[str, Handler] = {
    "enable": _read_float8,
    "recipe_name": _read_scaling,
    "scaling_type_input": ignore("how scales are computed"),
    "scaling_type_weight": ignore("how scales are computed"),
    "scaling_type_grad_output": ignore("how scales are computed"),
    "enable_fsdp_float8_all_gather": assume("weights are gathered in bf16, twice the bytes"),
    "precompute_float8_dynamic_scale_for_fsdp": ignore("how scales are computed"),
    "force_recompute_fp8_weight_in_bwd": ignore("how weights are cast"),
    "filter_fqns": ignore("layers that stay in bf16: the plan leaves out the head"),
    "emulate": assume("matmuls are in fp8"),
    "moe_fqns_prototype": assume("experts are in bf16"),
}
_SECTIONS = (
    *("job", "model", "training", "optimizer", "lr_scheduler", "parallelism", "checkpoint", "compile", "quantize"),
    *("float8", "mx", "metrics", "profiling", "profiler", "comm", "debug", "validation", "experimental", "loss"),
    *("memory_estimation", "fault_tolerance", "dataloader", "override"),
)
_OTHER_FORMAT = ignore("belongs to model.converters")

TORCHTITAN = Format(
    name="torchtitan",
    title="torchtitan",
    requires=frozenset({"training"}),
    unique=frozenset(
        {
            *("job", "metrics", "profiling", "lr_scheduler", "parallelism", "activation_checkpoint", "quantize"),
            *("float8", "model_spec", "hf_assets_path", "experimental"),
        }
    ),
    without=frozenset({"lora", "train"}),
    toml=True,
    defaults=DEFAULTS,
    variants={"model_spec": TORCHTITAN_REGISTRY},
    renamed=_EARLIER_SECTION,
    finish=_finish,
    table={
        **dict.fromkeys(_SECTIONS, ignore("a section without keys")),
        # The model.
        "model.name": _read_part,
        "model.flavor": _read_part,
        "model_spec.name": ignore("where model_registry comes from"),
        "model_spec.flavor": _read_part,
        "model.converters": _read_converters,
        "model.print_after_conversion": ignore(LOGGING),
        "model.norm_type": assume("the model's own norms"),
        "model.tokenizer_path": _read_tokenizer,
        "model.hf_assets_path": _read_tokenizer,
        "hf_assets_path": _read_tokenizer,
        "model.use_flex_attn": ignore("the fastest fused attention is planned"),
        "model.attn_mask_type": ignore("the fastest fused attention is planned"),
        "model_spec.attn_backend": ignore("the fastest fused attention is planned"),
        "model_spec.tp_gemm_backend": ignore("how collectives overlap with matmuls"),
        "model_spec.moe_comm_backend": ignore("how tokens are sent to experts"),
        "model_spec.non_blocking_capacity_factor": assume("even load of the experts"),
        "model_spec.num_mtp_layers": assume("no layers that predict further tokens, which take more memory"),
        "model_spec.converters": ignore("the model is as its flavor says"),
        "model_spec.converters.*.class": _read_converter,
        "model_spec.converters.*.recipe_name": _read_scaling,
        "model_spec.converters.*.rank": take("lora_rank", Entry.whole),
        "model_spec.converters.*.alpha": take("lora_alpha", Entry.number),
        "model_spec.converters.*.target_modules": _read_targets,
        "model_spec.converters.*.*": ignore("belongs to the converter"),
        "hf_transformers.model": _read_transformers_model,
        # The batch and the data.
        "training.local_batch_size": take("micro_batch", Entry.whole),
        "training.global_batch_size": _read_global_batch,
        "training.num_tokens_per_microbatch_per_dp_rank": _read_micro_tokens,
        "training.num_tokens_per_train_step": _read_step_tokens,
        "training.seq_len": take("length", Entry.whole),
        "training.steps": take("max_steps", Entry.whole),
        "training.max_norm": take("max_grad_norm", Entry.number),
        "training.dataset": _read_dataset,
        "training.dataset_path": _read_dataset_path,
        "training.dataloader.num_workers": take("workers", lambda entry: int(entry.number())),
        "training.dataloader.*": _DATA_WORK,
        "dataloader.class": _read_loader,
        "dataloader.dataset": _read_dataset,
        "dataloader.dataset.class": _DATA_WORK,
        "dataloader.dataset.dataset": _read_dataset,
        "dataloader.dataset_path": _read_dataset_path,
        "dataloader.load_dataset_kwargs.data_files": _read_data_file,
        "dataloader.load_dataset_kwargs.split": _read_split,
        "dataloader.num_workers": take("workers", lambda entry: int(entry.number())),
        "dataloader.*": _DATA_WORK,
        "tokenizer": ignore("a name"),
        "tokenizer.*": ignore("loading"),
        # Optimizer and schedule.
        **{f"optimizer.{name}": handler for name, handler in _ADAMW.items()},
        "optimizer.param_groups.*.*": _read_group,
        "optimizer.param_groups.*.optimizer_kwargs.*": _read_group,
        "lr_scheduler.warmup_steps": _read_warmup,
        "lr_scheduler.decay_ratio": take("decay_ratio", Entry.fraction),
        "lr_scheduler.decay_type": _read_decay,
        "lr_scheduler.min_lr_factor": take("min_lr_ratio", Entry.fraction),
        "lr_scheduler.total_steps": assume("the rate falls to the end of the run, which costs the same"),
        # Precision and recomputation.
        "training.dtype": _read_dtype,
        "training.mixed_precision_param": _read_precision,
        "training.mixed_precision_reduce": _read_reduction,
        "training.enable_cpu_offload": switch("offload"),
        **{f"float8.{name}": handler for name, handler in _FLOAT8.items()},
        **{f"quantize.linear.float8.{name}": handler for name, handler in _FLOAT8.items()},
        "quantize.*": _OTHER_FORMAT,
        "quantize.dense.*": _OTHER_FORMAT,
        "mx.*": _OTHER_FORMAT,
        "activation_checkpoint": _read_checkpointing,
        "activation_checkpoint.class": _read_checkpointing,
        "activation_checkpoint.mode": _read_checkpointing,
        "activation_checkpoint.selective_ac_option": _read_selection,
        "activation_checkpoint.memory_budget": ignore("belongs to a budget of memory"),
        "activation_checkpoint.*": ignore("which products of routers are computed again, and checks"),
        "activation_offload.mode": assume("activations stay on the device"),
        "compile.enable": switch("compiled"),
        "compile.components": _read_components,
        "compile.*": ignore("belongs to compile.enable"),
        "loss.class": _read_loss,
        "loss.*": ignore("belongs to the loss"),
        # Devices.
        "parallelism.data_parallel_shard_degree": _read_shards,
        "parallelism.data_parallel_replicate_degree": take("replicas", Entry.whole),
        "parallelism.fsdp_reshard_after_forward": _read_reshard,
        "parallelism.tensor_parallel_degree": take("tensor_parallel", Entry.whole),
        "parallelism.enable_sequence_parallel": switch("sequence_parallel"),
        "parallelism.disable_loss_parallel": _read_loss_parallel,
        "training.enable_loss_parallel": switch("loss_parallel"),
        "parallelism.context_parallel_degree": take("context_parallel", Entry.whole),
        "parallelism.pipeline_parallel_degree": take("pipeline_parallel", Entry.whole),
        "parallelism.pipeline_parallel_schedule": _read_pipeline,
        "parallelism.pipeline_parallel_microbatch_size": _read_pipeline_batch,
        "parallelism.pipeline_parallel_split_points": assume("layers are cut evenly, one sequence a micro-batch"),
        "parallelism.pipeline_parallel_microbatches": assume("one sequence a micro-batch"),
        "experimental.pipeline_parallel_microbatches": assume("one sequence a micro-batch"),
        "experimental.pipeline_parallel_split_points": assume("layers are cut evenly"),
        "parallelism.pipeline_parallel_layers_per_stage": assume("with an interleaved schedule, two stages a device"),
        "parallelism.module_fqns_per_model_part": assume("layers are cut evenly into stages"),
        "parallelism.pipeline_parallel_schedule_csv": assume("the pipeline runs its named schedule"),
        "parallelism.pipeline_parallel_first_stage_less_layers": ignore("belongs to a pipeline"),
        "parallelism.pipeline_parallel_last_stage_less_layers": ignore("belongs to a pipeline"),
        "parallelism.pipeline_parallel_expert_parallel_overlap": ignore("when tokens are sent"),
        "parallelism.expert_parallel_degree": take("expert_parallel", Entry.whole),
        "parallelism.expert_tensor_parallel_degree": take("expert_tensor", Entry.whole),
        "parallelism.expert_parallel_comm_backend": ignore("how tokens are sent to experts"),
        "parallelism.enable_async_tensor_parallel": ignore("when shards are sent"),
        "parallelism.enable_compiled_autograd": ignore("how the backward pass is compiled"),
        "parallelism.enable_fsdp_symm_mem": ignore("how shards are sent"),
        "parallelism.spmd_backend": ignore("how shards are described"),
        **{
            f"parallelism.context_parallel_{name}": ignore("how sequences are cut and sent")
            for name in ("load_balancer", "rotate_method", "ptrr_mask_key")
        },
        # Weights to begin with.
        "checkpoint.initial_load_in_hf": _read_initial,
        "checkpoint.initial_load_path": _read_initial_path,
        "checkpoint.*": ignore(SAVING),
        # Without effect.
        "debug.seed": take("seed", lambda entry: int(entry.number())),
        "debug.deterministic": assume("the fastest kernels, which may not be deterministic"),
        "debug.moe_force_load_balance": ignore("even load of the experts, as planned"),
        "debug.*": _WATCHING,
        "training.gc_freq": _WATCHING,
        "training.gc_debug": _WATCHING,
        "training.disable_cuda_graphs": ignore("kernels are planned without gaps"),
        "validation.*": _LATER,
        "validator": _LATER,
        "validator.*": _LATER,
        "job.*": ignore("names"),
        "dump_folder": ignore("names"),
        "profiling.*": ignore(LOGGING),
        "profiler.*": ignore(LOGGING),
        "metrics.*": ignore(LOGGING),
        "comm.*": ignore("how processes wait for each other"),
        "memory_estimation.*": ignore("torchtitan's own estimate"),
        "fault_tolerance.enable": assume("a run whose devices do not fail"),
        "fault_tolerance.*": ignore("belongs to fault_tolerance.enable"),
        "experimental.custom_import": ignore("a module of the user's"),
        "experimental.custom_args_module": ignore("a module of the user's"),
        "job.custom_config_module": ignore("a module of the user's"),
        "override.*": assume("components are torchtitan's own"),
        "encoder.*": refuse(VISION),
    },
)
"""Its TOML up to version 0.2, and a function of its registry (`config_registry.py::llama3_8b`) from 0.3 on."""
