"""Out of memory: the step is undone and taken again in less, on the same rows. Names no technique.

In one process the weights are as they were before the step until it updates them; random generators and buffers are put back. A rung that
changes only how rows are grouped is set in the build as it stands; any other is built anew from a checkpoint that is saved for it, as a
resumed run would be. Where weights were already being updated, the last checkpoint is gone on from. Of several processes none can go on, as
the others wait for it: it leaves word and ends, all are started again, and the first takes the rung (`fallback_log.apply_fallbacks`).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import TypeVar

import numpy
import torch

from preheat import recipe as recipes
from preheat.core import Build, Phase, Stage, Tag
from preheat.engine import checkpoint
from preheat.engine.async_checkpoint import Saving
from preheat.engine.checkpoint import is_async
from preheat.errors import RunError
from preheat.hardware.cpu_allocator import release_unused
from preheat.hardware.oom import asked_bytes, held_bytes, is_oom, memory_limit
from preheat.hardware.probe import reset_peak
from preheat.ops.distributed.dtensor_utils import local
from preheat.recipe import Recipe
from preheat.run_dir import to_json
from preheat.training.hang_watchdog import HangWatchdog
from preheat.training.recovery.fallback_log import Failure, choose_fallback, oom_records, recorded, write_oom_record
from preheat.training.session import Session

__all__ = ["StepSnapshot", "Recovery"]

T = TypeVar("T")
_UPDATED = (Phase.UPDATE, Phase.STEP_STATS)
"""Phases in which the weights may be those of either step."""


class StepSnapshot:
    """What gradients and evaluations change besides gradients: random generators, and buffers that the forward pass writes to."""

    def __init__(self, build: Build):
        self.build, self.rank = build, build.mesh.rank
        self.generators = checkpoint.torch_generators(build, self.rank)
        self.python, self.numpy = random.getstate(), numpy.random.get_state()
        self.buffers = [(buffer, buffer.clone()) for part in build.trained for buffer in part.buffers()]

    def undo(self) -> None:
        """Puts all back, and lets go of gradients."""
        self.build.optimizer.zero_grad(set_to_none=True)
        checkpoint.restore_torch_generators(self.generators, self.rank)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        with torch.no_grad():
            for buffer, kept in self.buffers:
                buffer.copy_(kept)


class Recovery:
    """Takes a run's work through lacks of memory.

    Args:
        standing: says what the process does.
    """

    def __init__(self, session: Session, standing: HangWatchdog):
        self.session, self.standing = session, standing
        self.guard: StepSnapshot | None = None
        self._failure: Failure | None = None  # while a rung is chosen for it
        self.left_out = -1
        """The step whose checkpoint was given up."""
        self._unsaved = -1  # a step that could not be saved once

    def begin(self) -> None:
        """Something begins that may be undone. Only where it can be: several processes begin again from the last checkpoint."""
        if self.session.build.mesh.world == 1:
            self.guard = StepSnapshot(self.session.build)

    def through(self, work: Callable[[], T]) -> T:
        """Does the work, after each lack of memory again with a rung; `work` goes on from where the session stands.

        Raises:
            RunError: no rung suffices.
            SystemExit: of several processes one is out of memory; `fallback_log.oom_records` says so to whoever starts them again.
        """
        failure: Failure | None = None
        on_cpu = self.session.device.kind == "cpu"
        while True:
            try:
                with memory_limit(self.session.ranks.on_host) if on_cpu else nullcontext():
                    if failure is not None:
                        self._step_down(failure)
                    return work()
            except (MemoryError, RuntimeError, OSError) as error:
                failure = self._seen(error)
                self._all_again(failure)
                if failure is None:
                    raise
            # Here the exception is gone, and with its traceback the tensors that the failed attempt held.

    def _seen(self, error: BaseException) -> Failure | None:
        if not is_oom(error):
            return None
        session, kind = self.session, self.session.device.kind
        asked, held = asked_bytes(str(error)), held_bytes(kind) - session.claimed
        beside = sum(
            size
            for what, size in session.plan["overhead"].items()
            if what in ("process", "kernels", "context", "workspaces")
        )
        most = session.device.memory - session.imports
        room = None if asked is None else min(held + asked, most)
        return Failure(
            where=self.standing.phase,
            step=session.progress.step,
            rank=session.ranks.rank,
            words=(str(error) or type(error).__name__).splitlines()[0],
            asked=asked,
            room=room,
            beside=round(beside * 2**30),
            held=_held(session.build, held) if session.assembled else {"other": held},
            allocator=_allocator(session) if kind == "cuda" else {},
        )

    def _all_again(self, failure: Failure | None) -> None:
        """Of several processes, ends this one where it or another is out of memory: they can only begin again together."""
        session = self.session
        if session.ranks.world == 1:
            return
        if failure is not None:
            write_oom_record(session.writer.path, failure)
            where = f"rank {failure.rank}: out of memory in step {failure.step + 1} ({failure.where})"
            session.watch.alarm(f"{where}; started again, all go on from the last checkpoint in less memory")
        if oom_records(session.writer.path):
            raise SystemExit(1)

    def _step_down(self, failure: Failure) -> None:
        session = self.session
        session.writer.event("out_of_memory", **asdict(failure))
        if failure.where is Phase.FALLBACK:  # there was no room to plan in beside the build
            if self._failure is None or not session.assembled:
                raise RunError(f"out of memory, and too little is left to choose a rung in ({failure.words})")
            failure = self._failure
            self._let_go(failure)
        self._undo()
        if failure.where in (Phase.SAVING, Phase.LAST_SAVING) and self._tried_again(failure):
            return
        self._failure = failure
        self.standing.at(failure.step, Phase.FALLBACK)
        assert session.planner is not None, "a process that is alone is the first"
        try:
            ladder, rung = choose_fallback(session.effective, failure, session.planner)
        except RunError:
            if session.assembled:
                self._let_go(failure)  # which saves
            raise
        step = session.progress.step if self._in_place(rung.recipe, failure) else self._part(failure)
        session.effective, self._failure = rung.recipe, None
        session.writer.event(**recorded(session.settled, rung, ladder, failure, step))
        session.watch.notice(f"out of memory in step {failure.step + 1} ({failure.where}): going on with {rung.words}")
        if ladder is not None:
            session.plan = dict(rung.plan)
            session.writer.json("plan.json", session.plan)
        if not session.assembled:
            self.standing.at(step, Phase.BUILDING)
            session.assemble(resume=True)
        reset_peak(session.device.kind)  # what is measured is what was planned

    def _undo(self) -> None:
        """All is as it was before what failed, as far as it can be; what is being written is written to its end."""
        session = self.session
        if session.assembled:
            if self.guard is not None:
                self.guard.undo()
            self.standing.at(session.progress.step, Phase.SAVING)
            for saved in session.saving.wait():
                session.writer.event("checkpoint", **saved.facts(session.writer.path))
        gc.collect()
        release_unused(session.device.kind)

    def _whole(self, failure: Failure) -> bool:
        """Whether the weights are still those of the last committed step."""
        in_backward = failure.where is Phase.GRADIENTS and Tag.STEP_IN_BACKWARD in self.session.build.tags
        return failure.where not in _UPDATED and not in_backward

    def _in_place(self, recipe: Recipe, failure: Failure) -> bool:
        """Sets what differs in the build as it stands, where it is no part of the model."""
        session = self.session
        before = session.effective.techniques
        changed = [t for name, t in recipe.techniques.items() if t != before.get(name)]
        if not session.assembled or not self._whole(failure) or any(t.stage != Stage.LOADER for t in changed):
            return False
        for t in changed:
            session.build.changes[t.name()] = [t.apply(session.build, part) for part in session.build.trained]
        session.build.recipe, session.progress.recipe = recipe, recipes.dump(recipe)
        session.saving = Saving(session.build, session.saving.folder, at=session.saving.at)
        session.read()
        return True

    def _part(self, failure: Failure) -> int:
        """Lets go of the build, if there is one; returns the step of the checkpoint that another goes on from."""
        session = self.session
        if session.assembled:
            self._let_go(failure)
        session.looked = checkpoint.find(session.writer.path / "checkpoints", run=session.writer.id)
        found = session.looked[0]
        return int(found.name.removeprefix("step-")) if found else 0

    def _let_go(self, failure: Failure) -> None:
        session = self.session
        if self._whole(failure) and session.progress.step > max(session.saving.at, 0):
            for session.saving.apart in (False, True):  # tensor by tensor, where there is no memory for larger files
                try:
                    saved = session.saving.begin(session.progress, last=True)
                except MemoryError as error:
                    session.watch.notice(str(error))
                else:
                    for one in saved:
                        session.writer.event("checkpoint", **one.facts(session.writer.path))
                    break
        self.guard = None
        session.let_go()

    def _tried_again(self, failure: Failure) -> bool:
        """A checkpoint that could not be saved is tried once more, tensor by tensor, and then left out."""
        session = self.session
        if is_async(session.effective, session.device) and failure.where is Phase.SAVING:
            return False
        if self._unsaved != failure.step:
            self._unsaved = failure.step
            session.saving.apart = True
            return True
        before = (
            "the last whole checkpoint stands"
            if any(session.saving.folder.glob("step-*"))
            else "there is none before it"
        )
        words = f"step {failure.step} cannot be saved for want of memory ({failure.words}); {before}"
        if failure.where is Phase.LAST_SAVING:
            raise RunError(words)
        session.watch.alarm(words)
        session.writer.event("unsaved", step=failure.step, reason=failure.words)
        self.left_out = failure.step
        return True


def _held(build: Build, held: int) -> dict[str, int]:
    """Bytes by category, as far as they can be told."""
    parameters = [p for part in build.trained for p in part.parameters()]
    states = [v for state in build.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    sizes = {
        "parameters": sum(local(p).nbytes for p in parameters),
        "gradients": sum(local(p.grad).nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(local(v).nbytes for v in states if v.device.type == build.torch_device.type),
    }
    return {**sizes, "other": max(held - sum(sizes.values()), 0)}


def _allocator(session: Session) -> dict[str, int]:
    """Counters of torch's CUDA allocator; its whole state is written beside the run, as JSON."""
    stats = torch.cuda.memory_stats()
    whole = {"stats": stats, "segments": torch.cuda.memory_snapshot()}
    session.writer.text("memory_snapshot.json", to_json(whole, default=str))
    free = [
        block["size"] for segment in whole["segments"] for block in segment["blocks"] if block["state"] == "inactive"
    ]
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "largest_free": max(free, default=0),
        "retries": stats["num_alloc_retries"],
    }
