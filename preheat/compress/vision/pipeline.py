"""Compression pipelines for image classifiers: width pruning, distillation and export, with accuracy, size and
agreement.

The file format is that of `preheat compress --recipe` (preheat/compress/pipeline.py). Image classifiers support these
steps:

    chain:
      - {compress: width, settings: {channels: 0.67}}         # fraction of the channels inside the blocks
      - {train: 5, rate: 0.25, techniques: {distillation: {teacher: $start, mixture: 0.7}}}      # 5 epochs
      - {export: onnx, settings: {dtype: int8}}               # or executorch; float32, or int8 calibrated on training
      images

`run_chain` writes a folder for each step: a model with its image processor, or an exported file, with a model card.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat.compress import compress
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import image_classifier, verify
from preheat.compress.export.merged_model import require
from preheat.compress.export.registry import require_settings
from preheat.compress.pipeline import START, Chain, Step, with_location
from preheat.compress.vision import model_card, training
from preheat.compress.vision.image_folder import Images, calibration, read_folder
from preheat.compress.vision.pruning import narrower
from preheat.errors import RecipeError, RunError, nearest
from preheat.models.image_classifiers import open_classifier, open_processor, scores
from preheat.run_dir import to_json, write_user_file

__all__ = ["run_chain"]

_NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "executorch": ("executorch", "torchao")}
_FILES = {"onnx": "model.onnx", "executorch": "model.pte"}
_SETTINGS = {"optimizer.lr": "lr", "optimizer.weight_decay": "weight_decay", "batch.size": "batch"}
"""Recipe keys that a training step may set -> parameters of `training.train`."""


@dataclass
class _State:
    """State of a running chain.

    Attributes:
        model: input of the next step.
        folder: of that model.
        start: folder of the original model.
    """

    model: Any
    folder: Path
    start: Path
    processor: Any
    train: Images
    held_out: Images
    calibration: Images


def run_chain(
    source: str | Path,
    chain: Chain,
    out: str | Path,
    *,
    data: str | Path,
    turns: int = 5,
    seed: int = 0,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Runs a chain on an image classifier; `out` and the finished steps are kept if a later step fails.

    Args:
        source: a transformers folder with its image processor.
        data: images by class, see `image_folder.read_folder`.
        turns: timed turns per model, one image at a time.
        seed: of the split, the calibration images and training.
        say: progress callback.

    Returns:
        {path, source, data, before, variants: [{name, method, settings, what, path, after, logits}]}. `before` and each
        `after` are {accuracy, loss, parameters, bytes, milliseconds}; `after` also has agreement: the fraction of
        held-out images with the original model's top class. `logits` of an export: see `export.verify.Difference`. The
        same is written to `out`/compress.json.

    Raises:
        RecipeError, DataError, RunError: before the first step if the error can be known by then.

    Example:
        >>> summary = run_chain("mobilenet", load_chain("edge-vision"), "out", data="digits")       # doctest: +SKIP
        >>> summary["variants"][-1]["after"]["accuracy"]                                            # doctest: +SKIP
        0.972
    """
    out, source = Path(out), Path(source)
    require_new(out, source)
    model, processor = open_classifier(source), open_processor(source)
    for step, place in zip(chain.steps, chain.locations, strict=True):
        with with_location(place):
            _require(step, source, model)
    say("reading images")
    train, held_out = read_folder(data, processor, model.config, seed=seed)
    state = _State(model, source, source, processor, train, held_out, calibration(train, seed=seed))
    original = training.all_scores(model, held_out)
    before = training.measure(original, held_out.labels) | {
        "parameters": model.num_parameters(),
        "bytes": _weights(source),
    }
    timed: dict[str, image_classifier.Scorer] = {"before": _eager(model)}
    rows: list[dict[str, Any]] = []
    for number, (step, place) in enumerate(zip(chain.steps, chain.locations, strict=True), 1):
        say(f"step {number} of {len(chain.steps)}: {_words(step)}")
        with with_location(place):
            rows.append(row := _run_step(step, number, state, out, seed, say))
        logits, timed[row["name"]] = row.pop("found"), row.pop("run")
        row["after"] |= training.measure(logits, held_out.labels)
        row["after"]["agreement"] = float((logits.argmax(-1) == original.argmax(-1)).double().mean())
    say("timing")
    speeds = _milliseconds(timed, held_out.pixels([0]), turns)
    before["milliseconds"] = speeds["before"]
    for row in rows:
        row["after"]["milliseconds"] = speeds[row["name"]]
    description = (
        f"{Path(data).resolve().name}: {len(train):,} images to train on, {len(state.calibration)} of them to "
        f"calibrate, {len(held_out):,} held out"
    )
    summary = {"path": rows[-1]["path"], "source": str(source), "data": description, "before": before, "variants": rows}
    for number, row in enumerate(rows):
        model_card.write(out / row["name"], summary, number)
    write_user_file(
        out / "compress.json", to_json(summary, indent=1), fix="free some room; the steps' folders are whole"
    )
    return summary


def _require(step: Step, start: Path, model: Any) -> None:
    """Checks a step before any work is done."""
    if step.compress is not None:
        _share(step)
    elif step.export is not None:
        if step.export not in _FILES:
            raise RecipeError(f"export to {step.export}: image classifiers go to {' and '.join(_FILES)}")
        if strange := sorted(step.settings.keys() - {"dtype", "tolerance"}):
            raise RecipeError(
                f"export to {step.export} has no setting '{strange[0]}' for an image classifier; it has "
                "dtype, tolerance"
            )
        if step.settings.get("dtype", "float32") not in verify.BOUNDS["vision"]:
            raise RecipeError(
                f"dtype: {step.settings['dtype']}: an image classifier has {', '.join(verify.BOUNDS['vision'])}"
            )
        require_settings(step.export, step.settings)
        require(step.export, *_NEEDED[step.export])
    else:
        if step.where_possible:
            raise RecipeError("where_possible: is for language models; leave it out")
        for key in step.settings:
            if key not in _SETTINGS:
                raise RecipeError(
                    f"settings.{key}: an image classifier's training has no such key; {nearest(key, list(_SETTINGS))}"
                )
        _teacher(step, start, model)


def _share(step: Step) -> float:
    """Returns the fraction of the channels to keep."""
    if step.compress != "width":
        raise RecipeError(
            f"compress: {step.compress}: for image classifiers there is width; 8 bits are a dtype of their exports"
        )
    compress.made_of("width", step.settings)
    if strange := sorted(step.settings.keys() - {"channels"}):
        raise RecipeError(f"width has no setting '{strange[0]}' for an image classifier; it has channels")
    if not 0 < (share := step.settings.get("channels", 1.0)) < 1:
        raise RecipeError(f"width: channels: {share} prunes nothing; give the share that stays, as channels: 0.67")
    return float(share)


def _teacher(step: Step, start: Path, model: Any) -> training.Distil | None:
    """Opens the step's teacher.

    Raises:
        RecipeError: techniques other than distillation, settings for language models, a teacher with other classes.
    """
    if strange := sorted(step.techniques.keys() - {"distillation"}):
        raise RecipeError(
            f"techniques.{strange[0]}: is for language models; an image classifier's training has distillation"
        )
    if not step.techniques:
        return None
    settings: Mapping[str, Any] = step.techniques["distillation"] or {}
    known = {f.name for f in fields(training.Distil)}
    if other := sorted(settings.keys() - known):
        raise RecipeError(
            f"techniques.distillation.{other[0]}: is for language models; here there are {', '.join(sorted(known))}"
        )
    if "teacher" not in settings:
        raise RecipeError(
            "techniques.distillation.teacher: is not stated; name the folder of an image classifier, or $start"
        )
    folder = start if settings["teacher"] == START else Path(settings["teacher"])
    teacher = open_classifier(folder, knob="techniques.distillation.teacher").requires_grad_(False)
    if teacher.config.num_labels != model.config.num_labels:
        raise RecipeError(
            f"techniques.distillation.teacher: {folder} tells {teacher.config.num_labels} classes apart, and "
            f"the model {model.config.num_labels}"
        )
    if teacher.config.num_channels != model.config.num_channels:
        raise RecipeError(
            f"techniques.distillation.teacher: {folder} reads images of {teacher.config.num_channels} "
            f"channels, and the model of {model.config.num_channels}"
        )
    return training.Distil(**{**settings, "teacher": teacher})


def _words(step: Step) -> str:
    if step.compress is not None:
        return f"{step.compress} {step.settings.get('channels', '')}".strip()
    if step.export is not None:
        return f"{step.export} {step.settings.get('dtype', 'float32')}"
    return " + ".join([f"train {step.train:g} passes", *step.techniques])


def _run_step(
    step: Step, number: int, state: _State, out: Path, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Runs one step and points `state.model` at its output; returns its figures, held-out logits, and a scorer to
    time."""
    description = _words(step)
    name = f"{number}-{description.replace(' + ', '-').replace(' ', '-')}"
    row: dict[str, Any] = {
        "name": name,
        "method": description,
        "settings": dict(step.settings),
        "path": str(out / name),
    }
    if step.export is not None:
        with NewFolder(out / name) as folder:
            return row | _export(step, folder / _FILES[step.export], state)
    if step.compress is not None:
        state.model, row["what"] = narrower(
            state.model, (pixels for pixels, _ in state.calibration.batches(32)), _share(step)
        )
        training.settle_norms(state.model, state.train)
    else:
        assert step.train is not None
        settings = {_SETTINGS[key]: value for key, value in step.settings.items()}
        teacher = _teacher(step, state.start, state.model)
        settings.setdefault("lr", step.rate * training.LR)
        loss = training.train(
            state.model, state.train, epochs=step.train, distil=teacher, seed=seed + number, say=say, **settings
        )
        row["what"] = (
            f"{step.train:g} passes over {len(state.train):,} images at a rate of {settings['lr']:g}; loss {loss:.4f}"
        )
        if teacher is not None:
            count = teacher.teacher.num_parameters()
            row["what"] += (
                f"; {teacher.mixture:.0%} of it from a teacher of {count:,} parameters at temperature "
                f"{teacher.temperature:g}"
            )
    expected = training.all_scores(state.model, state.held_out)
    with NewFolder(out / name) as folder:
        state.model.save_pretrained(folder)
        state.processor.save_pretrained(folder)
        reloaded = open_classifier(folder)
        logits = training.all_scores(reloaded, state.held_out)
        # Equal up to rounding: the alignment of loaded weights may change a convolution's order of summation.
        if not torch.allclose(expected, logits, rtol=1e-3, atol=1e-4):
            raise RunError(
                f"{out / name}: read again, what was written gives other scores than what was made (by "
                f"{(expected - logits).abs().max():.2g})"
            )
        bytes_ = _weights(folder)
    state.model, state.folder = reloaded, out / name  # the next step starts from the saved model
    row["after"] = {"parameters": state.model.num_parameters(), "bytes": bytes_}
    return row | {"found": logits, "run": _eager(state.model)}


def _export(step: Step, file: Path, state: _State) -> dict[str, Any]:
    kind, tolerance = step.settings.get("dtype", "float32"), step.settings.get("tolerance")
    write, open_it = {
        "onnx": (image_classifier.to_onnx, image_classifier.open_onnx),
        "executorch": (image_classifier.to_executorch, image_classifier.open_executorch),
    }[str(step.export)]
    pixels = state.calibration.pixels(range(len(state.calibration)))
    difference = write(state.model, file, pixels, int8=kind == "int8", tolerance=tolerance)
    state.processor.save_pretrained(file.parent)
    run = open_it(file)
    logits = torch.cat([run(state.held_out.pixels([n])) for n in range(len(state.held_out))])
    return {
        "what": f"{step.export} in {kind}"
        + (f", ranges from {len(state.calibration)} images" if kind == "int8" else ""),
        "logits": {
            "largest": difference.largest,
            "mean": difference.mean,
            "scale": difference.scale,
            "agreement": difference.agreement,
            "images": difference.tokens,
        },
        "after": {"parameters": state.model.num_parameters(), "bytes": file.stat().st_size},
        "found": logits,
        "run": run,
    }


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _eager(model: Any) -> image_classifier.Scorer:
    def run(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return scores(model, pixels)

    return run


def _milliseconds(runs: Mapping[str, image_classifier.Scorer], image: Tensor, turns: int) -> dict[str, float]:
    """Returns the median time of one image; models alternate, so that machine load affects all alike. The first turn
    is warmup."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(image)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(timings[1:]) for name, timings in times.items()}
