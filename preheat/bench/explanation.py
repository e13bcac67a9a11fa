"""Reasons why a contender of a benchmark is slower than another, from their plans and the use of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from preheat.core import MachineUse
from preheat.core.plan import Plan
from preheat.core.units import format_percent, format_three_digits

__all__ = ["NOISE", "describe_slow_bf16", "explain_slowdown", "note_busy_machine"]

NOISE = 0.03
"""Ratios of speeds closer to 1 than this count as equal."""


def describe_slow_bf16(bf16: float, fp32: float, kind: str) -> str:
    """Says how much slower bf16 matmuls are than fp32's.

    Args:
        bf16: FLOP/s of the device's bf16 matmuls.
        fp32: FLOP/s of its fp32 matmuls.
        kind: of the device, as in `Device.kind`.

    Example:
        >>> describe_slow_bf16(5e9, 1e11, "cpu")
        "bf16 matmuls are 20 times slower than fp32's on this CPU"
    """
    times = fp32 / bf16
    return f"bf16 matmuls are {times:.{0 if times >= 10 else 1}f} times slower than fp32's on this {_NAMES[kind]}"


_NAMES = {"cpu": "CPU", "cuda": "GPU"}


def explain_slowdown(plan: Plan | None, baseline: Plan | None) -> str:
    """Returns the reason why a recipe is slower than its baseline, in the words of their plans; "" without plans.

    The reason is the kind of operator that takes the most additional time. If the plan expected more speed, this is
    what the result says.

    Args:
        plan: of the slower recipe.
        baseline: of the recipe that it is compared with, with as many tokens per step.
    """
    if plan is None or baseline is None:
        return ""
    if plan.fp32_rate is not None and baseline.fp32_rate is None:
        return describe_slow_bf16(plan.matrix_rate, plan.fp32_rate, plan.device.kind)
    planned = plan.tokens_per_second / baseline.tokens_per_second
    if planned > 1 + NOISE:
        return f"the plan expected {format_percent(planned - 1)} more speed"
    if planned > 1 - NOISE or plan.split is None or baseline.split is None:
        return "the plan expected no difference"
    # Per token, because contenders may take batches of different sizes.
    kinds, before = (
        {kind: seconds / p.tokens_per_step for kind, seconds in split.kinds.items()}
        for p, split in ((plan, plan.split), (baseline, baseline.split))
    )
    added = {kind: seconds - before.get(kind, 0.0) for kind, seconds in kinds.items()}
    kind = max(added, key=lambda kind: added[kind])
    now, then = (format_three_digits(1e6 * costs.get(kind, 0.0)) for costs in (kinds, before))
    return f"planned: {now} us of {_KINDS.get(kind, kind)} a token, {then} us without it"


_KINDS = {"host only": "the host's work between operators", "elementwise": "elementwise work"}


def note_busy_machine(uses: Sequence[MachineUse | None]) -> str:
    """Returns a note if other processes used cores during a measurement; "" if not, or if it is unknown."""
    busy = [use for use in uses if use is not None and use.alone is False]
    if not busy:
        return ""
    most = max(use.other_cores or 0.0 for use in busy)
    return (
        f"other processes used up to {most:.1f} of {busy[0].cpus} cores in {len(busy)} of {len(uses)} turns: figures "
        "are lower than on an idle machine; repeat it when the machine is idle"
    )
