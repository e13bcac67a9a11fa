"""Plans made from the JSON that `preheat plan --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preheat.core.plan import Plan
from preheat.files import read_record

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "overhead")


def values_of(peak: float, available: float, **others: Any) -> dict[str, Any]:
    """The JSON of a plan for a GPU; keys of a plan may be overridden."""
    memory = dict(zip(CATEGORIES, (0.35 * peak, 0.0, 0.02 * peak, 0.59 * peak, 0.0, 0.04 * peak), strict=True))
    speed, tokens = 2379.2, 32768
    return {
        "peak_gib": peak, "peak_gib_interval": [0.88 * peak, 1.12 * peak], "available_gib": available, "in_use_gib": 0.0, "allocator_retries": False,
        "memory": memory, "overhead": {"context": 0.5}, "overhead_sources": {"context": "measured"},
        "allocated_gib": 0.9 * peak, "reserved_gib": 0.95 * peak, "phases": {"forward": peak}, "phase_memory": {"forward": memory},
        "export": None, "peak_phase": "forward", "seconds_per_step": tokens / speed, "tokens_per_second": speed,
        "tokens_per_second_interval": [0.67 * speed, 1.17 * speed], "mfu": 0.5, "matrix_rate": 165e12, "fp32_rate": None,
        "flops_per_step": 1e15, "model_flops_per_step": 1e15, "tokens_per_step": tokens,
        "parameters": {"total": 8234382336, "active": 8234382336, "trained": 43646976}, "steps": None, "seconds_to_start": 60.0,
        "seconds_total": None, "slots": {}, "packages": [], "watts": 450.0, "contended": False, "pace": 1.0, "now": None, "heap": None,
        "device": {"kind": "cuda", "name": "RTX-4090", "memory": int(available * 2**30), "expandable": True}, **others,
    }  # fmt: skip


def plan_of(values: Mapping[str, Any]) -> Plan:
    return read_record(Plan, values)
