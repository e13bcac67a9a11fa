"""Keys of torch's FSDP, as transformers' `fsdp_config` and accelerate's spell them, with and without a prefix."""

from __future__ import annotations

from collections.abc import Mapping

from preheat.interop.keys import Assumed, Entry, Handler, NoEffect, Outcome, Takes, assume, ignore, switch
from preheat.interop.settings import Settings

__all__ = ["FSDP", "read_fsdp", "read_fsdp_version"]


def read_fsdp(settings: Settings, entry: Entry) -> Outcome:
    """Reads whether weights are sharded: true or false, or the options of earlier versions (text or a list)."""
    if entry.is_off:
        settings.sharding = None
        return NoEffect("switched off")
    if isinstance(entry.value, bool):
        settings.sharding = "full"
        return Takes(("sharding",))
    names = entry.texts() if isinstance(entry.value, list) else entry.text().split()
    settings.sharding = "gradients" if "shard_grad_op" in names else "full"
    settings.offload = settings.offload or "offload" in names
    return Takes(("sharding", "offload") if "offload" in names else ("sharding",))


def read_fsdp_version(settings: Settings, entry: Entry) -> Outcome:
    """Reads FSDP's version: both are planned as FSDP2."""
    settings.sharding = settings.sharding or "full"
    return Takes(("sharding",), "" if entry.whole() == 2 else "planned as FSDP2")


def _read_reshard(settings: Settings, entry: Entry) -> Outcome:
    if isinstance(entry.value, str) and entry.value.upper() in (*_STRATEGIES, "HYBRID_SHARD", "NO_SHARD"):
        return _read_strategy(settings, entry)  # FSDP1 in accelerate
    settings.sharding = "full" if entry.truth() else "gradients"
    return Takes(("sharding",))


_STRATEGIES = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "gradients"}


def _read_strategy(settings: Settings, entry: Entry) -> Outcome:
    if (name := entry.text().upper()) in _STRATEGIES:
        settings.sharding = _STRATEGIES[name]
        return Takes(("sharding",))
    return Assumed("weights, gradients and optimizer states are sharded across all devices")


def _read_checkpointing(settings: Settings, entry: Entry) -> Outcome:
    if entry.truth():
        settings.checkpointing = True
        return Takes(("checkpointing",))
    return NoEffect("switched off")


_PLAIN: Mapping[str, Handler] = {
    "version": read_fsdp_version,
    "offload_params": switch("offload"),
    "cpu_offload": switch("offload"),
    "activation_checkpointing": _read_checkpointing,
    "reshard_after_forward": _read_reshard,
    "sharding_strategy": _read_strategy,
    **dict.fromkeys(
        (
            *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "use_orig_params", "min_num_params"),
            *("backward_prefetch", "limit_all_gathers", "forward_prefetch"),
        ),
        ignore("each layer is sharded by itself"),
    ),
    **dict.fromkeys(
        ("state_dict_type", "final_state_dict_type", "cpu_ram_efficient_loading", "sync_module_states"),
        ignore("loading and saving"),
    ),
    "cpu_offload_pin_memory": ignore("how shards are kept on the host"),
    "mixed_precision_policy": assume("matmuls in the precision of bf16 or fp16"),
    "xla": assume("the devices are GPUs"),
    "xla_fsdp_v2": assume("the devices are GPUs"),
    "xla_fsdp_grad_ckpt": assume("the devices are GPUs"),
}
FSDP: Mapping[str, Handler] = {f"{prefix}{key}": handler for prefix in ("", "fsdp_") for key, handler in _PLAIN.items()}
"""Keys of `fsdp_config`."""
