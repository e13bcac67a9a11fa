"""What a search comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from preheat.planning.search.candidates import Numerics, Settings
from preheat.recipe import Recipe

__all__ = ["SearchResult", "EstimatedPlan", "EvaluatedPlan", "falls_short", "fragmentation_hint", "too_large"]


class EstimatedPlan(NamedTuple):
    """A candidate as it was estimated, without a dry run.

    Attributes:
        what: its techniques and micro-batch, for people.
        techniques: the same without the micro-batch.
    """

    what: str
    techniques: str
    peak_gib: float
    tokens_per_second: float


@dataclass(frozen=True)
class EvaluatedPlan:
    """A candidate that was looked at.

    Attributes:
        plan: as of `planning.plan.plan`.
        trades: the most that it gives up of its numbers beyond the recipe as it was given.
    """

    recipe: Recipe
    plan: dict[str, Any]
    trades: Numerics
    micro: int
    added: Settings

    @property
    def names(self) -> frozenset[str]:
        return frozenset(t.name() for t in self.added if t.micro_batch_count() == 1)


@dataclass
class SearchResult:
    """What a search came to.

    Attributes:
        best: what serves the aim best of what fits; where nothing does, what needs the least memory of what was looked at.
        others: what fits besides, of other techniques, the best of each.
        seen: all that was looked at, in order.
        rejected: (settings in words, why not), a line each.
        guessed: how many candidates were put in order.
        confirmed: the best was dry-run with all its layers.
        guesses: (settings in words, GiB, tokens a second) of the candidates as they were put in order, the fastest first; of many, some.
    """

    best: EvaluatedPlan
    others: list[EvaluatedPlan] = field(default_factory=list)
    seen: list[EvaluatedPlan] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    guessed: int = 0
    confirmed: bool = False
    guesses: list[EstimatedPlan] = field(default_factory=list)


def too_large(plan: Mapping[str, Any]) -> str:
    """Why a plan does not fit, with what fills the most."""
    most = sorted(plan["memory"].items(), key=lambda item: -item[1])[:2]
    what = ", ".join(f"{category} {size:.1f}" for category, size in most)
    return "; ".join(
        filter(
            None, (f"needs {plan['peak_gib']:.1f} GiB of {plan['available_gib']:.1f}: {what}", fragmentation_hint(plan))
        )
    )


def falls_short(plan: Mapping[str, Any]) -> str:
    """By how much a plan does not fit.

    Example:
        >>> device = {"name": "a CPU"}
        >>> falls_short({"peak_gib": 2.0, "available_gib": 0.5, "device": device})
        'does not fit: needs 2.00 GiB, has 512 MiB'
        >>> falls_short({"peak_gib": 0.1, "available_gib": 1 / 2**30, "device": device})
        'does not fit: needs 102 MiB, and nothing is left of what a CPU may use: the process itself takes it all'
    """
    needs = f"does not fit: needs {size(plan['peak_gib'])}"
    if plan["available_gib"] * 1024 < 1:
        return f"{needs}, and nothing is left of what {plan['device']['name']} may use: the process itself takes it all"
    return f"{needs}, has {size(plan['available_gib'])}"


def size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"


def fragmentation_hint(plan: Mapping[str, Any]) -> str:
    """What to try on a GPU that has room for a plan's tensors and not for the freed memory that torch's allocator keeps in segments of fixed sizes; else empty."""
    cached = plan["overhead"].get("allocator", 0.0)
    if plan["device"].get("segments") != "fixed":
        return ""
    if plan.get("gives_back"):
        return "the allocator must give back freed memory in each step to make room, which takes time: --set hardware.segments=expandable has less to give back"
    if not plan["peak_gib"] - cached <= plan["available_gib"] < plan["peak_gib"]:
        return ""
    return f"{cached:.1f} of it is freed memory in pieces; segments that grow give it back page by page: --set hardware.segments=expandable"
