"""Learning-rate range test: trains for some steps at rates that rise exponentially, and suggests one from the losses.

Smith 2017, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186), section 3.3, raises the rate
linearly; the exponential rise and the rule for the suggestion, a tenth of the rate with the lowest loss, are those of
fastai (Howard and Gugger 2020, arXiv:2002.04688).
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

from preheat import recipe as recipes
from preheat.core import Batch
from preheat.core.lr_range import LrPoint, LrRange
from preheat.core.schema import Checkpoint, Evaluate, Sample, Schedule, Stop, Tracking
from preheat.engine.step import accumulate_gradients, read_step_stats, update
from preheat.errors import RunError
from preheat.files import to_json, write_atomic
from preheat.hardware.interrupts import check
from preheat.hardware.oom import is_oom, memory_limit
from preheat.recipe import Recipe
from preheat.run.layout import claim_folder
from preheat.training.observer import Watch
from preheat.training.session import Session, open_session

__all__ = ["FIGURES", "find_lr", "read_suggestion", "space_rates"]

FIGURES = "lr-range.json"
"""The file of the results; its page is beside it."""
_DIVERGED = 2.0
"""The test stops once the mean of the last losses is this many times the lowest: a loss that only levels off does not
reach it, and one that explodes passes it within a few steps."""
_NOISE = 4.0
"""Standard errors by which the lowest smoothed loss must be below the first: noise alone reaches 3 in some tests."""


def space_rates(low: float, high: float, steps: int) -> list[float]:
    """Returns `steps` rates from `low` to `high` whose quotients are equal.

    Example:
        >>> [round(rate, 6) for rate in space_rates(1e-4, 1e-1, 4)]
        [0.0001, 0.001, 0.01, 0.1]
    """
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def find_lr(
    recipe: Recipe,
    *,
    out: Path,
    low: float,
    high: float,
    steps: int,
    watch: Watch,
    force: bool = False,
) -> LrRange:
    """Tests rates and writes the measured table to `out`; trains no run, and the weights are discarded.

    Args:
        out: a folder for the results, which may hold those of an earlier test.
        low, high: first and last rate; 0 < low < high.
        steps: at least 10.
        force: test even if the plan says that the training does not fit.

    Raises:
        RunError: `out` holds something else, memory is exhausted, or the losses suggest no rate.
    """
    recipes.check(recipe)
    # Before the data is read, which may take minutes.
    if int(os.environ.get("RANK", "0")) == 0:
        claim_folder(out, "find-lr", (FIGURES, Path(FIGURES).with_suffix(".html").name))
    # Everything that does not concern the steps: the test neither evaluates, generates, saves nor reports.
    tested = replace(
        recipe,
        stop=Stop(max_steps=steps),
        schedule=Schedule(kind="constant", warmup_ratio=0),
        evaluate=Evaluate(),
        checkpoint=Checkpoint(),
        sample=Sample(),
        tracking=Tracking(),
    )
    session = open_session(tested, out, resume=False, watch=watch, force=force, record=False)
    assert isinstance(session, Session), "only a resumed run may have finished"
    watch.stage("testing learning rates")
    measured = _measure(session, space_rates(low, high, steps), watch)
    result = read_suggestion(measured, steps=steps, present=session.peak_lr)
    if session.ranks.lead:
        _write(out / FIGURES, result)
    session.ranks.leave()
    if (problem := _find_problem(result)) is not None:
        raise RunError(f"--lr-range {low:g}..{high:g}: {problem}; the losses are in {out / FIGURES}")
    return result


def _measure(session: Session, rates: Sequence[float], watch: Watch) -> list[tuple[float, float, float]]:
    """Returns (rate, loss, gradient norm) of each step, up to the one at which the loss has diverged."""
    measured: list[tuple[float, float, float]] = []
    half = _half_window(len(rates))
    try:
        with (
            memory_limit(session.ranks.on_host) if session.device.kind == "cpu" else nullcontext(),
            closing(session.rows()) as stream,
        ):
            for step, lr in enumerate(rates):
                check()
                measured.append((lr, *_take_step(session, stream, lr)))
                watch.progress("testing learning rates", step + 1, len(rates))
                if _has_diverged([loss for _, loss, _ in measured], half):
                    break
    except (MemoryError, RuntimeError, OSError) as error:
        if is_oom(error):
            raise RunError(
                f"out of memory in step {len(measured) + 1} of the learning-rate test; use smaller micro-batches "
                "(techniques.gradient_accumulation) or techniques that save memory: a test adds no fallback itself"
            ) from None
        if (explained := session.ranks.explained(error, len(measured))) is not error:
            raise explained from None
        raise
    return measured


def _take_step(session: Session, stream: Iterator[list[Batch]], lr: float) -> tuple[float, float]:
    """Returns the loss and the gradient norm of a step, the same on all ranks; a loss that is not finite is NaN."""
    batch = next(stream)
    loss = accumulate_gradients(session.build, batch, lr)
    stats = update(session.build, lr)
    numbers = read_step_stats(session.build, loss, stats, (False,))
    norm, finite = numbers.more
    mean = numbers.total / max(numbers.weight, 1)
    # An overflow of scaled fp16 gradients skips its update, and the loss is still that of the weights.
    valid = math.isfinite(mean) and (finite or session.build.loss.dynamic_scale is not None)
    return (mean if valid else math.nan), norm


def _half_window(steps: int) -> int:
    """Returns the number of losses on either side that a smoothed loss averages: a twentieth of the test in all."""
    return max(1, steps // 40)


def _has_diverged(losses: Sequence[float], half: int) -> bool:
    if not math.isfinite(losses[-1]):
        return True
    window = 2 * half + 1
    if len(losses) <= window:
        return False
    means = [statistics.fmean(losses[end - window : end]) for end in range(window, len(losses) + 1)]
    return means[-1] > _DIVERGED * min(means)


def _smooth(losses: Sequence[float], half: int) -> list[float]:
    """Returns the mean of each loss with `half` losses before and after it, fewer at the ends."""
    return [statistics.fmean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def read_suggestion(measured: Sequence[tuple[float, float, float]], *, steps: int, present: float) -> LrRange:
    """Smooths the losses of a test and reads the rates from them.

    Args:
        measured: (rate, loss, gradient norm) of each step; the last loss may be NaN.
        steps: planned number of steps.
        present: the rate of the recipe.
    """
    diverged_at = measured[-1][0] if len(measured) < steps or not math.isfinite(measured[-1][1]) else None
    finite = [point for point in measured if math.isfinite(point[1])]
    if not finite:
        raise RunError("--lr-range: the loss is not finite at the first rate; train in fp32, or check the data")
    smoothed = _smooth([loss for _, loss, _ in finite], _half_window(steps))
    lowest = min(range(len(finite)), key=lambda i: smoothed[i])
    # Rates are evenly spaced on a log scale, so differences of the loss are its slope.
    falls = [after - before for before, after in itertools.pairwise(smoothed[: lowest + 1])]
    steepest = min(range(len(falls)), key=lambda i: falls[i]) if falls else 0
    return LrRange(
        suggested=finite[lowest][0] / 10,
        lowest=finite[lowest][0],
        steepest=finite[steepest][0],
        present=present,
        diverged_at=diverged_at,
        steps=steps,
        points=tuple(
            LrPoint(lr, loss, mean, norm if math.isfinite(norm) else None)
            for (lr, loss, norm), mean in zip(finite, smoothed, strict=True)
        ),
    )


def _find_problem(result: LrRange) -> str | None:
    """Returns why the losses suggest no rate; None if they do."""
    losses, smoothed = [p.loss for p in result.points], [p.smoothed for p in result.points]
    window = 2 * _half_window(result.steps) + 1
    # The noise of single losses, from the differences of neighbours, whose trend is small.
    noise = statistics.median([abs(b - a) for a, b in itertools.pairwise(losses)] or [0.0]) * 1.4826 / math.sqrt(2)
    if smoothed[0] - min(smoothed) <= _NOISE * noise / math.sqrt(window):
        return "no rate lowers the loss by more than its noise; test lower and higher ones, or more steps (--lr-steps)"
    if result.diverged_at is None and min(smoothed) in smoothed[-window:]:
        return "the loss still falls at the last rate; test higher ones"
    return None


def _write(path: Path, result: LrRange) -> None:
    try:
        write_atomic(path, to_json(result, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); name another folder with --out") from None
