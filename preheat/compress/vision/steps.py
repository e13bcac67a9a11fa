"""Steps of chains over image classifiers: width pruning, distillation and export, with accuracy, size and agreement.

    chain:
      - {compress: width, settings: {channels: 0.67}}         # fraction of the channels inside the blocks
      - {train: 5, rate: 0.25, techniques: {distillation: {teacher: $start, mixture: 0.7}}}      # 5 epochs
      - {export: onnx, settings: {dtype: int8}}               # or executorch; float32, or int8 calibrated on training
      images

Each step writes a folder: a model with its image processor, or an exported file, with a model card.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat import recipe as recipes
from preheat.compress import compress, model_card
from preheat.compress.atomic_folder import NewFolder
from preheat.compress.chain import START, Chain, Step, Steps, add_location
from preheat.compress.compress import Say
from preheat.compress.export import image_classifier, verify
from preheat.compress.export.merged_model import require
from preheat.compress.export.registry import require_settings
from preheat.compress.latency import call_in_turns
from preheat.compress.save_load import count_weight_bytes
from preheat.compress.vision import training
from preheat.compress.vision.image_folder import read_folder, sample_calibration
from preheat.compress.vision.pruning import build_narrower
from preheat.core.compression import ImageFigures, ImageQuality, ImageResult, ImageStep, LogitDifference
from preheat.errors import RecipeError, RunError, suggest_nearest
from preheat.files import write_user_file
from preheat.models.image_classifiers import compute_scores, open_classifier, open_processor
from preheat.recipe import Recipe, Stop

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ImageSteps"]

_NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "executorch": ("executorch", "torchao")}
_FILES = {"onnx": "model.onnx", "executorch": "model.pte"}
_SETTINGS = {"optimizer.lr": "lr", "optimizer.weight_decay": "weight_decay", "batch.size": "batch"}
"""Recipe keys that a training step may set -> parameters of `training.train`."""


class ImageSteps(Steps[image_classifier.Scorer]):
    """Steps over the folder of an image classifier, measured on held-out images."""

    measures_exports = True

    def __init__(self, source: Path, chain: Chain, out: Path, *, data: str | Path | None, seed: int, say: Say):
        if data is None:
            raise RecipeError("--data: is needed with an image classifier: name a folder of images by class")
        self._source, self._out, self._seed, self._say = source, out, seed, say
        self._model, self._processor = open_classifier(source), open_processor(source)
        # All steps are checked before any work, so that a typing error in the last one costs nothing.
        for step, place in zip(chain.steps, chain.locations, strict=True):
            with add_location(place):
                _require(step, source, self._model)
        say("reading images")
        self._train, self._held_out = read_folder(data, self._processor, self._model.config, seed=seed)
        self._calibration = sample_calibration(self._train, seed=seed)
        self._data = (
            f"{Path(data).resolve().name}: {len(self._train):,} images to train on, {len(self._calibration)} of them "
            f"to calibrate, {len(self._held_out):,} held out"
        )
        self._rows: list[_Untimed] = []
        # Of the step taken last: the bytes that it wrote, the comparison of its file, its logits of the held-out
        # images, and what computes them.
        self._bytes = 0
        self._difference: LogitDifference | None = None
        self._logits = torch.empty(0)
        self._scorer: image_classifier.Scorer = _load_eager(self._model)

    def begin(self) -> image_classifier.Scorer:
        # Logits of the original model, which every later step is compared with.
        self._original = training.compute_all_scores(self._model, self._held_out)
        self._before = ImageQuality(
            **training.measure(self._original, self._held_out.labels),
            parameters=self._model.num_parameters(),
            bytes=count_weight_bytes(self._source),
        )
        return self._scorer

    def label(self, step: Step) -> str:
        if step.compress is not None:
            return f"{step.compress} {step.settings.get('channels', '')}".strip()
        if step.export is not None:
            return f"{step.export} {step.settings.get('dtype', 'float32')}"
        return " + ".join([f"train {step.train:g} passes", *step.techniques])

    def compress(self, step: Step, number: int) -> tuple[str, str]:
        # A generator: only one batch of images is in memory.
        pixels = (pixels for pixels, _ in self._calibration.batches(32))
        self._model, what = build_narrower(self._model, pixels, _kept_fraction(step))
        training.settle_norms(self._model, self._train)
        return self._write_model(step, number), what

    def train(self, step: Step, number: int) -> tuple[str, str]:
        assert step.train is not None
        settings = {_SETTINGS[key]: value for key, value in step.settings.items()}
        teacher = _open_teacher(step, self._source, self._model)
        settings.setdefault("lr", step.rate * training.LR)
        # Each training step of the chain draws its own order of images.
        seed = self._seed + number
        loss = training.train(
            self._model, self._train, epochs=step.train, distil=teacher, seed=seed, say=self._say, **settings
        )
        what = (
            f"{step.train:g} passes over {len(self._train):,} images at a rate of {settings['lr']:g}; loss {loss:.4f}"
        )
        if teacher is not None:
            count = teacher.teacher.num_parameters()
            what += (
                f"; {teacher.mixture:.0%} of it from a teacher of {count:,} parameters at temperature "
                f"{teacher.temperature:g}"
            )
        return self._write_model(step, number), what

    def export(self, step: Step, number: int) -> tuple[str, str]:
        name, images = self._name_step(step, number), self._calibration
        kind, tolerance = step.settings.get("dtype", "float32"), step.settings.get("tolerance")
        write, open_file = {
            "onnx": (image_classifier.write_onnx, image_classifier.open_onnx),
            "executorch": (image_classifier.write_executorch, image_classifier.open_executorch),
        }[str(step.export)]
        with NewFolder(self._out / name) as folder:
            file = folder / _FILES[str(step.export)]
            pixels = images.pixels(range(len(images)))
            difference = write(self._model, file, pixels, int8=kind == "int8", tolerance=tolerance)
            # A user of the file needs the same preprocessing of images.
            self._processor.save_pretrained(folder)
            self._scorer = open_file(file)
            # One image at a time, because an ExecuTorch program takes no more.
            self._logits = torch.cat([self._scorer(self._held_out.pixels([n])) for n in range(len(self._held_out))])
            self._bytes = file.stat().st_size
        self._difference = LogitDifference(
            largest=difference.largest,
            mean=difference.mean,
            scale=difference.scale,
            agreement=difference.agreement,
            images=difference.tokens,
        )
        return name, f"{step.export} in {kind}" + (f", ranges from {len(images)} images" if kind == "int8" else "")

    def _name_step(self, step: Step, number: int) -> str:
        return f"{number}-{self.label(step).replace(' + ', '-').replace(' ', '-')}"

    def _write_model(self, step: Step, number: int) -> str:
        """Writes the model and checks it by loading it again; the next step starts from the loaded one."""
        name = self._name_step(step, number)
        out = self._out / name
        expected = training.compute_all_scores(self._model, self._held_out)
        with NewFolder(out) as folder:
            self._model.save_pretrained(folder)
            self._processor.save_pretrained(folder)
            self._model = open_classifier(folder)
            self._logits = training.compute_all_scores(self._model, self._held_out)
            # Equal up to rounding: the alignment of loaded weights may change a convolution's order of summation.
            if not torch.allclose(expected, self._logits, rtol=1e-3, atol=1e-4):
                raise RunError(
                    f"{out}: read back, the written model gives other scores than in memory (by "
                    f"{(expected - self._logits).abs().max():.2g})"
                )
            self._bytes = count_weight_bytes(folder)
        self._difference = None
        self._scorer = _load_eager(self._model)
        return name

    def measure(self, step: Step, name: str, what: str) -> image_classifier.Scorer:
        # (images,)
        same = self._logits.argmax(-1) == self._original.argmax(-1)
        quality = ImageQuality(
            **training.measure(self._logits, self._held_out.labels),
            parameters=self._model.num_parameters(),
            bytes=self._bytes,
            agreement=float(same.double().mean()),
        )
        self._rows.append(_Untimed(step, name, what, quality, self._difference))
        return self._scorer

    def summarize(self, models: Mapping[str, image_classifier.Scorer], turns: int) -> ImageResult:
        # Values do not change the time, so one image serves all.
        image = self._held_out.pixels([0])
        # In turns, so that the machine's load affects all models alike.
        timings = call_in_turns(
            {name: partial(_measure_milliseconds, scorer, image) for name, scorer in models.items()}, turns
        )
        times = {name: statistics.median(milliseconds) for name, milliseconds in timings.items()}
        steps = [
            ImageStep(
                name=row.name,
                method=self.label(row.step),
                settings=dict(row.step.settings),
                path=str(self._out / row.name),
                what=row.what,
                logits=row.difference,
                after=ImageFigures(**vars(row.quality), milliseconds=times[row.name]),
            )
            for row in self._rows
        ]
        result = ImageResult(
            path=steps[-1].path,
            source=str(self._source),
            data=self._data,
            before=ImageFigures(**vars(self._before), milliseconds=times["before"]),
            variants=tuple(steps),
        )
        # Cards contain the times of all steps, so they are written at the end.
        for number, step in enumerate(steps):
            text = model_card.render_image_card(result, number, self._out / step.name)
            write_user_file(self._out / step.name / "README.md", text, fix="free disk space")
        return result


@dataclass(frozen=True)
class _Untimed:
    """A measured step, before the models are timed in turns."""

    step: Step
    name: str
    what: str
    quality: ImageQuality
    difference: LogitDifference | None


def _require(step: Step, start: Path, model: PreTrainedModel) -> None:
    """Checks a step before any work is done."""
    if step.compress is not None:
        _kept_fraction(step)
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
        for key, value in step.settings.items():
            if key not in _SETTINGS:
                raise RecipeError(
                    f"settings.{key}: an image classifier's training has no such key; "
                    f"{suggest_nearest(key, list(_SETTINGS))}"
                )
            if value == "auto":
                raise RecipeError(f"settings.{key}: auto: an image classifier's training needs a number here")
            # Checks the value as a recipe's, in a recipe with nothing else.
            recipes.override(
                Recipe(stop=Stop(max_steps=1)), f"{key}={json.dumps(value, default=str)}", where="settings"
            )
        _open_teacher(step, start, model)


def _kept_fraction(step: Step) -> float:
    """Returns the fraction of the channels to keep."""
    if step.compress != "width":
        raise RecipeError(
            f"compress: {step.compress}: for image classifiers there is width; 8 bits are a dtype of their exports"
        )
    # Validates the types of the settings; the method itself is for language models.
    compress.build_variant("width", step.settings)
    if strange := sorted(step.settings.keys() - {"channels"}):
        raise RecipeError(f"width has no setting '{strange[0]}' for an image classifier; it has channels")
    if not 0 < (share := step.settings.get("channels", 1.0)) < 1:
        raise RecipeError(f"width: channels: {share} prunes nothing; set the fraction to keep, e.g. channels: 0.67")
    return float(share)


def _open_teacher(step: Step, start: Path, model: PreTrainedModel) -> training.Distil | None:
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
    settings = step.techniques["distillation"] or {}
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
    # Without gradients: only the student is trained.
    teacher = open_classifier(folder, knob="techniques.distillation.teacher").requires_grad_(False)
    if teacher.config.num_labels != model.config.num_labels:
        raise RecipeError(
            f"techniques.distillation.teacher: {folder} has {teacher.config.num_labels} classes, and the model "
            f"{model.config.num_labels}"
        )
    if teacher.config.num_channels != model.config.num_channels:
        raise RecipeError(
            f"techniques.distillation.teacher: {folder} reads images of {teacher.config.num_channels} "
            f"channels, and the model of {model.config.num_channels}"
        )
    return training.Distil(**{**settings, "teacher": teacher})


def _load_eager(model: PreTrainedModel) -> image_classifier.Scorer:
    def run(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return compute_scores(model, pixels)

    return run


def _measure_milliseconds(scorer: image_classifier.Scorer, image: Tensor) -> float:
    start = time.perf_counter()
    scorer(image)
    return 1e3 * (time.perf_counter() - start)
