"""A callback for transformers' Trainer and TRL's trainers: plans the run before its first step, and measures it."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from preheat.core import Phase
from preheat.errors import DoesNotFit, PreheatError, RunError
from preheat.hardware.oom import is_oom
from preheat.integrations.applied import applied_to
from preheat.integrations.loop_config import read_trainer
from preheat.integrations.micro_batch import find_largest_micro_batch
from preheat.integrations.recorder import OnMisfit, RunRecorder, count_tensor_bytes, plan_loop
from preheat.training.observer import Logged, Watch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from preheat.core.plan import Plan

__all__ = ["PlanCallback"]


class _WithoutSteps(Logged):
    """Logs all but steps, which the trainer logs itself."""

    def step(self, metrics: Mapping[str, Any], total: int | None) -> None:
        pass


class PlanCallback(TrainerCallback):
    """Plans the run of a transformers Trainer or TRL's SFTTrainer or DPOTrainer, and compares it with the plan.

    Before the first step it plans the run under fake tensors, from the trainer's own arguments, model and longest rows,
    and warns or refuses if it does not fit. While the run goes on it measures peak memory and speed, and writes a run
    folder, of which `preheat report` makes a report. An out-of-memory error is raised with a note that says which
    changes would have fitted. The callback changes neither losses nor weights.

    Args:
        device: a GPU of the catalogue to plan for (`H100`), or its figures as for `preheat plan --gpu`; by default the
            device that the trainer runs on.
        on_misfit: warn, or refuse (raise DoesNotFit) if the run does not fit. With refuse, a run that cannot be planned
            is refused too.
        out: the run folder, new or empty; default `preheat` in the trainer's output_dir, or `preheat-2`, ... after an
            earlier run.
        watch: callbacks in place of log lines of `preheat.run`.

    Attributes:
        plan: the plan, from the start of the training on; None if the run cannot be planned.
        run: the run folder.

    Example:
        >>> from transformers import Trainer                                # doctest: +SKIP
        >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[PlanCallback()])  # doctest: +SKIP
        >>> trainer.train()                                                 # doctest: +SKIP
    """

    def __init__(
        self,
        device: str | None = None,
        on_misfit: OnMisfit = "warn",
        *,
        out: str | Path | None = None,
        watch: Watch | None = None,
    ):
        if on_misfit not in ("warn", "refuse"):
            raise RunError(f"on_misfit: {on_misfit!r}: must be 'warn' or 'refuse'")
        self._device, self._on_misfit, self._out, self._watch = device, on_misfit, out, watch
        self._recorder: RunRecorder | None = None
        self._restore: list[Callable[[], None]] = []
        self._lr: float | None = None
        self.plan: Plan | None = None
        self.run: Path | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Plans the run.

        Raises:
            DoesNotFit: it does not fit, and on_misfit is refuse.
            PreheatError: it cannot be planned, and on_misfit is refuse; or the run folder cannot be written.
        """
        self._end("the training ended before its last step")  # an earlier call of `train` that an error ended
        watch = self._watch or _WithoutSteps()
        trainer = _find_trainer()
        model = trainer.model
        assert model is not None
        try:
            batch = find_largest_micro_batch(trainer, kwargs["train_dataloader"])
            settings = applied_to(model).settings
            loop = read_trainer(args, model, batch=batch, max_steps=state.max_steps, applied=settings)
            reference = getattr(trainer, "ref_model", None)  # of DPOTrainer, which a plan has too
            planned = plan_loop(
                loop,
                kind=args.device.type,
                held=count_tensor_bytes(model, *([] if reference is None else [reference])),
                gpu=self._device,
                on_misfit=self._on_misfit,
                watch=watch,
            )
        except DoesNotFit:
            raise
        except PreheatError as error:
            if self._on_misfit == "refuse":
                raise
            watch.alarm(f"this run is not planned, nor measured: {error}")
            return
        self.plan = planned.plan
        recorder = RunRecorder(
            planned,
            self._choose_folder(args),
            watch,
            world=loop.world,
            lead=state.is_world_process_zero,
            step=state.global_step,
            total=state.max_steps,
        )
        self._recorder, self.run = recorder, recorder.writer.path
        listeners = applied_to(model).listeners
        listeners.append(recorder.write_event)
        self._restore.append(listeners.clear)
        self._guard(trainer, "training_step", self._observe_training_step(trainer, recorder))
        self._guard(kwargs["optimizer"], "step", self._observe_update(kwargs["optimizer"], recorder))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock of a step."""
        if self._recorder is not None:
            self._recorder.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes the learning rate of the step, which the schedule changes after it."""
        self._lr = float(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Records the step."""
        if self._recorder is not None:
            self._recorder.end_step(self._lr)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes over the norm of the gradients, which only the logs have."""
        if self._recorder is not None and (norm := (logs or {}).get("grad_norm")) is not None:
            self._recorder.add_gradient_norm(float(norm))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Records the loss of an evaluation."""
        if self._recorder is not None and (loss := (metrics or {}).get("eval_loss")) is not None:
            self._recorder.write_evaluation(float(loss))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Records what was measured, and closes the run folder."""
        self._end(None)

    def _choose_folder(self, args: TrainingArguments) -> Path:
        if self._out is not None:
            return Path(self._out)
        first = Path(args.output_dir or ".") / "preheat"
        later = (first.with_name(f"preheat-{number}") for number in range(2, 10_000))
        return next(path for path in (first, *later) if not (path / "recipe.yaml").exists())

    def _guard(self, owner: Any, name: str, observed: Callable[..., Any]) -> None:
        """Replaces a method of one object until the training ends."""
        before = vars(owner).get(name)
        setattr(owner, name, observed)
        self._restore.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))

    def _observe_training_step(self, trainer: Trainer, recorder: RunRecorder) -> Callable[..., Tensor]:
        run: Callable[..., Tensor] = trainer.training_step

        @functools.wraps(run)
        def training_step(model: nn.Module, inputs: dict[str, Any], *more: Any, **options: Any) -> Tensor:
            rows, length = inputs["input_ids"].shape
            loss = self._explain_oom(recorder, Phase.GRADIENTS, lambda: run(model, inputs, *more, **options))
            recorder.add_micro_batch(rows, length, loss)
            return loss

        return training_step

    def _observe_update(self, optimizer: Any, recorder: RunRecorder) -> Callable[..., Any]:
        run: Callable[..., Any] = optimizer.step

        @functools.wraps(run)
        def step(*args: Any, **options: Any) -> Any:
            return self._explain_oom(recorder, Phase.UPDATE, lambda: run(*args, **options))

        return step

    def _explain_oom(self, recorder: RunRecorder, phase: Phase, work: Callable[[], Any]) -> Any:
        """Does part of a step; an error is recorded, and one of memory raised with a note on what would have fitted."""
        try:
            return work()
        except (MemoryError, RuntimeError, PreheatError) as error:
            reason = f"{type(error).__name__}: {error}"
            if is_oom(error):
                # The frames of the failed work hold its tensors, which the dry runs below should not have to spare.
                traceback.clear_frames(error.__traceback__)
                reason = recorder.describe_oom(error, phase)
                recorder.watch.alarm(reason)
                error.add_note(f"preheat: {reason}")
            self._end(reason)
            raise

    def _end(self, failure: str | None) -> None:
        """Closes the run folder, and gives the trainer its own methods back."""
        while self._restore:
            self._restore.pop()()
        if self._recorder is not None:
            if failure is None:
                self._recorder.finish()
            else:
                self._recorder.fail(failure)
            self._recorder = None


def _find_trainer() -> Trainer:
    """Returns the trainer that is calling a callback, which is not told it.

    Raises:
        RunError: no trainer is.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(owner := frame.f_locals["self"], Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise RunError("PlanCallback: add it to a Trainer, which calls it (callbacks=[PlanCallback()])")
