"""A plain training loop, planned at its first forward pass and measured until it ends."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from preheat.core import Phase
from preheat.errors import DoesNotFit, PreheatError, RunError
from preheat.hardware.oom import is_oom
from preheat.integrations.loop_config import find_core_model, read_optimizer_loop
from preheat.integrations.micro_batch import MicroBatch
from preheat.integrations.recorder import OnMisfit, RunRecorder, count_tensor_bytes, plan_loop
from preheat.training.observer import Logged, Watch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from preheat.core.plan import Plan

__all__ = ["WatchedLoop", "watch"]

_AUTOCAST = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    accumulation: int = 1,
    steps: int | None = None,
    device: str | None = None,
    on_misfit: OnMisfit = "warn",
    out: str | Path = "runs/watched",
    watch: Watch | None = None,
) -> WatchedLoop:
    """Plans and measures the training loop in the body of a `with` statement, and writes a run folder of it.

    The loop is planned at its first forward pass with gradients, for rows and length of that batch; give it the largest
    first. Steps end with `optimizer.step()`. An out-of-memory error is raised with a note that says what would have
    fitted. Losses and weights do not change.

    Args:
        model: of transformers, with peft's adapters or without, where it trains; called with `input_ids`.
        accumulation: micro-batches of a step.
        steps: of the whole loop, if they are known.
        device, on_misfit: as of `PlanCallback`.
        out: the run folder, new or empty.
        watch: callbacks in place of log lines of `preheat.run`.

    Raises:
        RecipeError: the model is not of transformers.
        DoesNotFit: in the first forward pass with `refuse`: the loop does not fit.

    Example:
        >>> import preheat
        >>> with preheat.watch(model, optimizer, out="runs/mine"):          # doctest: +SKIP
        ...     for batch in loader:
        ...         model(**batch).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    if on_misfit not in ("warn", "refuse"):
        raise RunError(f"on_misfit: {on_misfit!r}: must be 'warn' or 'refuse'")
    find_core_model(model)
    return WatchedLoop(model, optimizer, accumulation, steps, device, on_misfit, Path(out), watch or Logged())


class WatchedLoop:
    """A loop under `watch`.

    Attributes:
        plan: the plan, from the first forward pass on.
        run: the run folder.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accumulation: int,
        steps: int | None,
        device: str | None,
        on_misfit: OnMisfit,
        out: Path,
        watch: Watch,
    ):
        self._model, self._optimizer, self._accumulation, self._steps = model, optimizer, accumulation, steps
        self._device, self._on_misfit, self._watch = device, on_misfit, watch
        self._recorder: RunRecorder | None = None
        self._handles: list[Any] = []
        self._planned = False
        self._phase = Phase.GRADIENTS
        self.plan: Plan | None = None
        self.run = out

    def __enter__(self) -> WatchedLoop:
        self._handles = [
            self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self._model.register_forward_hook(self._after_forward, with_kwargs=True),
            self._optimizer.register_step_pre_hook(self._before_update),
            self._optimizer.register_step_post_hook(self._after_update),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if error is None:
            recorder.finish()
            return
        reason = f"{type(error).__name__}: {error}"
        if is_oom(error):
            # The frames of the failed step hold its tensors, which the dry runs below should not have to spare.
            traceback.clear_frames(trace)
            reason = recorder.describe_oom(error, self._phase)
            recorder.watch.alarm(reason)
            error.add_note(f"preheat: {reason}")
        recorder.fail(reason)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self._phase = Phase.GRADIENTS
        tokens = _find_tokens(args, kwargs)
        if not self._planned:
            self._planned = True
            mask = kwargs.get("attention_mask")
            padded = torch.is_tensor(mask) and not bool(mask.all())
            self._start(MicroBatch(tokens.shape[0], tokens.shape[1], padded), tokens.device.type)

    def _start(self, batch: MicroBatch, kind: str) -> None:
        half = _AUTOCAST.get(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        try:
            loop = read_optimizer_loop(
                self._model,
                self._optimizer,
                batch=batch,
                accumulation=self._accumulation,
                steps=self._steps,
                autocast=half,
                name=self.run.name,
            )
            planned = plan_loop(
                loop,
                kind=kind,
                held=count_tensor_bytes(self._model),
                gpu=self._device,
                on_misfit=self._on_misfit,
                watch=self._watch,
            )
        except DoesNotFit:
            raise
        except PreheatError as error:
            if self._on_misfit == "refuse":
                raise
            self._watch.alarm(f"this loop is not planned, nor measured: {error}")
            return
        self.plan = planned.plan
        self._recorder = RunRecorder(planned, self.run, self._watch, total=self._steps)
        self._recorder.begin_step()

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._recorder is None or not torch.is_grad_enabled():
            return
        rows, length = _find_tokens(args, kwargs).shape
        loss = output.get("loss") if isinstance(output, dict) else None
        # Each micro-batch has its own mean.
        self._recorder.add_micro_batch(rows, length, None if loss is None else loss.detach() / self._accumulation)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._phase = Phase.UPDATE

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._recorder is not None:
            self._recorder.end_step(float(optimizer.param_groups[0]["lr"]))
            self._recorder.begin_step()


def _find_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the token ids of a call of the model, [rows, length].

    Raises:
        RunError: it has none.
    """
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not torch.is_tensor(tokens) or tokens.ndim != 2:
        raise RunError("watch: the model is called without input_ids of [rows, length], which the plan is made for")
    return tokens
