"""A task over a build: its questions asked, its metrics with a value for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from preheat.data.sources import digest
from preheat.errors import RecipeError, nearest
from preheat.evaluation import bootstrap, metrics
from preheat.evaluation.bootstrap import Metric
from preheat.evaluation.prompts import Item, items_of
from preheat.evaluation.results import Result
from preheat.evaluation.scoring import CLASSES, Reader, Score, Scorer
from preheat.evaluation.tasks import BY_LIKELIHOOD, Task
from preheat.run_dir import to_json

__all__ = ["measure_items", "measure_task", "require_room"]


def measure_task(task: Task, scorer: Scorer, *, limit: int | None = None, samples: Path | None = None) -> Result:
    """Asks a task's questions.

    Args:
        limit: the first so many rows.
        samples: a file that gets a line of JSON for each row: what was asked, what came, what is right.

    Raises:
        DataError, RecipeError: as `items_of`.
    """
    items = items_of(task, scorer.tokenizer, limit=limit, head=CLASSES in scorer.build.tags)
    return measure_items(task, items, scorer, samples=samples)


def require_room(items: Sequence[Item], reader: Reader) -> None:
    """Raises DataError where a choice has no room in a row: told before a run begins."""
    for item in items:
        for choice in item.choices:
            reader.require_room(reader.pair(item.context, choice, complete=item.complete)[1], item.where)


def measure_items(task: Task, items: Sequence[Item], scorer: Scorer, *, samples: Path | None = None) -> Result:
    """The same for questions that were read before."""
    before = scorer.truncated
    made: dict[str, Metric]
    written: list[Any]
    if CLASSES in scorer.build.tags:
        written = _classes(task, items, scorer)
        gold = [item.gold for item in items]
        accuracy = bootstrap.mean([float(a == b) for a, b in zip(gold, written, strict=True)])
        made = {"accuracy": accuracy, "macro_f1": bootstrap.macro_f1(gold, written, len(items[0].texts))}
    elif task.kind in BY_LIKELIHOOD:
        scores = _likelihoods(items, scorer)
        made, written = _by_likelihood(task, items, scores), list(scores)
    else:
        contexts = [scorer.encode(item.context, complete=item.complete) for item in items]
        answers = scorer.write(contexts, tokens=task.tokens, stop=task.stop)
        made, written = _by_answer(task, items, answers), list(answers)
    if samples is not None:
        with samples.open("a", encoding="utf-8") as file:
            for item, what in zip(items, written, strict=True):
                right = item.texts[item.gold] if item.texts else list(item.answers)
                line = {
                    "task": task.name,
                    "where": item.where,
                    "context": item.context,
                    "choices": list(item.texts),
                    "gold": right,
                }
                key, value = (
                    ("loglikelihoods", [s.loglikelihood for s in what]) if isinstance(what, list) else ("answer", what)
                )
                file.write(to_json(line | {key: value}) + "\n")
    identity = digest([(item.where, item.texts, item.gold, item.answers) for item in items])
    # Several choices of one question may each have cut its context.
    return Result(made, len(items), identity, truncated=min(scorer.truncated - before, len(items)))


def _classes(task: Task, items: Sequence[Item], scorer: Scorer) -> list[int]:
    rows = scorer.build.trained[0].get_output_embeddings().out_features  # type: ignore[operator]
    if task.kind != "classification":
        raise RecipeError(
            f"task {task.name}: this run has a head over {rows} classes: it can be asked a classification, no "
            f"{task.kind}"
        )
    texts = items[0].texts
    if scorer.classes and (strange := [name for name in scorer.classes if name not in texts]):
        words = f"the run was trained on the class {strange[0]!r}, which the task has not"
        raise RecipeError(f"task {task.name}: choices: {words}; {nearest(strange[0], list(texts))}")
    if not scorer.classes and len(texts) != rows:
        words = f"the task has {len(texts)} classes and the run's head {rows}"
        raise RecipeError(f"task {task.name}: choices: {words}; list those that it was trained on, in their order")
    # By name where the names are known: data may lack a class of the task's, or state them in another order.
    place = [texts.index(name) for name in scorer.classes] or list(range(rows))
    place += [-1] * (rows - len(place))  # of the head's rows, those that no class of the data stands for
    return [place[n] for n in scorer.classify([scorer.encode(item.context, complete=item.complete) for item in items])]


def _likelihoods(items: Sequence[Item], scorer: Scorer) -> list[list[Score]]:
    pairs, where = [], []
    for item in items:
        for choice in item.choices:
            pairs.append(scorer.pair(item.context, choice, complete=item.complete))
            where.append(item.where)
    flat = iter(scorer.score(pairs, where))
    return [[next(flat) for _ in item.choices] for item in items]


def _by_likelihood(task: Task, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Metric]:
    if task.kind == "cloze":
        lost = [-score[0].loglikelihood for score in scores]
        return {
            "accuracy": bootstrap.mean([float(score[0].greedy) for score in scores]),
            "perplexity": bootstrap.perplexity(lost, [1.0] * len(lost)),
        }
    gold = [item.gold for item in items]
    raw = [int(np.argmax([s.loglikelihood for s in row])) for row in scores]
    accuracy = bootstrap.mean([float(a == b) for a, b in zip(raw, gold, strict=True)])
    if task.kind == "classification":
        return {"accuracy": accuracy, "macro_f1": bootstrap.macro_f1(gold, raw, len(items[0].choices))}
    by_length = [
        int(np.argmax([s.loglikelihood / len(text) for s, text in zip(row, item.texts, strict=True)]))
        for row, item in zip(scores, items, strict=True)
    ]
    return {
        "accuracy": accuracy,
        "accuracy_norm": bootstrap.mean([float(a == b) for a, b in zip(by_length, gold, strict=True)]),
    }


def _by_answer(task: Task, items: Sequence[Item], answers: Sequence[str]) -> dict[str, Metric]:
    def each(score: Callable[..., float], *, scaled: bool = False) -> Metric:
        pairs = zip(answers, items, strict=True)
        return bootstrap.mean([score(a, item.answers, *([item.scale] if scaled else [])) for a, item in pairs])

    if task.kind == "numeric":
        return {"exact_match": each(metrics.numeric_match, scaled=True), "f1": each(metrics.numeric_f1, scaled=True)}
    made = {"exact_match": each(metrics.exact_match)}
    return made | ({"f1": each(metrics.token_f1)} if task.kind == "token_f1" else {})
