"""Memory of a GPU by phase: snapshots written by hand, and a profiler on a GPU that is none."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preheat.core import Phase
from preheat.core.step_profile import PhasePeak
from preheat.training.memory_history import compare_peaks, compute_phase_peaks
from preheat.training.profiler import StepProfiler

GIB = 2**30


def entry(action: str, size: int, phase: str) -> dict[str, Any]:
    return {"action": action, "size": size * GIB, "user_metadata": phase}


def snapshot(*entries: dict[str, Any], in_use: int) -> dict[str, Any]:
    segments = [{"device": 0, "active_size": in_use * GIB}, {"device": 1, "active_size": 99 * GIB}]
    return {"segments": segments, "device_traces": [list(entries), []]}


RECORDED = snapshot(
    entry("alloc", 2, ""),  # 5 GiB were in use before it
    entry("alloc", 1, "data"),
    entry("segment_alloc", 20, "gradients"),
    entry("alloc", 6, "gradients"),
    entry("free_requested", 6, "gradients"),
    entry("free_completed", 6, "gradients"),
    entry("free_completed", 3, "update"),
    entry("alloc", 1, "update"),
    entry("oom", 8, "update"),
    in_use=6,
)


def test_peaks_by_phase_follow_from_the_size_at_the_end() -> None:
    peaks = compute_phase_peaks(RECORDED, 0)
    assert peaks == {Phase.DATA: 8 * GIB, Phase.GRADIENTS: 14 * GIB, Phase.UPDATE: 8 * GIB}
    planned = {"load": 5.0, "forward": 9.0, "head and loss": 13.0, "backward": 12.0, "update": 7.0}
    assert compare_peaks(peaks, planned) == (
        PhasePeak("data", 8.0, None),
        PhasePeak("gradients", 14.0, 13.0),
        PhasePeak("update", 8.0, 7.0),
    )


def test_snapshots_of_the_warm_up_and_of_a_failure_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled, max_entries: calls.append(enabled))
    monkeypatch.setattr(memory, "_set_memory_metadata", calls.append)
    monkeypatch.setattr(memory, "_snapshot", lambda: RECORDED)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    session: Any = SimpleNamespace(
        writer=SimpleNamespace(path=tmp_path),
        device=SimpleNamespace(kind="cuda"),
        ranks=SimpleNamespace(lead=True),
        plan=SimpleNamespace(phases={"update": 7.0}),
        watch=SimpleNamespace(notice=calls.append),
    )
    profiler, build = StepProfiler(session, 1), SimpleNamespace()
    monkeypatch.setattr(profiler._tracer, "step", lambda build, number: nullcontext())

    def take(number: int, error: str = "") -> None:
        with profiler.step(build, number, 64):  # type: ignore[arg-type]
            profiler.enter(Phase.GRADIENTS)
            if error:
                raise RuntimeError(error)

    with pytest.raises(RuntimeError):
        take(1, "shapes differ")
    assert not (tmp_path / "profile").exists()
    with pytest.raises(RuntimeError):
        take(1, "CUDA out of memory")
    assert pickle.loads((tmp_path / "profile" / "out-of-memory.pickle").read_bytes()) == RECORDED
    # The fallback takes the step again, and the warm-up begins anew.
    take(1)
    take(2)
    assert not (tmp_path / "profile" / "memory.pickle").exists()
    take(3)
    assert pickle.loads((tmp_path / "profile" / "memory.pickle").read_bytes()) == RECORDED
    assert (
        profiler._peaks == profiler._peaks_of_failure == compare_peaks(compute_phase_peaks(RECORDED, 0), {"update": 7})
    )
    # On from the start, again after each failure; off before the profiled steps.
    assert [call for call in calls if call in ("all", None)] == ["all", "all", "all", None]
    assert calls.count("gradients") == 5
    profiler.close()
    assert calls[-2] == ""
