"""Image classifiers for devices on scikit-learn's digits: a teacher, a student distilled from it, narrower, in 8 bits to ONNX and ExecuTorch.

    python benchmarks/edge_vision.py [--families mobilenet_v2 efficientnet mobilevit] [--passes 20] [--timed] [--out benchmarks/results/edge_vision.md]

Needs scikit-learn, the extra onnx, and the extra executorch in the same environment (`--to onnx` leaves ExecuTorch out). The 1,797 digits are written
as images of 32 x 32 by class, every fifth held out, and go the way of a user's own: `preheat compress MODEL --recipe chain.yaml --data images`. The teacher is
trained on the labels; the student, of less width, on the labels alone and, in the second arm, on the labels and the teacher, with the same seed; this
one is then made narrower, taught again, and exported. With `--timed` the time of one image is in the table: leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from PIL import Image

from preheat.compress.chain import Chain, load_chain
from preheat.compress.pipeline import run_chain
from preheat.core.compression import ImageResult, ImageStep

SIZE = 32
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # teacher, student
    "mobilenet_v2": (
        {"depth_multiplier": 0.5, "classifier_dropout_prob": 0.1},
        {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.1},
    ),
    "efficientnet": (
        {
            "width_coefficient": 0.5,
            "depth_coefficient": 0.6,
            "hidden_dim": 640,
            "dropout_rate": 0.1,
            "drop_connect_rate": 0.0,
        },
        {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.4,
            "hidden_dim": 320,
            "dropout_rate": 0.1,
            "drop_connect_rate": 0.0,
        },
    ),
    "mobilevit": (
        {"hidden_sizes": [64, 80, 96], "neck_hidden_sizes": [16, 16, 24, 48, 64, 80, 320], "num_attention_heads": 4},
        {"hidden_sizes": [32, 40, 48], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 160], "num_attention_heads": 4},
    ),
}


def write_digits(folder: Path) -> None:
    """FOLDER/train/CLASS/N.png and FOLDER/validation/CLASS/N.png, 32 x 32 in grey."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for n, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / ("validation" if n % 5 == 0 else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        grey = numpy.round(image * 255 / 16).astype("uint8")
        Image.fromarray(grey).resize((SIZE, SIZE), Image.Resampling.BILINEAR).save(place / f"{n}.png")


def create_model(family: str, settings: dict[str, Any], folder: Path) -> None:
    """A model that nobody trained, with its image processor."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, image_size=SIZE, num_labels=10, **settings)
    model: Any = AutoModelForImageClassification.from_config(config)
    if (
        family == "efficientnet"
    ):  # transformers draws its norms' weights about 0, by which every score is 0 and no gradient comes through
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.ones_(module.weight)
            elif isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)
    model.save_pretrained(folder)
    kind = type(AutoImageProcessor.from_pretrained(_write_stub(family, folder.parent), backend="pil"))
    kind(size={"height": SIZE, "width": SIZE}, do_center_crop=False, do_flip_channel_order=False).save_pretrained(
        folder
    )


def _write_stub(family: str, beside: Path) -> Path:
    """A folder by which transformers finds the family's image processor."""
    place = beside / f"{family}-processor"
    place.mkdir(exist_ok=True)
    transformers.AutoConfig.for_model(family).save_pretrained(place)
    (place / "preprocessor_config.json").write_text("{}")
    return place


def build_chain(folder: Path, name: str, *steps: str) -> Chain:
    file = folder / f"{name}.yaml"
    file.write_text("\n".join([f"name: {name}", "chain:", *(f"  - {step}" for step in steps)]) + "\n")
    return load_chain(file)


def run(
    family: str, folder: Path, images: Path, *, passes: int, to: list[str], turns: int, seed: int
) -> list[tuple[str, ImageStep]]:
    """(step, what is told of it) of the three arms."""
    large, small = FAMILIES[family]
    create_model(family, large, folder / "teacher-new")
    create_model(family, small, folder / "student-new")

    def run_steps(model: str, steps: Chain, out: str) -> ImageResult:
        say = partial(print, f"{family}:", flush=True)
        result = run_chain(folder / model, steps, folder / out, data=images, turns=turns, seed=seed, say=say)
        assert isinstance(result, ImageResult), "these models are image classifiers"
        return result

    plain = f"{{train: {passes}, rate: 1.0}}"
    teacher = run_steps("teacher-new", build_chain(folder, "teacher", plain), "teacher")
    by = f"distillation: {{teacher: {teacher.path}, mixture: 0.7, temperature: 2.0}}"
    alone = run_steps("student-new", build_chain(folder, "alone", plain), "alone")
    taught = build_chain(
        folder,
        "taught",
        f"{{train: {passes}, rate: 1.0, techniques: {{{by}}}}}",
        "{compress: width, settings: {channels: 0.67}}",
        f"{{train: {max(1, passes // 4)}, rate: 0.25, techniques: {{{by}}}}}",
        *(f"{{export: {name}, settings: {{dtype: {kind}}}}}" for name in to for kind in ("float32", "int8")),
    )
    student = run_steps("student-new", taught, "taught")
    return [
        ("teacher, on labels", teacher.variants[0]),
        ("student, on labels alone", alone.variants[0]),
        *((f"student: {step.method}", step) for step in student.variants),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", nargs="*", default=["onnx", "executorch"], choices=["onnx", "executorch"])
    parser.add_argument("--timed", action="store_true", help="the time of one image, too: on a quiet machine")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    command = f"python benchmarks/edge_vision.py --families {' '.join(options.families)} --passes {options.passes} --seed {options.seed} --to {' '.join(options.to)}"
    lines = [
        "# Image classifiers on scikit-learn's digits: distilled, narrower, in 8 bits",
        "",
        f"`{command}{' --timed' if options.timed else ''}`: 1,437 digits of 32 x 32 to train on, 360 held out. torch {torch.__version__}, transformers {transformers.__version__}.",
        "A student is distilled (70 % of the loss from the teacher, temperature 2), pruned to two thirds of its blocks' inner channels, distilled again, and exported. Logits:",
        "the largest difference between the file's logits and those of its source model over 128 calibration images, as a fraction of the largest logit; as before:",
        "the fraction of these images with the same top class. Bytes: of the weights, or of the file."
        + (" Times: one image, medians in turns." if options.timed else ""),
    ]
    with tempfile.TemporaryDirectory() as temporary:
        images = Path(temporary) / "images"
        write_digits(images)
        for family in options.families:
            folder = Path(temporary) / family
            folder.mkdir()
            steps = run(
                family,
                folder,
                images,
                passes=options.passes,
                to=options.to,
                turns=50 if options.timed else 1,
                seed=options.seed,
            )
            more = " ms an image |" if options.timed else ""
            lines += [
                "",
                f"## {family}",
                "",
                f"| step | accuracy | loss | parameters | bytes | logits | as before |{more}",
            ]
            lines.append("|---|---|---|---|---|---|---|" + "---|" * options.timed)
            for name, step in steps:
                told, logits = step.after, step.logits
                within = f"{logits.largest / max(logits.scale, 1.0):.2g} | {logits.agreement:.1%}" if logits else " | "
                lines.append(
                    f"| {name} | {told.accuracy:.1%} | {told.loss:.4f} | {told.parameters:,} | {told.bytes:,} | {within} |"
                    + (f" {told.milliseconds:.2f} |" if options.timed else "")
                )
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
