"""Evaluations of a run: validation rows, the forgetting text and tasks, before training and during it."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core import Build, Slot
from preheat.core.run_records import (
    Damaged,
    Evaluation,
    EvaluationMetrics,
    ResultDifferences,
    Results,
    StoredResults,
)
from preheat.data.tokenizer import write_tokenizer
from preheat.engine.evaluate import Measured
from preheat.evaluation.execution import require_sandbox_for
from preheat.evaluation.lm_eval import measure_by_harness, require_harness
from preheat.evaluation.long_context import draw_questions, measure_length
from preheat.evaluation.perplexity import count_token_bytes, measure_text, read_text_rows, tokenize_text
from preheat.evaluation.prompts import read_items
from preheat.evaluation.results import (
    Result,
    ResultSet,
    compare_results,
    describe_result,
    deserialize,
    is_comparable,
    serialize,
)
from preheat.evaluation.run_task import measure_items, require_room
from preheat.evaluation.scoring import CLASSES, Reader, Scorer
from preheat.evaluation.tasks import LengthTask, Task, find_tasks
from preheat.recipe import Recipe
from preheat.run import reader as runs
from preheat.run.writer import Writer
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from preheat.data.preparation import PreparedData

__all__ = ["RunEvaluator", "compute_differences"]

BEFORE, SUMMARY = "before.json", "evaluation.json"


class RunEvaluator:
    """Evaluates a run. Texts and tasks are read in the constructor, so that their errors appear before training.

    Args:
        data: the run's data.

    Raises:
        RecipeError, DataError: a task or text does not exist, or its rows are invalid.
    """

    def __init__(
        self, recipe: Recipe, data: PreparedData, say: Callable[[str, float, float | None], None] | None = None
    ):
        settings = recipe.evaluate
        self.recipe, self.data, self.say = recipe, data, say
        self.tasks = find_tasks(settings.tasks, knob="evaluate.tasks")
        # Tasks given as text are lm-eval's (`find_tasks`).
        if any(isinstance(task, str) for task in self.tasks):
            require_harness()
        require_sandbox_for(self.tasks, knob="evaluate.tasks")
        head = CLASSES in {tag for t in recipe.techniques.values() for tag in t.provided()}
        self.items = {
            t.name: read_items(t, data.tokenizer, limit=settings.rows, head=head)
            for t in self.tasks
            if isinstance(t, Task)
        }
        # A head over classes scores no continuation, so none needs room.
        if not head:
            for items in self.items.values():
                require_room(items, Reader(data.tokenizer, recipe.batch.seq_len))
        self.sizes = count_token_bytes(data.tokenizer)
        length, self.forgetting = recipe.batch.seq_len, None
        with tempfile.TemporaryDirectory() as folder:  # the tokenizer may have been trained for this run
            write_tokenizer(data.tokenizer, Path(folder), data.stops)
            if settings.forgetting is not None:
                self.forgetting = read_text_rows(
                    recipe.data,
                    settings.forgetting,
                    knob="evaluate.forgetting",
                    length=length,
                    partial=True,
                    seed=recipe.seed,
                    tokenizer=folder,
                )
            reader, of = Reader(data.tokenizer, length), {"longest": length, "reach": length, "limit": settings.rows}
            texts = functools.partial(tokenize_text, recipe.data, seed=recipe.seed, tokenizer=folder)
            of_length = [task for task in self.tasks if isinstance(task, LengthTask)]
            self.questions = {task.name: draw_questions(task, reader, texts=texts, **of) for task in of_length}
        pretrained = recipe.model.path is not None and recipe.model.weights == "pretrained"
        self.at_start = pretrained or bool(self.tasks or self.forgetting)
        """True if the model is evaluated before the first step, to compare with later."""
        self.any = bool(self.tasks or self.forgetting or (data.validation is not None and len(data.validation)))
        """True if there is anything to measure."""

    def take(self, build: Build, writer: Writer, step: int) -> tuple[Measured, EvaluationMetrics]:
        """Runs all evaluations; writes a line of metrics, `before.json` at step 0 and `evaluation.json` after it.

        Rows are at most as long as the run's and batches at most as large as a step's, so the planned peak is valid.

        Returns:
            The measurement of the validation rows; a loss of NaN without any. And the line of metrics.
        """
        texts, tasks = self._measure(build)
        nothing = Measured(math.nan, 0, {})
        if not texts and not tasks:
            return nothing, EvaluationMetrics(step)
        losses = {name: result.metrics["loss"].value for name, result in texts.items()}
        validation = texts.get("validation")
        # The line has values only; intervals are in evaluation.json.
        line = EvaluationMetrics(
            step,
            validation_loss=losses.get("validation"),
            forgetting_loss=losses.get("forgetting"),
            tokens=validation.tokens if validation else None,
            scores={f"validation_{name}": value for name, value in validation.alone.items()} if validation else {},
            tasks={
                name: {key: metric.value for key, metric in describe_result(result).metrics.items()}
                for name, result in tasks.items()
            }
            or None,
            validation_loss_by_source=validation.by_source if validation else None,
        )
        writer.write_metric(line)
        results = ResultSet(texts, tasks)
        # With the values of all rows, so that later results can be compared row by row.
        if step == 0:
            by_name = ({name: serialize(result) for name, result in of.items()} for of in results)
            writer.write_json(BEFORE, StoredResults(*by_name))
        summary = Evaluation(step=step, after=_evaluate_values(results))
        # With several processes, only rank 0 reads and writes the run's folder.
        # Read back rather than kept in memory: a resumed run has no evaluation at step 0 of its own.
        run = runs.Reader(writer.path) if step and (writer.path / "recipe.yaml").is_file() else None
        stored = run.before if run is not None else StoredResults()
        if run is not None and (stored.texts or stored.tasks):
            before = ResultSet(
                *({name: deserialize(result) for name, result in of.items()} for of in (stored.texts, stored.tasks))
            )
            for old, new in zip(before, results, strict=True):
                # A list, since entries are deleted. Rows differ if a file changed, or `before.json` is damaged.
                for name in [name for name, result in old.items() if not is_comparable(result, new.get(name))]:
                    run.damaged[BEFORE] = f"left out {shorten(name)}, whose rows are not the measured ones"
                    del old[name]
            summary = replace(summary, before=_evaluate_values(before), difference=compute_differences(before, results))
        if run is not None and BEFORE in run.damaged:
            writer.write_event(Damaged(file=BEFORE, problem=run.damaged[BEFORE]))
        writer.write_json(SUMMARY, summary)
        if validation is None:
            return nothing, line
        return Measured(losses["validation"], validation.tokens or 0, dict(validation.alone)), line

    def _measure(self, build: Build) -> tuple[dict[str, Result], dict[str, Result]]:
        settings = self.recipe.evaluate
        micro = build.slot(Slot.BATCH_SHAPE)(
            1.0
        ).micro  # the shape of the last steps: evaluation rows always have full length
        # Never above training's, whose peak was planned.
        micro = min(build.recipe.evaluate.micro_batch_size or micro, micro)
        texts = {}
        measure = functools.partial(measure_text, build, micro=micro, limit=settings.rows, sizes=self.sizes)
        if self.data.validation is not None and len(self.data.validation):
            texts["validation"] = measure(self.data.validation, objective=True)
        if self.forgetting is not None:
            texts["forgetting"] = measure(self.forgetting)
        tasks: dict[str, Result] = {}
        length, classes = self.recipe.batch.seq_len, self.data.classes
        # One scorer for all tasks, with the shapes of training.
        scorer = Scorer(build, self.data.tokenizer, micro=micro, length=length, classes=classes, say=self.say)
        for task in self.tasks:
            if isinstance(task, Task):
                tasks[task.name] = measure_items(task, self.items[task.name], scorer)
            elif isinstance(task, LengthTask):
                tasks[task.name] = measure_length(self.questions[task.name], scorer)
            else:
                tasks |= measure_by_harness(task, scorer, limit=settings.rows)
        return texts, tasks


def _evaluate_values(results: ResultSet) -> Results:
    return Results(*({name: describe_result(result) for name, result in of.items()} for of in results))


def compute_differences(before: ResultSet, after: ResultSet) -> ResultDifferences:
    """Returns after - before for results that are in both."""
    return ResultDifferences(
        *(
            {name: compare_results(old[name], result) for name, result in new.items() if name in old}
            for old, new in zip(before, after, strict=True)
        )
    )
