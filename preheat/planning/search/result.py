"""Result of a search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, get_args

from preheat.core import Numerics
from preheat.core.plan import Candidate, Plan
from preheat.core.units import format_memory
from preheat.hardware.gpu_memory import OTHERS

if TYPE_CHECKING:  # the views import this module without torch
    from preheat.planning.search.candidates import Settings  # imports torch, which printing a stored plan does not need
    from preheat.recipe import Recipe

__all__ = [
    "LESS_MEMORY",
    "BestByStart",
    "EvaluatedPlan",
    "SearchResult",
    "describe_shortfall",
    "hint_fragmentation",
    "describe_held_memory",
    "is_better_in_something",
    "is_tradeoff",
    "describe_too_large",
]

# Share of the answer's memory above which an alternative saves nothing noticeable.
LESS_MEMORY = 0.99
_FASTER = 1.005  # times the answer's speed: below, the two are as fast
_NUMERICS = get_args(Numerics)  # effects on the numbers, smallest first


@dataclass(frozen=True)
class EvaluatedPlan:
    """A candidate that was dry-run.

    Attributes:
        trades: largest change of numerics compared with the given recipe.
    """

    recipe: Recipe
    plan: Plan
    trades: Numerics
    micro: int
    added: Settings

    @property
    def names(self) -> frozenset[str]:
        return frozenset(t.name() for t in self.added if t.is_parallel() or t.micro_batch_count() == 1)


class BestByStart(NamedTuple):
    """The best candidates without and with techniques that delay the first step to make all steps faster.

    Attributes:
        techniques: names of these techniques.
    """

    techniques: tuple[str, ...]
    without: EvaluatedPlan
    with_them: EvaluatedPlan

    def pays_from_steps(self) -> int | None:
        """Returns the steps of a run from which on they finish it sooner; None if they make no step faster."""
        slow, fast = self.without.plan, self.with_them.plan
        later, gain = fast.seconds_to_start - slow.seconds_to_start, slow.seconds_per_step - fast.seconds_per_step
        return math.ceil(later / gain) if gain > 0 else None


@dataclass
class SearchResult:
    """Result of a search.

    Attributes:
        best: the best candidate that fits safely; if none does, the one that needs the least memory.
        alternatives: others that fit and are better than the best in something: the best of each other set of
            techniques, and those that need less memory.
        evaluated: all dry-run candidates, in order.
        rejected: (settings, reason) of what does not fit or is refused beside the best, a line each.
        guessed: number of estimated candidates.
        confirmed: True if the best was dry-run with all its layers.
        guesses: estimates of the candidates, fastest first; a sample if there are many.
        interrupted: True if Ctrl-C ended the search early: `best` is the best so far.
        startup: the best beside a candidate that differs in techniques that delay the first step; None: none fits
            safely.
    """

    best: EvaluatedPlan
    alternatives: list[EvaluatedPlan] = field(default_factory=list)
    evaluated: list[EvaluatedPlan] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    guessed: int = 0
    confirmed: bool = False
    guesses: list[Candidate] = field(default_factory=list)
    interrupted: bool = False
    startup: BestByStart | None = None


def is_tradeoff(s: EvaluatedPlan, best: EvaluatedPlan) -> bool:
    """True if a candidate is better than the best in something, and worse in something: a choice that a user may make.

    Memory, speed, the time before the first step and the change of numerics count, and the size of micro-batches as a
    loss.
    """
    speed, memory, later, trades = _compare_plans(s, best)
    # The slightest loss counts: the search ranks by it.
    loses = speed < 1 or memory > 1 / LESS_MEMORY or later > 0 or trades > 0 or s.micro < best.micro
    return is_better_in_something(s, best) and loses


def is_better_in_something(s: EvaluatedPlan, other: EvaluatedPlan) -> bool:
    """True if a candidate has more speed, less memory, a shorter start or a smaller change of numerics than another."""
    speed, memory, later, trades = _compare_plans(s, other)
    return memory < LESS_MEMORY or speed > _FASTER or later < 0 or trades < 0


def _compare_plans(s: EvaluatedPlan, other: EvaluatedPlan) -> tuple[float, float, float, int]:
    """Returns speed and memory over those of another, and the differences of start (seconds) and numerics."""
    return (
        s.plan.tokens_per_second / other.plan.tokens_per_second,
        s.plan.peak_gib / other.plan.peak_gib,
        s.plan.seconds_to_start - other.plan.seconds_to_start,
        _NUMERICS.index(s.trades) - _NUMERICS.index(other.trades),
    )


def describe_too_large(plan: Plan) -> str:
    """Describes why a plan does not fit (safely), with the two largest categories."""
    # The two largest categories show which kind of technique could help.
    most = sorted(plan.memory.items(), key=lambda item: -item[1])[:2]
    what = ", ".join(f"{category} {size:.1f}" for category, size in most)
    return "; ".join(
        filter(None, (f"needs {plan.peak_gib:.1f} GiB of {plan.available_gib:.1f}: {what}", hint_fragmentation(plan)))
    )


def describe_shortfall(plan: Plan) -> str:
    """Describes by how much a plan does not fit."""
    needs = f"does not fit: needs {format_memory(plan.peak_gib)}"
    if others := describe_held_memory(plan):
        return f"{needs}, has {format_memory(plan.available_gib)}: {others}"
    if plan.available_gib * 1024 < 1:
        return f"{needs}, and the process itself takes all that {plan.device.name} may use"
    return f"{needs}, has {format_memory(plan.available_gib)}"


def describe_held_memory(plan: Plan) -> str:
    """Describes the memory that other processes hold on a GPU of this machine; "" if there is none."""
    if plan.device.kind != "cuda" or not plan.in_use_gib:
        return ""
    return f"other processes hold {format_memory(plan.in_use_gib)} of {plan.device.name}; {OTHERS}"


def hint_fragmentation(plan: Plan) -> str:
    """Suggests expandable segments if the tensors fit on a GPU but the allocator's fragmentation does not."""
    cached = plan.overhead.get("allocator", 0.0)
    if plan.device.kind == "cpu" or plan.device.expandable:
        return ""
    if plan.allocator_retries:
        return (
            "the allocator must release cached memory in each step, which takes time: --set "
            "hardware.segments=expandable has less to release"
        )
    # Only if the tensors fit, and the plan fails by the cached memory alone.
    if not plan.peak_gib - cached <= plan.available_gib < plan.peak_gib:
        return ""
    return (
        f"{cached:.1f} of it is fragmented free memory; expandable segments release it page by page: --set "
        "hardware.segments=expandable"
    )
