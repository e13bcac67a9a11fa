"""Model card (README.md) of an export: source run, data, comparison and usage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.compress.front_matter import front_matter
from preheat.errors import RunError
from preheat.recipe.paths import published
from preheat.run_dir import Reader

__all__ = ["version_of", "write"]


def write(
    folder: Path,
    run: str | Path,
    summary: Mapping[str, Any],
    *,
    title: str,
    use: str,
    library: str,
    pipeline: str = "text-generation",
) -> None:
    """Writes `folder`/README.md.

    Args:
        folder: of the export, while it is written.
        run: the exported run, whose recipe, data and metrics are included; or a model's or an adapter's folder.
        summary: result of the writer.
        title: the format and dtype, as in "GGUF, q8_0".
        use: a command or a few lines of Python that use it.
        library: the library that loads it, by the hub's name.
        pipeline: the hub's name of the task.
    """
    name = Path(run).resolve().name
    relation = "adapter" if library == "peft" else "quantized"
    front = front_matter(run, library=library, pipeline=pipeline, relation=relation)
    parts = [
        f"{front.yaml}\n\n# {name}: {title}",
        "\n".join(_origin(Path(run), summary)),
        "\n".join(["## Compared with the model it came from\n", *_compared(summary)]),
        f"## Use\n\n```\n{use}\n```",
    ]
    if summary["note"]:
        parts.insert(3, f"Note: {summary['note']}.")
    if front.left_out:
        parts.append(front.left_out)
    try:
        (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror})") from None


def version_of(package: str) -> str:
    """Returns a package and its version, as in "onnxruntime 1.32.0"."""
    from importlib.metadata import version

    import preheat

    return f"{package} {preheat.__version__ if package == 'preheat' else version(package)}"


def _origin(run: Path, summary: Mapping[str, Any]) -> list[str]:
    merged = f", {summary['merged']} adapters merged" if summary.get("merged") else ""
    run = run.parent.parent if run.parent.name == "checkpoints" else run
    if not (run / "recipe.yaml").is_file():
        return [f"Written by preheat from the folder `{run.resolve().name}`{merged}."]
    reader = Reader(run)
    lines = [f"Written by preheat from the run `{run.resolve().name}`{merged}.", "", "## Trained", ""]
    for technique, changes in reader.changes.items():
        lines += [f"- {technique}: {change['what']}" for change in changes]
    lines += _data(reader) + _measured(reader)
    text = recipes.dump(published(recipes.parse(reader.recipe_text, where=str(run / "recipe.yaml"))))
    return [*lines, "", "The recipe:", "", "```yaml", text.strip(), "```"]


def _data(run: Reader) -> list[str]:
    data = run.data
    if "source" not in data:
        return []
    sizes = (data.get("counts") or {}).get("train") or {}
    complete = "tokens" in sizes and "documents" in sizes
    count = f", {sizes['documents']:,} documents, {sizes['tokens']:,} tokens to train on" if complete else ""
    template = f"; chat template {data['template']}" if data.get("chat") and "template" in data else ""
    return [f"- data: {data['source']}{count}{template}"]


def _measured(reader: Reader) -> list[str]:
    metrics, evaluations = reader.metrics(), reader.evaluations()
    lines = []
    if metrics:
        last = metrics[-1]
        tokens = f" and {last['tokens']:,} tokens" if last.get("tokens") is not None else ""
        lines.append(f"- after {last['step']:,} steps{tokens}: training loss {last['loss']:.4f} nats a token")
    losses = [
        (line["step"], line["validation_loss"]) for line in evaluations if line.get("validation_loss") is not None
    ]
    if losses:
        lines.append(f"- validation loss {losses[-1][1]:.4f} at step {losses[-1][0]:,}")
    environment = reader.environment
    device, torch = (
        (environment.get(part) or {}).get(key) for part, key in (("machine", "device"), ("versions", "torch"))
    )
    if device and torch:
        lines.append(f"- on {device}, with torch {torch}")
    return lines


def _compared(summary: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a table with `verify.figures`."""
    before, after = summary["before"]["perplexity"], summary["after"]["perplexity"]
    rows = [
        ("positions compared", f"{summary['tokens']:,}, of prose, code, arithmetic and JSON"),
        (
            "largest difference of a logit",
            f"{summary['max_logit_difference']:.3g} (largest logit {summary['largest_logit']:.3g})",
        ),
        ("mean difference of a logit", f"{summary['mean_logit_difference']:.3g}"),
        ("same most likely token", f"{summary['top1_agreement']:.1%} of positions"),
    ]
    if before is not None:
        rows.append((f"perplexity on {summary['perplexity_of']}", f"{before:.5g} before, {after:.5g} after"))
    return [
        f"Read back by {summary['read_by']}:",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {what} | {figure} |" for what, figure in rows),
    ]
