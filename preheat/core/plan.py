"""A plan: the predicted memory and speed of a recipe, and the verdict on it. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

__all__ = ["PLAN_KEYS", "Verdict", "chance_to_fit", "expected_memory", "is_tight", "verdict_on"]

PLAN_KEYS = {
    "fits": "whether the predicted peak is at most what the device has",
    "verdict": "`Verdict` on the memory: fits, fits tightly, does not fit safely, does not fit",
    "chance": "probability that the run fits, by `chance_to_fit`",
    "peak_gib": "predicted peak memory, GiB, less what the imports take",
    "peak_gib_interval": "[low, high]: nine in ten measured peaks lay between",
    "available_gib": "what the device has",
    "memory": (
        "{category: GiB} at the peak: parameters, gradients, optimizer, activations, temporary, overhead; with several "
        "devices also gathered weights and communication buffers, if any phase has them"
    ),
    "overhead": (
        "{what: GiB} of memory.overhead: rounding, what the allocator keeps, context, workspaces, process, kernels, "
        "saving"
    ),
    "overhead_sources": "{what: where its figure is from}",
    "allocated_gib": "of it tensors alone",
    "reserved_gib": (
        "tensors, and freed ones that the allocator keeps: on a GPU torch's max_memory_reserved less the workspaces"
    ),
    "phases": (
        "{phase: GiB}, the peak of each: load, forward, head and loss, backward, update, saving, evaluation, "
        "generation (if there are samples)"
    ),
    "phase_memory": "{phase: {category: GiB}} at the peak of each phase, categories as of memory",
    "export": "{category: GiB} at the peak of `preheat export`, a command of its own; None for several devices",
    "peak_phase": "the one that is the peak of all",
    "seconds_per_step": "predicted",
    "tokens_per_second": "predicted; on this machine's CPU with the machine to itself",
    "tokens_per_second_interval": "[low, high]: nine in ten measured speeds lay between",
    "mfu": "model FLOPs utilisation, predicted, of the measured matrix rate",
    "fp32_rate": (
        "FLOP/s of fp32 matmuls, if the recipe computes in bf16 and this device is slower in it; None otherwise"
    ),
    "flops_per_step": "counted by the dry run",
    "parameters": "{total, active, trained}; active: all but those of the experts that a token is not sent to",
    "steps": "steps of the run",
    "seconds_to_start": "what the run takes once, before its first step: compiling, taken as a minute on a GPU",
    "seconds_total": "predicted time to finish",
    "contended": "whether the machine was busy when its rates were measured, and is still",
    "pace": (
        "how many times as long as by this machine's rates steps of earlier runs took, in the median of the last "
        "nine of 20 s and more: in the predicted seconds; 1 if fewer than three are known"
    ),
    "now": (
        "{tokens_per_second, seconds_per_step, machine} at present, with what other processes use, if a probe found "
        "this machine's CPU more than 15 % slower than calibrated; None otherwise"
    ),
    "allocator_retries": "whether it fits only if a GPU's allocator frees cached memory in each step, which takes time",
    "heap": "why preheat's heap, whose memory is predicted, does not work on this machine; None if it does",
    "watts": "of the device's board at most; None if unknown",
}


class Verdict(StrEnum):
    """A plan's answer to the question if a run fits in memory."""

    FITS = "fits"
    TIGHT = "fits tightly"
    """The upper end of the interval of the peak exceeds the device's memory."""
    UNSAFE = "does not fit safely"
    """The memory that must be held is above `SAFE` of the device's: such a run may be tried, and a search avoids it."""
    NO = "does not fit"


SAFE = 0.97
"""Share of a device's memory above which a predicted peak runs out of memory in practice."""


SAFE_WITH_RETRIES = 0.95
"""The same of the peak without cached memory, if the allocator must release that in each step: the pieces that it
cannot release need room, too."""


def verdict_on(plan: Mapping[str, Any]) -> Verdict:
    """Returns the verdict on a plan's memory.

    Example:
        >>> plan = {"fits": True, "peak_gib": 76.0, "peak_gib_interval": [66.9, 85.1], "available_gib": 79.1}
        >>> verdict_on(plan), verdict_on({**plan, "peak_gib": 79.0})
        (<Verdict.TIGHT: 'fits tightly'>, <Verdict.UNSAFE: 'does not fit safely'>)
    """
    if not plan["fits"]:
        return Verdict.NO
    if _held_gib(plan) > (SAFE_WITH_RETRIES if plan.get("allocator_retries") else SAFE) * plan["available_gib"]:
        return Verdict.UNSAFE
    return Verdict.TIGHT if is_tight(plan) else Verdict.FITS


def _held_gib(plan: Mapping[str, Any]) -> float:
    """Returns the GiB that a device must hold: without the cached memory that torch releases before it fails."""
    cached = plan["overhead"].get("allocator", 0.0) if plan.get("allocator_retries") else 0.0
    return float(plan["peak_gib"] - cached)


def is_tight(plan: Mapping[str, Any]) -> bool:
    """True if a plan fits, but not the upper end of its interval.

    Example:
        >>> is_tight({"fits": True, "peak_gib_interval": [68.0, 82.0], "available_gib": 79.0})
        True
    """
    # Candidates on a page have no interval.
    _, high = plan.get("peak_gib_interval") or (0.0, 0.0)
    return bool(plan["fits"] and high > plan["available_gib"])


_NINE_IN_TEN = 1.6449  # standard deviations from the mean of a normal distribution to its 95th percentile


def chance_to_fit(plan: Mapping[str, Any]) -> float:
    """Returns the probability that a device holds what it must: of a normal distribution whose 5th and 95th percentiles
    are the ends of the peak's interval, since nine in ten measured peaks lie in it.

    Example:
        >>> plan = {"peak_gib": 80.0, "peak_gib_interval": [70.0, 90.0], "available_gib": 80.0}
        >>> round(chance_to_fit(plan), 2), round(chance_to_fit({**plan, "available_gib": 90.0}), 2)
        (0.5, 0.95)
    """
    available, held = plan["available_gib"], _held_gib(plan) / plan["peak_gib"]
    low, high = (held * end for end in plan["peak_gib_interval"])
    deviation = (high - low) / (2 * _NINE_IN_TEN)
    return (1 + math.erf((available - (low + high) / 2) / (deviation * math.sqrt(2)))) / 2


def expected_memory(plan: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns a plan's predictions of `MEMORY_KEYS`; plans for a CPU have `peak_gib` alone."""
    # The lines of the plan's overhead: only a plan for a GPU has a context among them.
    lines: Mapping[str, float] = plan.get("overhead") or {}
    figures: dict[str, float | None] = {"peak_gib": plan.get("peak_gib")}
    if "context" not in lines:
        return figures
    for key in ("allocated_gib", "reserved_gib"):  # torch's allocator also serves the workspaces
        size = plan.get(key)
        figures[key] = None if size is None else size + (lines.get("workspaces") or 0.0)
    return {**figures, "context_gib": lines["context"]}
