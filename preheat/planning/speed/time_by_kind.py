"""The predicted seconds of a step, split by the kind of operator, and into gradients and update."""

from __future__ import annotations

from collections import defaultdict

from preheat.core.operator_kinds import OperatorKind, kind_of
from preheat.core.plan import StepSeconds
from preheat.hardware.rates import Rates
from preheat.planning.dispatch_recorder import Kernel
from preheat.planning.observation import Observation
from preheat.planning.speed.roofline import Roofline, estimate_fused_share
from preheat.planning.speed.step_time import estimate_kernel_seconds

__all__ = ["split_step"]


def split_step(
    observation: Observation, rates: Rates | Roofline, total: float, *, length: int, vocabulary: int
) -> StepSeconds:
    """Splits the predicted seconds of a step.

    Kernels take what the rates say, one after the other. The rest of the step is host time, in which nothing computes;
    by `Roofline` also exposed communication, and copies over the link.

    Args:
        total: the predicted seconds of the step.
        length: tokens of a sequence.
        vocabulary: rows of the head.
    """
    kinds: dict[OperatorKind, float] = defaultdict(float)
    update, operators, updating = 0.0, 0, 0
    for kernel, count in observation.kernels.items():
        if kernel.group is not None or (kernel.where != "device" and (isinstance(rates, Roofline) or rates.of_gpu)):
            continue  # collectives and copies over the link overlap with kernels: only the whole step knows their cost
        kind = kind_of(kernel.operator, kernel.shapes, length=length, vocabulary=vocabulary, updating=kernel.alone)
        seconds = _seconds(kernel, observation, rates) * count
        kinds[kind] += seconds
        operators += count
        if kernel.alone:
            updating += count
            update += seconds
    if isinstance(rates, Roofline):
        spent = rates.seconds(observation)
        kinds[OperatorKind.COMMUNICATION] += spent.waiting
        kinds[OperatorKind.COPIES] += spent.link
    rest = max(total - sum(kinds.values()), 0.0)
    kinds[OperatorKind.HOST] += rest
    # The host takes about as long for each operator.
    update += rest * updating / max(operators, 1)
    return StepSeconds({str(kind): kinds[kind] for kind in OperatorKind if kind in kinds}, total - update, update)


def _seconds(kernel: Kernel, observation: Observation, rates: Rates | Roofline) -> float:
    if isinstance(rates, Roofline):
        return rates.kernel_seconds(kernel, observation)
    fused = estimate_fused_share(kernel, observation) if rates.of_gpu else 1.0
    return rates.pace * estimate_kernel_seconds(kernel, rates) * fused
