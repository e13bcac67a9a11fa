"""Measures a task on a build: scores its questions and returns metrics with a value for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from preheat.data.sources import compute_digest
from preheat.errors import RecipeError, suggest_nearest
from preheat.evaluation import bootstrap, metrics
from preheat.evaluation.bootstrap import Metric
from preheat.evaluation.execution import Attempt, compute_pass_rates, run_attempts
from preheat.evaluation.prompts import Item, read_items
from preheat.evaluation.results import Result
from preheat.evaluation.scoring import CLASSES, Reader, Score, Scorer
from preheat.evaluation.tasks import BY_LIKELIHOOD, Task
from preheat.files import to_json

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["measure_items", "measure_task", "require_room"]


def measure_task(task: Task, scorer: Scorer, *, limit: int | None = None, samples: Path | None = None) -> Result:
    """Measures a task.

    Args:
        limit: maximum number of rows.
        samples: file to which a line of JSON is appended for each row, with the prompt, the answer and the gold.

    Raises:
        DataError, RecipeError: as in `read_items`.
    """
    items = read_items(task, scorer.tokenizer, limit=limit, head=CLASSES in scorer.build.tags)
    return measure_items(task, items, scorer, samples=samples)


def require_room(items: Sequence[Item], reader: Reader) -> None:
    """Raises DataError if a choice does not fit in a row; called before a run begins."""
    for item in items:
        for choice in item.choices:
            reader.require_room(reader.pair(item.context, choice, complete=item.complete)[1], item.where)


def measure_items(task: Task, items: Sequence[Item], scorer: Scorer, *, samples: Path | None = None) -> Result:
    """Measures questions that `read_items` has returned; arguments and errors as in `measure_task`."""
    if task.shots:
        _require_shots_fit(task, items, scorer)
    before = scorer.truncated
    values: dict[str, Metric]
    written: list[int] | list[list[Score]] | list[str] | list[list[Attempt]]
    if CLASSES in scorer.build.tags:
        written = _predict_classes(task, items, scorer)
        gold = [item.gold for item in items]
        accuracy = bootstrap.mean_metric([float(a == b) for a, b in zip(gold, written, strict=True)])
        values = {"accuracy": accuracy, "macro_f1": bootstrap.macro_f1(gold, written, len(items[0].texts))}
    elif task.kind in BY_LIKELIHOOD:
        scores = _score_answers(items, scorer)
        values, written = _evaluate_by_likelihood(task, items, scores), list(scores)
    elif task.kind == "execution":
        attempts = run_attempts(task, items, scorer)
        values, written = compute_pass_rates(attempts, task.k), list(attempts)
    else:
        contexts = [scorer.encode(item.context, complete=item.complete) for item in items]
        answers = scorer.write(contexts, tokens=task.tokens, stop=task.ends)
        values, written = _evaluate_by_answer(task, items, answers), list(answers)
    if samples is not None:
        with samples.open("a", encoding="utf-8") as file:
            for item, output in zip(items, written, strict=True):
                right = item.texts[item.gold] if item.texts else list(item.answers)
                line = {
                    "task": task.name,
                    "where": item.where,
                    "context": item.context,
                    "choices": list(item.texts),
                    "gold": right,
                }
                file.write(to_json(line | _describe_output(output)) + "\n")
    # Without the prompts: another prompt or number of examples asks the same rows.
    identity = compute_digest([(item.where, item.texts, item.gold, item.answers) for item in items])
    # The scorer counts a truncated context once for each choice.
    return Result(values, len(items), identity, truncated=min(scorer.truncated - before, len(items)))


def _require_shots_fit(task: Task, items: Sequence[Item], scorer: Scorer) -> None:
    """Raises an error if a question with its examples is longer than a row, whose first examples would be cut off."""
    for item in items:
        continuation = max((scorer.encode(text, complete=True) for text in item.choices), key=len, default=[])
        tokens = len(scorer.encode(item.context, complete=item.complete)) + len(continuation)
        if tokens > scorer.length:
            raise RecipeError(
                f"task {task.name}: shots: {item.where} with {task.shots} examples has {tokens:,} tokens, and a row "
                f"{scorer.length:,}; use fewer examples or a greater --length"
            )


def _describe_output(output: object) -> JsonObject:
    """Returns the keys of a row's output: its answer, the outcomes of its programs, or the scores of its choices."""
    if not isinstance(output, list):
        return {"answer": output}
    if all(isinstance(part, Attempt) for part in output):
        return {"answers": [part.answer for part in output], "outcomes": [part.outcome._asdict() for part in output]}
    return {"loglikelihoods": [score.loglikelihood for score in output]}


def _predict_classes(task: Task, items: Sequence[Item], scorer: Scorer) -> list[int]:
    # The head has a row per class.
    rows = scorer.build.trained[0].get_output_embeddings().out_features  # type: ignore[operator]
    if task.kind != "classification":
        raise RecipeError(
            f"task {task.name}: this run has a head over {rows} classes: it supports classification tasks, not "
            f"{task.kind}"
        )
    texts = items[0].texts
    # A class that the task lacks could be predicted and never be right.
    if scorer.classes and (strange := [name for name in scorer.classes if name not in texts]):
        problem = f"the run was trained on the class {strange[0]!r}, which the task does not have"
        raise RecipeError(f"task {task.name}: choices: {problem}; {suggest_nearest(strange[0], list(texts))}")
    if not scorer.classes and len(texts) != rows:
        problem = f"the task has {len(texts)} classes and the run's head {rows}"
        raise RecipeError(f"task {task.name}: choices: {problem}; list those that it was trained on, in their order")
    # Map the head's rows to the task's classes by name, if known: the data may lack a class or have another order.
    index = [texts.index(name) for name in scorer.classes] or list(range(rows))
    index += [-1] * (rows - len(index))  # rows of the head without a class in the data
    return [
        index[n]
        for n in scorer.predict_classes([scorer.encode(item.context, complete=item.complete) for item in items])
    ]


def _score_answers(items: Sequence[Item], scorer: Scorer) -> list[list[Score]]:
    pairs, where = [], []
    for item in items:
        for choice in item.choices:
            pairs.append(scorer.pair(item.context, choice, complete=item.complete))
            where.append(item.where)
    # All choices of all questions in one call, which batches similar lengths.
    flat = iter(scorer.score(pairs, where))
    return [[next(flat) for _ in item.choices] for item in items]


def _evaluate_by_likelihood(task: Task, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Metric]:
    if task.kind == "cloze":
        losses = [-score[0].loglikelihood for score in scores]
        return {
            "accuracy": bootstrap.mean_metric([float(score[0].greedy) for score in scores]),
            # Per row and not per token, as lm-eval computes it for LAMBADA.
            "perplexity": bootstrap.perplexity_metric(losses, [1.0] * len(losses)),
        }
    gold = [item.gold for item in items]
    # Sums favor short choices; `accuracy_norm` below corrects for that.
    raw = [int(np.argmax([s.loglikelihood for s in row])) for row in scores]
    accuracy = bootstrap.mean_metric([float(a == b) for a, b in zip(raw, gold, strict=True)])
    if task.kind == "classification":
        return {"accuracy": accuracy, "macro_f1": bootstrap.macro_f1(gold, raw, len(items[0].choices))}
    # lm-eval's acc_norm: log-likelihood per character, so that long choices are not at a disadvantage.
    by_length = [
        int(np.argmax([s.loglikelihood / len(text) for s, text in zip(row, item.texts, strict=True)]))
        for row, item in zip(scores, items, strict=True)
    ]
    return {
        "accuracy": accuracy,
        "accuracy_norm": bootstrap.mean_metric([float(a == b) for a, b in zip(by_length, gold, strict=True)]),
    }


def _evaluate_by_answer(task: Task, items: Sequence[Item], answers: Sequence[str]) -> dict[str, Metric]:
    def mean_of_rows(score: Callable[..., float], *, scaled: bool = False) -> Metric:
        pairs = zip(answers, items, strict=True)
        return bootstrap.mean_metric([score(a, item.answers, *([item.scale] if scaled else [])) for a, item in pairs])

    if task.kind == "numeric":
        return {
            "exact_match": mean_of_rows(metrics.score_numeric_match, scaled=True),
            "f1": mean_of_rows(metrics.score_numeric_f1, scaled=True),
        }
    values = {"exact_match": mean_of_rows(metrics.score_exact_match)}
    return values | ({"f1": mean_of_rows(metrics.score_token_f1)} if task.kind == "token_f1" else {})
