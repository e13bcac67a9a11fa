"""Megatron-LM's arguments: one table of them. Read from Megatron-LM, core 0.20 (megatron/training/arguments.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from preheat.interop.hf_keys import LOGGING, SAVING
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
from preheat.interop.torch_keys import adapt_to_planner, split_global_batch
from preheat.interop.trainer_defaults import MEGATRON as DEFAULTS
from preheat.model_folder import count_embedding_rows
from preheat.models import presets

__all__ = ["MEGATRON"]

_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
}
"""Argument of a size -> its name in transformers' configurations."""
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
"""Arguments that Megatron-LM requires."""
_NUMBERS = {
    "norm_epsilon": "rms_norm_eps",
    "layernorm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
}
_LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Argument of multi-latent attention -> its name in DeepSeek-V3's configuration."""
_LATENT_DEFAULTS = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
"""Sizes of multi-latent attention that the file leaves out (megatron/core/transformer/transformer_config.py)."""
_LATENT_MODEL = "deepseek-ai/DeepSeek-V3-Base"
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Type of tokenizer -> tokens, of types with one vocabulary."""
_BLENDED = 51200
"""Rows of an embedding whose tokenizer is not known: GPT-2's vocabulary over eight devices."""
_DECAYS = {"constant": "constant", "linear": "wsd", "cosine": "cosine", "WSD": "wsd"}
_STRATEGIES = {"no_shard": None, "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "full"}
_OPTIMIZERS = {"adam": "adamw_torch_fused", "muon": "muon", "dist_muon": "muon", "lion": "lion"}


def _read_size(settings: Settings, entry: Entry) -> Outcome:
    settings.architecture[_SIZES[entry.path[-1]]] = entry.whole()
    settings.family = "llama"
    return Takes(("architecture",))


def _read_number(settings: Settings, entry: Entry) -> Outcome:
    settings.architecture[_NUMBERS[entry.path[-1]]] = entry.number()
    return Takes(("architecture",))


def _read_rotary(settings: Settings, entry: Entry) -> Outcome:
    settings.architecture["rope_parameters"] = {"rope_type": "default", "rope_theta": entry.number()}
    return Takes(("architecture",))


def _read_rotated(settings: Settings, entry: Entry) -> Outcome:
    if entry.number() == 1:
        return NoEffect("all of a head's width, as planned")
    return Assumed("all of a head's width is rotated, which costs the same")


def _read_of_model(settings: Settings, entry: Entry) -> Outcome:
    """Reads an argument that decides between families of models, once all are read."""
    return Takes(("architecture", "family"))


def _read_untied(settings: Settings, entry: Entry) -> Outcome:
    settings.architecture["tie_word_embeddings"] = not entry.truth()
    return Takes(("architecture",))


def _read_precision(settings: Settings, entry: Entry) -> Outcome:
    if entry.truth():
        settings.precision = entry.path[-1]
    return Takes(("precision",))


def _read_fp8(settings: Settings, entry: Entry) -> Outcome:
    settings.fp8 = True
    return Takes(("fp8",), "planned as torchao's matmuls, which keep their inputs in half precision, not in fp8")


def _read_fp8_recipe(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("tensorwise", "delayed", "mxfp8", "blockwise", "custom")
    settings.fp8_recipe = "tensorwise" if name in ("tensorwise", "delayed") else "rowwise"
    return Takes(("fp8_recipe",), "" if name == "tensorwise" else f"in place of {name}")


def _read_beta(settings: Settings, entry: Entry) -> Outcome:
    first, second = settings.betas
    settings.betas = (entry.fraction(), second) if entry.path[-1] == "adam_beta1" else (first, entry.fraction())
    return Takes(("betas",))


def _read_optimizer(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text()) not in _OPTIMIZERS:
        return Assumed("the plan takes AdamW, with two fp32 moments per trained weight")
    settings.optimizer = _OPTIMIZERS[name]
    return Takes(("optimizer",))


def _read_decay(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text()) not in _DECAYS:
        return Assumed("the learning rate falls linearly, which costs the same")
    settings.schedule = _DECAYS[name]
    if name == "WSD":
        settings.decay_ratio = 0.1
        return Takes(("schedule", "decay_ratio"), "with a linear fall at the end")
    return Takes(("schedule",))


def _read_fall(settings: Settings, entry: Entry) -> Outcome:
    entry.whole()
    return Takes(("decay_ratio",), "as a part of all steps")


def _read_masks(settings: Settings, entry: Entry) -> Outcome:
    if entry.truth():
        return NoEffect("documents of a sequence never see each other")
    return Assumed("documents of a sequence do not see each other")


def _read_warmup(settings: Settings, entry: Entry) -> Outcome:
    if not entry.number():
        return NoEffect("switched off")
    settings.warmup_steps = entry.whole()
    return Takes(("warmup_steps",))


def _read_samples(settings: Settings, entry: Entry) -> Outcome:
    if entry.number():
        entry.whole()
    return Takes(("max_steps",) if entry.path[-1] == "train_samples" else ("warmup_steps",), "its samples in steps")


def _read_split(settings: Settings, entry: Entry) -> Outcome:
    text = str(entry.value) if isinstance(entry.value, int | float) else entry.text().strip("'\"")
    shares = [float(part) for part in text.split(",") if re.fullmatch(r" *\d+(\.\d+)? *", part)]
    if len(shares) < 2 or not sum(shares):
        return Assumed("nothing is held out")
    settings.validation = round(shares[1] / sum(shares), 6)
    return Takes(("validation",))


def _read_data(settings: Settings, entry: Entry) -> Outcome:
    names = entry.value if isinstance(entry.value, list) else [entry.value]
    paths = [name for name in names if isinstance(name, str)]
    if not paths:
        raise entry.error("names no data")
    settings.sources = [{"source": paths[0], "layout": "text"}]
    return Takes(
        ("sources",), "its text, not yet in tokens" if len(paths) == 1 else "the first; a blend costs the same"
    )


def _read_tokenizer(settings: Settings, entry: Entry) -> Outcome:
    if not Path(entry.text()).exists():
        return NoEffect("a tokenizer that is not here; its vocabulary counts")
    settings.tokenizer = entry.text()
    return Takes(("tokenizer",))


def _read_recomputation(settings: Settings, entry: Entry) -> Outcome:
    if entry.choice("full", "selective") == "full":
        settings.checkpointing = True
        return Takes(("checkpointing",))
    return NoEffect("only attention is computed again, which fused attention does by itself")


def _read_modules(settings: Settings, entry: Entry) -> Outcome:
    names = entry.value if isinstance(entry.value, list) else entry.texts()
    if set(names) <= {"core_attn"}:
        return NoEffect("attention, which fused attention computes again by itself")
    return Assumed("only attention is computed again, which takes more memory and less time")


def _read_sharding(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    if entry.path[-1] == "use_distributed_optimizer":
        settings.sharding = settings.sharding or "optimizer"
        return Takes(("sharding",))
    settings.sharding = "full"
    return Takes(("sharding",), "planned as FSDP2" if entry.path[-1] == "use_megatron_fsdp" else "")


def _read_strategy(settings: Settings, entry: Entry) -> Outcome:
    entry.choice(*_STRATEGIES)
    return Takes(("sharding",), "with use_megatron_fsdp")


def _read_virtual(settings: Settings, entry: Entry) -> Outcome:
    entry.whole()
    return Takes(("pipeline_schedule", "stages"))


def _read_attention(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    if name in ("unfused", "local"):
        settings.attention = False
        return Takes(("attention",))
    return NoEffect("the fastest fused attention is planned")


def _read_offload(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    return Assumed("optimizer states stay on the device, which takes more memory and less time")


def _read_dropout(settings: Settings, entry: Entry) -> Outcome:
    if not entry.fraction():
        return NoEffect("no dropout, as planned")
    return Assumed("no dropout, whose masks take memory")


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies Megatron's own rules between arguments."""
    notes = _finish_model(settings, entries)
    _check_devices(settings, entries)
    notes += split_experts(settings, default=settings.tensor_parallel)
    notes += _finish_batch(settings, entries)
    _finish_schedule(settings, entries)
    notes += _finish_sharding(settings, entries)
    notes += _finish_pipeline(settings, entries)
    notes += _finish_recomputation(settings, entries)
    rows = settings.micro_batch * settings.length
    settings.loss_rows = rows
    # In place in any case: logits and their gradients are never in memory at once.
    settings.chunked_loss = settings.tensor_parallel == 1 and settings.pipeline_parallel == 1
    settings.sequence_parallel = settings.sequence_parallel and settings.tensor_parallel > 1
    settings.regather = settings.sequence_parallel and not settings.checkpointing
    if _find(entries, "hidden_dropout") is None or _find(entries, "attention_dropout") is None:
        notes.append(
            "Megatron's default dropout of 0.1 is left out; its masks take memory, unless layers are recomputed"
        )
    return [*notes, *adapt_to_planner(settings)]


def _find(entries: Mapping[str, Entry], *names: str) -> Entry | None:
    """Returns the first of the arguments that the file gives a value that is known."""
    known = (entries[name] for name in names if name in entries)
    return next((entry for entry in known if entry.value is not None and not isinstance(entry.value, Computed)), None)


def _is_on(entries: Mapping[str, Entry], name: str) -> bool:
    entry = _find(entries, name)
    return entry is not None and entry.truth()


def _finish_model(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Sets family and sizes of the model; returns what its blocks have in place of Megatron's."""
    sizes = settings.architecture
    missing = [name for name in _REQUIRED if _find(entries, name) is None]
    if missing:
        stated = next((entries[name] for name in missing if name in entries), None)
        fix = "write its value in place of a computed one" if stated else "add what is missing"
        blamed = stated or entries.get("command") or next(iter(entries.values()))
        raise blamed.error(f"nothing can be planned without {', '.join(missing)}; {fix}")
    width, heads = int(str(sizes["hidden_size"])), int(str(sizes["num_attention_heads"]))
    groups = _find(entries, "num_query_groups")
    grouped = _is_on(entries, "group_query_attention") and groups is not None
    sizes["num_key_value_heads"] = groups.whole() if grouped and groups else heads
    gated = _is_on(entries, "swiglu") or _is_on(entries, "quick_geglu")
    sizes.setdefault("intermediate_size", 4 * width * 2 // 3 // 64 * 64 if gated else 4 * width)
    if "head_dim" not in sizes and width % heads:
        raise entries["num_attention_heads"].error(f"does not divide hidden_size {width}; state kv_channels")
    sizes.setdefault("tie_word_embeddings", True)
    notes = _finish_vocabulary(settings, entries)
    if _is_on(entries, "multi_latent_attention"):
        return [*notes, *_finish_latent(settings, entries)]
    qk_norm = _is_on(entries, "qk_layernorm")
    if "num_experts" in sizes:
        settings.family = "qwen3_moe" if qk_norm else "mixtral"
        expert = _find(entries, "moe_ffn_hidden_size")
        sizes["intermediate_size"] = expert.whole() if expert else sizes["intermediate_size"]
        sizes.setdefault("num_experts_per_tok", 2)
    else:
        sizes.pop("num_experts_per_tok", None)
        settings.family = "qwen3" if qk_norm else "llama"
    if _is_on(entries, "add_qkv_bias"):
        sizes["attention_bias"] = True
    settings.gelu = not gated and "num_experts" not in sizes
    settings.fused_gate = gated and not _is_on(entries, "no_bias_swiglu_fusion")
    return [*notes, *_describe_blocks(settings, entries, gated=gated)]


def _describe_blocks(settings: Settings, entries: Mapping[str, Entry], *, gated: bool) -> list[str]:
    """Returns in which ways the planned blocks differ from Megatron's."""
    norm, positions = _find(entries, "normalization"), _find(entries, "position_embedding_type")
    rotary = _is_on(entries, "use_rotary_position_embeddings") or (
        positions is not None and positions.value != "learned_absolute"
    )
    others = [
        "LayerNorm" if norm is None or norm.value != "RMSNorm" else "",
        "" if rotary or _is_on(entries, "no_position_embedding") else "learned positions",
        "" if _is_on(entries, "disable_bias_linear") else "biases",
        "squared ReLU" if _is_on(entries, "squared_relu") else "",
        "GELU in its experts" if not gated and "num_experts" in settings.architecture else "",
    ]
    if not (names := [name for name in others if name]):
        return []
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return [f"planned with {settings.family}'s blocks in place of {listed}, which cost about the same"]


def _finish_vocabulary(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Sets the rows of the embedding, padded so that they divide by the tensor-parallel devices."""
    padded, stated = _find(entries, "padded_vocab_size"), _find(entries, "vocab_size")
    if padded is not None:
        settings.architecture["vocab_size"] = padded.whole()
        return []
    count, notes = None if stated is None else stated.whole(), list[str]()
    kind, model = _find(entries, "tokenizer_type"), _find(entries, "tokenizer_model")
    if count is None and model is not None and isinstance(model.value, str):
        known = presets.find_variant(model.value.rstrip("/").rpartition("/")[2])
        count = None if known is None else int(str(presets.find(known).text["vocab_size"]))
    if count is None and settings.tokenizer is not None and Path(settings.tokenizer).is_dir():
        from preheat.data.tokenizer import load_tokenizer  # imports transformers

        count = count_embedding_rows(load_tokenizer(settings.tokenizer))
    if count is None and kind is not None:
        count = _VOCABULARIES.get(str(kind.value))
    if count is None and kind is None and ("vocab_file" in entries or "merge_file" in entries):
        count = _VOCABULARIES["GPT2BPETokenizer"]
    if count is None:
        count = _BLENDED
        notes.append(f"the tokenizer's size is not known: planned with {count:,} tokens; --set model.vocab_size=N")
    divisor = _find(entries, "make_vocab_size_divisible_by")
    unit = (128 if divisor is None else divisor.whole()) * settings.tensor_parallel
    settings.architecture["vocab_size"] = -(-count // unit) * unit
    return notes


def _finish_latent(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Describes a model with multi-latent attention by DeepSeek-V3's configuration and the sizes that differ."""
    sizes = settings.architecture
    settings.family, settings.model, settings.random_weights = None, _LATENT_MODEL, True
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in ("head_dim", "rope_parameters"):  # of DeepSeek-V3
        sizes.pop(name, None)
    for name, ours in _LATENT.items():
        entry = _find(entries, name)
        if entry is not None or name in _LATENT_DEFAULTS:
            sizes[ours] = _LATENT_DEFAULTS[name] if entry is None else entry.whole()
    sizes.setdefault("v_head_dim", 128)
    experts, layers = sizes.pop("num_experts", None), int(str(sizes["num_hidden_layers"]))
    if experts is None:
        sizes["first_k_dense_replace"] = layers
        sizes.pop("num_experts_per_tok", None)
        return []
    sizes["n_routed_experts"] = experts
    inner = _find(entries, "moe_ffn_hidden_size")
    expert = inner.whole() if inner else int(str(sizes["intermediate_size"]))
    sizes["moe_intermediate_size"] = expert
    sizes.setdefault("num_experts_per_tok", 2)
    shared = _find(entries, "moe_shared_expert_intermediate_size")
    sizes["n_shared_experts"] = max(shared.whole() // expert, 1) if shared else 0
    groups, chosen = _find(entries, "moe_router_num_groups"), _find(entries, "moe_router_group_topk")
    sizes["n_group"], sizes["topk_group"] = (groups.whole(), chosen.whole()) if groups and chosen else (1, 1)
    dense = _find(entries, "moe_layer_freq")
    text = "" if dense is None else re.sub(r"[()\s'\"]", "", str(dense.value))
    match = re.fullmatch(r"\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})", text)
    sizes["first_k_dense_replace"] = int(match[1]) if match else 0
    if text in ("", "1") or match:
        return []
    return ["all layers are planned with experts"]


def _check_devices(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Raises RecipeError if the degrees of parallelism do not divide the devices."""
    if settings.world % settings.model_parallel == 0:
        return
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    blamed = next(entries[name] for name in names if name in entries and not isinstance(entries[name].value, Computed))
    raise blamed.error(
        f"tensor {settings.tensor_parallel} x pipeline {settings.pipeline_parallel} x context "
        f"{settings.context_parallel} needs a multiple of {settings.model_parallel} devices, not {settings.world}; "
        f"state --count {settings.model_parallel}"
    )


def _finish_sharding(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Sets what is split across data-parallel devices; returns how it differs from Megatron's."""
    if _is_on(entries, "use_megatron_fsdp") and (strategy := _find(entries, "data_parallel_sharding_strategy")):
        settings.sharding = _STRATEGIES[strategy.text()]
    notes = []
    split = settings.ranks > 1 and settings.sharding == "optimizer"
    if split and settings.precision == "bf16" and (settings.accumulation > 1 or settings.expert_parallel > 1):
        # Either way a device holds weights in bf16 and gradients in fp32, both whole, and its share of fp32 states.
        settings.sharding, settings.deferred_reduction = "gradients", True
        notes.append("the distributed optimizer is planned as FSDP with whole weights and gradients on each device")
    # FSDP keeps fp32 weights in shards, and gathers them in half precision.
    settings.masters = settings.precision != "fp32" and settings.sharding not in ("full", "gradients")
    if settings.half_reduction and (settings.masters or settings.ranks == 1):
        notes.append("gradients are planned in fp32 in place of bf16, which takes more memory")
    if settings.masters and settings.ranks > 1:
        notes.append("data parallelism is planned with a second copy of the weights, which Megatron does without")
    return notes


def _finish_batch(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    if settings.global_batch is None:
        settings.global_batch = settings.micro_batch * settings.ranks
    notes = split_global_batch(settings, entries, "global_batch_size", "micro_batch_size")
    total = settings.global_batch
    samples = _find(entries, "train_samples")
    if settings.max_steps is None and samples is not None:
        settings.max_steps = max(samples.whole() // total, 1)
    warmup, fraction = _find(entries, "lr_warmup_samples"), _find(entries, "lr_warmup_fraction")
    if warmup is not None and warmup.number() and settings.warmup_steps is None:
        settings.warmup_steps = max(warmup.whole() // total, 1)
    if fraction is not None:
        settings.warmup_steps, settings.warmup_ratio = None, fraction.fraction()
    if settings.max_steps is None:
        settings.epochs = 1.0
    return notes


def _finish_schedule(settings: Settings, entries: Mapping[str, Entry]) -> None:
    """Sets the part of the steps in which the rate falls."""
    if settings.schedule != "wsd" or settings.max_steps is None:
        return
    if (steps := _find(entries, "lr_wsd_decay_iters")) is not None:
        settings.decay_ratio = round(min(steps.whole() / settings.max_steps, 1.0), 6)
    elif (samples := _find(entries, "lr_wsd_decay_samples")) is not None and settings.global_batch:
        settings.decay_ratio = round(min(samples.whole() / settings.global_batch / settings.max_steps, 1.0), 6)


def _finish_pipeline(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Sets the stages of each device of an interleaved pipeline."""
    if settings.pipeline_parallel == 1:
        return []
    settings.deferred_reduction = True
    layers = int(str(settings.architecture["num_hidden_layers"]))
    per_stage, count = (
        _find(entries, "num_layers_per_virtual_pipeline_stage"),
        _find(entries, "num_virtual_stages_per_pipeline_rank"),
    )
    stages = 1 if count is None else count.whole()
    if per_stage is not None:
        stages, rest = divmod(layers, settings.pipeline_parallel * per_stage.whole())
        if rest:
            raise per_stage.error(
                f"{per_stage.whole()} layers x {settings.pipeline_parallel} devices do not divide the {layers} layers"
            )
    if stages > 1:
        settings.pipeline_schedule, settings.stages = "interleaved", stages
    return []


def _finish_recomputation(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Sets which layers are recomputed: all in groups (uniform), or the first of each stage (block)."""
    method, count = _find(entries, "recompute_method"), _find(entries, "recompute_num_layers")
    if not settings.checkpointing or method is None or count is None:
        return []
    number = count.whole()
    stages = settings.pipeline_parallel * (settings.stages or 1)
    here = max(int(str(settings.architecture["num_hidden_layers"])) // stages, 1)
    if method.value == "uniform":
        return [] if number == 1 else [f"each layer keeps its input, where Megatron keeps that of every {number}th"]
    if number < here:
        settings.checkpointed_layers = max(round(here / number), 1)
        every = "every layer" if settings.checkpointed_layers == 1 else f"one layer in {settings.checkpointed_layers}"
        return [f"{every} is recomputed, in place of the first {number} of {here} of each stage"]
    return []


_EVALUATION = ignore("evaluation: the plan has it at the end, with a training micro-batch")
_DATA_WORK = ignore("preparing the data")
_SCALING = ignore("how gradients of fp16 are scaled")
_WHEN = ignore("when shards and gradients are sent")
_KERNEL = ignore("a kernel of little weight")
_ROUTER = ignore("how tokens are sent to experts: the plan takes even load")
_STARTING = ignore("how processes start and wait for each other")
_WATCHING = ignore("watching the run")
_STEPS = assume("the rate falls to the end of the run, which costs the same")
_ALL_STEPS = assume("all steps have the stated global batch")


def _each(handler: Handler, names: str) -> dict[str, Handler]:
    return dict.fromkeys(names.split(), handler)


MEGATRON = Format(
    name="megatron",
    title="Megatron-LM",
    requires=frozenset({"num_layers", "hidden_size", "micro_batch_size"}),
    unique=frozenset({"tensor_model_parallel_size", "use_mcore_models", "num_attention_heads", "train_iters"}),
    defaults=DEFAULTS,
    finish=_finish,
    table={
        # The model.
        **dict.fromkeys(_SIZES, _read_size),
        **dict.fromkeys(_NUMBERS, _read_number),
        **dict.fromkeys(_LATENT, _read_of_model),
        **_each(
            _read_of_model,
            "group_query_attention num_query_groups swiglu quick_geglu normalization position_embedding_type "
            "qk_layernorm disable_bias_linear add_qkv_bias use_rotary_position_embeddings no_position_embedding "
            "vocab_size padded_vocab_size make_vocab_size_divisible_by multi_latent_attention moe_ffn_hidden_size "
            "moe_layer_freq moe_router_num_groups moe_router_group_topk squared_relu tokenizer_type",
        ),
        **_each(ignore("the tokenizer's files; its vocabulary counts"), "vocab_file merge_file"),
        "moe_shared_expert_intermediate_size": _read_of_model,
        "untie_embeddings_and_output_weights": _read_untied,
        "seq_length": take("length", Entry.whole),
        "encoder_seq_length": take("length", Entry.whole),
        "rotary_base": _read_rotary,
        "rotary_percent": _read_rotated,
        **_each(
            assume("positions are plain rotary ones, which cost the same"),
            "use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor rotary_scaling_factor "
            "rope_type mscale mscale_all_dim beta_fast beta_slow no_rope_freq",
        ),
        "hidden_dropout": _read_dropout,
        "attention_dropout": _read_dropout,
        **_each(ignore("the norm's own form, of the same cost"), "apply_layernorm_1p layernorm_zero_centered_gamma"),
        "openai_gelu": ignore("GELU in another form"),
        "window_size": assume("attention is over the whole sequence, which takes more time"),
        "mtp_num_layers": assume("no layers that predict further tokens, which take more memory"),
        "mtp_loss_scaling_factor": ignore("belongs to mtp_num_layers"),
        "experimental_attention_variant": refuse("only attention over all positions is planned"),
        "hybrid_layer_pattern": refuse("only layers of attention and a feed-forward block are planned"),
        "hybrid_override_pattern": refuse("only layers of attention and a feed-forward block are planned"),
        "spec": ignore("which module builds the layers"),
        "transformer_impl": ignore("fused kernels are planned"),
        **_each(
            ignore("the implementation of the layers"), "use_mcore_models use_legacy_models fp32_residual_connection"
        ),
        # The batch.
        "micro_batch_size": take("micro_batch", Entry.whole),
        "global_batch_size": take("global_batch", Entry.whole),
        "train_iters": take("max_steps", Entry.whole),
        "train_samples": _read_samples,
        **_each(_ALL_STEPS, "rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed"),
        "exit_duration_in_mins": assume("the run is not cut off after a time"),
        "exit_interval": assume("the run is not cut off after some steps"),
        # Optimizer and schedule.
        "optimizer": _read_optimizer,
        "lr": take("learning_rate", Entry.number),
        "min_lr": take("min_lr", Entry.number),
        "weight_decay": take("weight_decay", Entry.number),
        "adam_beta1": _read_beta,
        "adam_beta2": _read_beta,
        "adam_eps": take("eps", Entry.number),
        "clip_grad": take("max_grad_norm", Entry.number),
        "lr_decay_style": _read_decay,
        "lr_warmup_iters": _read_warmup,
        "lr_warmup_fraction": take("warmup_ratio", Entry.fraction),
        "lr_warmup_samples": _read_samples,
        "lr_warmup_init": ignore("the rate of the first step"),
        **_each(_STEPS, "lr_decay_iters lr_decay_samples"),
        **_each(_read_fall, "lr_wsd_decay_iters lr_wsd_decay_samples"),
        "lr_wsd_decay_style": ignore("planned as linear, which costs the same"),
        **_each(assume("one learning rate for all weights, which costs the same"), "decoupled_lr decoupled_min_lr"),
        **_each(
            assume("a constant weight decay, which costs the same"),
            "start_weight_decay end_weight_decay weight_decay_incr_style",
        ),
        "optimizer_cpu_offload": _read_offload,
        "optimizer_offload_fraction": ignore("belongs to optimizer_cpu_offload"),
        "overlap_cpu_optimizer_d2h_h2d": ignore("belongs to optimizer_cpu_offload"),
        "use_precision_aware_optimizer": ignore("belongs to the dtypes of states"),
        **_each(
            assume("fp32 weights, gradients and moments, which may take more memory"),
            "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        ),
        "seed": take("seed", lambda entry: int(entry.number())),
        # Precision.
        "bf16": _read_precision,
        "fp16": _read_precision,
        "fp8_format": _read_fp8,
        "fp8": _read_fp8,
        "fp8_hybrid": _read_fp8,
        "fp8_recipe": _read_fp8_recipe,
        "fp8_param_gather": assume("weights are gathered in half precision, twice the bytes"),
        "fp4_format": assume("matmuls are in half precision"),
        "first_last_layers_bf16": ignore("a few layers in bf16"),
        **_each(
            ignore("how scales are computed"),
            "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad no_fp8_wgrad "
            "reuse_grad_buf_for_mxfp8_param_ag num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        ),
        **_each(_SCALING, "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
        "grad_reduce_in_bf16": switch("half_reduction"),
        "accumulate_allreduce_grads_in_fp32": ignore("as planned"),
        "attention_softmax_in_fp32": ignore("as planned"),
        "fp16_lm_cross_entropy": ignore("the loss in half precision"),
        # Recomputation and kernels.
        "recompute_activations": ignore("only attention is computed again, which fused attention does by itself"),
        "recompute_granularity": _read_recomputation,
        "recompute_method": ignore("belongs to recompute_granularity full"),
        "recompute_num_layers": ignore("belongs to recompute_method"),
        "recompute_modules": _read_modules,
        "moe_layer_recompute": assume("experts are not computed again, which takes more memory and less time"),
        "distribute_saved_activations": assume("inputs of layers are on each device"),
        "fine_grained_activation_offloading": assume("activations stay on the device, which takes more memory"),
        "cpu_offloading_num_layers": assume("activations stay on the device, which takes more memory"),
        "use_flash_attn": ignore("fused attention is planned"),
        "attention_backend": _read_attention,
        **_each(
            _KERNEL,
            "cross_entropy_loss_fusion cross_entropy_fusion_impl no_masked_softmax_fusion no_bias_gelu_fusion "
            "no_rope_fusion no_bias_swiglu_fusion no_bias_dropout_fusion no_gradient_accumulation_fusion "
            "no_persist_layer_norm gradient_accumulation_fusion apply_query_key_layer_scaling "
            "use_fused_weighted_squared_relu rotary_interleaved",
        ),
        **_each(
            ignore("kernels are planned without gaps"),
            "cuda_graph_impl cuda_graph_scope cuda_graph_modules enable_cuda_graph external_cuda_graph "
            "cuda_graph_warmup_steps te_rng_tracker",
        ),
        # Devices.
        "tensor_model_parallel_size": take("tensor_parallel", Entry.whole),
        "pipeline_model_parallel_size": take("pipeline_parallel", Entry.whole),
        "context_parallel_size": take("context_parallel", Entry.whole),
        "expert_model_parallel_size": take("expert_parallel", Entry.whole),
        "expert_tensor_parallel_size": take("expert_tensor", Entry.whole),
        "sequence_parallel": switch("sequence_parallel"),
        "num_layers_per_virtual_pipeline_stage": _read_virtual,
        "num_virtual_stages_per_pipeline_rank": _read_virtual,
        **_each(
            assume("layers are cut evenly into stages"),
            "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split standalone_embedding_stage",
        ),
        "use_distributed_optimizer": _read_sharding,
        "use_megatron_fsdp": _read_sharding,
        "use_custom_fsdp": _read_sharding,
        "use_torch_fsdp2": _read_sharding,
        "data_parallel_sharding_strategy": _read_strategy,
        "num_distributed_optimizer_instances": assume("states are split across all data-parallel devices"),
        "outer_dp_sharding_strategy": assume("shards are across all data-parallel devices"),
        **_each(
            _WHEN,
            "overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step no_align_param_gather "
            "align_param_gather no_overlap_p2p_communication tp_comm_overlap tp_comm_overlap_cfg ddp_num_buckets "
            "ddp_bucket_size ddp_average_in_collective ddp_pad_buckets_for_high_nccl_busbw cp_comm_type "
            "fsdp_double_buffer gradient_reduce_div_fusion no_gradient_reduce_div_fusion use_nccl_ub nccl_ub "
            "use_sharp delay_wgrad_compute overlap_moe_expert_parallel_comm suggested_communication_unit_size "
            "megatron_fsdp_version megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype "
            "megatron_fsdp_grad_comm_dtype fsdp_manual_registration init_model_with_meta_device "
            "hierarchical_context_parallel_sizes pipeline_model_parallel_comm_backend tp_comm_bootstrap_backend "
            "high_priority_stream_groups",
        ),
        **_each(
            _STARTING,
            "distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init local_rank "
            "lazy_mpu_init use_tp_pp_dp_mapping disable_gloo_process_groups enable_gloo_process_groups "
            "nccl_communicator_config_path use_cpu_initialization no_initialization inprocess_restart "
            "data_parallel_random_init",
        ),
        # Experts.
        **_each(
            _ROUTER,
            "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps "
            "moe_grouped_gemm moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend "
            "moe_permute_fusion moe_router_fusion moe_router_pre_softmax moe_router_dtype moe_router_score_function "
            "moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate "
            "moe_router_force_load_balancing moe_per_layer_logging moe_shared_expert_overlap "
            "moe_use_legacy_grouped_gemm moe_router_padding_for_fp8 moe_router_padding_for_quantization "
            "moe_deepep_num_sms moe_hybridep_num_sms moe_apply_probs_on_input",
        ),
        **_each(
            assume("each expert computes all of its tokens"),
            "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping",
        ),
        # The data.
        **_each(_read_data, "data_path train_data_path"),
        "split": _read_split,
        "tokenizer_model": _read_tokenizer,
        "num_workers": take("workers", lambda entry: int(entry.number())),
        "mock_data": ignore("tokens drawn at random, which cost the same"),
        "eod_mask_loss": ignore("the ends of documents are not trained on"),
        **_each(_read_masks, "reset_attention_mask reset_position_ids dataloader_inter_document_masking"),
        **_each(
            _DATA_WORK,
            "data_cache_path data_args_path per_split_data_args_path valid_data_path test_data_path "
            "no_mmap_bin_files no_create_attention_mask_in_dataloader create_attention_mask_in_dataloader "
            "dataloader_type vocab_extra_ids num_dataset_builder_threads mid_level_dataset_surplus tiktoken_pattern "
            "tiktoken_num_special_tokens tiktoken_special_tokens null_tokenizer_eod_id legacy_tokenizer "
            "trust_remote_code tokenizer_hf_include_special_tokens",
        ),
        "sft": assume("plain text is trained on as a whole"),
        "fim_data": assume("plain text, which costs the same"),
        "perform_rl_step": refuse("training on rewards is not planned"),
        # Evaluation, saving, watching.
        **_each(
            _EVALUATION,
            "eval_interval eval_iters full_validation eval_global_batch_size eval_micro_batch_size skip_train",
        ),
        **_each(
            ignore(SAVING),
            "save save_interval persistent_save_interval save_retain_interval load ckpt_format ckpt_step async_save "
            "use_dist_ckpt dist_ckpt_format no_save_optim no_save_rng no_load_optim no_load_rng finetune "
            "pretrained_checkpoint use_checkpoint_args auto_detect_ckpt_format ckpt_fully_parallel_save "
            "no_ckpt_fully_parallel_save ckpt_fully_parallel_load ckpt_assume_constant_structure "
            "dist_ckpt_strictness exit_on_missing_checkpoint override_opt_param_scheduler "
            "use_checkpoint_opt_param_scheduler use_persistent_ckpt_worker non_persistent_save_interval "
            "non_persistent_ckpt_type dist_ckpt_optim_fully_reshardable most_recent_k load_main_params_from_ckpt",
        ),
        **_each(
            ignore(LOGGING),
            "log_interval log_throughput log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard "
            "log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_world_size_to_tensorboard log_progress "
            "log_loss_scale_to_tensorboard log_memory_interval log_device_memory_used log_energy timing_log_level "
            "timing_log_option tensorboard_dir tensorboard_log_interval tensorboard_queue_size wandb_project "
            "wandb_exp_name wandb_save_dir wandb_entity logging_level one_logger_project no_one_logger "
            "one_logger_run_name no_barrier_with_level_1_timing no_log_loss_scale_to_tensorboard",
        ),
        **_each(
            _WATCHING,
            "profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler record_memory_history "
            "memory_snapshot_path manual_gc manual_gc_interval manual_gc_eval no_manual_gc_eval "
            "empty_unused_memory_level check_for_nan_in_loss_and_grad no_check_for_nan_in_loss_and_grad "
            "check_for_large_grads rerun_mode check_weight_hash_across_dp_replicas_interval log_straggler "
            "exit_signal_handler enable_ft_package adlr_autoresume adlr_autoresume_interval "
            "result_rejected_tracker_filename train_sync_interval calculate_per_token_loss enable_experimental",
        ),
        "deterministic_mode": assume("the fastest kernels, which may not be deterministic"),
        "freeze_all_layers": refuse("trains nothing"),
    },
)
"""Flags of `pretrain_gpt.py` in a shell script, and a YAML file with the same names."""
