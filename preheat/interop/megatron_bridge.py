"""Megatron-Bridge's YAML of overrides over a recipe function: one table of keys.

Read from Megatron-Bridge 0.3.1 (training/config.py, recipes/common.py, peft, models/gpt_provider.py). The recipe
function, which is Python and not in the file, has the model and more: what the file leaves out is as in the functions
that all recipes start from. The model is that of `model.hf_model_id` or of the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from preheat.interop.hf_keys import LOGGING, SAVING, find_source, read_beta, read_of_source, read_warmup
from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, refuse, switch, take
from preheat.interop.reading import Format
from preheat.interop.settings import Settings, split_experts
from preheat.interop.torch_keys import adapt_to_planner, last_name, split_global_batch
from preheat.interop.trainer_defaults import MEGATRON_BRIDGE as DEFAULTS
from preheat.interop.trainer_defaults import MEGATRON_BRIDGE_PEFT, MEGATRON_BRIDGE_SFT
from preheat.interop.training_arguments import add_prefix

__all__ = ["MEGATRON_BRIDGE", "MODEL", "OPTIMIZER", "SCHEDULER", "TRAIN", "finish_megatron"]

_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
}
"""Key of a size -> its name in transformers' configurations."""
_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Megatron's layers -> those of transformers' models, which are not joined."""
_DECAYS = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
_OPTIMIZERS = {"adam": "adamw_torch_fused", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
_STRATEGIES = {"no_shard": None, "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "full"}
_FILE = "training.jsonl"
"""The rows of a `dataset_root`."""


def _read_size(settings: Settings, entry: Entry) -> Outcome:
    settings.architecture[_SIZES[entry.path[-1]]] = entry.whole()
    return Takes(("architecture",))


def _read_tokenizer(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text()
    if settings.model is None and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).is_file():
        settings.model = name
        return Takes(("model",), "its tokenizer's")
    if Path(name).exists():
        settings.tokenizer = name
        return Takes(("tokenizer",))
    return NoEffect("a tokenizer that is not here")


def _read_precision(settings: Settings, entry: Entry) -> Outcome:
    name = entry.text().replace("-", "_")
    if not name.startswith(("bf16", "fp16", "nemotron_h_bf16", "nanov2_bf16")):
        return Assumed(f"matmuls are in {settings.precision}")
    settings.precision = "fp16" if name.startswith("fp16") else "bf16"
    if "nvfp4" in name:
        return Assumed("matmuls are in bf16, which is slower than fp4")
    settings.fp8 = "fp8" in name
    if not settings.fp8:
        return Takes(("precision",))
    settings.fp8_recipe = "tensorwise" if "current" in name or "delayed" in name else "rowwise"
    return Takes(("precision", "fp8", "fp8_recipe"), "planned as torchao's matmuls")


def _read_half(settings: Settings, entry: Entry) -> Outcome:
    if not entry.truth():
        return NoEffect("switched off")
    settings.precision = entry.path[-1]
    return Takes(("precision",))


def _read_fp8(settings: Settings, entry: Entry) -> Outcome:
    settings.fp8 = True
    return Takes(("fp8",), "planned as torchao's matmuls")


def _read_optimizer(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text()) not in _OPTIMIZERS:
        return Assumed("the plan takes AdamW, with two fp32 moments per trained weight")
    settings.optimizer = _OPTIMIZERS[name]
    return Takes(("optimizer",))


def _read_decay(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text()) not in _DECAYS:
        return Assumed("the plan takes a cosine, which costs the same")
    settings.schedule = _DECAYS[name]
    return Takes(("schedule",))


def _read_warmup_fraction(settings: Settings, entry: Entry) -> Outcome:
    settings.warmup_steps, settings.warmup_ratio = None, entry.fraction()
    return Takes(("warmup_ratio",))


def _read_recomputation(settings: Settings, entry: Entry) -> Outcome:
    if entry.choice("full", "selective", "none") == "full":
        settings.checkpointing = True
        return Takes(("checkpointing",))
    return NoEffect("only attention is computed again, which fused attention does by itself")


def _read_modules(settings: Settings, entry: Entry) -> Outcome:
    if set(entry.texts()) <= {"core_attn"}:
        return NoEffect("attention, which fused attention computes again by itself")
    return Assumed("only attention is computed again, which takes more memory and less time")


def _read_virtual(settings: Settings, entry: Entry) -> Outcome:
    if entry.whole() == 1:
        return NoEffect("one stage a device")
    settings.pipeline_schedule, settings.stages = "interleaved", entry.whole()
    return Takes(("pipeline_schedule", "stages"))


def _read_data(settings: Settings, entry: Entry) -> Outcome:
    names = entry.value if isinstance(entry.value, list) else [entry.value]
    paths = [name for name in names if isinstance(name, str)]
    if not paths:
        return Assumed("the data is not named")
    settings.sources = [{"source": paths[0], "layout": "text"}]
    return Takes(
        ("sources",), "its text, not yet in tokens" if len(paths) == 1 else "the first; a blend costs the same"
    )


def _read_root(settings: Settings, entry: Entry) -> Outcome:
    root = Path(entry.text())
    file = next((path for path in (root / _FILE, settings.home / root / _FILE) if path.is_file()), root / _FILE)
    settings.sources = [{"source": str(file)}]
    return Takes(("sources",))


def _read_dataset_name(settings: Settings, entry: Entry) -> Outcome:
    find_source(settings, entry)["source"] = entry.text()
    return Takes(("sources",))


def _read_pack(settings: Settings, entry: Entry) -> Outcome:
    settings.packing = entry.number() > 0
    if not settings.packing:
        return Takes(("packing",))
    settings.length = entry.whole()
    return Takes(("packing", "length"))


def _read_split(settings: Settings, entry: Entry) -> Outcome:
    shares = [float(part) for part in str(entry.value).split(",") if re.fullmatch(r" *\d+(\.\d+)? *", part)]
    if len(shares) < 2 or not sum(shares):
        return Assumed("nothing is held out")
    settings.validation = round(shares[1] / sum(shares), 6)
    return Takes(("validation",))


def _read_targets(settings: Settings, entry: Entry) -> Outcome:
    names = entry.texts()
    if unknown := [name for name in names if name not in _LAYERS]:
        return Assumed(f"all linear layers have adapters, not {unknown[0]} as named")
    layers = tuple(dict.fromkeys(layer for name in names for layer in _LAYERS[name]))
    every = {layer for layers in _LAYERS.values() for layer in layers}
    settings.lora_targets = "all-linear" if set(layers) == every else list(layers)
    return Takes(("lora_targets",), "layers that Megatron joins share one adapter")


def _read_method(settings: Settings, entry: Entry) -> Outcome:
    name = last_name(entry)
    if name == "DoRA":
        settings.lora_variant = "dora"
        return Takes(("lora_variant",))
    if name in ("LoRA", "CanonicalLoRA"):
        return NoEffect("LoRA")
    raise entry.error(f"{name}: is not one of preheat's methods; use megatron.bridge.peft.lora.LoRA")


def _read_limit(settings: Settings, entry: Entry) -> Outcome:
    if entry.number() < 1:
        return NoEffect("all are kept")
    settings.save_limit = entry.whole()
    return Takes(("save_limit",))


def _names(text: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(text.split(), handler)


_KERNELS = ignore("which kernels compute the same")
_STARTING = ignore("how processes start and find each other")
_EVALUATION = ignore("evaluation: the plan has it at the end, with a training micro-batch")
_LARGE = assume("the plan is without it, and of the same order")

MODEL: Mapping[str, Handler] = {
    "hf_model_id": take("model", Entry.text),
    **dict.fromkeys(_SIZES, _read_size),
    "seq_length": take("length", Entry.whole),
    "tensor_model_parallel_size": take("tensor_parallel", Entry.whole),
    "pipeline_model_parallel_size": take("pipeline_parallel", Entry.whole),
    "context_parallel_size": take("context_parallel", Entry.whole),
    "expert_model_parallel_size": take("expert_parallel", Entry.whole),
    "expert_tensor_parallel_size": take("expert_tensor", Entry.whole),
    "virtual_pipeline_model_parallel_size": _read_virtual,
    "pipeline_model_parallel_layout": assume("layers are cut evenly into stages"),
    **_names(
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split",
        assume("layers are cut evenly into stages"),
    ),
    "sequence_parallel": switch("sequence_parallel"),
    "recompute_granularity": _read_recomputation,
    "recompute_modules": _read_modules,
    **_names("recompute_method recompute_num_layers", assume("each recomputed layer keeps its input")),
    **_names(
        "fine_grained_activation_offloading offload_modules cpu_offloading cpu_offloading_num_layers",
        assume("activations stay on the device, which takes more memory"),
    ),
    **_names("hidden_dropout attention_dropout", assume("no dropout, whose masks take memory")),
    **_names("mtp_num_layers mtp_loss_scaling_factor", assume("one token is predicted at a time")),
    **_names("rope_scaling rope_scaling_factor rotary_base rotary_percent", assume("positions are the model's own")),
    **_names("moe_aux_loss_coeff moe_z_loss_coeff", assume("without a loss on the router, of little weight")),
    **_names(
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
        assume("experts take all tokens that choose them"),
    ),
    "should_pad_vocab": assume("the vocabulary is the model's own"),
    "make_vocab_size_divisible_by": assume("the vocabulary is the model's own"),
    "fp8": _read_fp8,
    **_names("bf16 fp16", _read_half),
    **_names("params_dtype pipeline_dtype autocast_dtype", ignore("mixed_precision says it")),
    **_names(
        "transformer_impl attention_backend cross_entropy_loss_fusion cross_entropy_fusion_impl cuda_graph_impl "
        "cuda_graph_scope cuda_graph_warmup_steps enable_cuda_graph bias_activation_fusion bias_dropout_fusion "
        "bias_dropout_add_fusion masked_softmax_fusion apply_rope_fusion gradient_accumulation_fusion "
        "persist_layer_norm moe_grouped_gemm moe_permute_fusion moe_token_dispatcher_type moe_enable_deepep "
        "moe_flex_dispatcher_backend moe_hybridep_num_sms moe_shared_expert_overlap moe_router_fusion moe_router_dtype "
        "moe_router_force_load_balancing attention_softmax_in_fp32 apply_query_key_layer_scaling "
        "deallocate_pipeline_outputs tp_comm_overlap tp_comm_overlap_cfg use_te_rng_tracker calculate_per_token_loss "
        "init_method_std init_model_with_meta_device perform_initialization use_cpu_initialization parallel_output "
        "overlap_p2p_comm batch_p2p_comm a2a_overlap delay_wgrad_compute overlap_moe_expert_parallel_comm cp_comm_type",
        _KERNELS,
    ),
    "*": _LARGE,
}
"""Sizes, parallelism and kernels."""
TRAIN: Mapping[str, Handler] = {
    "train_iters": take("max_steps", Entry.whole),
    "train_samples": lambda settings, entry: Takes(("max_steps",), "its samples in steps"),
    "global_batch_size": take("global_batch", Entry.whole),
    "micro_batch_size": take("micro_batch", Entry.whole),
    "rampup_batch_size": assume("the global batch is that of the end"),
    "decrease_batch_size_if_needed": ignore("for batches that do not divide"),
    **_names("eval_iters eval_interval skip_train", _EVALUATION),
    **_names(
        "manual_gc manual_gc_interval manual_gc_eval exit_interval exit_duration_in_mins exit_signal "
        "exit_signal_handler exit_signal_handler_for_dataloader empty_unused_memory_level train_sync_interval "
        "check_weight_hash_across_dp_replicas_interval iterations_to_skip",
        ignore("of little weight"),
    ),
}
"""Batch and steps."""
OPTIMIZER: Mapping[str, Handler] = {
    "optimizer": _read_optimizer,
    "lr": take("learning_rate", Entry.number),
    "min_lr": take("min_lr", Entry.number),
    "weight_decay": take("weight_decay", Entry.number),
    "adam_beta1": read_beta(0),
    "adam_beta2": read_beta(1),
    "adam_eps": take("eps", Entry.number),
    "clip_grad": take("max_grad_norm", Entry.number),
    "use_distributed_optimizer": switch("sharding", "optimizer"),
    **_names("bf16 fp16", ignore("mixed_precision says it")),
    **_names(
        "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        assume("moments and copies of the weights are in fp32"),
    ),
    **_names(
        "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d "
        "use_torch_optimizer_for_cpu_offload",
        assume("optimizer states stay on the device, which takes more memory and less time"),
    ),
    **_names("params_dtype overlap_param_gather_with_optimizer_step log_num_zeros_in_grad", ignore("of little weight")),
}
"""The optimizer."""
SCHEDULER: Mapping[str, Handler] = {
    "lr_decay_style": _read_decay,
    "lr_warmup_iters": read_warmup,
    "lr_warmup_fraction": _read_warmup_fraction,
    "max_lr": take("learning_rate", Entry.number),
    "min_lr": take("min_lr", Entry.number),
    **_names("lr_decay_iters lr_decay_samples", assume("the schedule ends with the run")),
    **_names("lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples", assume("the schedule costs the same")),
    **_names(
        "lr_warmup_init lr_wsd_decay_style start_weight_decay end_weight_decay weight_decay_incr_style "
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler no_weight_decay_cond_type",
        ignore("the rate's and the decay's small print"),
    ),
}
"""The learning rate's schedule."""
_DATASET: Mapping[str, Handler] = {
    "dataset_root": _read_root,
    "dataset_name": _read_dataset_name,
    "dataset_subset": read_of_source("subset"),
    **_names("data_path data_paths blend", _read_data),
    "seq_length": take("length", Entry.whole),
    "sequence_length": take("length", Entry.whole),
    "packed_sequence_specs.packed_sequence_size": _read_pack,
    "packed_sequence_specs.*": ignore("preparing the data"),
    "enable_offline_packing": switch("packing"),
    "split": _read_split,
    "num_workers": take("workers", lambda entry: int(entry.number())),
    "max_train_samples": assume("all rows of the dataset are read"),
    "val_proportion": take("validation", Entry.fraction),
    "loss_mode": assume("the assistant's turns are trained on"),
    "*": ignore("preparing the data"),
}
_PEFT: Mapping[str, Handler] = {
    "dim": take("lora_rank", Entry.whole),
    "alpha": take("lora_alpha", Entry.number),
    "dropout": take("lora_dropout", Entry.fraction),
    "target_modules": _read_targets,
    "_target_": _read_method,
    "exclude_modules": assume("all layers of target_modules have adapters"),
    "lora_dtype": assume("adapters are in fp32"),
    **_names("dropout_position lora_A_init_method lora_B_init_method a2a_experimental", ignore("of little weight")),
    **_names(
        "freeze_vision_model freeze_vision_projection freeze_language_model", ignore("only the text part is planned")
    ),
}
_DDP: Mapping[str, Handler] = {
    "use_distributed_optimizer": switch("sharding", "optimizer"),
    "use_megatron_fsdp": ignore("belongs to data_parallel_sharding_strategy"),
    "data_parallel_sharding_strategy": lambda settings, entry: Takes(("sharding",), "with use_megatron_fsdp"),
    "grad_reduce_in_fp32": ignore("gradients are added up in fp32 in any case"),
    "*": ignore("how gradients are added across devices"),
}
_CHECKPOINT: Mapping[str, Handler] = {
    "pretrained_checkpoint": ignore("weights that training starts from, in Megatron's own layout"),
    "save_interval": take("save_steps", Entry.whole),
    "most_recent_k": _read_limit,
    "*": ignore(SAVING),
}
_PRECISION: Mapping[str, Handler] = {
    **_names("bf16 fp16", _read_half),
    "fp8": _read_fp8,
    "fp4": assume("matmuls are in bf16, which is slower than fp4"),
    "fp8_recipe": assume("in fp8, one scale per matrix"),
    **_names("grad_reduce_in_fp32 params_dtype pipeline_dtype autocast_dtype", ignore("of little weight")),
    "*": ignore("of little weight"),
}


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies Megatron-Bridge's own rules between keys."""
    notes = [*_finish_model(settings), *split_experts(settings, default=settings.tensor_parallel)]
    lengths = [entries[name] for name in ("model.seq_length", "dataset.seq_length") if name in entries]
    if len({entry.whole() for entry in lengths}) > 1:
        raise lengths[1].error(f"{lengths[1].shown}: model.seq_length is {lengths[0].shown}; write one length in both")
    if any(name.startswith("peft.") for name in entries):
        settings.adapter = "lora"
    trains_from_weights = settings.adapter is not None or "checkpoint.pretrained_checkpoint" in entries
    settings.random_weights = settings.model is not None and not trains_from_weights
    _finish_sharding(settings, entries)
    samples = entries.get("train.train_samples")
    assert settings.global_batch is not None
    if samples is not None and "train.train_iters" not in entries:
        settings.max_steps = max(samples.whole() // settings.global_batch, 1)
    if {"scheduler.lr_warmup_iters", "scheduler.lr_warmup_fraction"}.isdisjoint(entries) and settings.max_steps:
        settings.warmup_steps = min(settings.warmup_steps or 0, settings.max_steps)
    notes += split_global_batch(settings, entries, "train.global_batch_size", "train.micro_batch_size")
    notes += finish_megatron(settings)
    unstated = [
        name
        for name in ("train.global_batch_size", "train.micro_batch_size", "model.tensor_model_parallel_size")
        if name not in entries
    ]
    if unstated:
        notes.append(f"the recipe function may state {', '.join(unstated)}: planned as in the one that all start from")
    if not settings.sources:
        notes.append("the file names no dataset")
    return notes


def finish_megatron(settings: Settings) -> list[str]:
    """Sets how Megatron's layers and optimizer work on several devices; returns what is planned in their place."""
    if settings.expert_parallel > 1 and settings.sharding == "optimizer":
        settings.sharding = "gradients"  # states alone are not split beside experts
    # FSDP keeps fp32 weights in shards, and gathers them in half precision.
    settings.masters = settings.sharding not in ("full", "gradients")
    settings.deferred_reduction = settings.pipeline_parallel > 1
    settings.sequence_parallel = settings.sequence_parallel and settings.tensor_parallel > 1
    settings.regather = settings.sequence_parallel and not settings.checkpointing
    # The loss takes the place of the logits, whose gradients are never beside them.
    settings.loss_rows = settings.micro_batch * settings.length
    settings.chunked_loss = settings.tensor_parallel == 1 and settings.pipeline_parallel == 1
    return adapt_to_planner(settings)


def _finish_model(settings: Settings) -> list[str]:
    """Sets the model's family if the file gives its sizes and no name."""
    needed = {"num_hidden_layers", "hidden_size", "num_attention_heads"}
    if settings.model is not None or not needed <= settings.architecture.keys():
        return []
    settings.family = "mixtral" if "num_experts" in settings.architecture else "llama"
    width = int(str(settings.architecture["hidden_size"]))
    settings.architecture.setdefault("intermediate_size", 4 * width)
    return [f"the model is not named: planned with {settings.family}'s blocks of these sizes"]


def _finish_sharding(settings: Settings, entries: Mapping[str, Entry]) -> None:
    fsdp, strategy = entries.get("ddp.use_megatron_fsdp"), entries.get("ddp.data_parallel_sharding_strategy")
    if fsdp is not None and fsdp.truth():
        name = "optim_grads_params" if strategy is None else strategy.choice(*_STRATEGIES)
        settings.sharding = _STRATEGIES[name]


_REWARDS = refuse("of Megatron-Bridge's runs, pretraining and fine-tuning are read")

MEGATRON_BRIDGE = Format(
    name="megatron-bridge",
    title="Megatron-Bridge",
    requires=frozenset({"train"}),
    unique=frozenset({"scheduler", "ddp", "mixed_precision", "logger", "rerun_state_machine", "comm_overlap"}),
    without=frozenset({"checkpoint_dir", "step_scheduler", "model_name"}),
    names_model="model.hf_model_id",
    defaults=DEFAULTS,
    variants={
        "checkpoint.pretrained_checkpoint": MEGATRON_BRIDGE_SFT,
        "dataset.dataset_root": MEGATRON_BRIDGE_SFT,
        "dataset.dataset_name": MEGATRON_BRIDGE_SFT,
        "peft": MEGATRON_BRIDGE_SFT | MEGATRON_BRIDGE_PEFT,
    },
    finish=_finish,
    table={
        **add_prefix("model", MODEL),
        **add_prefix("train", TRAIN),
        "validation.*": _EVALUATION,
        **add_prefix("optimizer", OPTIMIZER),
        **add_prefix("scheduler", SCHEDULER),
        **add_prefix("dataset", _DATASET),
        **add_prefix("peft", _PEFT),
        **add_prefix("ddp", _DDP),
        **add_prefix("checkpoint", _CHECKPOINT),
        "mixed_precision": _read_precision,
        **add_prefix("mixed_precision", _PRECISION),
        "tokenizer.tokenizer_model": _read_tokenizer,
        "tokenizer.vocab_size": ignore("the model's own vocabulary is planned"),
        "tokenizer.*": ignore("the tokenizer"),
        "rng.seed": take("seed", lambda entry: int(entry.number())),
        "rng.*": ignore("random numbers"),
        "comm_overlap": _KERNELS,
        "comm_overlap.*": _KERNELS,
        "dist.*": _STARTING,
        "distill.*": _REWARDS,
        **{
            f"{section}.*": ignore(LOGGING)
            for section in ("logger", "profiling", "tensor_inspect", "straggler", "nvrx_straggler")
        },
        **{f"{section}.*": _STARTING for section in ("ft", "inprocess_restart", "rerun_state_machine")},
    },
)
