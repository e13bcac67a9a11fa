"""Best checkpoint and early stopping: decided by a run's evaluations alone, so that a resumed run decides alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from preheat.core.run_records import EvaluationMetrics
from preheat.errors import RecipeError
from preheat.evaluation.long_context import SHARES
from preheat.evaluation.scoring import CLASSES
from preheat.evaluation.tasks import BY_LIKELIHOOD, LengthTask, Task, find_tasks
from preheat.recipe import Recipe
from preheat.sanitize import quote_value

__all__ = [
    "Criterion",
    "Evaluated",
    "Verdict",
    "criterion_of",
    "judge",
    "score_of",
    "scores_given",
    "scores_of",
    "unknown_score",
]

# Metrics of lm-eval of which less is better; all others are shares of right answers or similarities.
_LOWER = re.compile(r"loss|perplexity|ppl|bits_per|brier|error|\b(ter|wer|cer|mse|mae)\b")


class Evaluated(NamedTuple):
    """The values of an evaluation that count here; None if they were not measured."""

    step: int
    score: float | None
    validation_loss: float | None


@dataclass(frozen=True)
class Criterion:
    """When an evaluation is better than those before it, and when a run stops early.

    Attributes:
        score: name of the score, as `checkpoint.best` names it.
        higher: True if higher is better.
        min_delta, patience, target_loss: of the recipe's section `stop`.
        keep: whether the best checkpoint is kept.
    """

    score: str
    higher: bool
    min_delta: float = 0.0
    patience: int | None = None
    target_loss: float | None = None
    keep: bool = False

    def evaluated(self, line: EvaluationMetrics) -> Evaluated:
        """Returns the values of an evaluation that count."""
        return Evaluated(line.step, score_of(line, self.score), line.validation_loss)


@dataclass(frozen=True)
class Verdict:
    """The result of the evaluations of a run.

    Attributes:
        step, value: the best step and its score; step 0: none yet.
        without: evaluations since then, none of which was better.
        at: step of the last evaluation; 0: none yet.
        ends: why the run ends at that step, if it does.
    """

    step: int = 0
    value: float = math.nan
    without: int = 0
    at: int = 0
    ends: Literal["patience", "target_loss"] | None = None


def judge(evaluations: Iterable[Evaluated], criterion: Criterion) -> Verdict:
    """Judges the evaluations of a run up to a step, in the order of their steps.

    An evaluation is better if it exceeds the best one so far by more than `min_delta`. The evaluation before the first
    step has no checkpoint, so it does not count.

    Example:
        >>> losses = enumerate([3.0, 2.0, 2.5, 2.1], start=1)
        >>> evaluations = [Evaluated(10 * n, loss, loss) for n, loss in losses]
        >>> judge(evaluations, Criterion("validation_loss", higher=False, patience=2))
        Verdict(step=20, value=2.0, without=2, at=40, ends='patience')
    """
    sign = 1 if criterion.higher else -1
    best, without, last = (0, math.nan), 0, None
    for last in (e for e in evaluations if e.step > 0):
        # Of a score that is missing or not finite nothing is known: it is no improvement.
        score = math.nan if last.score is None else last.score
        better = math.isfinite(score) and (best[0] == 0 or sign * (score - best[1]) > criterion.min_delta)
        best, without = ((last.step, score), 0) if better else (best, without + 1)
    if last is None:
        return Verdict()
    ends: Literal["patience", "target_loss"] | None = None
    if criterion.patience is not None and without >= criterion.patience:
        ends = "patience"
    loss = last.validation_loss
    # NaN is not at or below anything.
    if criterion.target_loss is not None and loss is not None and loss <= criterion.target_loss:
        ends = "target_loss"
    return Verdict(*best, without, last.step, ends)


def score_of(line: EvaluationMetrics, name: str) -> float | None:
    """Returns a score of an evaluation by its name: `validation_NAME`, `forgetting_loss` or `TASK/METRIC`."""
    task, slash, metric = name.rpartition("/")
    if slash:
        return (line.tasks or {}).get(task, {}).get(metric)
    if name in ("validation_loss", "forgetting_loss"):
        value: float | None = getattr(line, name)
        return value
    return line.scores.get(name)


def scores_given(line: EvaluationMetrics) -> list[str]:
    """Returns the names of the scores of an evaluation."""
    losses = [name for name in ("validation_loss", "forgetting_loss") if getattr(line, name) is not None]
    tasks = [f"{task}/{metric}" for task, metrics in (line.tasks or {}).items() for metric in metrics]
    return [*losses, *line.scores, *tasks]


def criterion_of(recipe: Recipe) -> Criterion | None:
    """Returns the recipe's criterion; None if it neither keeps the best checkpoint nor stops early.

    Raises:
        RecipeError: no evaluation of this recipe gives the score.
    """
    stop, best = recipe.stop, recipe.checkpoint.best
    if best is None and stop.patience is None and stop.target_loss is None:
        return None
    score, tasks = best or "validation_loss", find_tasks(recipe.evaluate.tasks, knob="evaluate.tasks")
    scores = scores_of(recipe, tasks)
    higher = scores.get(score)
    # The metrics of lm-eval's tasks are known only once they are measured; the first time before the first step.
    if higher is None and "/" in score and any(isinstance(task, str) for task in tasks):
        higher = _LOWER.search(score.rpartition("/")[2]) is None
    if higher is None:
        limit = "patience" if stop.patience is not None else "target_loss"
        key = "checkpoint.best" if best is not None else f"stop.{limit}"
        raise RecipeError(f"{key}: {unknown_score(score, list(scores))}")
    if stop.target_loss is not None and "validation_loss" not in scores:
        raise RecipeError(f"stop.target_loss: {unknown_score('validation_loss', list(scores))}")
    return Criterion(score, higher, stop.min_delta, stop.patience, stop.target_loss, keep=best is not None)


def unknown_score(name: str, known: Sequence[str]) -> str:
    """Returns the message for a score that no evaluation gives."""
    return f"no evaluation of this recipe gives {quote_value(name, 60)}; it gives: {', '.join(known) or 'none'}"


def scores_of(recipe: Recipe, tasks: Sequence[Task | LengthTask | str]) -> dict[str, bool]:
    """Returns the scores of each evaluation: name -> whether higher is better. Those of lm-eval's tasks are unknown."""
    scores: dict[str, bool] = {}
    if recipe.data.validation != 0:
        scores["validation_loss"] = False
        for technique in recipe.techniques.values():
            scores |= {f"validation_{name}": higher for name, higher in technique.evaluation_scores().items()}
    if recipe.evaluate.forgetting is not None:
        scores["forgetting_loss"] = False
    head = CLASSES in {tag for technique in recipe.techniques.values() for tag in technique.provided()}
    for task in tasks:
        if isinstance(task, str):
            continue
        metrics = _of_length(task) if isinstance(task, LengthTask) else _of_task(task, head=head)
        scores |= {f"{task.name}/{metric}": higher for metric, higher in metrics.items()}
    return scores


def _of_task(task: Task, *, head: bool) -> dict[str, bool]:
    """Returns the metrics of `run_task.measure_items`."""
    if head or task.kind == "classification":
        return {"accuracy": True, "macro_f1": True}
    if task.kind == "cloze":
        return {"accuracy": True, "perplexity": False}
    if task.kind in BY_LIKELIHOOD:
        return {"accuracy": True, "accuracy_norm": True}
    if task.kind == "execution":
        return {f"pass@{k}": True for k in task.k}
    return {"exact_match": True} if task.kind == "exact_match" else {"exact_match": True, "f1": True}


def _of_length(task: LengthTask) -> dict[str, bool]:
    """Returns the metrics of `long_context.measure_length`."""
    if task.kind == "positions":
        return {"loss": False, "perplexity": False, "loss_at_end": False}
    if task.kind == "continuation":
        return {f"loss_{name}": False for name in SHARES}
    return {"accuracy": True, "loss": False}
