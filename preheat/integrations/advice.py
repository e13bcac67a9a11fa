"""Changes with which a loop that does not fit would, in the arguments of its trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from preheat.core import Phase
from preheat.core.units import format_memory
from preheat.planning.fallback_ladder import Fallback, PlannedFallback, find_fallbacks, halve_length
from preheat.planning.request import Request
from preheat.recipe import Recipe

__all__ = ["Advice", "find_changes", "spell_changes"]

_MOST = 3
"""Changes that are named: the cheapest ones."""
_BY_US = "accelerate_trainer(trainer)"


@dataclass(frozen=True)
class Advice:
    """A change of settings with which a loop fits, by a dry run.

    Attributes:
        change: in the arguments of the trainer.
        peak_gib: its planned peak.
        slower: how much longer a step takes, as a fraction.
    """

    change: str
    peak_gib: float
    slower: float

    def __str__(self) -> str:
        pace = f"{self.slower:.0%} slower" if self.slower > 0.005 else "no slower"
        return f"{self.change} ({format_memory(self.peak_gib)}, {pace})"


def find_changes(request: Request, *, room: float | None, phase: Phase | None = None) -> tuple[Advice, ...]:
    """Returns the cheapest changes with which a loop fits; if there are none, the longest sequences that would.

    Args:
        room: GiB available to the run; None: any saving counts.
        phase: phase whose peak counts; all by default.
    """
    ladder = find_fallbacks(request, room=room, phase=phase)
    fallbacks: list[PlannedFallback] = list(ladder.fallbacks)
    if not fallbacks:
        limit = min(ladder.present.peak_gib, room if room is not None else ladder.present.peak_gib)
        shorter = halve_length(ladder.lowest.recipe, request, room=limit, phase=phase)
        fallbacks = [shorter] if shorter else []
    now = ladder.present.plan.seconds_per_step
    advice = [
        Advice(change, fallback.peak_gib, fallback.plan.seconds_per_step / now - 1)
        for fallback in fallbacks
        if (change := spell_changes(request.recipe, fallback))
    ]
    # The first of those that are spelled alike is the cheapest.
    distinct = {item.change: item for item in reversed(advice)}
    return tuple(sorted(distinct.values(), key=advice.index)[:_MOST])


def spell_changes(recipe: Recipe, fallback: Fallback) -> str:
    """Returns the differences of a fallback in the arguments of a transformers Trainer; empty if it has none for one.

    Args:
        recipe: that the fallback changes.

    Example:
        >>> from preheat.recipe import override, parse
        >>> now = parse("{stop: {max_steps: 1}, batch: {size: 8}, techniques: {}}")
        >>> less = override(now, "techniques.gradient_accumulation.steps=4")
        >>> spell_changes(now, Fallback((), less))
        'per_device_train_batch_size=2, gradient_accumulation_steps=4'
    """
    after = fallback.recipe
    changes: list[str] = []
    if after.batch.seq_len != recipe.batch.seq_len:
        changes.append(f"sequences of {after.batch.seq_len} tokens (max_length)")
    if (rows := after.evaluate.micro_batch_size) != recipe.evaluate.micro_batch_size:
        changes.append(f"per_device_eval_batch_size={rows}")
    for name, technique in after.techniques.items():
        if technique != recipe.techniques.get(name):
            spell = _SPELLED.get(name)
            if spell is None or (change := spell(technique, after)) is None:
                return ""
            changes.append(change)
    return ", ".join(dict.fromkeys(changes))


def _spell_checkpointing(technique: Any, recipe: Recipe) -> str:
    return "activation_checkpointing=True" if technique.mode == "full" and technique.every == 1 else _BY_US


def _spell_accumulation(technique: Any, recipe: Recipe) -> str:
    rows = recipe.batch.size // (recipe.parallel.devices or 1) // technique.steps
    if "preference" in recipe.techniques:
        rows //= 2  # a pair is two sequences
    return f"per_device_train_batch_size={max(rows, 1)}, gradient_accumulation_steps={technique.steps}"


def _spell_low_bits(technique: Any, recipe: Recipe) -> str:
    return f'optim="adamw_torch_{technique.bits}bit"'


_SPELLED: Mapping[str, Callable[[Any, Recipe], str | None]] = {
    "activation_checkpointing": _spell_checkpointing,
    "gradient_accumulation": _spell_accumulation,
    "low_bit_adamw": _spell_low_bits,
    "adafactor": lambda technique, recipe: 'optim="adafactor"',
    "chunked_loss": lambda technique, recipe: _BY_US,
    "fused_operators": lambda technique, recipe: _BY_US,
    "efficient_attention": lambda technique, recipe: _BY_US,
    "activation_offload": lambda technique, recipe: "activation_offloading=True (TRL)",
}
"""Technique -> the arguments of a Trainer that do the same; None for settings that it lacks."""
