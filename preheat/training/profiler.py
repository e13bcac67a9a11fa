"""Profiles steps of a run with torch's profiler, and writes `profile/` in its folder.

The steps compute what they compute without it. Imported only if a run is profiled. The parts for a GPU have not run on
one yet.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from preheat.core import Build, MachineUse, Phase, Slot
from preheat.errors import RunError
from preheat.files import to_json, write_atomic
from preheat.hardware.cpu_allocator import release_small
from preheat.hardware.machine_use import UseMeter
from preheat.hardware.oom import is_oom
from preheat.hardware.probe import reset_peak
from preheat.run.layout import PROFILE
from preheat.training.profile_figures import STEP_MARK, Measured, Setting, figures_of, phase_mark
from preheat.training.session import WARM_UP, Session

__all__ = ["StepProfiler"]

_HISTORY = 100_000  # allocations and releases of a memory snapshot: the newest


class StepProfiler:
    """Profiles `steps` steps of a session, after `WARM_UP` others.

    On a GPU it also writes snapshots of the memory for torch's viewer (docs.pytorch.org/memory_viz): `memory.pickle`
    has the allocations of the warm-up, and `out-of-memory.pickle` those before an out-of-memory error. Allocations are
    not recorded during the profiled steps, which that would slow down.

    Attributes:
        done: the files are written.
    """

    def __init__(self, session: Session, steps: int):
        self.session, self.steps = session, steps
        self.folder = session.writer.path / PROFILE
        self.done = False
        self._on_gpu = session.device.kind == "cuda"
        self._restart()

    def _restart(self) -> None:
        """Begins with the warm-up."""
        self._taken = 0  # steps of this session, warm-up included
        self._seconds: list[float] = []  # of the steps before the profiled ones
        self._first = 0  # the first profiled step
        self._length = 0  # tokens of a sequence in it
        self._use: UseMeter | None = None  # of the machine, from then on
        self._profile: profile | None = None
        self._phase: record_function | None = None
        if self._on_gpu and not self.done:
            self._record_memory(True)

    @contextmanager
    def step(self, build: Build, number: int, length: int) -> Iterator[None]:
        """Takes a step, counted from 1, within the profiler if it is due; `length` is that of its sequences."""
        if self.done:
            with self._memory_of_failure():
                yield
            return
        # torch advises to discard a first step, in which tracing itself is set up.
        if self._taken == WARM_UP - 1:
            self._start()
        elif self._profile is not None:
            self._profile.step()
        if self._taken == WARM_UP:
            self._first, self._length, self._use = number, length, UseMeter()
        start = time.perf_counter()
        try:
            with self._memory_of_failure(), self._marked(build, f"{STEP_MARK}{number}"):
                yield
        except BaseException:
            self._stop()
            self._restart()  # a fallback takes the step again
            raise
        # Not the first, which may compile, nor those within the profiler.
        if 0 < self._taken < WARM_UP - 1:
            self._seconds.append(time.perf_counter() - start)
        self._taken += 1
        if self._taken == WARM_UP + self.steps:
            self._finish()

    def close(self) -> None:
        """Ends what is still recorded; says so if the run ended before the profile did."""
        self._stop()
        if self._on_gpu:
            self._record_memory(False)
        if not self.done:
            self.session.watch.notice(
                f"--profile {self.steps}: the run ended after {self._taken:,} of {WARM_UP + self.steps:,} steps, so it "
                "has no profile"
            )

    def enter(self, phase: Phase) -> None:
        """Marks the beginning of a phase, and the end of the one before it."""
        if self._profile is None:
            return
        self._leave()
        self._phase = record_function(phase_mark(phase))
        self._phase.__enter__()

    def _leave(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _start(self) -> None:
        if self._on_gpu:
            self._dump_memory("memory.pickle")
            self._record_memory(False)
        # Before its first use: kineto would print a line to standard error when it starts and when it stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "10")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=self.steps, repeat=1)
        self._profile = profile(activities=activities, schedule=schedule, record_shapes=True)
        self._profile.start()

    def _stop(self) -> profile | None:
        self._leave()
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
        return running

    @contextmanager
    def _marked(self, build: Build, name: str) -> Iterator[None]:
        """Marks a step and its forward passes in the trace."""
        if self._profile is None:
            yield
            return
        inner = build.slot(Slot.MODEL_LOSS)

        def marked(*args: Any, **kwargs: Any) -> Any:
            with record_function(phase_mark(Phase.FORWARD)):
                return inner(*args, **kwargs)

        # The owner stays: this wrapper is no technique.
        owner = build.owner(Slot.MODEL_LOSS)
        build.claim(Slot.MODEL_LOSS, marked, owner)
        try:
            with record_function(name):
                yield
                self._leave()
        finally:
            build.claim(Slot.MODEL_LOSS, inner, owner)

    def _finish(self) -> None:
        running = self._stop()
        assert running is not None, "steps were profiled"
        assert self._use is not None, "the first of them began it"
        machine = self._use.use(self.session.threads)
        self.done = True
        session = self.session
        # All ranks are profiled, so that none waits for a slower one; rank 0 writes.
        if session.ranks.lead:
            self._write(running, machine)
        if self._on_gpu:
            self._record_memory(True)
            return
        # What the profiler held is no memory of the run.
        del running
        gc.collect()
        release_small("cpu")
        if session.total is None or session.progress.step < session.total:
            reset_peak()
        else:
            session.watch.notice("the measured peak includes the profiler's memory, as no step followed")

    @property
    def is_tracing(self) -> bool:
        """True during a step that the profiler slows."""
        return self._profile is not None

    def _write(self, running: profile, machine: MachineUse) -> None:
        session = self.session
        try:
            self.folder.mkdir(exist_ok=True)
            trace = self.folder / "trace.json.gz"
            running.export_chrome_trace(str(trace))
            with gzip.open(trace) as file:
                events = json.load(file)
            figures = figures_of(
                events,
                Setting(session.ranks.rank, session.ranks.world, session.device.name, self._length, self._head()),
                Measured(self._first, statistics.median(self._seconds) if self._seconds else None, machine),
                planned=session.plan.split,
                planned_seconds=session.plan.seconds_per_step,
            )
            write_atomic(self.folder / "profile.json", to_json(figures, indent=1) + "\n")
        except OSError as error:
            raise RunError(
                f"{self.folder}: cannot be written ({error.strerror}); make the folder writable or free some room"
            ) from None
        session.watch.notice(f"profile: {figures.findings[0].text}")

    def _head(self) -> int:
        """Returns the rows of the model's head."""
        rows: int = self.session.request.config.get_text_config().vocab_size
        return rows

    # --- memory of a GPU

    def _record_memory(self, on: bool) -> None:
        torch.cuda.memory._record_memory_history("all" if on else None, max_entries=_HISTORY)

    def _dump_memory(self, name: str) -> None:
        if self.session.ranks.lead:
            self.folder.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.folder / name))

    @contextmanager
    def _memory_of_failure(self) -> Iterator[None]:
        """Writes a snapshot if a step runs out of a GPU's memory, while its tensors are alive."""
        try:
            yield
        except RuntimeError as error:
            if self._on_gpu and is_oom(error):
                self._dump_memory("out-of-memory.pickle")
            raise
