"""Plans a training loop that is not preheat's, measures its steps, and writes both into a run folder."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from preheat import recipe as recipes
from preheat.core import Phase
from preheat.core.plan import Plan, Verdict
from preheat.core.run_records import (
    DataRecord,
    EvaluationMetrics,
    Event,
    Failed,
    Finished,
    Measured,
    OutOfMemory,
    Started,
    StepMetrics,
)
from preheat.core.units import format_memory
from preheat.errors import DoesNotFit
from preheat.files import to_plain_data
from preheat.hardware.catalogue import resolve_accelerator
from preheat.hardware.cpu_allocator import install_heap, release_unused
from preheat.hardware.deterministic import describe_exactness
from preheat.hardware.energy import count_cpu_energy, count_gpu_energy
from preheat.hardware.gpu_memory import read_memory_peak, read_uuid
from preheat.hardware.machine_use import UseMeter
from preheat.hardware.oom import parse_requested_bytes
from preheat.hardware.probe import probe, reset_peak, resident_bytes
from preheat.integrations.advice import find_changes
from preheat.integrations.loop_memory import add_loop_memory
from preheat.planning.plan import plan as make_plan
from preheat.planning.plan_request import choose_hardware, choose_run_rates, read_bytes_in_use
from preheat.planning.request import Request
from preheat.planning.search.result import describe_shortfall
from preheat.recipe.paths import anchor_paths
from preheat.run.writer import Silent, Writer
from preheat.sanitize import shorten
from preheat.training.observer import Watch
from preheat.training.provenance import record_environment
from preheat.training.system_monitor import SystemMonitor
from preheat.training.throughput import build_measured
from preheat.training.usage import UsageMeter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from preheat.hardware.energy import EnergyCounter
    from preheat.integrations.loop_config import LoopConfig

__all__ = [
    "LoopPlan",
    "OnMisfit",
    "RunRecorder",
    "count_tensor_bytes",
    "plan_loop",
    "predict_loop",
    "preserve_generators",
]

OnMisfit = Literal["warn", "refuse"]
GIB = 2**30
_FIRST_LOOK = 3
"""Steps after which measured and planned figures are first compared."""


@dataclass(frozen=True)
class LoopPlan:
    """A planned loop.

    Attributes:
        loop: as it was read.
        request: what was planned.
        imports: on a CPU, bytes of the process that are not of the run.
    """

    loop: LoopConfig
    request: Request
    plan: Plan
    imports: int


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Leaves torch's random generators, gradients and autocast as they are around work in the middle of a loop."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    before = {kind: torch.is_autocast_enabled(kind) for kind in kinds}
    with torch.random.fork_rng(), torch.enable_grad():
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        try:
            yield
        finally:
            for kind, enabled in before.items():
                torch.set_autocast_enabled(kind, enabled)


def predict_loop(loop: LoopConfig, kind: str, held: int, gpu: str | None = None) -> tuple[Request, Plan]:
    """Returns the plan of a loop, and its request.

    Args:
        kind: cpu or cuda, where the loop runs.
        held: bytes of the loop's weights, which are in memory already.
        gpu: name of another GPU to plan for, or its figures, as `preheat plan --gpu` takes them.

    Raises:
        RecipeError: the loop cannot be planned.
    """
    recipe, here = loop.foreign.recipe, probe(kind)
    if loop.world > 1 and kind == "cpu":  # the processes of a host share its memory
        here = replace(here, memory=here.memory // loop.world)
    with preserve_generators():
        request = Request(recipe, here, world=loop.world, source_config=loop.source_config)
        if gpu is not None:
            device, rates, used = choose_hardware(resolve_accelerator(gpu), recipe, 8)
            request = replace(request, device=device, rates=rates, in_use=used)
        else:
            used = read_bytes_in_use(here)
            request = replace(request, in_use=max(used - held, 0) if kind == "cpu" else used)
            request = replace(request, rates=choose_run_rates(request, torch.get_num_threads()))
        plan = add_loop_memory(make_plan(request), loop.extra)
    return request, replace(plan, reading=loop.foreign.reading, recipe=recipes.to_values(recipe))


def plan_loop(
    loop: LoopConfig, *, kind: str, held: int, gpu: str | None, on_misfit: OnMisfit, watch: Watch
) -> LoopPlan:
    """Plans a loop, and warns or refuses if it does not fit; arguments as of `predict_loop`.

    Raises:
        DoesNotFit: it does not fit, with `refuse`; the message names changes that would.
        RecipeError: the loop cannot be planned.
    """
    watch.stage("planning")
    if kind == "cpu":
        why = "TRL's buffer of logits is wider than the vocabulary" if loop.extra.sparse else install_heap()
        if why:
            watch.notice(f"{why}; torch's own allocator is used, and takes more memory than planned, often a third")
    request, plan = predict_loop(loop, kind, held, gpu)
    watch.planned(plan)
    for key in loop.foreign.reading.not_understood:
        watch.notice(f"{key.key}: {key.value}: not understood; {key.assumed}")
    _judge(plan, request, on_misfit, watch)
    # After planning, which imports modules of its own. Memory that an earlier loop in this process
    # freed would count as held by the imports, and then be reused.
    gc.collect()
    release_unused(kind)
    return LoopPlan(loop, request, plan, max(resident_bytes() - held, 0) if kind == "cpu" else 0)


def _judge(plan: Plan, request: Request, on_misfit: OnMisfit, watch: Watch) -> None:
    """Warns of a loop that does not fit (safely), or refuses it.

    Raises:
        DoesNotFit: with `refuse`.
    """
    if plan.fits:
        if plan.verdict is not Verdict.FITS:
            watch.alarm(
                f"{plan.verdict}: needs {format_memory(plan.peak_gib)} of {format_memory(plan.available_gib)} on "
                f"{plan.device.name}"
            )
        return
    changes = find_changes(request, room=plan.available_gib)
    hint = f"; it fits with {' or '.join(map(str, changes))}" if changes else "; only a smaller model fits"
    message = f"{describe_shortfall(plan)} on {plan.device.name}{hint}"
    if on_misfit == "refuse":
        raise DoesNotFit(message)
    watch.alarm(message)


def count_tensor_bytes(*models: nn.Module) -> int:
    """Returns the bytes of the weights and buffers of models; a shared one counts once."""
    tensors = {id(t): t.nbytes for model in models for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


@dataclass
class _Step:
    """Figures of the present step."""

    begun: float
    positions: int = 0
    length: int = 0
    losses: list[Tensor] = field(default_factory=list)


class RunRecorder:
    """Records the steps of a loop in a run folder, as preheat's own loop does.

    Args:
        out: the folder; new or empty.
        world: number of processes.
        lead: this process writes; the others only plan.
        step: steps of the loop before it was watched.

    Raises:
        RunError: the folder holds other files, or cannot be written.
    """

    def __init__(
        self,
        planned: LoopPlan,
        out: Path,
        watch: Watch,
        *,
        world: int = 1,
        lead: bool = True,
        step: int = 0,
        total: int | None = None,
    ):
        self.planned, self.watch, self.world, self.total = planned, watch, world, total
        self.step = step
        self._kind = "cuda" if planned.request.device.kind == "cuda" and torch.cuda.is_available() else "cpu"
        self.writer = Writer(out) if lead else Silent(out)
        self._speeds: list[float] = []
        self._tokens, self._elapsed, self._loss = 0, 0.0, math.nan
        self._open: _Step | None = None
        self._line: StepMetrics | None = None
        self._use, self._ended = UseMeter(), False
        self._write_start()
        self._usage = UsageMeter(None, devices=world, counter=self._count_energy())
        self._monitor = SystemMonitor(self.writer, lambda: self.step, self._usage) if lead else None
        reset_peak(self._kind)

    @property
    def plan(self) -> Plan:
        """The plan that the loop is compared with."""
        return self.planned.plan

    def _write_start(self) -> None:
        """Writes the files that a run begins with; the recipe last, since a folder with it is a run."""
        request, writer = self.planned.request, self.writer
        try:
            recipe, config = request.recipe, request.source_config
            assert config is not None, "the loop has a model"
            if self.planned.loop.folder is not None and config.name_or_path:  # of the hub
                model = replace(recipe.model, path=config.name_or_path, weights="pretrained")
                recipe = replace(recipe, model=model)
            elif self.planned.loop.folder is not None:
                writer.write_folder("model", config.save_pretrained)
                recipe = replace(recipe, model=replace(recipe.model, path=str(writer.path.absolute() / "model")))
            writer.write_json("data.json", DataRecord(source=str(recipe.data.source), layout="as the loop reads them"))
            writer.write_json("plan.json", self.plan)
            writer.write_json("changes.json", {})
            exactness = describe_exactness(self._kind, torch.are_deterministic_algorithms_enabled())
            here = probe(self._kind)
            writer.write_json(
                "environment.json", record_environment(here, torch.get_num_threads(), self.world, exactness)
            )
            writer.write_text("recipe.yaml", recipes.dump(anchor_paths(recipe)))
            writer.write_event(Started(step=self.step))
        except BaseException:
            writer.remove_unstarted()
            raise

    def _count_energy(self) -> EnergyCounter | None:
        if self._kind == "cpu":
            return count_cpu_energy()
        return count_gpu_energy([read_uuid(torch.cuda.current_device())], self.plan.watts)

    def begin_step(self) -> None:
        """Called before the first micro-batch of a step."""
        self._flush()
        self._open = _Step(time.perf_counter())

    def add_micro_batch(self, rows: int, length: int, loss: Tensor | None) -> None:
        """Called after a micro-batch.

        Args:
            loss: its share of the step's mean loss.
        """
        if self._open is None:
            self.begin_step()
        assert self._open is not None
        self._open.positions += rows * length
        self._open.length = max(self._open.length, length)
        if loss is not None:
            self._open.losses.append(loss.detach())

    def end_step(self, lr: float | None = None) -> None:
        """Called after the update of the weights."""
        step, self._open = self._open, None
        if step is None:
            return
        # Reading the loss waits for the device, so the seconds are those of the whole step.
        self._loss = float(sum(float(loss) for loss in step.losses)) if step.losses else math.nan
        if self._kind == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - step.begun
        self.step += 1
        self._tokens += step.positions * self.world
        self._elapsed += seconds
        speed = step.positions * self.world / seconds
        self._speeds.append(speed)
        self._line = StepMetrics(
            self.step,
            tokens=self._tokens,
            loss=self._loss,
            lr=lr,
            seconds=seconds,
            tokens_per_second=speed,
            memory=self._read_memory(),
            elapsed=self._elapsed,
            length=step.length,
        )
        if self._is_milestone():
            self._compare()

    def add_gradient_norm(self, norm: float) -> None:
        """Adds the norm of the gradients to the last step."""
        if self._line is not None:
            self._line = replace(self._line, gradient_norm=norm)

    def write_evaluation(self, loss: float) -> None:
        """Records the loss of an evaluation after the last step."""
        self._flush()
        self.writer.write_metric(EvaluationMetrics(self.step, validation_loss=loss))
        self.watch.evaluated(self.step, loss)

    def write_event(self, event: Event) -> None:
        """Records an event."""
        self._flush()
        self.writer.write_event(event)

    def measured(self) -> Measured:
        """Returns peak memory and speed so far."""
        peak = read_memory_peak(self._kind, self.planned.imports)
        machine = self._use.use(1 if self._kind == "cuda" else torch.get_num_threads()) if self.world == 1 else None
        return replace(build_measured(self.plan, peak, self._speeds, machine), usage=self._usage.read())

    def finish(self) -> None:
        """Ends the run: records what was measured beside the plan."""
        if self._ended:
            return
        self._flush()
        if self._speeds:
            self._compare()
            self.writer.write_event(self.measured())
        self.writer.write_event(
            Finished(
                steps=self.step,
                loss=self._loss,
                tokens=self._tokens,
                seconds=self._elapsed,
                reason="length",
            )
        )
        self._close()

    def fail(self, reason: str) -> None:
        """Ends the run with an error."""
        if self._ended:
            return
        self._flush()
        if self._speeds:
            self.writer.write_event(self.measured())
        self.writer.write_event(Failed(reason=reason))
        self._close()

    def describe_oom(self, error: BaseException, phase: Phase) -> str:
        """Records an out-of-memory error, and returns which changes would have fitted.

        Call it outside of frames that hold tensors of the failed step.
        """
        message = shorten(str(error), 400)
        requested = parse_requested_bytes(message)
        used = read_memory_peak(self._kind, self.planned.imports).total
        # At least the run's peak was available, and at most the memory of the planned device.
        room = min(used + (requested or 0), round(self.plan.available_gib * GIB))
        overhead = sum(self.plan.overhead.values())
        self.write_event(
            OutOfMemory(
                phase=phase,
                step=self.step,
                rank=0,
                message=message,
                requested=requested,
                room=room,
                overhead=round(overhead * GIB),
                in_use={},
                allocator={},
            )
        )
        request = self.planned.request
        with preserve_generators():
            changes = find_changes(request, room=room / GIB)
            # Some of what the plan counts apart from tensors may not have been in use yet.
            less = () if changes else find_changes(request, room=None)
        advice = f"it would have fitted with {' or '.join(map(str, changes))}"
        if not changes:
            advice = f"nothing is known to fit in {format_memory(room / GIB)}" + (
                f"; less is needed with {' or '.join(map(str, less))}" if less else ""
            )
        return (
            f"out of memory in step {self.step + 1}: {format_memory(self.plan.peak_gib)} were planned; {advice}. Run "
            f"folder: {self.writer.path}"
        )

    def _is_milestone(self) -> bool:
        """Returns True after 3 steps, and 10, 100, ...: the first steps warm up."""
        count = len(self._speeds)
        return count == _FIRST_LOOK or (count >= 10 and count == 10 ** (len(str(count)) - 1))

    def _compare(self) -> None:
        measured, plan = self.measured(), self.plan
        assert measured.peak_gib is not None
        assert measured.tokens_per_second is not None
        other = "" if plan.device.kind == self._kind else f" for {plan.device.name}"
        self.watch.notice(
            f"step {self.step:,}: peak {format_memory(measured.peak_gib)}, planned {format_memory(plan.peak_gib)}; "
            f"{measured.tokens_per_second:,.0f} tokens/s, planned {plan.tokens_per_second:,.0f}{other}"
        )

    def _read_memory(self) -> int:
        if self._kind == "cuda":
            return torch.cuda.memory_allocated()
        return max(resident_bytes() - self.planned.imports, 0)

    def _flush(self) -> None:
        """Writes the line of the last step, which waits for the norm of its gradients."""
        if self._line is not None:
            self.writer.write_metric(self._line)
            self.watch.step(to_plain_data(self._line), self.total)
            self._line = None

    def _close(self) -> None:
        self._ended = True
        if self._monitor is not None:
            self._monitor.close()
        self.writer.close()
