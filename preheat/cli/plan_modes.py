"""Modes of `preheat plan`: plan a recipe unchanged, search, plan serving, or size a model for a FLOPs budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.cli.views.output import passing

if TYPE_CHECKING:
    from preheat.training.plan_request import Question

__all__ = ["budget", "recipe_text", "searched", "served", "stated", "write_recipe"]

_SECONDS = {1: 8.0, 64: 50.0}  # {largest number of devices: seconds for the search}
_MANY = 60.0  # seconds for the search on more devices


def stated(
    question: Question, gpu: str | None, devices: int, per_host: int, price: float | None
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Plans a recipe unchanged; returns (plan, function that computes the figures of its page)."""
    from preheat.core import Tag
    from preheat.planning.explain import explain, figures
    from preheat.planning.observation_cache import observe_cached
    from preheat.planning.plan import plan, settled
    from preheat.planning.search.candidates import worst
    from preheat.planning.search.max_context import longest_as_stated
    from preheat.planning.search.result import EvaluatedPlan, SearchResult
    from preheat.training.plan_request import hardware
    from preheat.training.session import rows_of, vocabulary_of

    device, rates, in_use = hardware(gpu, question.recipe, per_host)
    context: dict[str, Any] = {
        "vocabulary": vocabulary_of(question.recipe),
        "device": device,
        "rates": rates,
        "in_use": in_use,
    }
    world: dict[str, Any] = {} if gpu is None else {"world": devices}
    rows = rows_of(question.recipe)
    recipe = settled(question.recipe, rows=rows, **context, **world)
    prediction = plan(recipe, rows=rows, **context, **world)
    added = tuple(recipe.techniques.values())
    more: dict[str, Any] = {}
    if any(Tag.EXTENDED_CONTEXT in t.provided() for t in added):  # also report the longest context that fits
        more["longest_context"] = longest_as_stated(recipe, **context, **world)
    result = SearchResult(EvaluatedPlan(recipe, prediction, worst(added), recipe.batch.size, ()))

    def page() -> dict[str, Any]:
        observation = observe_cached(
            recipe, vocabulary=context["vocabulary"], device=device, world=devices, how="whole", logged=True
        )
        return figures(replace(result, seen=[result.best]), observation, rates)

    more["settled"] = {
        f"{name}.{key}": value
        for name, t in recipe.techniques.items()
        for key, value in vars(t).items()
        if key != "on_gpu" and value != getattr(question.recipe.techniques[name], key)
    }
    return {**explain(result, devices=devices, price=price), "chosen": "the recipe as it is", **more}, page


def searched(
    question: Question,
    others: Mapping[str, Question],
    gpu: str | None,
    devices: int,
    per_host: int,
    *,
    aim: str,
    allow: str,
    price: float | None,
    quiet: bool,
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Searches for the best recipe; if nothing fits, plans of other methods that do are added to the alternatives.

    Args:
        others: requests to try in that case: {method: request}.
        quiet: do not print progress.
    """
    from preheat.planning.explain import explain, figures
    from preheat.planning.observation_cache import observe_cached, observe_for_others
    from preheat.planning.search.candidates import Space
    from preheat.planning.search.max_context import longest
    from preheat.planning.search.search import search
    from preheat.planning.worker_pool import worker_pool
    from preheat.training.plan_request import hardware
    from preheat.training.session import rows_of, vocabulary_of

    device, rates, in_use = hardware(gpu, question.recipe, per_host)
    rows = rows_of(question.recipe) if question.given else None
    seconds = next((s for most, s in _SECONDS.items() if devices <= most), _MANY)

    def tell(message: str) -> None:
        if not quiet:
            passing(f"dry run: {message}")

    def search_for(request: Question, **options: Any) -> Any:
        vocabulary = vocabulary_of(request.recipe)
        space = Space(request.recipe, vocabulary, device, devices, allow, per_host, rows)  # type: ignore[arg-type]
        run = longest if aim == "longest-context" else search
        more: dict[str, Any] = {} if aim == "longest-context" else {"aim": aim}
        return run(
            space, rates=rates, in_use=in_use, seconds=options.pop("seconds", seconds), tell=tell, **more, **options
        )

    with worker_pool(observe_for_others):
        result = search_for(question)
        if not quiet:
            passing()
        explained = explain(result, devices=devices, price=price)
        if not explained["fits"]:
            for name, other in others.items():
                would = explain(search_for(other, seconds=seconds / 2, confirm=False), devices=devices, price=price)
                if would["fits"]:
                    keys = ("peak_gib", "tokens_per_second", "seconds_per_step", "mfu", "cost", "energy")
                    metrics = {key: would[key] for key in keys}
                    explained["alternatives"].append(
                        {
                            "what": f"--method {name}: {would['chosen']}",
                            "recipe": would["recipe"]["techniques"],
                            **metrics,
                            "gives_up": "trains an adapter" + (" on a base in 4 bits" if name == "qlora" else ""),
                        }
                    )

    def page() -> dict[str, Any]:
        best = result.best.recipe
        observation = observe_cached(
            best, vocabulary=vocabulary_of(best), device=device, world=devices, how="whole", logged=True
        )
        return figures(result, observation, rates)

    return explained, page


def recipe_text(result: Mapping[str, Any], question: Question) -> str:
    """Returns the chosen recipe as YAML; a model given by name gets the path of its checkpoint."""
    from preheat.recipe.commented_yaml import brief

    values = dict(result["recipe"])
    if question.checkpoint and values["model"]["path"] is None and values["model"]["weights"] != "random":
        values["model"] = {**values["model"], "path": question.checkpoint}
    return brief(values)


def write_recipe(result: Mapping[str, Any], question: Question, path: Path) -> None:
    """Writes the chosen recipe.

    Raises:
        RunError: it cannot be written, or another file exists there.
    """
    from preheat.run_dir import write_generated

    write_generated(path, recipe_text(result, question), "# written by preheat plan")


def served(question: Question, gpu: str | None, devices: int, json: bool) -> None:
    """Prints weights, KV cache, rows that fit and peak speed for each combination of weight and cache format."""
    from preheat.cli.views.console import console, emit
    from preheat.cli.views.plan_view import serving_picture
    from preheat.hardware.rates import Rates
    from preheat.planning.analytic import CACHES, cache_bytes, parameters_of, serving
    from preheat.training.plan_request import hardware

    recipe = question.recipe
    config, total, ends = parameters_of(recipe)
    device, rates, _ = hardware(gpu, recipe, devices)
    if isinstance(rates, Rates):
        bandwidth, peaks = rates.bandwidth, rates.peak_matrix_rate  # measured on this machine
    else:
        assert rates.device.bandwidth is not None
        bandwidth, peaks = rates.device.bandwidth, rates.device.sustained()
    length = recipe.batch.seq_len
    rows = [
        estimate
        for cache_format in CACHES
        for estimate in serving(
            config,
            total,
            ends,
            memory=device.memory,
            length=length,
            devices=devices,
            bandwidth=bandwidth,
            matrix_rate=peaks.get("bf16") or max(peaks.values()),
            kept=cache_format,
        )
    ]
    result = {
        "model": recipe.name,
        "device": {"kind": device.kind, "name": device.name, "memory_gib": device.memory / 2**30, "count": devices},
        "parameters": total,
        "length": length,
        "cache_bytes_per_token": cache_bytes(config, length) / length,
        "fits": any(s.rows for s in rows),
        "formats": [
            {
                "weights": s.format,
                "cache": s.kept,
                "weights_gib": s.weights / 2**30,
                "cache_gib_per_row": s.cache / 2**30,
                "rows": s.rows,
                "longest_context": s.longest,
                "tokens_per_second_at_most": s.tokens_per_second,
                "tokens_per_second_alone": s.alone,
                "seconds_to_first_token": s.first_token,
            }
            for s in rows
        ],
    }
    if json:
        emit(result)
    else:
        console().print(serving_picture(result))
    if not result["fits"]:
        import typer

        raise typer.Exit(3)


def budget(flops: float, json: bool) -> None:
    """Prints the compute-optimal model size and tokens for a budget of FLOPs, by three approaches."""
    from preheat.cli.views.console import console, emit
    from preheat.cli.views.plan_view import budget_picture
    from preheat.planning.analytic import compute_optimal

    approaches = [vars(o) for o in compute_optimal(flops)]
    if json:
        emit({"flops": flops, "approaches": approaches})
    else:
        console().print(budget_picture(flops, approaches))
