"""Former names of recipe keys and values, which recipes, `--set` and existing run folders may still use. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = [
    "FORMER_KEYS",
    "FORMER_VALUES",
    "current_key",
    "current_names",
    "current_values",
    "former_names",
    "within_recipe",
]

FORMER_KEYS: Mapping[str, str] = {
    "batch.length": "seq_len",
    "data.longer": "overlong",
    "data.vocabulary": "vocab_size",
    "evaluate.micro": "micro_batch_size",
    "model.experts": "num_experts",
    "model.experts_per_token": "num_experts_per_tok",
    "model.feed_forward": "intermediate_size",
    "model.heads": "num_heads",
    "model.kv_heads": "num_kv_heads",
    "model.layers": "num_layers",
    "model.positions": "max_positions",
    "model.vocabulary": "vocab_size",
    "model.width": "hidden_size",
    "optimizer.clip": "max_grad_norm",
    "parallel.zero": "zero_stage",
    "sample.draft": "draft_model",
    "sample.lookup": "prompt_lookup_tokens",
    "sample.tokens": "max_new_tokens",
    "schedule.decay": "decay_ratio",
    "schedule.floor": "min_lr_ratio",
    "schedule.warmup": "warmup_ratio",
    "stop.steps": "max_steps",
    "techniques.adafactor.clip": "clip_threshold",
    "techniques.distillation.top": "top_k",
    "techniques.fsdp.reshard": "reshard_after_forward",
    "techniques.grouped_queries.kv_heads": "num_kv_heads",
    "techniques.lora.targets": "target_modules",
    "techniques.low_bit_adamw.least": "min_size",
    "techniques.muon.steps": "ns_steps",
    "techniques.peft_adapter.targets": "target_modules",
    "techniques.quantization_aware.group": "group_size",
    "techniques.shifted_groups.group": "group_size",
    "techniques.upcycling.chosen": "num_experts_per_tok",
    "techniques.upcycling.experts": "num_experts",
}
"""Former dotted key -> the key's name today, in the same section."""
FORMER_VALUES: Mapping[str, Mapping[str, str]] = {
    "data.layout": {"unpaired": "kto"},
    "techniques.preference.loss": {"unpaired": "apo_zero", "apo_zero_unpaired": "apo_zero"},  # the second is TRL's
}
"""Dotted key -> former value -> today's."""


def current_key(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path of a key under its name of today.

    Example:
        >>> current_key(("batch", "length")), current_key(("batch", "size"))
        (('batch', 'seq_len'), ('batch', 'size'))
    """
    name = FORMER_KEYS.get(".".join(within_recipe(path)))
    # A former key is in the section of today's: only the last component differs.
    return path if name is None else (*path[:-1], name)


def former_names(section: tuple[str, ...]) -> list[str]:
    """Returns the former names of keys in a section or technique."""
    keys = [former.rpartition(".") for former in FORMER_KEYS]
    return [name for at, _, name in keys if at == ".".join(within_recipe(section))]


def within_recipe(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path without what leads to a recipe's part in a chain of steps."""
    # Steps of a chain have techniques of their own, at a deeper path than in a recipe.
    return path[path.index("techniques") :] if "techniques" in path else path


def current_values(section: tuple[str, ...], values: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of a section or technique under their names of today.

    A former name beside the name of today is left, for the reader to report.

    Example:
        >>> current_values(("batch",), {"size": 8, "length": 64})
        {'size': 8, 'seq_len': 64}
        >>> current_values(("batch",), {"length": 64, "seq_len": 32})
        {'length': 64, 'seq_len': 32}
    """
    current = {}
    for key, value in values.items():
        path = current_key((*section, str(key)))
        # Both names are given: keep the former one under its name, which no
        # section knows, so that the reader reports it.
        name = key if path[-1] in values else path[-1]
        current[name] = _current_value(".".join(within_recipe(path)), value)
    return current


def _current_value(key: str, value: object) -> object:
    # Each source of a list repeats keys of the section `data`.
    if key == "data.source" and isinstance(value, list | tuple):  # settings per source
        return [current_values(("data",), part) if isinstance(part, Mapping) else part for part in value]
    return FORMER_VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


@overload
def current_names(values: Mapping[str, object]) -> JsonObject: ...


@overload
def current_names(values: object) -> object: ...


def current_names(values: object) -> object:
    """Returns the values of a whole recipe under their names of today; what is no mapping is left as it is."""
    if not isinstance(values, Mapping):
        return values
    return {
        key: {name: _section(("techniques", str(name)), settings) for name, settings in value.items()}
        if key == "techniques" and isinstance(value, Mapping)
        else _section((str(key),), value)
        for key, value in values.items()
    }


def _section(path: tuple[str, ...], values: object) -> object:
    return current_values(path, values) if isinstance(values, Mapping) else values
