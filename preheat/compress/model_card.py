"""Model cards (README.md): of compressed models, of exports, and of the steps of image classifiers' chains.

Each kind of card hands its sections to `_render_card`, which adds the front matter and what had to be left out of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.compress.atomic_folder import choose_home
from preheat.compress.export import hub
from preheat.compress.front_matter import build_front_matter
from preheat.core.run_records import Results
from preheat.core.units import format_memory, format_three_digits
from preheat.recipe.paths import shorten_paths
from preheat.run.reader import Reader

if TYPE_CHECKING:
    from preheat.compress.calibration_text import Texts
    from preheat.core.compression import CompressedVariant, ImageResult
    from preheat.core.export import ExportResult
    from preheat.recipe import Recipe

__all__ = ["format_before_and_after", "render_compressed_card", "render_image_card", "find_version", "write_export"]

_USES = {
    ".onnx": (
        'import onnxruntime\nsession = onnxruntime.InferenceSession("model.onnx")\nscores, = session.run(None, '
        '{"pixel_values": pixels.numpy()})'
    ),
    ".pte": (
        "from executorch.runtime import Runtime\nforward = "
        'Runtime.get().load_program("model.pte").load_method("forward")\nscores, = forward.execute((pixels,))  # '
        "one image"
    ),
    "": (
        "from transformers import AutoModelForImageClassification\nscores = "
        'AutoModelForImageClassification.from_pretrained(".")(pixels).logits'
    ),
}
_IMAGE = (
    'from transformers import AutoImageProcessor\npixels = AutoImageProcessor.from_pretrained(".", '
    'backend="pil")(image, return_tensors="pt")["pixel_values"]\n'
)


def _render_card(
    source: str | Path,
    title: str,
    sections: Iterable[str],
    *,
    library: str,
    pipeline: str,
    relation: str = "quantized",
    tags: Sequence[str] = (),
    closing: str = "",
) -> str:
    """Returns a card in Markdown; the arguments that are not listed are those of `front_matter`.

    Args:
        title: the heading.
        sections: paragraphs, lists, tables; empty ones are left out.
        closing: begins the last paragraph, before what was left out of the front matter.
    """
    front = build_front_matter(source, library=library, pipeline=pipeline, relation=relation, tags=tags)
    # Says which fields the front matter lacks, such as the license of an unknown base.
    last = " ".join(filter(None, (closing, front.left_out)))
    return "\n\n".join(filter(None, (front.yaml, f"# {title}", *sections, last))) + "\n"


def _render_table(rows: Sequence[Sequence[str]], rule: str = "---") -> str:
    """Returns a table in Markdown with the first row as its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0].replace("|  |", "| |"), "|" + f"{rule}|" * len(rows[0]), *lines[1:]])


def render_compressed_card(
    row: CompressedVariant, *, source: str, texts: Texts, reads: bool, said: Sequence[str] = ()
) -> str:
    """Returns the card of a compressed model: method, source, data and measurements.

    Args:
        row: figures of a variant, from `compress.compress`.
        source: the model that was compressed.
        texts: calibration and held-out rows.
        reads: True if the method used the calibration sequences.
        said: further notes.
    """
    from preheat.compress.calibration import describe

    before, after = row.before, row.after
    low, high = after.perplexity_interval
    between = f" (95 % of bootstrap resamples: {low:.4f} to {high:.4f})" if low is not None else ""
    settings = ", ".join(f"{key} {value!r}" for key, value in row.settings.items()) or "none"
    calibration = describe(texts.calibration) if reads else "not used by this method"
    speeds = [figures.decode_tokens_per_second for figures in (before, after)]
    first = [1e3 * figures.first_token_seconds for figures in (before, after)]
    name = Path(source).name
    sections = [
        f"What: {row.what}.{' ' + row.detail + '.' if row.detail else ''}",
        f"From: `{name}`, adapters merged, in fp32. Settings: {settings}.",
        *(f"Note: {note}." for note in said),
        f"Calibration: {calibration}. Data: {texts.description}.",
        _render_table(
            [
                ("", "before", "after"),
                (
                    "perplexity on held-out text",
                    f"{before.perplexity:.4f}",
                    f"{after.perplexity:.4f} ({row.perplexity_rise:+.2%})",
                ),
                ("loss, nats a token", f"{before.loss:.4f}", f"{after.loss:.4f}"),
                ("weights", f"{before.bytes:,} bytes in bf16", f"{after.bytes:,} bytes"),
                (
                    "decoding, one sequence, tokens/s",
                    f"{speeds[0]:.1f} in bf16",
                    f"{speeds[1]:.1f} ({speeds[1] / speeds[0]:.2f}x)",
                ),
                (
                    f"first token after {after.prompt_tokens} tokens, ms",
                    f"{first[0]:.1f} in bf16",
                    f"{first[1]:.1f}",
                ),
            ]
        ),
        f"Measured: perplexity over {after.tokens:,} held-out tokens in {after.rows} sequences{between}, before "
        "in the precision that it was trained in.\nTimes are medians of turns taken alternately with the same model in "
        "bf16, by transformers' own forward with a KV cache, on the machine that\nwrote this. Logits differ by at "
        f"most {row.max_logit_difference:.3g} (largest {row.largest_logit:.3g}), and the likeliest token is "
        f"the\nsame at {row.top_1_agreement:.1%} of the positions. The written model was read back and reproduces "
        "its in-memory logits exactly.",
    ]
    return _render_card(
        source,
        f"{name}, compressed by {row.method}",
        sections,
        library="preheat" if row.quantized else "transformers",
        pipeline="text-generation",
        tags=("compressed", row.method),
        closing=(
            'Use: `preheat generate FOLDER --prompt "…"`, `preheat eval FOLDER --data TEXT`. '
            f"Written by {find_version('preheat')}."
        ),
    )


def render_image_card(summary: ImageResult, number: int, folder: Path) -> str:
    """Returns the card of one step of an image classifier's chain: method, source, images and measurements.

    Args:
        summary: of the chain.
        number: index of the step in it.
        folder: that the step wrote.
    """
    # Exports do not change the model, so earlier exports are not among the steps that led to this one.
    last = summary.variants[number]
    steps = [*(step for step in summary.variants[:number] if step.logits is None), last]
    # The exported file, if the step wrote one; models of transformers have no `model.*` in `_USES`.
    suffix = next((file.suffix for file in folder.glob("model.*") if file.suffix in _USES), "")
    models = [("before", summary.before), *((step.method, step.after) for step in steps)]
    comparison = ""
    if (difference := last.logits) is not None:
        comparison = (
            f"Compared with the original model, over {difference.images} calibration images: scores differ by at "
            f"most {difference.largest:.3g} (largest {difference.scale:.3g}), by {difference.mean:.3g} in "
            f"the mean; the first class is the same at {difference.agreement:.1%}."
        )
    name = Path(summary.source).resolve().name
    sections = [
        f"From the image classifier `{name}`:",
        "\n".join(f"{n}. {step.method}: {step.what}." for n, step in enumerate(steps, 1)),
        f"Images: {summary.data}.",
        _render_table(
            [
                ("", "accuracy", "loss", "parameters", "bytes", "as before", "ms an image"),
                *(
                    (
                        method,
                        f"{figures.accuracy:.1%}",
                        f"{figures.loss:.4f}",
                        f"{figures.parameters:,}",
                        f"{figures.bytes:,}",
                        "" if figures.agreement is None else f"{figures.agreement:.1%}",
                        f"{figures.milliseconds:.2f}",
                    )
                    for method, figures in models
                ),
            ]
        ),
        "Accuracy, loss (nats an image) and the share with the same first class as before are of the held-out images; "
        "times are medians of turns taken\n"
        "alternately, one image at a time, on the machine that wrote this: models in eager PyTorch, files in their own "
        "runtime.",
        comparison,
        f"Use:\n\n```\n{_IMAGE}{_USES[suffix]}\n```",
    ]
    return _render_card(
        summary.source,
        f"{name}: {last.method}",
        sections,
        library={".onnx": "onnx", ".pte": "executorch"}.get(suffix, "transformers"),
        pipeline="image-classification",
        # The hub has no relation for a converted file; a pruned or distilled model is a finetune.
        relation="quantized" if suffix else "finetune",
        closing=f"Written by {find_version('preheat')}.",
    )


def write_export(
    folder: Path,
    run: str | Path,
    summary: ExportResult,
    *,
    title: str,
    use: str,
    library: str,
    pipeline: str = "text-generation",
) -> None:
    """Writes the card of an export: source run, data, comparison and usage.

    Args:
        folder: of the export, while it is written.
        run: the exported run, whose data, evaluation, predictions and recipe are included; or a model's or an adapter's
            folder.
        summary: the writer's result.
        title: the format and dtype, as in "GGUF, q8_0".
        use: a command or a few lines of Python that use it.
        library: the library that loads it, by the hub's name.
        pipeline: the hub's name of the task.
    """
    # The run's name, also of a checkpoint.
    title = f"{choose_home(run)[0].resolve().name}: {title}"
    sections = [
        *_describe_origin(Path(run), summary),
        "## Compared with the original model",
        _render_comparison(summary),
        f"Note: {_without_path(summary.note, Path(run))}." if summary.note else "",
        f"## Use\n\n```\n{use}\n```",
    ]
    text = _render_card(
        run,
        title,
        sections,
        library=library,
        pipeline=pipeline,
        relation="adapter" if library == "peft" else "quantized",
    )
    (folder / hub.CARD).write_text(text, encoding="utf-8")
    hub.write_record(folder, title, summary.step)


def find_version(package: str) -> str:
    """Returns a package and its version, as in "onnxruntime 1.32.0"."""
    from importlib.metadata import version

    import preheat

    return f"{package} {preheat.__version__ if package == 'preheat' else version(package)}"


def _without_path(text: str, run: Path) -> str:
    """Returns a text about a run that was named by an absolute path, with its name instead."""
    home, _ = choose_home(run)
    return text.replace(str(home), home.name) if home.is_absolute() else text


def _describe_origin(run: Path, summary: ExportResult) -> list[str]:
    """Returns the sections on the run: data, training, evaluation, prediction and recipe."""
    merged = f", {summary.merged} adapters merged" if summary.merged else ""
    # Of a checkpoint, the run's folder.
    run, _ = choose_home(run)
    if not (run / "recipe.yaml").is_file():
        return [f"Written by preheat from the folder `{run.resolve().name}`{merged}."]
    reader = Reader(run)
    recipe = shorten_paths(recipes.parse(reader.recipe_text, where=str(run / "recipe.yaml")))
    changes = [f"- {technique}: {change.what}" for technique, made in reader.changes.items() for change in made]
    return [
        f"Written by preheat from the run `{run.resolve().name}`{merged}.",
        "## Trained",
        "\n".join([*changes, *_describe_data(reader, recipe), *_describe_measurements(reader, summary.step)]),
        *_evaluated(reader, summary.step),
        *_predicted(reader),
        f"The recipe:\n\n```yaml\n{recipes.dump(recipe).strip()}\n```",
    ]


def _describe_data(run: Reader, recipe: Recipe) -> list[str]:
    data = run.data
    if not data.source:
        return []
    # By the recipe: the record describes the sources with their paths.
    names = ", ".join(f"`{part.source}`" for part, _ in recipe.data.parts())
    read = (data.counts or {}).get("read")
    rows = f", {read:,} rows read" if isinstance(read, int) else ""
    size = data.trained_on
    count = f", {size.documents:,} documents, {size.tokens:,} tokens to train on" if size else ""
    template = f"; chat template {_bare(data.template)}" if data.chat else ""
    return [f"- data: {names}{rows}{count}{template}"]


def _bare(template: str | None) -> str | None:
    """Returns the name of a chat template, of a file without its folder."""
    return Path(template).name if template and Path(template).is_absolute() else template


def _describe_measurements(reader: Reader, step: int | None) -> list[str]:
    # Those of the exported checkpoint: the run may have continued.
    metrics = [line for line in reader.metrics() if step is None or line.step <= step]
    evaluations = [line for line in reader.evaluations() if step is None or line.step <= step]
    lines = []
    if metrics:
        last = metrics[-1]
        tokens = f" and {last.tokens:,} tokens" if last.tokens is not None else ""
        lines.append(f"- after {last.step:,} steps{tokens}: training loss {last.loss:.4f} nats a token")
    # Evaluations may have other metrics only.
    losses = [
        (line.step, line.validation_loss)
        for line in evaluations
        if line.validation_loss is not None and math.isfinite(line.validation_loss)
    ]
    if losses:
        lines.append(f"- validation loss {losses[-1][1]:.4f} at step {losses[-1][0]:,}")
    environment = reader.environment
    device = environment.machine.device if environment.machine else None
    torch = (environment.versions or {}).get("torch")
    if device and torch:
        lines.append(f"- on {device}, with torch {torch}")
    return lines


def _evaluated(reader: Reader, step: int | None) -> list[str]:
    """Returns a table of the run's newest evaluation and of that before training; [] if it is of a later checkpoint."""
    evaluation = reader.evaluation
    if evaluation.after is None or evaluation.step is None or (step is not None and evaluation.step > step):
        return []
    before = evaluation.before or Results()
    rows = [("", "before training", f"after step {evaluation.step:,}")]
    for results, earlier in ((evaluation.after.texts, before.texts), (evaluation.after.tasks, before.tasks)):
        for name, result in results.items():
            old = earlier[name].metrics if name in earlier else {}
            for metric, figure in result.metrics.items():
                was = f"{old[metric].value:.5g}" if metric in old else "not measured"
                rows.append((f"{name}: {metric.replace('_', ' ')}", was, f"{figure.value:.5g}"))
    return ["## Evaluation", _render_table(rows)] if len(rows) > 1 else []


def _predicted(reader: Reader) -> list[str]:
    """Returns a table of predicted and measured memory and speed of training."""
    plan, measured = reader.plan, reader.measured()
    if plan is None or measured.peak_gib is None or measured.tokens_per_second is None:
        return []
    predicted = plan.predicted
    rows = [
        ("", "predicted", "measured"),
        ("peak memory", format_memory(predicted.peak_gib), format_memory(measured.peak_gib)),
        ("tokens/s", format_three_digits(predicted.tokens_per_second), format_three_digits(measured.tokens_per_second)),
    ]
    return ["## Memory and speed of training", _render_table(rows)]


def format_before_and_after(summary: ExportResult) -> str:
    """Returns an export's perplexities, with their precisions if these differ.

    As in "5.1 before (computed in bf16), 5.2 after (f16 weights)".
    """
    before, after = summary.before, summary.after
    # The run's own evaluation may compute in another precision than the exported file.
    computed = f" (computed in {before.computes_in})" if before.computes_in else ""
    # An adapter has no file of weights in a precision of its own.
    weights = f" ({summary.dtype} weights)" if computed and summary.dtype else ""
    return f"{before.perplexity:.5g} before{computed}, {after.perplexity:.5g} after{weights}"


def _render_comparison(summary: ExportResult) -> str:
    """Returns a table with `verify.build_comparison`."""
    rows = [
        ("positions compared", f"{summary.tokens:,}, of prose, code, arithmetic and JSON"),
        (
            "largest difference of a logit",
            f"{summary.max_logit_difference:.3g} (largest logit {summary.largest_logit:.3g})",
        ),
        ("mean difference of a logit", f"{summary.mean_logit_difference:.3g}"),
        ("same most likely token", f"{summary.top1_agreement:.1%} of positions"),
    ]
    if summary.before.perplexity is not None:
        rows.append((f"perplexity on {summary.perplexity_of}", format_before_and_after(summary)))
    return f"Read back by {summary.read_by}:\n\n" + _render_table([("", ""), *rows], " --- ")
