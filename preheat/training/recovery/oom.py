"""Out-of-memory recovery: rolls the step back and retries it with less memory, on the same rows.

In a single process, the weights are unchanged until the update; RNG state and buffers are restored. A fallback that
only changes how rows are grouped is applied to the existing build; any other is built from a checkpoint saved for it,
as in a resumed run. If the update had begun, training resumes from the last checkpoint. With several processes, a
failing rank cannot continue alone: it writes a record and ends, all ranks are restarted, and rank 0 chooses the
fallback (`fallback_log.apply_fallbacks`).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy
import torch

from preheat import recipe as recipes
from preheat.core import Build, Phase, Stage, Tag
from preheat.core.run_records import OutOfMemory, Unsaved
from preheat.engine import checkpoint
from preheat.engine.async_checkpoint import Saved, Saving
from preheat.engine.checkpoint import is_async
from preheat.errors import RunError
from preheat.files import to_json
from preheat.hardware.cpu_allocator import release_unused
from preheat.hardware.oom import is_oom, memory_limit, parse_requested_bytes, read_reserved_bytes
from preheat.hardware.probe import reset_peak
from preheat.ops.distributed.dtensor_utils import local
from preheat.planning.explain import add_cost
from preheat.planning.fallback_ladder import PlannedFallback
from preheat.recipe import Recipe
from preheat.training.hang_watchdog import HangWatchdog
from preheat.training.recovery.fallback_log import build_event, choose_fallback, find_oom_records, write_oom_record
from preheat.training.session import Session

__all__ = ["StepSnapshot", "Recovery"]

T = TypeVar("T")
_UPDATED = (Phase.UPDATE, Phase.STEP_STATS)
"""Phases in which the weights may be those of the previous or of the next step."""


class StepSnapshot:
    """RNG state and buffers, which forward passes change, so that a failed attempt can be rolled back."""

    def __init__(self, build: Build):
        self.build, self.rank = build, build.mesh.rank
        self.generators = checkpoint.collect_torch_generators(build, self.rank)
        self.python, self.numpy = random.getstate(), numpy.random.get_state()
        # Buffers only: running statistics, for example. Weights do not change before the update, so they need no copy.
        self.buffers = [(buffer, buffer.clone()) for part in build.trained for buffer in part.buffers()]

    def restore(self) -> None:
        """Restores RNG state and buffers, and frees the gradients."""
        # Gradients of the failed attempt would be added to those of the retry.
        self.build.optimizer.zero_grad(set_to_none=True)
        checkpoint.restore_torch_generators(self.generators, self.rank)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        with torch.no_grad():
            for buffer, copy in self.buffers:
                # Copied into the same tensors, because modules and hooks refer to them.
                buffer.copy_(copy)


class Recovery:
    """Runs the training loop and recovers from out-of-memory errors.

    Args:
        watchdog: knows the current phase of this process.
    """

    def __init__(self, session: Session, watchdog: HangWatchdog, log: Callable[[list[Saved]], None]):
        self.session, self.watchdog, self._log = session, watchdog, log
        self.guard: StepSnapshot | None = None
        self._failure: OutOfMemory | None = None  # set while a fallback is chosen for it
        self.skipped_saves = -1
        """The step whose checkpoint was given up."""
        self._unsaved = -1  # the step whose checkpoint failed once

    def snapshot(self) -> None:
        """Snapshots RNG state and buffers before work that may be rolled back (single process only)."""
        # Several processes restart from the last checkpoint, so they need no snapshot.
        if self.session.build.mesh.world == 1:
            self.guard = StepSnapshot(self.session.build)

    def run(self, work: Callable[[], T]) -> T:
        """Runs the work, and again with a fallback after each out-of-memory error.

        `work` must continue from the session's progress.

        Raises:
            RunError: no fallback suffices.
            SystemExit: with several processes, some rank is out of memory; `fallback_log.find_oom_records` finds its
                record after the restart.
        """
        failure: OutOfMemory | None = None
        on_cpu = self.session.device.kind == "cpu"
        while True:
            try:
                # On a CPU the kernel would kill the process; under the limit, the allocation fails and can be handled.
                with memory_limit(self.session.ranks.on_host) if on_cpu else nullcontext():
                    # Inside the `try`: a fallback that itself runs out of memory takes another turn.
                    if failure is not None:
                        self._apply_fallback(failure)
                    return work()
            # Out of memory is a RuntimeError in torch, a MemoryError in Python and an OSError in system calls.
            except (MemoryError, RuntimeError, OSError) as error:
                # Numbers only: the exception holds the frames of the failed attempt, and with them its tensors.
                failure = self._describe(error)
                # Also for other errors: another rank's out-of-memory error may be why this rank failed.
                self._restart_all_ranks(failure)
                if failure is None:
                    raise
            # Retry outside the handler: the exception's traceback would keep the failed attempt's tensors alive.

    def _describe(self, error: BaseException) -> OutOfMemory | None:
        if not is_oom(error):
            return None
        session, kind = self.session, self.session.device.kind
        # `claimed` was allocated before the build, and is no memory of the run.
        requested, in_use = parse_requested_bytes(str(error)), read_reserved_bytes(kind) - session.claimed
        overhead = sum(
            size
            for what, size in session.plan.overhead.items()
            if what in ("process", "packing", "kernels", "context", "workspaces")
        )
        # A request may exceed the device: the room is at most the device without the imports.
        most = session.device.memory - session.imports
        room = None if requested is None else min(in_use + requested, most)
        return OutOfMemory(
            phase=self.watchdog.phase,
            step=session.progress.step,
            rank=session.ranks.rank,
            message=(str(error) or type(error).__name__).splitlines()[0],
            requested=requested,
            room=room,
            overhead=round(overhead * 2**30),
            in_use=_count_bytes_by_category(session.build, in_use) if session.assembled else {"other": in_use},
            allocator=_read_allocator(session) if kind == "cuda" else {},
        )

    def _restart_all_ranks(self, failure: OutOfMemory | None) -> None:
        """Ends this process of several if any rank is out of memory: they must all restart together."""
        session = self.session
        if session.ranks.world == 1:
            return
        # For the next start, in which rank 0 chooses the fallback: only rank 0 writes events.
        if failure is not None:
            write_oom_record(session.writer.path, failure)
            where = f"rank {failure.rank}: out of memory in step {failure.step + 1} ({failure.phase})"
            session.watch.alarm(f"{where}; restarting all ranks from the last checkpoint with less memory")
        # A record of another rank is a reason to end, too: its collectives with this rank will never complete.
        if find_oom_records(session.writer.path):
            raise SystemExit(1)

    def _apply_fallback(self, failure: OutOfMemory) -> None:
        session = self.session
        # Logged first, so that the report finds the failure even if choosing a fallback fails.
        session.writer.write_event(failure)
        if failure.phase is Phase.FALLBACK:  # planning did not fit in memory: free the build, then plan again
            if self._failure is None or not session.assembled:
                raise RunError(f"out of memory, and too little is left to choose a fallback ({failure.message})")
            # The original failure is the one to solve; freeing the build makes room for planning.
            failure = self._failure
            self._save_and_free_build(failure)
        # Before anything else allocates: the failed attempt still holds its tensors.
        self._roll_back()
        if failure.phase in (Phase.SAVING, Phase.LAST_SAVING) and self._retry_save(failure):
            return
        # Kept while planning runs, which may run out of memory itself.
        self._failure = failure
        self.watchdog.set_phase(failure.step, Phase.FALLBACK)
        try:
            ladder, rung = choose_fallback(session.request, failure)
        except RunError:
            if session.assembled:
                self._save_and_free_build(failure)  # saves a checkpoint
            raise
        step = (
            session.progress.step
            if self._apply_in_place(rung.recipe, failure)
            else self._rebuild_from_checkpoint(failure)
        )
        # From here on the fallback is the recipe of the run.
        session.request, self._failure = replace(session.request, recipe=rung.recipe), None
        # With `step`: a run resumed from an earlier checkpoint must not apply this fallback to its steps.
        session.writer.write_event(build_event(session.resolved, rung, ladder, failure, step))
        session.watch.notice(
            f"out of memory in step {failure.step + 1} ({failure.phase}): continuing with {rung.description}"
        )
        # Synchronous checkpoints need no dry run, so they have no plan.
        if isinstance(rung, PlannedFallback):
            session.plan = add_cost(rung.plan, session.ranks.world, session.price)
            session.writer.write_json("plan.json", session.plan)
        # The fallback changes the model: build again and load the checkpoint that was saved for it.
        if not session.assembled:
            self.watchdog.set_phase(step, Phase.BUILDING)
            session.assemble(resume=True)
        reset_peak(session.device.kind)  # the measured peak must be that of the new plan

    def _roll_back(self) -> None:
        """Rolls back the failed attempt, and waits for a checkpoint that is being written."""
        session = self.session
        if session.assembled:
            if self.guard is not None:
                self.guard.restore()
            self.watchdog.set_phase(session.progress.step, Phase.SAVING)
            self._log(session.saving.wait())
        # Reference cycles still hold tensors of the failed attempt; cached memory returns only once they are gone.
        gc.collect()
        release_unused(session.device.kind)

    def _has_intact_weights(self, failure: OutOfMemory) -> bool:
        """Returns True if the weights are still those of the last committed step."""
        # Techniques that step in the backward pass change weights while gradients are computed.
        in_backward = failure.phase is Phase.GRADIENTS and Tag.STEP_IN_BACKWARD in self.session.build.tags
        return failure.phase not in _UPDATED and not in_backward

    def _apply_in_place(self, recipe: Recipe, failure: OutOfMemory) -> bool:
        """Applies the changed techniques to the existing build; returns False if they change the model."""
        session = self.session
        before = session.effective.techniques
        changed = [t for name, t in recipe.techniques.items() if t != before.get(name)]
        # LOADER techniques only group rows and change no module, so they can be applied to a finished build again.
        if (
            not session.assembled
            or not self._has_intact_weights(failure)
            or any(t.stage != Stage.LOADER for t in changed)
        ):
            return False
        for t in changed:
            session.build.changes[t.name()] = [t.apply(session.build, part) for part in session.build.trained]
        # Everything that was derived from the old recipe: the checkpoint's recipe, the writer, shapes and row order.
        session.build.recipe, session.progress.recipe = recipe, recipes.dump(recipe)
        session.saving = Saving(session.build, session.saving.folder, last_step=session.saving.last_step)
        session.read()
        return True

    def _rebuild_from_checkpoint(self, failure: OutOfMemory) -> int:
        """Frees the build, if any; returns the step of the checkpoint that the next build resumes from."""
        session = self.session
        if session.assembled:
            self._save_and_free_build(failure)
        # Looked up again: a checkpoint was perhaps saved just above, or damaged since the start.
        session.scan = checkpoint.find(session.writer.path / "checkpoints", run=session.writer.id)
        newest = session.scan[0]
        return int(newest.name.removeprefix("step-")) if newest else 0

    def _save_and_free_build(self, failure: OutOfMemory) -> None:
        """Saves a checkpoint of the current step, if its weights are intact, and frees the build."""
        session = self.session
        # Otherwise the steps since the last checkpoint are trained again.
        if self._has_intact_weights(failure) and session.progress.step > max(session.saving.last_step, 0):
            for session.saving.file_per_tensor in (
                False,
                True,
            ):  # tensor by tensor if larger files do not fit in memory
                try:
                    saved = session.saving.save(session.progress, last=True)
                except MemoryError as error:
                    session.watch.notice(str(error))
                else:
                    self._log(saved)
                    break
        # The snapshot holds copies of the build's buffers, which would stay in memory with it.
        self.guard = None
        session.free_build()

    def _retry_save(self, failure: OutOfMemory) -> bool:
        """Retries a failed checkpoint once, tensor by tensor, then skips it; returns False if a fallback may help."""
        session = self.session
        # Asynchronous saving copies the whole state: the fallback is to save synchronously.
        if is_async(session.effective, session.device) and failure.phase is Phase.SAVING:
            return False
        # First failure at this step: files of single tensors need the least memory.
        if self._unsaved != failure.step:
            self._unsaved = failure.step
            session.saving.file_per_tensor = True
            return True
        before = (
            "the last intact checkpoint remains"
            if any(session.saving.folder.glob("step-*"))
            else "there is no earlier one"
        )
        message = f"step {failure.step} cannot be saved: out of memory ({failure.message}); {before}"
        # Training may continue without a checkpoint; the last one is the result of the run.
        if failure.phase is Phase.LAST_SAVING:
            raise RunError(message)
        session.watch.alarm(message)
        session.writer.write_event(Unsaved(step=failure.step, reason=failure.message))
        self.skipped_saves = failure.step
        return True


def _count_bytes_by_category(build: Build, in_use: int) -> dict[str, int]:
    """Splits the bytes in use into parameters, gradients, optimizer states and the rest."""
    # `local`: of a sharded tensor, only this rank's shard takes memory here.
    parameters = [p for part in build.trained for p in part.parameters()]
    states = [v for state in build.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    sizes = {
        "parameters": sum(local(p).nbytes for p in parameters),
        "gradients": sum(local(p.grad).nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(local(v).nbytes for v in states if v.device.type == build.torch_device.type),
    }
    return {**sizes, "other": max(in_use - sum(sizes.values()), 0)}


def _read_allocator(session: Session) -> dict[str, int]:
    """Returns counters of torch's CUDA allocator; writes its full state to the run's folder, as JSON."""
    stats = torch.cuda.memory_stats()
    snapshot = {"stats": stats, "segments": torch.cuda.memory_snapshot()}
    session.writer.write_text("memory_snapshot.json", to_json(snapshot, default=str))
    free = [
        block["size"] for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == "inactive"
    ]
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "largest_free": max(free, default=0),
        "retries": stats["num_alloc_retries"],
    }
