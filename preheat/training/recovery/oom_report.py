"""The report of `preheat doctor oom`: what filled a run's memory and the cheapest fallbacks, from its folder alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.core import Device, Phase
from preheat.core.run_records import Environment, Fallback, OutOfMemory
from preheat.core.units import format_memory
from preheat.engine.device import resolve_device
from preheat.errors import RunError
from preheat.hardware.cuda_driver import has_cuda
from preheat.hardware.rates import Rates
from preheat.hardware.segments import grows_segments
from preheat.planning.fallback_ladder import find_fallbacks, halve_length
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline
from preheat.recipe import Recipe
from preheat.run.reader import Reader
from preheat.sanitize import shorten
from preheat.training.recovery.fallback_log import effective

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["suggest_allocator_settings", "diagnose"]

GIB = 2**30
WAYS = 3
"""Fallbacks in the report: the cheapest ones."""


def diagnose(run: str | Path) -> JsonObject:
    """Analyses the latest out-of-memory error of a run.

    Returns:
        {failure: the event `out_of_memory` or None, in_use: {category: GiB}, predicted: {category: GiB}, peak_phase,
        room_gib, peak_gib, fallbacks: events of the fallbacks applied, options: [{set, peak_gib, seconds_per_step,
        slower}], at most three, the cheapest first, least: the fallback that needs the least memory if none suffices,
        shorter: settings that would fit in that case, allocator: {set, or, why} or None}.

    Raises:
        RunError: no run, no out-of-memory error in it, or another type of device than this machine has.

    Example:
        >>> diagnose("runs/demo")["options"][0]["set"]  # doctest: +SKIP
        ['techniques.gradient_accumulation.steps=4']
    """
    from preheat.data.tokenizer import load_tokenizer

    reader = Reader(run)
    plan, events = reader.plan, reader.events()
    # Without an event the plan may explain the failure: a run that was forced although it does not fit.
    failures = [event for event in events if isinstance(event, OutOfMemory)]
    if not failures and "plan.json" in reader.damaged:
        raise RunError(
            f"{run}: no out-of-memory event recorded, and plan.json is damaged ({reader.damaged['plan.json']})"
        )
    if not failures and (plan is None or plan.fits):
        raise RunError(
            f"{run}: no out-of-memory event recorded; if the system killed it, lower hardware.memory and plan it again"
        )
    failure = failures[-1] if failures else None
    # Only the fallbacks that were active when it failed, not those that the failure led to.
    before = events[: events.index(failure)] if failure else events
    recipe = recipes.parse(reader.recipe_text, where=f"{run}/recipe.yaml")
    recipe = effective(recipe, before, failure.step if failure else 0)
    machine, measured = _find_machine(recipe, reader.environment)
    request = Request(
        recipe,
        device=machine,
        vocabulary=len(load_tokenizer(str(reader.path / "tokenizer"))),
        rates=measured,
        world=reader.environment.processes,
    )
    phase = Phase.EVALUATION if failure and failure.phase is Phase.EVALUATION else None
    # The room plus the overhead that the plan counts apart from tensors, which is what a plan's peak includes.
    known = failure and failure.room and failure.room + failure.overhead
    room = known / GIB if known else plan.available_gib if plan else None
    if room is None:
        raise RunError(f"{run}: neither its events nor plan.json record how much memory there was; train it again")
    # The same search as during recovery, so that the report offers what a run would choose.
    ladder = find_fallbacks(request, room=room, phase=phase)
    now = ladder.present
    ways = [
        {
            "set": list(rung.set),
            "peak_gib": rung.peak_gib,
            "seconds_per_step": rung.plan.seconds_per_step,
            "slower": rung.plan.seconds_per_step / now.plan.seconds_per_step - 1,
        }
        for rung in ladder.fallbacks[:WAYS]
    ]
    # A shorter length changes the training itself, so it is offered only if nothing else helps.
    fits = None if ways else halve_length(ladder.lowest.recipe, request, room=room, phase=phase)
    return {
        "failure": failure,
        "in_use": {name: size / GIB for name, size in (failure.in_use if failure else {}).items()},
        "predicted": now.plan.memory,
        "peak_phase": now.plan.peak_phase,
        "peak_gib": now.peak_gib,
        "room_gib": room,
        "fallbacks": [event for event in events if isinstance(event, Fallback)],
        "options": ways,
        "least": None if ways else {"set": list(ladder.lowest.set), "peak_gib": ladder.lowest.peak_gib},
        "shorter": list(fits.set) if fits else None,
        "allocator": suggest_allocator_settings(failure) if failure and not machine.expandable else None,
    }


def _find_machine(recipe: Recipe, environment: Environment) -> tuple[Device, Rates | Roofline]:
    """Returns the device of a run and its rates: measured if this machine has one, else from the catalogue."""
    from preheat.hardware.benchmark_rates import rates

    kind = environment.device
    # A run folder copied from a GPU machine: plan for its GPU by the catalogue, with the memory that was recorded.
    if kind == "cuda" and not has_cuda():
        machine = environment.machine
        if machine is None or machine.device is None or machine.memory_gib is None:
            raise RunError("environment.json of the run does not name its GPU; run this on a machine with that GPU")
        roofline = replace(Roofline.of(machine.device), alone=environment.processes in (None, 1))
        memory = round(machine.memory_gib * GIB)
        segments = environment.segments or recipe.hardware.segments
        expandable = grows_segments(segments, amd=roofline.device.generation == "cdna")
        return replace(roofline.as_device, memory=memory, expandable=expandable), roofline
    device, threads = resolve_device(recipe)
    # A dry run for another kind of device would choose other kernels and say nothing about this run.
    if kind not in (None, device.kind):
        raise RunError(
            f"this run used {shorten(kind)}, and the recipe uses {device.kind} here; set hardware.device: "
            f"{shorten(kind)} in its recipe.yaml"
        )
    return device, rates(device, threads)


def suggest_allocator_settings(failure: OutOfMemory) -> dict[str, str] | None:
    """Returns allocator settings if fragmentation caused the error: enough memory was free, but not in one block.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf

    Example:
        >>> counters = {"allocated": 6 << 30, "reserved": 9 << 30, "largest_free": 1 << 28, "retries": 3}
        >>> failure = OutOfMemory(phase=Phase.GRADIENTS, step=0, rank=0, message="", requested=1 << 30, room=None,
        ...                       overhead=0, in_use={}, allocator=counters)
        >>> suggest_allocator_settings(failure)["set"]
        'hardware.segments=expandable'
    """
    # Fragmentation: the allocator held at least as much free memory as was requested.
    counters, requested = failure.allocator, failure.requested
    if not counters or requested is None or (idle := counters["reserved"] - counters["allocated"]) < requested:
        return None
    # Blocks larger than this (MiB) are not split and can be reused for large tensors. torch's minimum is 21.
    size = max(21, (requested >> 20) // 2)
    return {
        "set": "hardware.segments=expandable",
        "or": f"PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:{size}",
        "why": f"{format_memory(idle / GIB)} were reserved and not used, in blocks of at most "
        f"{format_memory(counters['largest_free'] / GIB)}, when {format_memory(requested / GIB)} were asked for",
    }
