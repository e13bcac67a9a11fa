"""The plan of a recipe: what it will need and how fast it will run, from a dry run and this machine's measured rates."""

from __future__ import annotations

import math
from typing import Any

from preheat.hardware.rates import Rates
from preheat.planning.allocator import heap_peak
from preheat.planning.observe import CATEGORIES, Observation, observe
from preheat.planning.predict import step_seconds
from preheat.recipe import Recipe
from preheat.technique import Device, Tag

__all__ = ["describe", "overhead_bytes", "plan"]

GIB = 2**30


def overhead_bytes(observation: Observation, device: Device) -> int:
    """What a process holds beside its tensors, by a correction measured on each kind of device.

    On a CPU: stacks and scratch of the threads, oneDNN's kernels, autograd's objects (`_CPU_BASE`), and what glibc's heap
    keeps of freed tensors: an aligned block asks for more than its own size, so that a freed one of the same size rarely
    serves and the heap grows to nearly twice what is alive in it (`_HEAP_KEPT`). Both were fitted to five
    recipes of 0.1 to 4 GiB (15M and 110M, lean and plain); benchmarks/plan_vs_measured.py holds them against more.
    """
    if device.kind == "cpu":
        return round(_CPU_BASE + _HEAP_KEPT * heap_peak(observation.log))
    return round(0.5 * GIB)  # context and cuBLAS workspaces, as commonly reported; not yet measured here


_CPU_BASE = 64 * 2**20
_HEAP_KEPT = 0.7


def steps_of(recipe: Recipe, rows: int | None) -> int | None:
    """Optimizer steps of the whole run; None when only the clock ends it, or when epochs need rows that are not known."""
    stop, batch = recipe.stop, recipe.batch
    found = []
    if stop.steps:
        found.append(stop.steps)
    if stop.tokens:
        found.append(math.ceil(stop.tokens / (batch.size * batch.length)))
    if stop.epochs and rows:
        found.append(max(1, math.ceil(stop.epochs * rows / batch.size)))
    return min(found) if found else None


def plan(
    recipe: Recipe, *, vocabulary: int | None, device: Device, rates: Rates, rows: int | None = None, in_use: int = 0
) -> dict[str, Any]:
    """Predicts memory and time of a recipe on one device.

    Args:
        vocabulary: pieces of the tokenizer.
        rates: measured on `device` (`preheat.hardware.calibrate.rates`).
        rows: training rows, where known; `stop.epochs` needs it.
        in_use: bytes of the device that are taken before the run (on a CPU by the imports).

    Returns:
        The keys of `preheat.run.PLAN_KEYS`.

    Raises:
        RecipeError: the recipe cannot be built.
    """
    seen = observe(recipe, vocabulary=vocabulary, device=device)
    return describe(recipe, seen, device=device, rates=rates, rows=rows, in_use=in_use)


def describe(
    recipe: Recipe, seen: Observation, *, device: Device, rates: Rates, rows: int | None, in_use: int
) -> dict[str, Any]:
    """An observation as a plan."""
    overhead = overhead_bytes(seen, device)
    memory = {category: seen.categories[seen.peak_phase][category] / GIB for category in CATEGORIES} | {
        "overhead": overhead / GIB
    }
    peak = (seen.peak[seen.peak_phase] + overhead) / GIB
    available = (device.memory - in_use) / GIB
    seconds = step_seconds(seen, rates)
    ceiling = rates.peak_matrix_rate[
        "bf16" if any(Tag("bf16-compute") in t.provides for t in recipe.techniques.values()) else "fp32"
    ]
    steps = steps_of(recipe, rows)
    total = seconds * steps if steps else (recipe.stop.hours or 0) * 3600 or None
    return {
        "fits": peak <= available,
        "peak_gib": peak,
        "available_gib": available,
        "memory": memory,
        "phases": {phase: (size + overhead) / GIB for phase, size in seen.peak.items()},
        "peak_phase": seen.peak_phase,
        "seconds_per_step": seconds,
        "tokens_per_second": seen.tokens / seconds,
        "mfu": seen.model_flops / seconds / ceiling,
        "matrix_rate": ceiling,
        "flops_per_step": sum(seen.flops.values()),
        "model_flops_per_step": seen.model_flops,
        "tokens_per_step": seen.tokens,
        "parameters": {"total": seen.parameters, "trained": seen.trained},
        "steps": steps,
        "seconds_total": total,
        "slots": seen.slots,
        "device": {"kind": device.kind, "name": device.name},
        "contended": rates.contended,
    }
