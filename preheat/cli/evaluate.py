"""The `preheat eval` command."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.console import Base, Checkpoint, Json
from preheat.cli.views.estimate import format_estimate
from preheat.cli.views.long_context_table import build_grids
from preheat.cli.views.variants_table import build_variants_tables
from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.data import Rows
    from preheat.evaluation.results import ResultSet
    from preheat.evaluation.tasks import LengthTask, Task
    from preheat.recipe import Recipe

__all__ = ["evaluate"]

# Names of a run's own texts; a file of the same name takes precedence.
SPLITS = ("validation", "train")


def evaluate(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|MODEL|ADAPTER [AFTER]",
            help=(
                "The folder of a run, a Hugging Face model, or a PEFT adapter. Two are compared, as before and after."
            ),
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help=("A text: a file, folder or source, or `validation` (the default) or `train` of a run. Repeatable."),
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="NAME|FILE.yaml",
            help=(
                "A task: a built-in name or a YAML file, NAME=ROWS for your own rows, with ,KEY=VALUE for further "
                "keys (shots=0..8 compares numbers of examples); lm-eval:NAME for one of lm-eval's. Long context: "
                "recall, and with a long text needle=FILE, "
                "positions=FILE, continuation=FILE. Repeatable."
            ),
        ),
    ] = None,
    prompt: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompt",
            metavar="FILE.jinja",
            help=(
                "Ask the tasks with this prompt instead of their own. Repeatable: the prompts are compared with the "
                "first one, question by question."
            ),
        ),
    ] = None,
    before: Annotated[
        bool, typer.Option("--before", help="For a run: also measure the model that it started from.")
    ] = False,
    forgetting: Annotated[
        str | None,
        typer.Option("--forgetting", help="A text whose loss shows forgetting; needs --before or two models."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Maximum number of sequences of a text.")] = 1000,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of rows of a task; default: all.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            min=2,
            help=(
                "Tokens per sequence; default: for texts the run's, or 512; for tasks the model's positions, up to "
                "2,048."
            ),
        ),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option("--samples", help="Write the questions and answers, row by row, to this .jsonl file."),
    ] = None,
    checkpoint: Checkpoint = None,
    base: Base = None,
    json: Json = False,
) -> None:
    """Measure loss and perplexity on texts, and scores of tasks, with 95 % bootstrap intervals; compare two models.

    Example: `preheat eval runs/demo`, `preheat eval my-model --data notes.txt --tasks multiple_choice=rows.jsonl`,
    `preheat eval runs/demo --before`, `preheat eval my-model --length 4096 --tasks 'recall,lengths=[1024, 4096]'
    --tasks positions=book.txt`
    """
    from preheat.cli.views.console import build_console, emit
    from preheat.errors import RecipeError
    from preheat.evaluation.execution import require_sandbox_for
    from preheat.evaluation.lm_eval import require_harness
    from preheat.evaluation.run_evaluator import compute_differences
    from preheat.evaluation.tasks import find_tasks
    from preheat.evaluation.variants import compare_variants, find_variants, replace_prompts
    from preheat.files import to_plain_data
    from preheat.inference.load import require_model

    if len(model) > 2 or (before and len(model) > 1):
        problem = "--before is for one run" if len(model) == 2 else f"{len(model)} models were named"
        raise RecipeError(f"RUN|MODEL: name one, or two to compare; {problem}")
    if forgetting is not None and len(model) == 1 and not before:
        raise RecipeError("--forgetting: shows a difference: add --before, or name two models")
    # Before any model is loaded: an unknown task is reported at once.
    chosen = find_tasks(tasks or [])
    if prompt:
        if not chosen:
            raise RecipeError("--prompt: replaces the prompt of a task; name one with --tasks")
        chosen = replace_prompts(chosen, prompt)
    if any(isinstance(task, str) for task in chosen):
        require_harness()
    require_sandbox_for(chosen, knob="--tasks")
    # Emptied here, since each task appends its rows.
    if samples is not None:
        _create_samples_file(samples)
    model = [find_local_folder(path) for path in model]
    for path in model:
        require_model(path)
    model = _at_checkpoint(model, checkpoint)
    recipe = _find_recipe(model)
    texts = data if data is not None else (["validation"] if recipe is not None else [])
    # Each text once, in the order of the command line; the text for forgetting is measured like the others.
    texts = [*dict.fromkeys(texts), *([forgetting] if forgetting is not None and forgetting not in texts else [])]
    if not texts and not chosen:
        raise RecipeError("--data: is needed with a model folder: name the text to evaluate on, or --tasks")

    # (path, measure it before its first step)
    wanted = [(model[0], True), (model[0], False)] if before else [(path, False) for path in model]
    evaluate_model = partial(
        _evaluate_model, texts=texts, tasks=chosen, recipe=recipe, rows=rows, limit=limit, length=length, base=base
    )
    results = [
        # Answers of the last model only: those after training.
        evaluate_model(path, at_start, samples=samples if n == len(wanted) - 1 else None)
        for n, (path, at_start) in enumerate(wanted)
    ]
    summary = _summarize(model[-1], results[-1])
    if len(results) == 2:
        summary |= {
            "before": _summarize(model[0], results[0]),
            "difference": to_plain_data(compute_differences(*results)),
        }
    if groups := find_variants(chosen):
        summary["variants"] = to_plain_data(compare_variants(groups, results[-1].tasks))
    if json:
        emit(summary)
    else:
        build_console().print(_build_table(summary))
        for table in build_variants_tables(groups, summary):
            build_console().print(table)
        for grid in build_grids(summary):
            build_console().print(grid)
        for note in _collect_notes(summary):
            build_console().print(note, style="dim")


def _create_samples_file(samples: Path) -> None:
    """Creates or empties the samples file; raises RecipeError if an existing file is not one of ours."""
    from preheat.errors import RecipeError
    from preheat.files import require_overwritable

    require_overwritable(samples, ['{"task": '])
    try:
        # The keys that every line of a samples file has.
        first = samples.open(encoding="utf-8", errors="replace").readline(1 << 20) if samples.is_file() else ""
        if first and not all(f'"{key}": ' in first for key in ("where", "context", "choices", "gold")):
            raise RecipeError(f"--samples {samples}: exists, and preheat did not write it; name another file")
        samples.write_text("", encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"--samples {samples}: cannot be written ({error.strerror})") from None


def _at_checkpoint(models: list[str], checkpoint: str | None) -> list[str]:
    """Returns the models, each run among them at a checkpoint."""
    from preheat.engine.checkpoint import at_checkpoint

    runs = [path for path in models if (Path(path) / "recipe.yaml").is_file()]
    # Of models without a run: the error says so.
    wanted = runs or models[:1]
    return [str(at_checkpoint(Path(path), checkpoint)) if path in wanted else path for path in models]


def _find_recipe(models: list[str]) -> Recipe | None:
    """Returns the recipe of the last run among the models, which sets how texts are read; None without a run."""
    from preheat import recipe as recipes
    from preheat.compress.atomic_folder import choose_home
    from preheat.run.reader import Reader

    runs = [file for path in models if (file := choose_home(path)[0] / "recipe.yaml").is_file()]
    return recipes.parse(Reader(runs[-1].parent).recipe_text, where=str(runs[-1])) if runs else None


def _evaluate_model(
    path: str,
    at_start: bool,
    *,
    texts: list[str],
    tasks: Sequence[Task | LengthTask | str],
    recipe: Recipe | None,
    rows: int,
    limit: int | None,
    length: int | None,
    samples: Path | None,
    base: str | None,
) -> ResultSet:
    """Evaluates one model on all texts and tasks; the model is freed on return."""
    from preheat.cli.views.console import build_console
    from preheat.compress.atomic_folder import choose_home
    from preheat.evaluation.lm_eval import measure_by_harness
    from preheat.evaluation.long_context import draw_questions, measure_length, reach_of
    from preheat.evaluation.perplexity import count_token_bytes, measure_text, tokenize_text
    from preheat.evaluation.results import ResultSet
    from preheat.evaluation.run_task import measure_task
    from preheat.evaluation.scoring import Scorer
    from preheat.evaluation.tasks import LengthTask, Task
    from preheat.inference.load import load_model

    # A full model has no base; in a comparison, the other one may be an adapter that needs it.
    takes_base = (Path(path) / "adapter_config.json").is_file() or (choose_home(path)[0] / "recipe.yaml").is_file()
    opened = load_model(path, base=base if takes_base else None, at_start=at_start)
    # One recipe for all models, so that both read the same rows.
    settings = recipe or opened.recipe
    cut = length or settings.batch.seq_len
    tokenizer = opened.tokenizer_folder
    micro = min(8, settings.batch.size)
    positions = opened.build.model.positions
    with build_console(error=True).status("reading") as status:

        def say(what: str, done: float, total: float | None) -> None:
            status.update(f"{path}: {what} {done:,.0f}" + (f" of {total:,.0f}" if total else ""))

        results = ResultSet({}, {})
        sizes = count_token_bytes(opened.tokenizer)
        for name in texts:
            split_rows = _read_rows(settings, name, is_run=recipe is not None, length=cut, tokenizer=tokenizer)
            # On its own data, a run is measured by its own objective.
            own = name in SPLITS and recipe is not None and not Path(name).exists()
            results.texts[name] = measure_text(
                opened.build, split_rows, micro=micro, limit=rows, sizes=sizes, objective=own
            )
            say("texts", len(results.texts), len(texts))
        # Contexts of tasks are longer than many training rows.
        reach = length or max(settings.batch.seq_len, min(positions, 2048))
        # positions 0: no limit
        scorer = Scorer(
            opened.build,
            opened.tokenizer,
            micro=micro,
            compiles=True,
            say=say,
            length=min(reach, positions or reach),
            classes=opened.classes,
        )
        for task in tasks:
            if isinstance(task, Task):
                results.tasks[task.name] = measure_task(task, scorer, limit=limit, samples=samples)
            elif isinstance(task, LengthTask):
                texts_of = partial(tokenize_text, settings.data, seed=settings.seed, tokenizer=tokenizer)
                questions = draw_questions(
                    task,
                    scorer,
                    texts=texts_of,
                    longest=length or scorer.length,
                    reach=reach_of(opened.build),
                    limit=limit,
                )
                results.tasks[task.name] = measure_length(questions, scorer)
            else:
                results.tasks.update(measure_by_harness(task, scorer, limit=limit))
    return results


def _read_rows(settings: Recipe, name: str, *, is_run: bool, length: int, tokenizer: str) -> Rows:
    from dataclasses import replace

    from preheat.data import Rows, prepare
    from preheat.data.rows.example_kinds import require_examples
    from preheat.errors import RecipeError
    from preheat.evaluation.perplexity import read_text_rows

    if name in SPLITS and is_run and not Path(name).exists():
        data = replace(settings.data, tokenizer=tokenizer)
        prepared = prepare(data, length=length, seed=settings.seed, add_tokens=settings.model.add_tokens)
        require_examples(settings, prepared)
        split = prepared.validation if name == "validation" else prepared.train
        if split is None or not isinstance(split, Rows) or not len(split):
            reason = "is read as a stream" if name == "train" else "has no validation rows"
            raise RecipeError(f"--data {name}: the run {reason}; name a text")
        return split
    return read_text_rows(
        settings.data, name, knob="--data", partial=True, length=length, seed=settings.seed, tokenizer=tokenizer
    )


def _summarize(model: str, results: ResultSet) -> JsonObject:
    """Returns the results as JSON data; top-level loss, perplexity and bits_per_byte are those of the first text."""
    from preheat.evaluation.results import describe_result
    from preheat.files import to_plain_data

    texts, tasks = ({name: describe_result(result) for name, result in of.items()} for of in results)
    # At the top level for scripts: most evaluations have one text.
    first = next(iter(texts.values()), None)
    values = {name: estimate.value for name, estimate in first.metrics.items()} if first else {}
    top = {key: values.get(key) for key in ("loss", "perplexity", "bits_per_byte")}
    tokens = first.tokens if first else None
    return {"model": model, **top, "tokens": tokens, "texts": to_plain_data(texts), "tasks": to_plain_data(tasks)}


def _build_table(summary: JsonObject) -> Table:
    from rich.table import Table

    compared = "before" in summary
    table = Table(
        "", "metric", *(("before", "after", "difference") if compared else ("value",)), box=None, pad_edge=False
    )
    for part in ("texts", "tasks"):
        for name, result in summary[part].items():
            shown = name
            for metric, value in result["metrics"].items():
                cells = [format_estimate(value)]
                if compared:
                    old = summary["before"][part].get(name, {}).get("metrics", {}).get(metric)
                    off = summary["difference"][part].get(name, {}).get("metrics", {}).get(metric)
                    cells = [format_estimate(old), *cells, format_estimate(off, signed=True)]
                table.add_row(shown, metric, *cells)
                # A name appears in the first row of its metrics only.
                shown = ""
    return table


def _collect_notes(summary: JsonObject) -> list[str]:
    notes = []
    for name, result in summary["texts"].items():
        left = f"; {result['unread_rows']:,} more sequences were not read (--rows)" if result["unread_rows"] else ""
        cut = f"; {result['truncated']:,} examples were truncated (--length)" if result["truncated"] else ""
        if result["no_room"]:
            cut += f"; {result['no_room']:,} examples were left out: no room for an answer (--length)"
        notes.append(f"{name}: {result['tokens']:,} tokens in {result['rows']:,} sequences{left}{cut}")
    for name, result in summary["tasks"].items():
        cut = f"; {result['truncated']:,} had their context truncated" if result["truncated"] else ""
        notes.append(f"{name}: {result['rows']:,} rows{cut}")
    for part in ("texts", "tasks"):
        for name, off in summary.get("difference", {}).get(part, {}).items():
            if not off["paired"]:
                notes.append(
                    f"{name}: the two did not read the same sequences (another tokenizer), so each was resampled "
                    "separately; only bits per byte are comparable"
                )
    notes.append("In brackets: 95 % of 1,000 bootstrap resamples. Losses are in nats a token.")
    return notes
