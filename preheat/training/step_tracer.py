"""Traces training steps with torch's profiler, and writes their trace and their figures.

The steps compute what they compute without it. Imported only if steps are profiled. The parts for a GPU have not run on
one yet.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from preheat.core import Build, Phase, Slot
from preheat.core.plan import StepSeconds
from preheat.core.step_profile import PhasePeak, StepProfile
from preheat.errors import RunError
from preheat.files import to_json, write_atomic
from preheat.torch_compat import read_activity
from preheat.training.profile_figures import STEP_MARK, Measured, Setting, TraceEvent, figures_of, phase_mark

__all__ = ["StepTracer", "read_events", "write_profile"]

_HOST, _GPU = {"cpu_op", "user_annotation"}, {"kernel", "gpu_memcpy", "gpu_memset"}
_LEVEL = 3  # of compression: a fifth larger than at the highest, 9
_BYTES = re.compile(r'"bytes": (\d+)')


class StepTracer:
    """Traces steps: one in which tracing itself is set up, which torch advises to discard, and then `steps` others."""

    def __init__(self, steps: int, *, on_gpu: bool):
        self.steps, self._on_gpu = steps, on_gpu
        self._profile: profile | None = None
        self._phase: record_function | None = None

    @property
    def is_tracing(self) -> bool:
        """True from the first traced step on, until `stop`."""
        return self._profile is not None

    @contextmanager
    def step(self, build: Build, number: int) -> Iterator[None]:
        """Traces a step, and marks it and its forward passes."""
        if self._profile is None:
            self._start()
        else:
            self._profile.step()
        inner = build.slot(Slot.MODEL_LOSS)

        def marked(*args: Any, **kwargs: Any) -> Any:
            with record_function(phase_mark(Phase.FORWARD)):
                return inner(*args, **kwargs)

        # The owner stays: this wrapper is no technique.
        owner = build.owner(Slot.MODEL_LOSS)
        build.claim(Slot.MODEL_LOSS, marked, owner)
        try:
            with record_function(f"{STEP_MARK}{number}"):
                yield
                self._leave()
        finally:
            build.claim(Slot.MODEL_LOSS, inner, owner)

    def enter(self, phase: Phase) -> None:
        """Marks the beginning of a phase, and the end of the one before it; outside of traced steps nothing."""
        if self._profile is None:
            return
        self._leave()
        self._phase = record_function(phase_mark(phase))
        self._phase.__enter__()

    def stop(self) -> profile | None:
        """Ends tracing and returns what was traced; None if nothing was."""
        self._leave()
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
        return running

    def _start(self) -> None:
        # Before its first use: kineto would print a line to standard error when it starts and when it stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "10")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=self.steps, repeat=1)
        self._profile = profile(activities=activities, schedule=schedule, record_shapes=True)
        self._profile.start()

    def _leave(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None


def read_events(traced: profile) -> list[TraceEvent]:
    """Returns the events from which figures are computed.

    They are read from the profiler's memory: parsing the exported trace takes many times as long and more memory.
    """
    assert traced.profiler is not None, "steps were traced"
    result = traced.profiler.kineto_results
    assert result is not None, "tracing has ended"
    # Relative to the start: nanoseconds since 1970 exceed the digits of a float.
    start = result.trace_start_ns()
    # Few names and shapes occur, many times each.
    known: dict[object, Any] = {}
    events: list[TraceEvent] = []
    for event in result.events():
        kind = read_activity(event)
        if kind not in _HOST and kind not in _GPU:
            continue
        shapes: tuple[tuple[int, ...], ...] = ()
        operator, size = event.correlation_id(), 0
        if kind in _GPU:
            operator = event.linked_correlation_id()
            if kind == "gpu_memcpy" and (match := _BYTES.search(event.metadata_json())):
                size = int(match[1])
        elif kind == "cpu_op":
            shapes = tuple(map(tuple, event.shapes()))
            shapes = known.setdefault(shapes, shapes)
        begun = event.start_ns() - start
        events.append(
            TraceEvent(
                sys.intern(kind),
                sys.intern(event.name()),
                begun / 1e3,
                (begun + event.duration_ns()) / 1e3,
                event.device_resource_id(),
                shapes,
                operator,
                size,
            )
        )
    return events


def write_profile(
    folder: Path,
    traced: profile,
    setting: Setting,
    measured: Measured,
    *,
    planned: StepSeconds | None,
    planned_seconds: float,
    memory: tuple[PhasePeak, ...] = (),
    out_of_memory: tuple[PhasePeak, ...] = (),
) -> StepProfile:
    """Writes `profile.json` and `trace.json.gz` into a folder, and returns the figures.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures = figures_of(read_events(traced), setting, measured, planned=planned, planned_seconds=planned_seconds)
        figures = replace(figures, memory=memory, out_of_memory=out_of_memory)
        _export(traced, folder / "trace.json.gz")
        write_atomic(folder / "profile.json", to_json(figures, indent=1) + "\n")
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be written ({error.strerror}); make the folder writable or free some room"
        ) from None
    return figures


def _export(traced: profile, path: Path) -> None:
    """Writes the trace for other viewers, compressed."""
    # torch would compress by lines of text and at the highest level, which takes many times as long.
    plain = path.with_suffix("")
    try:
        traced.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=_LEVEL) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    finally:
        plain.unlink(missing_ok=True)
