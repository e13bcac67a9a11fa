"""The training loop: read a batch, compute gradients, update, check the statistics, log them.

Technique-specific behaviour lives in the build's slots; the data order is a function of the committed samples; the
checkpoint holds everything that resuming needs. The loop itself decides only when to evaluate, save and stop.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from preheat import recipe as recipes
from preheat import remote_code
from preheat.core import Batch, Build, Phase, Shape, Tag, run_records
from preheat.data import compute_baselines
from preheat.data.loader import choose_evaluation_rows, count_consumed_rows
from preheat.engine import checkpoint
from preheat.engine.async_checkpoint import Saved
from preheat.engine.checkpoint import Progress
from preheat.engine.evaluate import Measured
from preheat.engine.step import accumulate_gradients, read_step_stats, split_sources, update
from preheat.errors import PreheatError, RecipeError, RunError
from preheat.evaluation.best import Evaluated, Verdict, criterion_of, judge, scores_given, unknown_score
from preheat.files import to_plain_data
from preheat.hardware.cpu_allocator import release_small, release_unused
from preheat.hardware.deterministic import explain_lacking
from preheat.hardware.interrupts import Interrupted, check
from preheat.hardware.probe import reset_peak
from preheat.model_folder import count_embedding_rows
from preheat.planning.fallback_ladder import describe_differences
from preheat.recipe import Recipe
from preheat.run.layout import MEMORY_KEYS
from preheat.run.reader import Reader
from preheat.tracking.follower import Followers
from preheat.training.hang_watchdog import HangWatchdog
from preheat.training.lr_schedule import compute_lr_factor
from preheat.training.observer import Logged, Watch
from preheat.training.recovery.oom import Recovery
from preheat.training.resume import Looked, early_stopping
from preheat.training.session import Finished, Session, open_session
from preheat.training.signals import SAVE, Signals
from preheat.training.spikes import HISTORY, Range, Spike, SpikeDetector, advance
from preheat.training.system_monitor import SystemMonitor
from preheat.training.throughput import ThroughputMeter
from preheat.training.uploader import open_run_folder
from preheat.training.usage import UsageMeter, open_usage_meter

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.core.plan import Price
    from preheat.hardware.rates import Rates
    from preheat.training.profiler import StepProfiler

__all__ = ["train"]


def train(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    watch: Watch | None = None,
    rates: Rates | None = None,
    trust_remote_code: bool = False,
    profile: int | None = None,
    price: Price | None = None,
    skip_rows: Sequence[Range] = (),
) -> JsonObject:
    """Trains a recipe into a run folder.

    Args:
        out: the folder; default `runs/<name>`. With s3://, gs://, az:// or hf://bucket/folder, the run is written to
            the cache and uploaded there after each checkpoint.
        resume: resume the run in that folder or at that URL: bit for bit on CPUs, and on a GPU with
            `hardware.deterministic`.
        force: train even if the plan says that it does not fit.
        progress: log stages, the plan and steps as `preheat.run` (to standard error if logging is not configured).
        watch: callbacks to use instead.
        rates: measured rates to plan with; by default those of this machine, measured if none are stored.
        trust_remote_code: run Python code from the model's folder; `model.trust_remote_code` alone never does.
        profile: number of steps to profile, after a few to warm up: where their time goes, beside the plan. The folder
            `profile` of the run gets a trace of torch's profiler and our figures.
        skip_rows: rows to leave out, such as those of a spike: each range goes from a number in the order of training,
            from 0, up to, and without, another. Later sessions of the run leave them out too.
        price: of a device-hour (`preheat.core.plan.Price`): adds the cost; by default that of the run's last session.

    Returns:
        {run, steps, loss, validation_loss, tokens_per_second, peak_gib, predicted: {peak_gib, tokens_per_second},
        stopped, reason}; the keys of `preheat.core.run_records.Usage`: device-hours, energy and cost; on a GPU also the
        parts of its memory (`preheat.run.layout.MEMORY_KEYS`); scores: {name:
        value} of the last evaluation, if the objective has metrics (e.g. accuracy); best: {step, value, name}, if the
        recipe keeps the best checkpoint or stops early; target: {loss, steps, tokens, seconds}, once
        `stop.target_loss` is reached; skipped_steps: with fp16 loss scaling (all of them skipped is an error).
        `already_finished` is True if the run had finished before; nothing is written then.

    Raises:
        PreheatError: with a one-line message; see preheat/errors.py for the kinds.

    Example:
        >>> from preheat import load_recipe, train
        >>> train(load_recipe("demo", ["stop.max_steps=20"]), out="runs/first")      # doctest: +SKIP
    """
    if profile is not None and profile < 1:
        raise RecipeError(f"--profile {profile}: must be at least 1, the number of steps to profile")
    if sys.platform == "win32":  # forks, signals and locks of training are those of POSIX
        raise RunError("training runs on Linux and macOS; on Windows, train in WSL 2 (plans and reports work here)")
    with remote_code.trust_remote_code(trust_remote_code):
        seen_by = watch or (Logged() if progress else Watch())
        with open_run_folder(out or Path("runs") / recipe.name, resume=resume, watch=seen_by) as folder:
            return _train(
                recipe,
                folder,
                resume=resume,
                force=force,
                watch=seen_by,
                rates=rates,
                profile=profile,
                price=price,
                skip_rows=skip_rows,
            )


def _train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool,
    force: bool,
    watch: Watch,
    rates: Rates | None,
    profile: int | None,
    price: Price | None,
    skip_rows: Sequence[Range],
) -> JsonObject:
    recipes.check(recipe)  # one that was made in Python: before the data is read
    for first, end in skip_rows:
        if not 0 <= first < end:
            raise RecipeError(f"skip_rows: {first}..{end}: must be A..B with A from 0 and below B, such as 640..704")
    # No watchdog during preparation: rank 0 reads data, benchmarks and plans alone, for as long as that takes.
    session = open_session(
        recipe,
        folder,
        resume=resume,
        watch=watch,
        force=force,
        rates=rates,
        profile=profile,
        price=price,
        remove=skip_rows,
    )
    if isinstance(session, Finished):
        return session.summary
    # The watchdog reports before torch's own timeout, which aborts the process without saying where the others are.
    watchdog = HangWatchdog(session.ranks, 0.8 * recipe.parallel.timeout, watch.alarm)
    usage = open_usage_meter(session) if session.ranks.lead else None
    loop = _Loop(session, watch, watchdog, profile, usage)
    monitor = None
    if usage is not None:
        monitor = SystemMonitor(
            session.writer,
            lambda: session.progress.step,
            usage,
            ranks=watchdog.list_states,
            stopping=lambda: loop.signals.received,
        )
    followers = Followers(session.writer.path, recipe.tracking, watch.notice) if session.ranks.lead else None
    try:
        summary = loop.run()
    except BaseException as error:
        # A checkpoint that is being written may still become complete, and is then what --resume begins with.
        if warning := session.assembled and session.saving.close():
            watch.alarm(warning)
        # A missing deterministic kernel and a lost peer have unreadable messages of torch: replace them by one line.
        explained = explain_lacking(error) or session.ranks.explained(error, session.progress.step)
        # SystemExit means that all ranks restart with a fallback: the run has not failed.
        if not isinstance(error, SystemExit):
            session.writer.write_event(run_records.Failed(reason=str(explained) or type(explained).__name__))
        if explained is not error:
            raise explained from None
        raise
    finally:
        watchdog.close()
        if loop.profiler is not None:
            loop.profiler.close()
        if monitor is not None:
            monitor.close()
        session.writer.close()
        # Last, when the folder has everything that this session writes.
        if followers is not None:
            followers.close()
    session.ranks.leave()
    return summary


# Below this no scale helps: the gradients overflow without any scaling.
_LEAST_LOSS_SCALE = 1.0
# A scale that doubled once too often costs one skipped step. After 8 in a row the gradients are hundreds of times
# larger than those that the scale worked for: the run diverges.
_MANY_SKIPPED = 8
# A run begins with a search for its scale, which skips more steps the larger `loss_scale` is. It ends above this scale:
# at 2 ** 8, gradients overflow fp16's 65,504 from 256 on, and those of a mean loss are smaller.
_LEAST_CALIBRATED = 2.0**8


def _is_alarming(in_a_row: int, scale: float, *, updated: bool) -> bool:
    """Returns True if so many steps in a row were skipped that more than a search for the loss scale is wrong.

    Args:
        scale: the loss scale after them.
        updated: whether the run has updated its weights before.
    """
    return in_a_row >= _MANY_SKIPPED and (updated or scale <= _LEAST_CALIBRATED)


def _has_died_again(events: list[run_records.Event], step: int) -> bool:
    """Returns True if the previous session resumed at this step and ended there without being asked to stop."""
    # The present session has logged its own start already, so the previous session is the one before the last start.
    starts = [n for n, event in enumerate(events) if isinstance(event, run_records.Started | run_records.Resumed)]
    if len(starts) < 2:
        return False
    first, *others = events[starts[-2] : starts[-1]]
    if not isinstance(first, run_records.Resumed) or first.step != step:
        return False
    return not any(isinstance(event, run_records.Stopping) for event in others)


class _Loop:
    """The state of the training loop within one session."""

    def __init__(
        self,
        session: Session,
        watch: Watch,
        watchdog: HangWatchdog,
        profile: int | None = None,
        usage: UsageMeter | None = None,
    ):
        self.session, self.watch, self.watchdog, self.usage = session, watch, watchdog, usage
        self.profiler: StepProfiler | None = None
        if profile is not None:
            # Its import takes time, and runs that are not profiled do without it.
            from preheat.training.profiler import StepProfiler

            self.profiler = StepProfiler(session, profile)
        self.recipe, self.writer = session.recipe, session.writer
        self.recovery = Recovery(session, watchdog, self._log_checkpoints)
        self.meter = ThroughputMeter(session)
        self.loss = self._read_last_loss()
        # The last evaluation and its step, so that a final step that was evaluated on schedule is not evaluated twice.
        self.evaluated: tuple[int, Measured] | None = None
        self.shape: Shape | None = None
        self.signals = Signals()
        self.stopped: str | None = None  # the signal that ends the run
        self.tried = False  # whether this session has evaluated
        self.out_of_time = False  # whether some rank has reached stop.hours
        self.save_now = False  # whether a signal to some rank asks for a checkpoint of the current step
        self.ahead: list[Batch] | Exception | None = None  # the prefetched batch, or the error of reading it
        # What the evaluations up to the current step say about the best checkpoint and stopping early. All ranks have
        # the same, so that they save and stop together.
        self.criterion = criterion_of(self.recipe)
        self.evaluations = self._past_evaluations()
        self.verdict = self._judged()
        self.complete: set[int] = set()  # steps of complete checkpoints
        self.recorded_best: run_records.BestScore | None = None
        self.last_eval_step = self._find_first_eval_step()  # the last step whose evaluation, if due, is done
        self.spikes, self.rewinds = SpikeDetector(), 0
        self.spike: tuple[int, int] | None = None  # step of a spike to go back from, and the position after its batch

    def _read_last_loss(self) -> float:
        """Returns the logged loss of the current step, for sessions that have no step left to train."""
        step = self.session.progress.step
        lines = Reader(self.writer.path).metrics() if step and self.session.ranks.lead else []
        return next((line.loss for line in lines if line.step == step and line.loss is not None), math.nan)

    def _past_evaluations(self) -> dict[int, Evaluated]:
        """Returns the evaluations of this run up to the step at which the session begins, by step."""
        if self.criterion is None:
            return {}
        step, ranks = self.session.progress.step, self.session.ranks
        # From the run's files, which only rank 0 reads.
        if ranks.lead:
            lines = Reader(self.writer.path).evaluations() if step else []
            values = [self.criterion.evaluated(line) for line in lines if line.step <= step]
            ranks.publish("evaluations", values)
        else:
            values = [Evaluated(*value) for value in ranks.fetch("evaluations")]
        return {value.step: value for value in values}

    def _read_spikes(self) -> tuple[SpikeDetector, int]:
        """Returns a detector that remembers the steps up to the current one, and the number of rewinds so far."""
        history: list[tuple[float, float]] = []
        rewinds = 0
        # From the run's files, which only rank 0 reads.
        if self.session.ranks.lead:
            run, step = Reader(self.writer.path), self.progress.step
            figures = [(line.loss, line.gradient_norm) for line in run.metrics() if line.step <= step] if step else []
            # Without the steps that fp16 skipped.
            history = [(x, y) for x, y in figures if x is not None and y is not None and math.isfinite(x + y)]
            rewinds = len(run.events(run_records.Rewound))
        history, rewinds = checkpoint.all_gather_object(self.build, (history[-HISTORY:], rewinds))[0]
        return SpikeDetector(history), rewinds

    def _judged(self) -> Verdict:
        """Judges the evaluations up to the current step."""
        if self.criterion is None:
            return Verdict()
        # After a fallback the current step may be an earlier one.
        steps = sorted(step for step in self.evaluations if step <= self.progress.step)
        return judge([self.evaluations[step] for step in steps], self.criterion)

    def _find_first_eval_step(self) -> int:
        """Returns the step at which the session begins, or -1 if its evaluation is still due.

        An evaluation that killed the process is retried once; if it kills the process again, it is skipped with a
        notice, so that an evaluation that does not fit in memory does not end every later session.
        """
        step, ranks = self.session.progress.step, self.session.ranks
        # Rank 0 decides from the run's files for all ranks, because they must evaluate together.
        if not ranks.lead:
            return int(ranks.fetch("judged"))
        # A resumed step counts as evaluated, unless it is step 0 or its evaluation is missing from the run's folder.
        evaluated = step
        run = Reader(self.writer.path)
        if step == 0 or (self._is_evaluated_at(step) and step not in [e.step for e in run.evaluations()]):
            evaluated = -1
        if step and evaluated < 0 and _has_died_again(run.events(), step):
            evaluated = step
            self.writer.write_event(run_records.Unevaluated(step=step))
            self.watch.notice(
                f"step {step}: its evaluation is skipped, since it ended the run twice; evaluate it with preheat eval"
            )
        ranks.publish("judged", evaluated)
        return evaluated

    def _is_evaluated_at(self, step: int) -> bool:
        every = self.recipe.evaluate.every
        return bool(every and step and step % every == 0 and not self._is_finished() and self.session.probes.any)

    # Properties, because recovery from an out-of-memory error replaces the session's build and progress.
    @property
    def build(self) -> Build:
        return self.session.build

    @property
    def progress(self) -> Progress:
        return self.session.progress

    def run(self) -> JsonObject:
        check()
        # Handlers are installed outside of recovery, so that a signal during a fallback also saves and ends.
        with self.signals:
            return self.recovery.run(self._train)

    def _train(self) -> JsonObject:
        """Trains from the session's progress to the end of the run."""
        while not self._take_steps():
            self._rewind()
        if self.stopped is not None:
            self._check_stop()
        elif self._ends_early():
            self._say_early_end()
        self.watchdog.set_phase(self.progress.step, Phase.SAVING)
        # Before the last evaluation, so that an evaluation that fails loses no step.
        if self.progress.step > max(self.session.saving.last_step, 0):
            self._save(last=True)
        # An asynchronous checkpoint must be complete before the run may claim to have finished.
        self._log_checkpoints(self.session.saving.wait())
        # After saving: with a later end the run can be resumed, and begins with the scale that it has come down to.
        if self.stopped is None:
            self._require_updates()
        # Evaluation, samples and summary; every step is saved by here.
        return self._finish()

    def _take_steps(self) -> bool:
        """Takes steps from the session's progress on; returns False if a spike sends the run back to a checkpoint."""
        # This method starts again after each fallback, so everything below follows from the session's progress.
        self.spikes, self.rewinds = self._read_spikes()
        self.meter = ThroughputMeter(self.session)
        # After recovery the loader begins at the committed samples again, so a batch read before is dropped.
        self.ahead = None
        self._find_best()
        # Once: a fallback in the first step starts this method again, with the hooks of step 0 done.
        if self.progress.step == 0 and self.session.samples.before and self.last_eval_step < 0:
            self._run_unless_stopped(self._record_samples)
            reset_peak(self.build.device.kind)  # the measured peak must not include generation
        self.watch.stage("training")
        # Closing the generator ends the loader's worker processes, also after an error.
        with closing(self.session.rows()) as stream:
            # One turn per optimizer step: hooks that are due, checkpoints that completed, then the step itself.
            while True:
                # First, so that a session resumed at step n makes up for an evaluation of step n that is missing.
                self._run_due_hooks()
                if self._is_finished() or self.stopped is not None:
                    return True
                # An asynchronous checkpoint is logged once it is complete; an error of its write is raised here.
                self.watchdog.set_phase(self.progress.step, Phase.SAVING)
                self._log_checkpoints(self.session.saving.poll())
                with self._profiled():
                    self._run_step(stream)
                # Before anything of the spike's step is saved or evaluated, and before a signal ends the run.
                if self.spike is not None:
                    return False

    def _run_unless_stopped(self, work: Callable[[], object]) -> bool:
        """Runs long work that does not change the weights; returns False if a signal aborted it.

        With several processes the work always completes: the other ranks would wait for an aborted one.
        """
        self.recovery.snapshot()  # so that an abort undoes the changes of this work only
        if self.build.mesh.world > 1:
            work()
            return True
        # A signal raises only inside this block: in the middle of an update, it would leave half-updated weights.
        try:
            with self.signals.raised():
                work()
        except Interrupted:
            if self.recovery.guard is not None:
                self.recovery.guard.restore()
            self.stopped = self.signals.received
            return False
        return True

    def _check_stop(self) -> None:
        self.writer.write_event(run_records.Stopping(signal=self.stopped, step=self.progress.step))
        self.watch.notice(f"{self.stopped}: saving step {self.progress.step} and ending")

    def _say_early_end(self) -> None:
        assert self.criterion is not None, "only a criterion ends a run early"
        name, step = self.criterion.score, self.progress.step
        if self.verdict.ends == "target_loss":
            why = f"the validation loss is at most stop.target_loss {self.criterion.target_loss:g}"
        else:
            why = f"{self.verdict.without} evaluations without a better {name}"
            why += f" than {self.verdict.value:.4g} of step {self.verdict.step:,}" if self.verdict.step else ""
        self.watch.notice(f"step {step:,}: {why}: ending")

    def _run_due_hooks(self) -> None:
        """Runs the evaluation and saves the checkpoint that are due at this step."""
        # All conditions below are equal on all ranks, because evaluating and saving are collectives.
        step, every = self.progress.step, self.recipe.checkpoint.every
        evaluation_due = self._is_evaluated_at(step)
        save_due = every and step and step % every == 0 and not self._is_finished()
        if self.last_eval_step != step and (evaluation_due or (step == 0 and self.session.probes.at_start)):
            # A stopping run leaves this evaluation to the session that resumes it.
            if self.stopped is not None:
                return
            # The first evaluation of a session is the risky one: later ones take the same memory.
            if not self.tried and step not in (0, self.session.saving.last_step, self.recovery.skipped_saves):
                # Saves first, so that a run whose evaluation kills the process resumes at that evaluation.
                self._save()
                self._log_checkpoints(self.session.saving.wait())
            self.tried = True
            if not self._run_unless_stopped(self._evaluate):
                return
            self._update_best()
        self.last_eval_step = step
        save_due = save_due or (self._keeps_best and step > 0 and self.verdict.step == step)
        if self.save_now and step > 0 and not self._is_finished():
            save_due = True
            if self.session.ranks.lead:
                self.watch.notice(f"{SAVE}: saving step {step:,}")
        # The evaluation above may have saved this step, and recovery may have given its checkpoint up.
        if save_due and step not in (self.session.saving.last_step, self.recovery.skipped_saves):
            self._save()
        self.save_now = False

    def _is_finished(self) -> bool:
        total = self.session.total
        if total is not None and self.progress.step >= total:
            return True
        if self._ends_early():
            return True
        # With several processes the clocks differ: only `out_of_time`, which `read_step_stats` shares, may end the run.
        return self.out_of_time or (self.build.mesh.world == 1 and self._is_late())

    def _profiled(self) -> AbstractContextManager[None]:
        if self.profiler is None:
            return nullcontext()
        step = self.progress.step
        return self.profiler.step(self.build, step + 1, self.session.shape(step).length)

    def _enter(self, step: int, phase: Phase) -> None:
        """Tells who watches the steps that a phase of step `step`, counted from 1, begins."""
        self.watchdog.set_phase(step, phase)
        if self.profiler is not None:
            self.profiler.enter(phase)

    def _ends_early(self) -> bool:
        """Returns True if the evaluation of this step ends the run."""
        return self.verdict.ends is not None and self.verdict.at == self.progress.step

    def _run_step(self, stream: Iterator[list[Batch]]) -> None:
        # 1. Read the batch. `step` numbers the step in progress, from 1; `progress.step` counts committed steps.
        start, step = time.perf_counter(), self.progress.step + 1
        self._enter(step, Phase.DATA)
        batch: list[Batch] = []
        try:
            # Reading may wait for a slow stream: in a single process a signal aborts it, and the step does not begin.
            if not self._run_unless_stopped(lambda: batch.extend(self._read(stream))):
                return
        except RunError as error:
            raise RunError(f"{error}; {self._save_before_the_end()}") from None
        # The shape may change between steps; cached blocks of the old sizes would stay beside those of the new ones.
        shape = self.session.shape(self.progress.step)
        if self.shape not in (None, shape):
            release_unused(self.build.device.kind)
        self.shape = shape
        # 2. Compute the gradients of all micro-batches, then update the weights.
        # By updates, not steps: steps that fp16 skips would use up the warm-up before the weights have changed.
        lr = self.session.peak_lr * compute_lr_factor(self.recipe.schedule, self.progress.updates, self.session.total)
        self._enter(step, Phase.GRADIENTS)
        # `lr` is passed to both verbs: a build that steps in backward needs it with the gradients.
        loss = accumulate_gradients(self.build, batch, lr)
        # Between the two verbs, while the gradients are queued on the device and the host is free.
        self._read_ahead(stream)
        self._enter(step, Phase.UPDATE)
        stats = update(self.build, lr)
        # 0 without loss scaling, where no step may be skipped.
        scaling = self.build.loss.dynamic_scale
        loss_scale = scaling.scale() if scaling else torch.zeros_like(stats[0])
        # The only device synchronization of the step. If the gradients are not finite, the update changed no weights.
        self._enter(step, Phase.STEP_STATS)
        late = self._is_late(time.perf_counter() - start)
        # 3. Read the results. Stop requests and time limits travel in the same collective, so that all ranks leave the
        # loop at the same step: a rank that left alone would hang the others.
        flags = (self.signals.received is not None, late, self.signals.save_requested)
        total, metrics, weight, (norm, finite, scale), (some_stopped, some_late, some_save) = read_step_stats(
            self.build, loss, torch.stack([*stats, loss_scale]), flags
        )
        # A signal that arrives after the collective counts in the next step if there are other processes: they do not
        # know of it. Only a single process may act on what it alone knows, here and on its clock in `_is_finished`.
        alone = self.build.mesh.world == 1
        if some_stopped or alone:
            self.stopped = self.signals.received or ("a signal to another process" if some_stopped else None)
        self.out_of_time = some_late and not alone
        # Cleared once all ranks know: an error before this line keeps the request for the next step.
        if some_save:
            self.save_now, self.signals.save_requested = True, False
        # `weight` is the number of trained tokens (or examples) of the global batch: 0 if all its labels are masked.
        mean = total / max(weight, 1)
        # fp16 loss scaling: an overflow of scaled gradients is expected at times, and the update changed no weights.
        skipped = not finite and scale >= _LEAST_LOSS_SCALE and math.isfinite(mean)
        after = advance(
            self.progress.samples, count_consumed_rows(shape, self.recipe.batch.seq_len), self.session.left_out
        )
        if not skipped and not (finite and math.isfinite(mean)):
            spike = self.spikes.compare("gradient_norm" if math.isfinite(mean) else "loss", math.nan)
            assert spike is not None, "a value that is not finite is a spike"
            if not self._report_spike(spike, step, after):
                self._refuse(mean, norm, batch, lr)
            return
        seconds = time.perf_counter() - start
        # 4. Commit. An error before this line repeats the step on the same rows, because `samples` decides which rows
        # come next.
        p = self.progress
        p.samples = after
        p.step += 1
        tokens = shape.rows * shape.length  # on all devices
        p.tokens += tokens
        p.elapsed += seconds
        self._count_skipped(skipped, scale)
        self.loss = mean
        if self.profiler is None or not self.profiler.is_tracing:
            self.meter.speeds.append(tokens / seconds)
        # 5. Log. The file has a line per committed step; reports and resumed sessions read it.
        line = run_records.StepMetrics(
            step=p.step,
            tokens=p.tokens,
            loss=mean,
            lr=lr,
            gradient_norm=norm,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            memory=self.meter.memory(),
            elapsed=p.elapsed,
            length=shape.length,
            skipped_steps=self._skipped(),
            loss_scale=scale if scaling else None,
            loss_by_source=split_sources(self.build, metrics),
            scores=self.build.loss.scores(metrics, weight) | self._drain_events(),
        )
        self.writer.write_metric(line)
        figures = {**to_plain_data(line), "gradient_norm": norm, "mfu": self.meter.mfu(tokens / seconds)}
        self.watch.step(figures, self.session.total)
        if not skipped and (spike := self.spikes.observe(mean, norm)) is not None:
            self._report_spike(spike, p.step, after)

    def _report_spike(self, spike: Spike, step: int, after: int) -> bool:
        """Logs the spike of a step; returns True if the run goes back to the checkpoint before it.

        Args:
            after: position in the data after the step's batch.
        """
        # A batch lies before `after` in one piece, unless rows in its middle are left out.
        consumed = count_consumed_rows(self.session.shape(step - 1), self.recipe.batch.seq_len)
        rows = (after - consumed, after)
        event = run_records.Spike(
            step=step, score=spike.score, value=spike.value, median=spike.median, threshold=spike.threshold, rows=rows
        )
        self.writer.write_event(event)
        limit = self.recipe.checkpoint.rewinds
        goes_back = self.rewinds < limit
        # Every rank sees the same, so one says it.
        if self.session.ranks.lead:
            if goes_back:
                reaction = f"going back to the last checkpoint (rewind {self.rewinds + 1} of {limit})"
            elif limit:
                reaction = f"no rewind is left of checkpoint.rewinds {limit}"
            else:
                reaction = f"its batch has the rows {rows[0]}..{rows[1]} (for --skip-rows)"
            self.watch.alarm(
                f"step {step}: spike of the {spike.score.replace('_', ' ')}, {spike.value:.4g} after a median of "
                f"{spike.median:.4g}; {reaction}"
            )
        if goes_back:
            self.spike = step, after
        return goes_back

    def _rewind(self) -> None:
        """Goes back to the last checkpoint, and leaves out the batches from there to the spike."""
        assert self.spike is not None, "a spike sends the run back"
        session, (spike, end) = self.session, self.spike
        self.spike = None
        self.watchdog.set_phase(spike, Phase.SAVING)
        self._log_checkpoints(session.saving.wait())
        scan: Looked = (None, [])
        if session.ranks.lead:
            scan = checkpoint.find(session.saving.folder, run=self.writer.id)
        newest = checkpoint.read_progress(scan[0]) if scan[0] is not None else Progress()
        step, begin = checkpoint.all_gather_object(self.build, (newest.step, newest.samples))[0]
        # First on record: a process that ends from here on resumes at the checkpoint, and leaves the rows out too.
        self.writer.write_event(run_records.Rewound(step=step, spike=spike, rows=(begin, end)))
        session.scan, session.left_out = scan, (*session.left_out, (begin, end))
        elapsed = self.progress.elapsed
        # It holds copies of the build's buffers, which would stay in memory with it.
        self.recovery.guard = None
        self.watchdog.set_phase(step, Phase.BUILDING)
        session.free_build()
        # Built anew, as in a resumed run: whatever a checkpoint does not hold is as at the beginning.
        session.assemble(resume=True)
        self.progress.elapsed = elapsed  # the time of the discarded steps counts for stop.hours
        # Fallbacks of the discarded steps stay, since there is no more memory; resuming reads them from the log.
        if changes := describe_differences(session.resolved, session.effective):
            self.writer.write_event(run_records.Fallback(step=step, cause="rewound", changed=(), set=changes))
        # Evaluations after this step were of weights that are gone.
        self.evaluated, self.last_eval_step = None, step
        self.evaluations = {at: value for at, value in self.evaluations.items() if at <= step}
        self.watch.notice(f"continuing from step {step:,} without the rows {begin}..{end}")

    def _count_skipped(self, skipped: bool, scale: float) -> None:
        """Counts the committed step if it was skipped, and reports it; `scale` is the loss scale after it."""
        p = self.progress
        if not skipped:
            p.skipped_in_a_row = 0
            return
        scaling = self.build.loss.dynamic_scale
        assert scaling is not None, "only loss scaling skips steps"
        p.skipped += 1
        p.skipped_in_a_row += 1
        self.build.state.skipped = p.skipped
        self.writer.write_event(run_records.Overflow(step=p.step, loss_scale=scale))
        self.watch.notice(
            f"step {p.step}: the scaled gradients overflowed: step skipped, loss scale lowered to {scale:,.0f}"
        )
        in_a_row, updated = p.skipped_in_a_row, p.updates > 0
        # Once, at the first step at which it holds: the step before had one fewer, and twice the scale.
        before, now = (
            _is_alarming(count, at, updated=updated) for count, at in ((in_a_row - 1, 2 * scale), (in_a_row, scale))
        )
        if now and not before:
            self.writer.write_event(run_records.Overflows(step=p.step, steps=in_a_row, loss_scale=scale))
            # Every rank counts the same, so one says it.
            if self.session.ranks.lead:
                lower = f", or a lower optimizer.lr (it is {self.session.peak_lr:.2e})" if updated else ""
                self.watch.alarm(
                    f"step {p.step}: {in_a_row} steps in a row were skipped because gradients overflowed in fp16; the "
                    f"loss scale is down to {scale:,.0f}. {scaling.remedy}{lower}"
                )

    def _skipped(self) -> int | None:
        """Returns the number of skipped steps; None without loss scaling."""
        return self.progress.skipped if self.build.loss.dynamic_scale else None

    def _require_updates(self) -> None:
        """Raises RunError if the run is over and has not changed a weight."""
        p, scaling = self.progress, self.build.loss.dynamic_scale
        if p.step == 0 or p.updates > 0:
            return
        assert scaling is not None, "only loss scaling skips steps"
        steps = "the only step" if p.step == 1 else f"all {p.step:,} steps"
        raise RunError(
            f"no weight has changed: gradients overflowed in fp16 in {steps} of the run, which skips such steps; the "
            f"loss scale is {float(scaling.scale()):,.0f} now. {scaling.remedy}, or a smaller {scaling.initial}"
        )

    def _read(self, stream: Iterator[list[Batch]]) -> list[Batch]:
        """Returns the micro-batches of the next step, prefetched if possible."""
        # Cleared first: if the error is raised, the retry after recovery must read anew.
        ahead, self.ahead = self.ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        rows: list[Batch] = next(stream) if ahead is None else ahead
        return rows

    @property
    def _reads_ahead(self) -> bool:
        """True if the device computes asynchronously, so that the host is free to read."""
        return self.build.device.kind == "cuda"

    def _read_ahead(self, stream: Iterator[list[Batch]]) -> None:
        """Reads the next step's batch while the device computes the gradients; errors are raised in the next step.

        The data order does not change: like the checkpoint, it depends only on the samples trained on.
        """
        total = self.session.total
        # A CPU has computed the gradients by here, so reading ahead would only delay the update.
        if not self._reads_ahead or (total is not None and self.progress.step + 1 >= total):
            return
        # A hang of the reader must be reported as one of the data, not of the gradients.
        self._enter(self.progress.step + 1, Phase.DATA)
        try:
            self.ahead = batches = next(stream)
        except (PreheatError, MemoryError, OSError, RuntimeError) as error:
            self.ahead = error.with_traceback(None)  # the traceback would keep the reader's buffers alive
            return
        self.build.begin(batches[0])  # overlaps with the update, which is queued next

    def _save_before_the_end(self) -> str:
        """Saves the current step, if this is the only process, and describes where `--resume` would resume."""
        # Saving is a collective, and the other ranks may not have failed: only a single process may save here.
        if self.build.mesh.world == 1 and self.progress.step > max(self.session.saving.last_step, 0):
            self._save(last=True)
        at = self.session.saving.last_step
        return f"--resume continues from step {at}" if at > 0 else "no checkpoint was saved yet"

    def _is_late(self, seconds: float = 0.0) -> bool:
        hours = self.recipe.stop.hours
        return hours is not None and self.progress.elapsed + seconds >= hours * 3600

    def _drain_events(self) -> dict[str, int]:
        """Logs the pending events of the build's techniques and returns their counters."""
        while self.build.state.events:
            event = self.build.state.events.pop(0)
            self.writer.write_event(event if event.step is not None else replace(event, step=self.progress.step))
            if isinstance(event, run_records.Notice):
                self.watch.notice(event.message)
        return {name: count() for name, count in self.build.state.counters.items()}

    def _refuse(self, mean: float, norm: float, batch: list[Batch], lr: float) -> None:
        # Names the rows, so that the user can look at the data that the loss was computed on.
        rows = [row for b in batch for row in b.rows]
        listed = ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
        step = self.progress.step + 1
        state = (
            f"The weights of step {step - 1} are untouched"
            if Tag.STEP_IN_BACKWARD not in self.build.tags
            else "Some weights were updated before this was detected: resume from the last checkpoint"
        )
        remedy = f"Try a lower optimizer.lr (it was {lr:.2e}), a longer schedule.warmup_ratio, or fp32"
        # With a finite loss: no loss scale is low enough for these gradients.
        if (scaling := self.build.loss.dynamic_scale) and math.isfinite(mean):
            in_a_row = self.progress.skipped_in_a_row + 1
            state += f". Gradients overflowed in fp16 in {in_a_row} steps in a row, at last without any loss scaling"
            remedy = f"{scaling.remedy}, or a lower optimizer.lr (it was {lr:.2e})"
        raise RunError(
            f"step {step}: the loss is {mean:g} and the gradients' norm {norm:g}; sequences {listed} of the training "
            f"data. {state}. {remedy}"
        )

    def _save(self, *, last: bool = False) -> None:
        self.watchdog.set_phase(self.progress.step, Phase.LAST_SAVING if last else Phase.SAVING)
        # Waits first: a write removes old checkpoints, and must know by then whether the one before it is the best.
        self._log_checkpoints(self.session.saving.wait())
        self._log_checkpoints(self.session.saving.save(self.progress, last=last))
        release_small(self.build.device.kind)

    def _log_checkpoints(self, saved: list[Saved]) -> None:
        for save in saved:
            self.writer.write_event(save.event(self.writer.path))
            self.complete.add(save.step)
        if saved:
            self._mark_best()

    @property
    def _keeps_best(self) -> bool:
        return self.criterion is not None and self.criterion.keep

    def _find_best(self) -> None:
        """Judges the evaluations so far, and makes `checkpoints/best` agree with them."""
        self.verdict = self._judged()
        if not self.session.ranks.lead or self.criterion is None:
            return
        folder, step = self.session.saving.folder, self.verdict.step
        self.complete = {at for at in checkpoint.steps_of(folder, self.writer.id) if at <= self.progress.step}
        for event in Reader(self.writer.path).events(run_records.NewBest)[-1:]:
            self.recorded_best = run_records.BestScore(event.step, event.value, event.score)
        self._update_best()
        # After an evaluation without a checkpoint: of a session that had other settings, or no memory to save it.
        if self._keeps_best and step and step not in self.complete and step != self.progress.step:
            self.watch.notice(
                f"step {step:,} has the best {self.criterion.score} ({self.verdict.value:.4g}) but no checkpoint; the "
                "next better one is kept"
            )

    def _update_best(self) -> None:
        """Judges the newest evaluation, and records and marks a new best one."""
        self.verdict = self._judged()
        best = self._best()
        if best is not None and best != self.recorded_best:
            self.writer.write_event(run_records.NewBest(step=best.step, score=best.name, value=best.value))
            self.recorded_best = best
        self._mark_best()

    def _mark_best(self) -> None:
        """Makes `checkpoints/best` name the best checkpoint if it is complete; the former best one goes after that."""
        step, saving = self.verdict.step, self.session.saving
        if not (self.session.ranks.lead and self._keeps_best and step in self.complete):
            return
        try:
            marked = checkpoint.best_step(saving.folder)
        except RunError as error:  # somebody changed it: it is written again
            self.watch.notice(str(error))
            marked = None
        if marked != step:
            checkpoint.mark_best(saving.folder, step)
            checkpoint.prune(saving.folder, self.progress.step, keep=saving.keep, run=self.writer.id)

    def _evaluate(self) -> float:
        step = self.progress.step
        self.watchdog.set_phase(step, Phase.EVALUATION)
        # A retry after recovery, or the final evaluation, reuses a result of the same weights.
        if self.evaluated is None or self.evaluated[0] != step:
            self.recovery.snapshot()
            result, line = self.session.probes.take(self.build, self.writer, step)
            self.evaluated = (step, result)
            self._record(line)
            if result.weight:
                self.watch.evaluated(step, result.loss, result.scores)
            release_small(self.build.device.kind)
        return self.evaluated[1].loss

    def _record(self, line: run_records.EvaluationMetrics) -> None:
        """Keeps the values of an evaluation that count: on all ranks those of rank 0, which logs them."""
        if self.criterion is None:
            return
        value = Evaluated(*checkpoint.all_gather_object(self.build, self.criterion.evaluated(line))[0])
        if value.score is None:
            raise RecipeError(f"checkpoint.best: {unknown_score(self.criterion.score, scores_given(line))}")
        self.evaluations[value.step] = value

    def _reason(self) -> str:
        """Returns why the run is complete."""
        if self._ends_early() and self.verdict.ends == "target_loss":
            return "target_loss"
        total = self.session.total
        if total is not None and self.progress.step >= total:
            return "length"
        return "patience" if self._ends_early() else "hours"

    def _best(self) -> run_records.BestScore | None:
        if self.criterion is None or not self.verdict.step:
            return None
        return run_records.BestScore(self.verdict.step, self.verdict.value, self.criterion.score)

    def _finish(self) -> JsonObject:
        plan, p = self.session.plan, self.progress
        stopped = self.stopped
        # `stopped` is what ended the steps; a signal during the work below sets `self.stopped` as well.
        complete = stopped is None and self._run_unless_stopped(self._evaluate)
        if complete:
            self._update_best()
        validation = self.evaluated[1].loss if complete and self.evaluated is not None else math.nan
        # Measured before the samples: the predicted peak covers training and evaluation only.
        measured = self.meter.measured(self._drain_events())
        if self.usage is not None:
            measured = replace(measured, usage=self.usage.read())
        if self.meter.speeds:  # a session without a step has no measurements to compare with the plan
            self.writer.write_event(measured)
        # `finished` is the last event of a complete run: launchers read it to decide against another restart.
        if complete and self._run_unless_stopped(self._finish_run):
            end = run_records.Finished(
                steps=p.step,
                loss=self.loss,
                validation_loss=validation,
                tokens=p.tokens,
                seconds=p.elapsed,
                skipped_steps=self._skipped(),
                reason=self._reason(),
                best=self._best(),
            )
            self.writer.write_event(end)
        # A signal interrupted the evaluation, the baselines or the samples, after all steps.
        elif complete or stopped is None:
            self.writer.write_event(run_records.Stopping(signal=self.stopped, step=p.step))
            self.watch.notice(f"{self.stopped}: ending; all steps are done and saved, the figures after them are not")
        figures = to_plain_data(measured)
        summary = {
            "run": str(self.writer.path),
            "steps": p.step,
            **({} if self._skipped() is None else {"skipped_steps": self._skipped()}),
            "loss": self.loss,
            "validation_loss": validation,
            "tokens_per_second": figures.get("tokens_per_second"),
            **{key: figures[key] for key in (*MEMORY_KEYS, "machine") if key in figures},
            **(to_plain_data(self.usage.close()) if self.usage is not None else {}),
            "predicted": plan.predicted.known(),
            "stopped": self.stopped,
        }
        if self.evaluated is not None and self.evaluated[1].scores:
            summary["scores"] = self.evaluated[1].scores
        summary["reason"] = self._reason() if self.stopped is None else None
        return summary | early_stopping(self.recipe, summary, self._best(), p.tokens, p.elapsed)

    def _finish_run(self) -> None:
        try:
            self.meter.store_speed_correction()
        except RunError as error:  # the speed correction is optional: do not fail a finished run
            self.watch.notice(str(error))
        self._record_baselines()
        self._record_samples()

    def _record_baselines(self) -> None:
        if self.recipe.evaluate.baselines:
            self.watch.stage("counting a unigram and a bigram model")
            losses = compute_baselines(
                self.session.data, choose_evaluation_rows(len(self.session.data.validation), self.recipe.evaluate.rows)
            )
            vocabulary = count_embedding_rows(self.session.data.tokenizer)
            self.writer.write_event(run_records.Baseline(vocabulary=vocabulary, **losses))

    def _record_samples(self) -> None:
        if self.session.samples.prompts:
            self.recovery.snapshot()
            self.watch.stage("writing samples")
            self.session.samples.write(self.build, self.writer, step=self.progress.step)
