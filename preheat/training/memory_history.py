"""Peaks of a GPU's memory by phase, from the allocations that torch recorded. Has not run on a GPU yet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from preheat.core import Phase
from preheat.core.step_profile import PhasePeak

__all__ = ["compare_peaks", "compute_phase_peaks"]

# The loop computes forward, head, loss and backward in one phase.
_PLANNED = {
    Phase.GRADIENTS: (Phase.FORWARD, Phase.HEAD_AND_LOSS, Phase.BACKWARD),
    Phase.UPDATE: (Phase.UPDATE,),
}
_GIB = 2**30


def compute_phase_peaks(snapshot: Mapping[str, Any], device: int) -> dict[Phase, int]:
    """Returns the most bytes of tensors in each phase of a snapshot, by the phase in the entries' metadata.

    Args:
        snapshot: of `torch.cuda.memory._snapshot`.
    """
    changes = [
        (entry["user_metadata"], entry["size"] if entry["action"] == "alloc" else -entry["size"])
        for entry in snapshot["device_traces"][device]
        if entry["action"] in ("alloc", "free_completed")
    ]
    # The snapshot has the size at its end; what was allocated before the recording is not among the entries.
    end = sum(segment["active_size"] for segment in snapshot["segments"] if segment["device"] == device)
    sizes = itertools.accumulate((size for _, size in changes), initial=end - sum(size for _, size in changes))
    peaks: dict[Phase, int] = {}
    for (name, _), (before, after) in zip(changes, itertools.pairwise(sizes), strict=True):
        # Before the first phase begins there is no name.
        if name:
            phase = Phase(name)
            peaks[phase] = max(peaks.get(phase, 0), before, after)
    return peaks


def compare_peaks(peaks: Mapping[Phase, int], planned: Mapping[str, float]) -> tuple[PhasePeak, ...]:
    """Returns measured peaks beside those of the plan's phases.

    Args:
        planned: {phase: GiB}, as in `Plan.phases`.
    """

    def find_planned(phase: Phase) -> float | None:
        return max((planned[name] for name in _PLANNED.get(phase, ()) if name in planned), default=None)

    return tuple(PhasePeak(str(phase), size / _GIB, find_planned(phase)) for phase, size in peaks.items())
