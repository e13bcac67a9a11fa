"""Tasks whose answers are programs: generates them, runs each with its row's tests in a sandbox, estimates pass@k."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from preheat.evaluation import bootstrap
from preheat.evaluation.bootstrap import Metric
from preheat.evaluation.metrics import cut_answer
from preheat.evaluation.sandbox import Limits, Outcome, require_sandbox, run_programs
from preheat.evaluation.tasks import Task

if TYPE_CHECKING:
    from preheat.evaluation.prompts import Item
    from preheat.evaluation.scoring import Scorer
    from preheat.evaluation.tasks import LengthTask

__all__ = [
    "Attempt",
    "compute_pass_rates",
    "estimate_pass_at_k",
    "extract_code",
    "require_sandbox_for",
    "run_attempts",
]

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Attempt(NamedTuple):
    """A generated program, and what became of it."""

    answer: str
    outcome: Outcome


def require_sandbox_for(tasks: Iterable[Task | LengthTask | str], *, knob: str) -> None:
    """Raises RecipeError if a task runs programs and this machine gives no sandbox."""
    if name := next((t.name for t in tasks if isinstance(t, Task) and t.kind == "execution"), None):
        require_sandbox(f"{knob} {name}")


def extract_code(answer: str, stop: Sequence[str] = ()) -> str:
    """Returns the first fenced block of a chat's answer; without one, the answer up to the first of `stop`.

    Example:
        >>> extract_code("Sure:\\n```python\\nx = 1\\n```\\nDone.")
        'x = 1\\n'
    """
    block = _FENCED.search(answer)
    return block[1] if block else cut_answer(answer, stop)


def run_attempts(task: Task, items: Sequence[Item], scorer: Scorer) -> list[list[Attempt]]:
    """Generates `task.samples` programs for each row and runs them.

    Raises:
        RunError: the sandbox cannot be set up.
    """
    contexts = [scorer.encode(item.context, complete=item.complete) for item in items]
    # At least half of a sequence is left to the question, as for tasks of lm-eval.
    tokens = min(task.tokens, scorer.length // 2)
    rounds = [
        # A seed for each round: equal ones would draw equal answers.
        scorer.write(
            contexts,
            tokens=tokens,
            # A chat's program is a block, in which these may occur: HumanEval's stop strings begin a function.
            stop=() if task.chat else task.ends,
            strip=False,
            temperature=task.temperature,
            top_p=task.top_p,
            seed=(task.seed + number) % 2**32,
        )
        for number in range(task.samples)
    ]
    # [items][samples]; indentation belongs to a program, so answers are not stripped.
    answers = [list(row) for row in zip(*rounds, strict=True)]
    programs = [
        item.build_program(extract_code(answer, task.ends) if task.chat else answer)
        for item, row in zip(items, answers, strict=True)
        for answer in row
    ]
    scorer.say("running programs", 0, len(programs))
    outcomes = iter(run_programs(programs, Limits(seconds=task.seconds)))
    return [[Attempt(answer, next(outcomes)) for answer in row] for row in answers]


def compute_pass_rates(attempts: Sequence[Sequence[Attempt]], ks: Sequence[int]) -> dict[str, Metric]:
    """Returns pass@k for each k, with a value for each row."""
    passed = [sum(attempt.outcome.kind == "passed" for attempt in row) for row in attempts]
    return {
        f"pass@{k}": bootstrap.mean_metric(
            [estimate_pass_at_k(len(row), count, k) for row, count in zip(attempts, passed, strict=True)]
        )
        for k in ks
    }


def estimate_pass_at_k(samples: int, passed: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that at least one of k answers passes.

    It is 1 - C(samples - passed, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374, equation 1).

    Example:
        >>> estimate_pass_at_k(4, 1, 1), estimate_pass_at_k(4, 1, 4)
        (0.25, 1.0)
    """
    assert 1 <= k <= samples, (samples, k)
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)
