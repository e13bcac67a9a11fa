"""Variants of an evaluation task on the same questions: other prompts, other numbers of few-shot examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from preheat.core.run_records import ResultDifference
from preheat.errors import RecipeError
from preheat.evaluation.results import Result, compare_results
from preheat.evaluation.tasks import LengthTask, Task
from preheat.recipe.yaml_io import read_text

__all__ = ["VariantDifference", "compare_variants", "find_variants", "replace_prompts"]


@dataclass(frozen=True)
class VariantDifference:
    """The difference of a variant from the first variant of its task.

    Attributes:
        against: name of the first variant.
    """

    against: str
    difference: ResultDifference


def replace_prompts(tasks: Sequence[Task | LengthTask | str], files: Sequence[Path]) -> list[Task | LengthTask | str]:
    """Returns each task with the prompt of each file; with one file, under the task's own name.

    Args:
        files: Jinja templates, as `Task.prompt`.

    Raises:
        RecipeError: a file cannot be read, two have one name, or a task has no prompt of its own.
    """
    if twice := next((f.stem for f in files if [g.stem for g in files].count(f.stem) > 1), None):
        raise RecipeError(f"--prompt: two files have the name {twice!r}, which names their results; rename one")
    if folder := next(filter(Path.is_dir, files), None):
        raise RecipeError(f"--prompt {folder}: is a folder; name the file of a prompt")
    # The line break that editors add at the end of a file belongs to no prompt.
    prompts = {file.stem: read_text(file, f"--prompt {file}").removesuffix("\n") for file in files}
    variants: list[Task | LengthTask | str] = []
    for task in tasks:
        if not isinstance(task, Task):
            name = task if isinstance(task, str) else task.name
            raise RecipeError(f"--prompt: the task {name} has no prompt that could be replaced; leave it out")
        variants += [
            replace(task, prompt=prompt, name=task.name if len(prompts) == 1 else f"{task.name}, {stem}")
            for stem, prompt in prompts.items()
        ]
    return variants


def find_variants(tasks: Sequence[Task | LengthTask | str]) -> list[list[Task]]:
    """Groups the tasks that ask the same questions with another prompt or another number of examples."""
    groups: dict[Task, list[Task]] = {}
    for task in tasks:
        if isinstance(task, Task):
            # Rows that are set aside for examples are not asked.
            pool = max(task.pool, task.shots)
            groups.setdefault(replace(task, name="", prompt="", shots=0, pool=pool), []).append(task)
    return [group for group in groups.values() if len(group) > 1]


def compare_variants(groups: Sequence[Sequence[Task]], results: Mapping[str, Result]) -> dict[str, VariantDifference]:
    """Returns the difference of each variant from the first of its group, row by row.

    Args:
        groups: by `find_variants`.
        results: by the name of the task.
    """
    return {
        task.name: VariantDifference(first.name, compare_results(results[first.name], results[task.name]))
        for first, *others in groups
        for task in others
    }
