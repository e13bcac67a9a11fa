"""A chain of steps over an image classifier: narrower, distilled, exported; accuracy, bytes and agreement before and after each.

The file is that of `preheat compress --recipe` (see preheat/compress/pipeline.py); of its words these are for image classifiers:

    chain:
      - {compress: width, settings: {channels: 0.67}}                     # share of the channels inside the blocks
      - {train: 5, rate: 0.25, techniques: {distillation: {teacher: $start, mixture: 0.7}}}      # 5 passes over the images
      - {export: onnx, settings: {dtype: int8}}                           # or executorch; float32 or int8, calibrated on training images

`run_chain` writes a folder for each step: a model's with its image processor, or one file with a model card.
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
from preheat.compress.pipeline import START, Chain, Step, said_of
from preheat.compress.vision import model_card, training
from preheat.compress.vision.image_folder import Images, calibration, read_folder
from preheat.compress.vision.pruning import narrower
from preheat.errors import RecipeError, RunError, nearest
from preheat.models.image_classifiers import open_classifier, open_processor, scores
from preheat.run_dir import to_json, write_asked

__all__ = ["run_chain"]

_NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "executorch": ("executorch", "torchao")}
_FILES = {"onnx": "model.onnx", "executorch": "model.pte"}
_SETTINGS = {"optimizer.lr": "lr", "optimizer.weight_decay": "weight_decay", "batch.size": "batch"}
"""Keys of a recipe that a step that trains may set here -> what `training.train` calls them."""


@dataclass
class _State:
    """Attributes:
    model: what the next step begins from; folder: where it stands.
    start: the folder that the chain begins with.
    """

    model: Any
    folder: Path
    start: Path
    processor: Any
    train: Images
    held: Images
    calibration: Images


def run_chain(
    source: str | Path,
    chain: Chain,
    out: str | Path,
    *,
    data: str | Path,
    turns: int = 5,
    seed: int = 0,
    say: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    """Runs a chain on an image classifier; `out` and what each step wrote stay where a later one fails.

    Args:
        source: a folder of transformers with its image processor.
        data: images by class, see `image_folder.read_folder`.
        turns: of the timing, one image at a time.
        say: told what is being done.

    Returns:
        {path, source, data, before, variants: [{name, method, settings, what, path, after, logits}]}. `before` and each `after` are
        {accuracy, loss, parameters, bytes, milliseconds}, `after` with agreement too: share of the held-out images with the same first class
        as the model that the chain began with. `logits`, of an export: see `export.shared.Difference`. Also in `out`/compress.json.

    Raises:
        RecipeError, DataError, RunError: before the first step where that can be known.

    Example:
        >>> run_chain("mobilenet", load_chain("edge-vision"), "out", data="digits")["variants"][-1]["after"]["accuracy"]   # doctest: +SKIP
        0.972
    """
    out, source = Path(out), Path(source)
    require_new(out, source)
    model, processor = open_classifier(source), open_processor(source)
    for step, place in zip(chain.steps, chain.places, strict=True):
        with said_of(place):
            _require(step, source, model)
    say("reading images")
    train, held = read_folder(data, processor, model.config, seed=seed)
    state = _State(model, source, source, processor, train, held, calibration(train, seed=seed))
    first = training.all_scores(model, held)
    before = training.measure(first, held.labels) | {"parameters": model.num_parameters(), "bytes": _weights(source)}
    timed: dict[str, image_classifier.Scorer] = {"before": _eager(model)}
    told: list[dict[str, Any]] = []
    for number, (step, place) in enumerate(zip(chain.steps, chain.places, strict=True), 1):
        say(f"step {number} of {len(chain.steps)}: {_words(step)}")
        with said_of(place):
            told.append(made := _take(step, number, state, out, seed, say))
        found, timed[made["name"]] = made.pop("found"), made.pop("run")
        made["after"] |= training.measure(found, held.labels)
        made["after"]["agreement"] = float((found.argmax(-1) == first.argmax(-1)).double().mean())
    say("timing")
    speeds = _milliseconds(timed, held.pixels([0]), turns)
    before["milliseconds"] = speeds["before"]
    for made in told:
        made["after"]["milliseconds"] = speeds[made["name"]]
    words = f"{Path(data).resolve().name}: {len(train):,} images to train on, {len(state.calibration)} of them to calibrate, {len(held):,} held out"
    whole = {"path": told[-1]["path"], "source": str(source), "data": words, "before": before, "variants": told}
    for number, made in enumerate(told):
        model_card.write(out / made["name"], whole, number)
    write_asked(out / "compress.json", to_json(whole, indent=1), fix="free some room; the steps' folders are whole")
    return whole


def _require(step: Step, start: Path, model: Any) -> None:
    """Raises before any work what is wrong with a step."""
    if step.compress is not None:
        _share(step)
    elif step.export is not None:
        if step.export not in _FILES:
            raise RecipeError(f"export to {step.export}: image classifiers go to {' and '.join(_FILES)}")
        if strange := sorted(step.settings.keys() - {"dtype", "tolerance"}):
            raise RecipeError(
                f"export to {step.export} has no setting '{strange[0]}' for an image classifier; it has dtype, tolerance"
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
    """The share of the channels that stay."""
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
    """The step's teacher, opened.

    Raises:
        RecipeError: other techniques than distillation, settings that are for language models, a teacher of other classes.
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
            f"techniques.distillation.teacher: {folder} tells {teacher.config.num_labels} classes apart, and the model {model.config.num_labels}"
        )
    if teacher.config.num_channels != model.config.num_channels:
        raise RecipeError(
            f"techniques.distillation.teacher: {folder} reads images of {teacher.config.num_channels} channels, and the model of {model.config.num_channels}"
        )
    return training.Distil(**{**settings, "teacher": teacher})


def _words(step: Step) -> str:
    if step.compress is not None:
        return f"{step.compress} {step.settings.get('channels', '')}".strip()
    if step.export is not None:
        return f"{step.export} {step.settings.get('dtype', 'float32')}"
    return " + ".join([f"train {step.train:g} passes", *step.techniques])


def _take(step: Step, number: int, state: _State, out: Path, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Takes a step; the state's model is what it made. Returns what is told of it, scores of the held-out images, and what gives them."""
    words = _words(step)
    name = f"{number}-{words.replace(' + ', '-').replace(' ', '-')}"
    made: dict[str, Any] = {"name": name, "method": words, "settings": dict(step.settings), "path": str(out / name)}
    if step.export is not None:
        with NewFolder(out / name) as folder:
            return made | _export(step, folder / _FILES[step.export], state)
    if step.compress is not None:
        state.model, made["what"] = narrower(
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
        made["what"] = (
            f"{step.train:g} passes over {len(state.train):,} images at a rate of {settings['lr']:g}; loss {loss:.4f}"
        )
        if teacher is not None:
            count = teacher.teacher.num_parameters()
            made["what"] += (
                f"; {teacher.mixture:.0%} of it from a teacher of {count:,} parameters at temperature {teacher.temperature:g}"
            )
    wanted = training.all_scores(state.model, state.held)
    with NewFolder(out / name) as folder:
        state.model.save_pretrained(folder)
        state.processor.save_pretrained(folder)
        again = open_classifier(folder)
        found = training.all_scores(again, state.held)
        # Up to rounding: weights read from a file may be aligned otherwise, and a convolution then sums in another order.
        if not torch.allclose(wanted, found, rtol=1e-3, atol=1e-4):
            raise RunError(
                f"{out / name}: read again, what was written gives other scores than what was made (by {(wanted - found).abs().max():.2g})"
            )
        bytes_ = _weights(folder)
    state.model, state.folder = again, out / name  # what was written is what goes on
    made["after"] = {"parameters": state.model.num_parameters(), "bytes": bytes_}
    return made | {"found": found, "run": _eager(state.model)}


def _export(step: Step, file: Path, state: _State) -> dict[str, Any]:
    kind, tolerance = step.settings.get("dtype", "float32"), step.settings.get("tolerance")
    write, open_it = {
        "onnx": (image_classifier.to_onnx, image_classifier.open_onnx),
        "executorch": (image_classifier.to_executorch, image_classifier.open_executorch),
    }[str(step.export)]
    pixels = state.calibration.pixels(range(len(state.calibration)))
    apart = write(state.model, file, pixels, int8=kind == "int8", tolerance=tolerance)
    state.processor.save_pretrained(file.parent)
    run = open_it(file)
    found = torch.cat([run(state.held.pixels([n])) for n in range(len(state.held))])
    return {
        "what": f"{step.export} in {kind}"
        + (f", ranges from {len(state.calibration)} images" if kind == "int8" else ""),
        "logits": {
            "largest": apart.largest,
            "mean": apart.mean,
            "scale": apart.scale,
            "agreement": apart.agreement,
            "images": apart.tokens,
        },
        "after": {"parameters": state.model.num_parameters(), "bytes": file.stat().st_size},
        "found": found,
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
    """Median over the turns of the time of one image, all in turns, so that what else the machine does meets each alike; the first is not counted."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(image)
            found[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times[1:]) for name, times in found.items()}
