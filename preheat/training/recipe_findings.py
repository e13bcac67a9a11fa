"""Findings of `preheat doctor RECIPE`: what a run on this machine would reject before its data is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from preheat import recipe as recipes
from preheat.core import Device, Tag
from preheat.core.finding import Finding, Fix, FixKind, Severity
from preheat.core.problems import Problem, TechniqueError
from preheat.core.registry import conflicts_of
from preheat.errors import PreheatError
from preheat.recipe import Recipe

__all__ = ["check_recipe"]

_Value = TypeVar("_Value")


class _Checks:
    """Collects findings; a step that is rejected gives one, and the next ones run."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def run(self, part: str, step: Callable[[], _Value]) -> _Value | None:
        """Returns the result of a step; None if it raised an error that the user can fix."""
        try:
            return step()
        except TechniqueError as error:
            self.findings += map(_describe_problem, error.problems)
        except PreheatError as error:
            self.findings += [Finding(part, Severity.STOPS, line) for line in map(str, error.args[0].splitlines())]
        return None


def check_recipe(text: str) -> list[Finding]:
    """Checks a recipe against this machine: device, trackers, data, model, tokenizer, techniques.

    Args:
        text: YAML of a recipe.
    """
    recipe, checks = recipes.parse(text), _Checks()
    device = _check_device(recipe, checks)
    _check_names(recipe, checks)
    if device is not None:
        _check_build(recipe, device, checks)
    message = f"{recipe.name}: its device, data, model and techniques are usable here"
    findings = checks.findings or [Finding("recipe", Severity.OK, message)]
    return [replace(finding, of_recipe=True) for finding in findings]


def _check_device(recipe: Recipe, checks: _Checks) -> Device | None:
    from preheat.engine.device import resolve_device

    resolved = checks.run("device", lambda: resolve_device(recipe))
    if resolved is None:
        return None
    if resolved[0].notice:
        checks.findings.append(Finding("device", Severity.NOTE, resolved[0].notice))
    return resolved[0]


def _check_names(recipe: Recipe, checks: _Checks) -> None:
    """Looks up the trackers and sources that the recipe names."""
    from preheat.data.sources import require_sources
    from preheat.tracking.tracker import find

    for name in recipe.tracking.to:
        checks.run("tracking", lambda name=name: find(name))  # type: ignore[misc]
    checks.run("data", lambda: require_sources(recipe.data))


def _check_build(recipe: Recipe, device: Device, checks: _Checks) -> None:
    """Reads the model's configuration, and builds the recipe with a few layers and without values."""
    from preheat.engine.builder import list_techniques
    from preheat.models import configs
    from preheat.models.presets import require_weights
    from preheat.planning.layer_extrapolation import require_buildable
    from preheat.planning.plan_request import find_vocabulary_size
    from preheat.planning.request import Request

    checks.run("model", lambda: require_weights(recipe))
    before = len(checks.findings)
    source = checks.run("model", lambda: configs.source_config(recipe))
    if len(checks.findings) > before:  # a new model has no configuration either, and is no error
        return
    vocabulary = checks.run("tokenizer", lambda: find_vocabulary_size(recipe, source))
    if vocabulary is None:
        return
    request = checks.run(
        "model", lambda: Request(recipe, device, vocabulary=vocabulary, world=None, source_config=source)
    )
    context = None if request is None else checks.run("techniques", lambda: request.context)
    if request is None or context is None:
        return
    problems = conflicts_of(list_techniques(recipe), context)
    checks.findings += map(_describe_problem, problems)
    if not problems:
        checks.run("techniques", lambda: require_buildable(request))
    if device.kind == "cpu" and Tag.BF16_COMPUTE in context.tags:
        _check_bf16(checks)


def _check_bf16(checks: _Checks) -> None:
    import torch

    from preheat.hardware.probe import fastest_half_dtype

    if fastest_half_dtype() == torch.float32:
        # Two cores with AVX2 (benchmarks/results/inference_cpu.md).
        cost = "0.3 to 8 GFLOP/s where fp32 has 70 to 175: leave out the technique that sets bf16"
        message = "the recipe computes in bf16, for which this CPU has no instructions"
        checks.findings.append(Finding("dtypes", Severity.SLOWS, message, cost))


def _describe_problem(problem: Problem) -> Finding:
    fix = Fix(FixKind.INSTALL, problem.install) if problem.install else None
    key = problem.selected_by or (f"techniques.{problem.technique}" if problem.technique else "techniques")
    return Finding("techniques", Severity.STOPS, f"{key}: {problem.text}", fix=fix)
