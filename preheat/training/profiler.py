"""Profiles steps of a run, and writes `profile/` in its folder. Imported only if a run is profiled.

The parts for a GPU have not run on one yet.
"""

from __future__ import annotations

import gc
import pickle
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import profile

from preheat.core import Build, MachineUse, Phase
from preheat.core.step_profile import PhasePeak
from preheat.errors import RunError
from preheat.hardware.cpu_allocator import release_small
from preheat.hardware.machine_use import UseMeter
from preheat.hardware.oom import is_oom
from preheat.hardware.probe import reset_peak
from preheat.run.layout import PROFILE
from preheat.training.memory_history import compare_peaks, compute_phase_peaks
from preheat.training.profile_figures import Measured, Setting
from preheat.training.session import WARM_UP, Session
from preheat.training.step_tracer import StepTracer, write_profile

__all__ = ["StepProfiler"]

_HISTORY = 100_000  # allocations and releases of a memory snapshot: the newest


class StepProfiler:
    """Profiles `steps` steps of a session, after `WARM_UP` others.

    On a GPU it also writes snapshots of the memory for torch's viewer (docs.pytorch.org/memory_viz): `memory.pickle`
    has the allocations of the warm-up, and `out-of-memory.pickle` those before an out-of-memory error, each allocation
    with its phase. The figures have the peaks of both by phase. Allocations are not recorded during the profiled steps,
    which that would slow down.

    Attributes:
        done: the files are written.
    """

    def __init__(self, session: Session, steps: int):
        self.session, self.steps = session, steps
        self.folder = session.writer.path / PROFILE
        self.done = False
        self._on_gpu = session.device.kind == "cuda"
        self._tracer = StepTracer(steps, on_gpu=self._on_gpu)
        self._peaks: tuple[PhasePeak, ...] = ()  # of the warm-up
        self._peaks_of_failure: tuple[PhasePeak, ...] = ()
        self._restart()

    def _restart(self) -> None:
        """Begins with the warm-up."""
        self._taken = 0  # steps of this session, warm-up included
        self._seconds: list[float] = []  # of the steps before the profiled ones
        self._first = 0  # the first profiled step
        self._length = 0  # tokens of a sequence in it
        self._use: UseMeter | None = None  # of the machine, from then on
        if self._on_gpu and not self.done:
            self._record_memory(True)

    @contextmanager
    def step(self, build: Build, number: int, length: int) -> Iterator[None]:
        """Takes a step, counted from 1, within the profiler if it is due; `length` is that of its sequences."""
        if self.done:
            with self._memory_of_failure():
                yield
            return
        if self._on_gpu and self._taken == WARM_UP - 1:
            self._peaks = self._dump_memory("memory.pickle")
            self._record_memory(False)
        if self._taken == WARM_UP:
            self._first, self._length, self._use = number, length, UseMeter()
        start = time.perf_counter()
        try:
            with self._memory_of_failure(), self._traced(build, number):
                yield
        except BaseException:
            self._tracer.stop()
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
        self._tracer.stop()
        if self._on_gpu:
            self._record_memory(False)
            torch.cuda.memory._set_memory_metadata("")
        if not self.done:
            self.session.watch.notice(
                f"--profile {self.steps}: the run ended after {self._taken:,} of {WARM_UP + self.steps:,} steps, so it "
                "has no profile"
            )

    @property
    def is_tracing(self) -> bool:
        """True during a step that the profiler slows."""
        return self._tracer.is_tracing

    def enter(self, phase: Phase) -> None:
        """Marks the beginning of a phase, and the end of the one before it."""
        if self._on_gpu:
            torch.cuda.memory._set_memory_metadata(str(phase))
        self._tracer.enter(phase)

    def _traced(self, build: Build, number: int) -> AbstractContextManager[None]:
        return self._tracer.step(build, number) if self._taken >= WARM_UP - 1 else nullcontext()

    def _finish(self) -> None:
        traced = self._tracer.stop()
        assert traced is not None, "steps were profiled"
        assert self._use is not None, "the first of them began it"
        machine = self._use.use(self.session.threads)
        self.done = True
        session = self.session
        # All ranks are profiled, so that none waits for a slower one; rank 0 writes.
        if session.ranks.lead:
            self._write(traced, machine)
        if self._on_gpu:
            self._record_memory(True)
            return
        # What the profiler held is no memory of the run.
        del traced
        gc.collect()
        release_small("cpu")
        if session.total is None or session.progress.step < session.total:
            reset_peak()
        else:
            session.watch.notice("the measured peak includes the profiler's memory, as no step followed")

    def _write(self, traced: profile, machine: MachineUse) -> None:
        session = self.session
        figures = write_profile(
            self.folder,
            traced,
            Setting(session.ranks.rank, session.ranks.world, session.device.name, self._length, self._head()),
            Measured(self._first, statistics.median(self._seconds) if self._seconds else None, machine),
            planned=session.plan.split,
            planned_seconds=session.plan.seconds_per_step,
            memory=self._peaks,
            out_of_memory=self._peaks_of_failure,
        )
        session.watch.notice(f"profile: {figures.findings[0].text}")

    def _head(self) -> int:
        """Returns the rows of the model's head."""
        rows: int = self.session.request.config.get_text_config().vocab_size
        return rows

    # --- memory of a GPU

    def _record_memory(self, on: bool) -> None:
        torch.cuda.memory._record_memory_history("all" if on else None, max_entries=_HISTORY)

    def _dump_memory(self, name: str) -> tuple[PhasePeak, ...]:
        """Writes a snapshot and returns its peaks; on rank 0 only."""
        if not self.session.ranks.lead:
            return ()
        snapshot = torch.cuda.memory._snapshot()
        path = self.folder / name
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(pickle.dumps(snapshot))
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written ({error.strerror}); make the folder writable or free some room"
            ) from None
        peaks = compute_phase_peaks(snapshot, torch.cuda.current_device())
        return compare_peaks(peaks, self.session.plan.phases)

    @contextmanager
    def _memory_of_failure(self) -> Iterator[None]:
        """Writes a snapshot if a step runs out of a GPU's memory, while its tensors are alive."""
        try:
            yield
        except RuntimeError as error:
            if self._on_gpu and is_oom(error):
                self._peaks_of_failure = self._dump_memory("out-of-memory.pickle")
            raise
