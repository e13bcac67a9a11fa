"""A model card (README.md) in an export's folder: what was done, from what run, on what data, measured how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.errors import RunError
from preheat.recipe.places import published
from preheat.run import Reader

__all__ = ["version_of", "write"]


def write(folder: Path, run: str | Path, made: Mapping[str, Any], *, title: str, use: str) -> None:
    """Writes `folder`/README.md.

    Args:
        folder: of the export, while it is written.
        run: what was exported: a run, whose recipe, data and metrics are told; a model's or an adapter's folder, which is named.
        made: what the writer returns.
        title: the format and dtype, as in "GGUF, q8_0".
        use: a command or a few lines of Python that use it.
    """
    name = Path(run).resolve().name
    parts = [
        f"---\ntags:\n- preheat\n---\n\n# {name}: {title}",
        "\n".join(_origin(Path(run), made)),
        "\n".join(["## Compared with the model it came from\n", *_compared(made)]),
        f"## Use\n\n```\n{use}\n```",
    ]
    if made["note"]:
        parts.insert(3, f"Note: {made['note']}.")
    try:
        (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror})") from None


def version_of(package: str) -> str:
    """As in "onnxruntime 1.32.0"."""
    from importlib.metadata import version

    return f"{package} {version(package)}"


def _origin(run: Path, made: Mapping[str, Any]) -> list[str]:
    merged = f", {made['merged']} adapters merged" if made.get("merged") else ""
    run = run.parent.parent if run.parent.name == "checkpoints" else run
    if not (run / "recipe.yaml").is_file():
        return [f"Written by preheat from the folder `{run.resolve().name}`{merged}."]
    told = Reader(run)
    lines = [f"Written by preheat from the run `{run.resolve().name}`{merged}.", "", "## Trained", ""]
    for technique, changes in told.changes.items():
        lines += [f"- {technique}: {change['what']}" for change in changes]
    lines += _data(run) + _measured(told)
    return [*lines, "", "The recipe:", "", "```yaml", recipes.dump(published(recipes.load(run / "recipe.yaml"))).strip(), "```"]


def _data(run: Path) -> list[str]:
    file = run / "data.json"
    if not file.is_file():
        return []
    data = json.loads(file.read_text(encoding="utf-8"))
    sizes = data.get("counts", {}).get("train", {})
    count = f", {sizes['documents']:,} documents, {sizes['tokens']:,} tokens to train on" if "tokens" in sizes else ""
    template = f"; chat template {data['template']}" if data.get("chat") else ""
    return [f"- data: {data['source']}{count}{template}"]


def _measured(told: Reader) -> list[str]:
    metrics, evaluations = told.metrics(), told.evaluations()
    lines = []
    if metrics:
        last = metrics[-1]
        lines.append(
            f"- after {last['step']:,} steps and {last['tokens']:,} tokens: training loss {last['loss']:.4f} nats a token"
        )
    losses = [(line["step"], line["validation_loss"]) for line in evaluations if "validation_loss" in line]
    if losses:
        lines.append(f"- validation loss {losses[-1][1]:.4f} at step {losses[-1][0]:,}")
    if machine := told.environment.get("machine"):
        lines.append(f"- on {machine['device']}, with torch {told.environment['versions']['torch']}")
    return lines


def _compared(made: Mapping[str, Any]) -> list[str]:
    """A table of what `shared.figures` says."""
    before, after = made["before"]["perplexity"], made["after"]["perplexity"]
    rows = [
        ("positions compared", f"{made['tokens']:,}, of prose, code, arithmetic and JSON"),
        ("largest difference of a logit", f"{made['max_logit_difference']:.3g} (largest logit {made['largest_logit']:.3g})"),
        ("mean difference of a logit", f"{made['mean_logit_difference']:.3g}"),
        ("same most likely token", f"{made['top1_agreement']:.1%} of positions"),
    ]
    if before is not None:
        rows.append(("perplexity over these rows", f"{before:.5g} before, {after:.5g} after"))
    return [
        f"Read back by {made['read_by']}:",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {what} | {figure} |" for what, figure in rows),
    ]
