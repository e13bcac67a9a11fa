"""ms-swift's `megatron sft` and `megatron pt`: its own keys of model, data and adapters, and Megatron's of the rest.

Read from ms-swift 4.6 (swift/megatron/arguments).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preheat.interop.hf_keys import LOGGING, SAVING, read_epochs
from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, refuse, switch, take
from preheat.interop.megatron_bridge import MODEL, OPTIMIZER, SCHEDULER, TRAIN, finish_megatron
from preheat.interop.ms_swift import FULL_RATE, MEGATRON_KEYS, MS_SWIFT
from preheat.interop.reading import Format
from preheat.interop.settings import Settings, split_experts
from preheat.interop.torch_keys import split_global_batch
from preheat.interop.trainer_defaults import MEGATRON_SWIFT as DEFAULTS

__all__ = ["MEGATRON_SWIFT"]


def _read_attention(settings: Settings, entry: Entry) -> Outcome:
    if entry.text() in ("unfused", "local"):
        settings.attention = False
        return Takes(("attention",))
    return NoEffect("the fastest fused attention is planned")


def _read_fp8(settings: Settings, entry: Entry) -> Outcome:
    settings.fp8 = True
    return Takes(("fp8",), "planned as torchao's matmuls")


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies the rules of `megatron sft`."""
    notes = split_experts(settings, default=settings.tensor_parallel)
    if "lr" not in entries and settings.adapter is None:
        settings.learning_rate = FULL_RATE
    pretrains = "command" in entries and str(entries["command"].value).endswith("pt")
    if pretrains and "loss_scale" not in entries:
        settings.train_on = "all"
    if settings.streaming and not settings.max_steps:
        raise entries["streaming"].error("a streamed dataset has no known length; add train_iters")
    if settings.quantized:
        raise entries["quant_bits"].error("Megatron trains no base in 4 bits; leave it out")
    if "max_length" not in entries:
        notes.append(f"max_length is not stated: sequences of {settings.length:,} tokens are planned")
    if settings.streaming and len(settings.sources) > 1:
        settings.sources = settings.sources[:1]
        notes.append("one streamed dataset is planned; a mixture costs the same")
    notes += split_global_batch(settings, entries, "global_batch_size", "micro_batch_size")
    return [*notes, *finish_megatron(settings)]


def _names(text: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(text.split(), handler)


MEGATRON_SWIFT = Format(
    name="megatron-swift",
    title="ms-swift",
    requires=frozenset({"model"}),
    unique=MEGATRON_KEYS,
    without=frozenset({"base_model", "model_name_or_path"}),
    defaults=DEFAULTS,
    finish=_finish,
    renamed={**MS_SWIFT.renamed, "max_epochs": "num_train_epochs"},
    table={
        **MS_SWIFT.table,
        **{key: handler for key, handler in MODEL.items() if key not in ("*", "hf_model_id", "bf16", "fp16")},
        **TRAIN,
        **OPTIMIZER,
        **SCHEDULER,
        "bf16": ignore("torch_dtype says it"),
        "fp16": ignore("torch_dtype says it"),
        "torch_dtype": take("precision", lambda entry: "fp16" if entry.text() == "float16" else "bf16"),
        "num_train_epochs": read_epochs,
        "mcore_model": ignore("weights that training starts from, in Megatron's own layout"),
        "attention_backend": _read_attention,
        "padding_free": lambda settings, entry: (
            Assumed("rows are padded, which takes more memory") if entry.truth() else NoEffect("switched off")
        ),
        "fp8_format": _read_fp8,
        **_names(
            "fp8_recipe fp8_amax_history_len fp8_amax_compute_algo fp8_param_gather", ignore("belongs to fp8_format")
        ),
        "use_megatron_fsdp": switch("sharding", "full"),
        "perform_initialization": switch("random_weights"),
        "language_model_only": ignore("only the text part is planned"),
        "rlhf_type": refuse("of `megatron rlhf`, which is not read; write the run as `swift rlhf`"),
        "optimizer": OPTIMIZER["optimizer"],
        **_names("no_save_optim no_save_rng no_load_optim no_load_rng finetune async_save merge_lora", ignore(SAVING)),
        **_names("tensorboard_dir tensorboard_queue_size wandb_exp_name", ignore(LOGGING)),
        **_names(
            "overlap_grad_reduce overlap_param_gather align_grad_reduce align_param_gather nccl_comm_warmup "
            "bridge_backend accumulate_allreduce_grads_in_fp32 moe_token_drop_policy distributed_backend",
            ignore("how gradients and weights are sent"),
        ),
        "router_replay_mode": assume("the router chooses by itself"),
    },
)
