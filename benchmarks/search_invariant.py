"""Compares the recipe that `preheat plan` chooses with all recipes one or two changes away, for 19 tasks.

    python benchmarks/search_invariant.py [--tasks 0.5b ...] [--out benchmarks/results/search_invariant.json]

Tasks that the file already has are kept; the page is written beside it. The exit code is 1 if a neighbour is faster than
the answer by more than 2 %.

A change adds a technique that the search may add, drops one that it added, sets one to another of its options (the
micro-batch is one of them: `gradient_accumulation`), or takes another parallel layout. All single changes are dry-run. Of
the pairs, those are dry-run that by the effects of their two changes could be faster than the answer and fit, and all
pairs with a change that is refused by itself. Techniques that are a last resort are left out, as in the search.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preheat.cli.options.subject import find_subject
from preheat.core import Numerics, Technique
from preheat.core.plan import Plan
from preheat.errors import RecipeError
from preheat.hardware.catalogue import resolve_accelerator
from preheat.planning.observation_cache import observe_cached, observe_for_others
from preheat.planning.plan import describe
from preheat.planning.plan_request import request_of
from preheat.planning.request import Request
from preheat.planning.search.candidates import Space, describe_techniques, find_candidate_problems
from preheat.planning.search.result import EvaluatedPlan
from preheat.planning.search.search import count_passes, search
from preheat.planning.worker_pool import start_worker_pool

MOST = 0.02
"""Largest improvement by a neighbour that passes."""
_ROOM = 1.1  # of the available memory: pairs that are estimated up to this are dry-run


@dataclass(frozen=True)
class Task:
    """A question to `preheat plan`; `gpu` None is the CPU of this machine."""

    model: str
    method: str
    gpu: str | None
    count: int = 1
    nodes: int = 1
    allow: Numerics = "rounding"
    batch_tokens: int | None = None
    length: int | None = None  # tokens of a row

    @property
    def devices(self) -> int:
        return self.count * self.nodes

    @property
    def name(self) -> str:
        many = f"{self.devices} " if self.devices > 1 else ""
        allowed = f", --allow {self.allow}" if self.allow != "rounding" else ""
        rows = f", rows of {self.length:,} tokens" if self.length else ""
        return f"{self.model} {self.method} on {many}{self.gpu or 'this CPU'}{allowed}{rows}"

    def request(self) -> Request:
        subject = find_subject(
            self.model,
            method=self.method,
            length=self.length,
            batch_tokens=self.batch_tokens,
            devices=self.devices,
        )
        per_host = self.count if self.nodes > 1 else min(self.devices, 8)
        gpu = None if self.gpu is None else resolve_accelerator(self.gpu)
        return request_of(subject.recipe, gpu, world=self.devices, per_host=per_host, count_rows=False)


TASKS = (
    Task("Qwen/Qwen2.5-0.5B", "qlora", "RTX-4090"),
    Task("llama-3.2-1b", "full", "H100"),
    Task("Qwen/Qwen3-8B", "qlora", "RTX-4090"),
    Task("Qwen/Qwen2.5-1.5B", "lora", "L40S"),
    Task("Qwen/Qwen3-1.7B", "full", "A100-80GB"),
    Task("Qwen/Qwen3-4B", "lora", "RTX-4090"),
    Task("llama-3.1-8b", "lora", "H100", allow="different"),
    Task("llama-3.1-8b", "full", "A100-80GB", 8),
    Task("Qwen/Qwen2.5-0.5B", "lora", None, batch_tokens=8192),
    Task("Qwen/Qwen2.5-32B", "qlora", "L40S"),
    Task("llama-3.1-70b", "full", "H100", 8, 8),
    Task("Qwen/Qwen2.5-0.5B", "full", None, batch_tokens=8192),
    Task("llama-3.2-1b", "full", "H100", length=32768),
    Task("Qwen/Qwen3-8B", "qlora", "RTX-4090", length=8192),
    Task("llama-3.1-8b", "lora", "H100", length=8192),
    Task("llama-3.1-70b", "full", "H100", 8, 8, length=8192),
    Task("Qwen/Qwen3.5-9B", "lora", "H100"),
    Task("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qlora", "H100"),
    Task("Qwen/Qwen3-30B-A3B", "lora", "H100"),
    Task("openai/gpt-oss-120b", "full", "H100", 8, 8, length=4096),
)


@dataclass(frozen=True)
class Change:
    """Techniques to set (None: to drop) in the answer."""

    set: Mapping[str, Technique | None]

    @property
    def what(self) -> str:
        return ", ".join(
            f"without {name}" if t is None else f"with {_format_change(t)}" for name, t in sorted(self.set.items())
        )


@dataclass
class Outcome:
    """Results of the neighbours of a task's answer.

    Attributes:
        singles, pairs: neighbours that were dry-run.
        enumerated: all neighbours that are not refused.
        best: the fastest neighbour that fits, and its tokens/s over the answer's, less 1.
    """

    singles: int = 0
    pairs: int = 0
    enumerated: int = 0
    best: str = "-"
    gain: float = -1.0
    better: list[tuple[str, float]] = field(default_factory=list)


def _format_change(t: Technique) -> str:
    if t.micro_batch_count() > 1:
        return f"{t.micro_batch_count()} micro-batches"
    return describe_techniques((t,))


def iterate_single_changes(space: Space, added: Mapping[str, Technique]) -> Iterator[Change]:
    """Yields every change of one technique of an answer, and every other layout that differs in two techniques."""
    context = space.context(space.add_techniques(added.values()).recipe)
    for cls in space.searched():
        present = added.get(cls.name())
        if cls.last_resort and present is None:
            continue
        if present is not None:
            yield Change({cls.name(): None})
        for t in space.settings_of(cls).options(context):
            if space.is_allowed(t) and t != present:
                yield Change({cls.name(): t})
    if space.world > 1:
        shared = {cls.name() for cls in space.searched()} - {cls.name() for cls in space.single_device_techniques()}
        layout = {name: t for name, t in added.items() if name in shared and t.micro_batch_count() == 1}
        for other in space.layouts():
            named = {t.name(): t for t in other}
            changed = {n: named.get(n) for n in {*named, *layout} if named.get(n) != layout.get(n)}
            if len(changed) == 2:
                yield Change(changed)


def apply_changes(added: Mapping[str, Technique], *changes: Change) -> tuple[Technique, ...]:
    """Returns the techniques of an answer after some changes."""
    techniques: dict[str, Technique | None] = dict(added)
    for change in changes:
        techniques.update(change.set)
    return tuple(t for t in techniques.values() if t is not None)


class Neighbourhood:
    """The neighbours of an answer, planned as the search plans its candidates."""

    def __init__(self, space: Space, best: EvaluatedPlan, tell: Callable[[str], None]):
        self.space, self.tell = space, tell
        self.added = {t.name(): t for t in best.added}
        base = self.plan(self.added.values())
        assert base is not None
        self.base = base
        self.speed = self._read_speed(base, self.added.values())

    def plan(self, added: Iterable[Technique], how: str = "few") -> Plan | None:
        """Returns the plan of the recipe with these techniques; None if they are refused."""
        request = self.space.add_techniques(added)
        if find_candidate_problems(self.space, request):
            return None
        try:
            return describe(request, observe_cached(request, how=how))
        except RecipeError:  # found by the build only
            return None

    def refused(self, *changes: Change) -> bool:
        return bool(find_candidate_problems(self.space, self.space.add_techniques(apply_changes(self.added, *changes))))

    def _read_speed(self, plan: Plan, added: Iterable[Technique]) -> float:
        return self.space.over_run(plan.tokens_per_second, added)

    def gain(self, plan: Plan, added: Iterable[Technique]) -> float:
        return self._read_speed(plan, added) / self.speed - 1

    def run(self) -> Outcome:
        outcome = Outcome()
        singles = list(iterate_single_changes(self.space, self.added))
        allowed = [c for c in singles if not self.refused(c)]
        alone = [c for c in singles if c not in allowed]
        effects: list[tuple[Change, float, float]] = []  # GiB more, tokens/s over those of the answer
        tell_every = time.monotonic()
        for n, change in enumerate(allowed):
            plan = self.plan(apply_changes(self.added, change))
            if plan is None:
                continue
            outcome.singles += 1
            gain = self._take(outcome, plan, (change,))
            effects.append((change, plan.peak_gib - self.base.peak_gib, 1 + gain))
            if time.monotonic() - tell_every > 10:
                tell_every = time.monotonic()
                self.tell(f"{n + 1} of {len(allowed)} single changes")
        pairs = [(a[0], b[0]) for a, b in itertools.combinations(effects, 2) if self._is_promising(a, b)]
        pairs += [
            (a, b)
            for a in alone
            for b in (*allowed, *alone)
            if a is not b and not set(a.set) & set(b.set) and not (b in alone and str(a) > str(b))
        ]
        outcome.enumerated = outcome.singles + sum(
            not set(a[0].set) & set(b[0].set) and not self.refused(a[0], b[0])
            for a, b in itertools.combinations(effects, 2)
        )
        pairs = [pair for pair in pairs if not self.refused(*pair)]
        for n, pair in enumerate(pairs):
            plan = self.plan(apply_changes(self.added, *pair))
            if plan is None:
                continue
            outcome.pairs += 1
            self._take(outcome, plan, pair)
            if time.monotonic() - tell_every > 10:
                tell_every = time.monotonic()
                self.tell(f"{n + 1} of {len(pairs)} pairs")
        return outcome

    def _take(self, outcome: Outcome, plan: Plan, changes: tuple[Change, ...]) -> float:
        """Counts a neighbour, with all its layers if it is faster by more than passes; returns its gain."""
        added = apply_changes(self.added, *changes)
        gain = self.gain(plan, added)
        if not plan.fits or (gain <= outcome.gain and gain <= MOST):
            return gain
        what = "; ".join(change.what for change in changes)
        if gain > MOST:
            sure = self.plan(added, "whole" if self.space.world == 1 else "enough")
            if sure is None or not sure.fits:
                return gain
            outcome.better.append((f"{what} ({plan.peak_gib:.1f} GiB)", gain))
            self.tell(f"better by {gain:.1%}: {what}")
        if gain > outcome.gain:
            outcome.best, outcome.gain = what, gain
        return gain

    def _is_promising(self, a: tuple[Change, float, float], b: tuple[Change, float, float]) -> bool:
        """True if two changes together could be faster than the answer and fit, by their effects one by one."""
        if set(a[0].set) & set(b[0].set) or a[2] * b[2] < 1:
            return False
        base, room = self.base.peak_gib, self.base.available_gib * _ROOM
        states = sum(self.base.memory[what] for what in ("parameters", "optimizer", "gradients"))
        rest = max(base - states, 0.01)
        together = states + rest * max(1 + a[1] / rest, 0) * max(1 + b[1] / rest, 0)  # as of a larger micro-batch
        return min(base + a[1] + b[1], together) <= room


def build_row(task: Task, best: EvaluatedPlan, seconds: float, dry_runs: int, outcome: Outcome) -> dict[str, Any]:
    return {
        "task": task.name,
        "answer": describe_techniques(best.added, best.micro),
        "fits": best.plan.fits,
        "tokens_per_second": best.plan.tokens_per_second,
        "peak_gib": best.plan.peak_gib,
        "seconds": seconds,
        "dry_runs": dry_runs,
        "singles": outcome.singles,
        "pairs": outcome.pairs,
        "enumerated": outcome.enumerated,
        "best": outcome.best,
        "gain": outcome.gain,
        "better": sorted(outcome.better, key=lambda pair: -pair[1]),
    }


def render_page(rows: list[dict[str, Any]]) -> str:
    """The results as a page."""
    bad = [row for row in rows if row["gain"] > MOST]
    verdict = (
        f"{len(bad)} of {len(rows)} answers are improved by more than 2 %"
        if bad
        else f"none of {len(rows)} answers is improved by more than 2 %"
    )
    largest = max(row["gain"] for row in rows)
    tried = sum(row["singles"] + row["pairs"] for row in rows)
    lines = [
        "# Plans one or two changes away from the planner's choice",
        "",
        f"**By {tried:,} neighbours (one or two changes of techniques, settings, micro-batch or layout) {verdict}; the largest "
        f"improvement is {max(largest, 0.0):.1%}.**",
        "",
        "| task | answer | tokens/s | GiB | neighbours dry-run (of) | fastest neighbour | by |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {row['task']} | {row['answer']} | {row['tokens_per_second']:,.0f} | {row['peak_gib']:.1f} | "
        f"{row['singles'] + row['pairs']} ({max(row['enumerated'], row['singles'] + row['pairs']):,}) | {row['best']} | "
        f"{row['gain']:+.1%} |"
        for row in rows
    ]
    lines += [
        "",
        "All neighbours are planned by the prediction that the search uses, with the numbers that `--allow` permits "
        "(rounding unless stated). All single changes are dry-run; of the pairs, those that by the effects of their two "
        "changes could be faster and fit, and those with a change that is refused by itself; a pair that is "
        "faster though its changes are slower one by one is not seen. Layouts differ from the answer's in two "
        "techniques. Made by `python benchmarks/search_invariant.py`.",
    ]
    return "\n".join(lines) + "\n"


def check(task: Task, tell: Callable[[str], None]) -> dict[str, Any]:
    """Searches as `preheat plan` does, then plans the neighbours of the answer."""
    request = task.request()
    space = Space(request, task.allow)
    began = time.perf_counter()
    result = search(space, passes=count_passes(task.devices))
    seconds = time.perf_counter() - began
    best = result.best
    tell(
        f"{task.name}: {best.plan.tokens_per_second:,.0f} tokens/s, {best.plan.peak_gib:.1f} GiB in {seconds:.0f} s:"
        f" {describe_techniques(best.added)}; {', '.join(_format_change(t) for t in best.added if t.micro_batch_count() > 1)}"
    )
    outcome = Neighbourhood(space, best, tell).run()
    return build_row(task, best, seconds, len(result.evaluated), outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", help="only tasks whose name contains one of these")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/search_invariant.json"))
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        rows = {row["task"]: row for row in json.loads(options.out.read_text())}

    def tell(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    with start_worker_pool(observe_for_others):  # before the first dry run of this process
        for task in TASKS:
            asked = not options.tasks or any(part.lower() in task.name.lower() for part in options.tasks)
            if task.name in rows or not asked:
                continue
            row = rows[task.name] = check(task, tell)
            tell(
                f"{task.name}: {row['singles']} + {row['pairs']} neighbours, the best {row['gain']:+.1%}: {row['best']}"
            )
            order = [each.name for each in TASKS]
            ordered = sorted(rows.values(), key=lambda each: order.index(each["task"]))
            options.out.write_text(json.dumps(ordered, indent=1) + "\n")
            options.out.with_suffix(".md").write_text(render_page(ordered))
    sys.exit(any(row["gain"] > MOST for row in rows.values()))


if __name__ == "__main__":
    main()
