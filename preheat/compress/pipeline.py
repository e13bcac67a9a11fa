"""Runs a chain of compress, train and export steps over a trained model, each measured on the same held-out data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from preheat.compress.atomic_folder import require_new
from preheat.compress.chain import Chain, Steps, add_location
from preheat.compress.compress import Page, Say
from preheat.compress.text_steps import TextSteps
from preheat.compress.vision.steps import ImageSteps
from preheat.files import to_json, write_user_file
from preheat.models.image_classifiers import is_classifier

if TYPE_CHECKING:
    from preheat.core.compression import CompressionResult, ImageResult

__all__ = ["run_chain"]


def run_chain(
    source: str | Path,
    chain: Chain,
    out: str | Path,
    *,
    data: str | Path | None = None,
    measured: int = 64,
    turns: int = 5,
    seed: int = 0,
    page: Page = lambda folder: None,
    say: Say = lambda message: None,
) -> CompressionResult | ImageResult:
    """Runs a chain on a trained model and writes a subfolder for each step: a model, a run or an export.

    `out` and the finished steps are kept if a later step fails.

    Args:
        source: a run, whose data and techniques the training steps reuse; or a model's folder, with `data`; or the
            folder of an image classifier with its image processor.
        data: a text to calibrate, train and measure with; images by class, see `vision.image_folder.read_folder`.
        measured: text: maximum number of held-out rows.
        turns: timed turns per model; images one at a time.
        seed: images: of the split, the calibration images and training.
        page: called with the folder after compress.json is written, to write a page.
        say: progress callback.

    Returns:
        The contents of `out`/compress.json; `variants` are the steps.

    Raises:
        RecipeError, DataError, RunError: before the first step if the error can be known by then.

    Example:
        >>> summary = run_chain("mobilenet", load_chain("edge-vision"), "out", data="digits")       # doctest: +SKIP
        >>> summary.variants[-1].after.accuracy                                                     # doctest: +SKIP
        0.972
    """
    out = Path(out)
    # Before the model is opened, which takes long.
    require_new(out, source)
    steps: Steps
    if is_classifier(Path(source)):
        steps = ImageSteps(Path(source), chain, out, data=data, seed=seed, say=say)
    else:
        steps = TextSteps(source, chain, out, data=None if data is None else str(data), measured=measured, say=say)
    # Kept until the end, because all models are timed in alternating turns.
    models = {"before": steps.begin()}
    for number, (step, path) in enumerate(zip(chain.steps, chain.locations, strict=True), 1):
        progress, label = f"step {number} of {len(chain.steps)}", steps.label(step)
        say(f"{progress}: {label}")
        with add_location(path):
            name, what = steps.take(step, number)
            # Exports of language models are compared by their writers.
            if step.export is None or steps.measures_exports:
                say(f"{progress}: measuring")
                models[name] = steps.measure(step, name, what)
    say("timing")
    summary = steps.summarize(models, turns)
    # Written last: a folder without it shows a chain that did not finish.
    write_user_file(
        out / "compress.json", to_json(summary, indent=1), fix="free disk space; the steps' folders are intact"
    )
    page(out)
    return summary
