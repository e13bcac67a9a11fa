"""Image classifiers: made narrower without loss where channels do nothing, norms that settle, images by class, chains of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image

from preheat.compress import pipeline as chains
from preheat.compress.chain import Chain, Step, load_chain
from preheat.compress.vision import training
from preheat.compress.vision.image_folder import read_folder, sample_calibration
from preheat.compress.vision.pruning import build_narrower
from preheat.errors import DataError, PreheatError, RecipeError
from preheat.models.image_classifiers import compute_scores, open_classifier

READERS = {
    "mobilenet_v2": "reduce_1x1.convolution",
    "mobilevit": "reduce_1x1.convolution",
    "efficientnet": "projection.project_conv",
}


def small(family: str, classes: int = 4, **more: Any) -> Any:
    """A small classifier of 32 x 32 images whose norms have seen some."""
    torch.manual_seed(0)
    settings: dict[str, dict[str, Any]] = {
        "mobilenet_v2": {"depth_multiplier": 0.35, "classifier_dropout_prob": 0.0},
        "mobilevit": {
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 24, 32],
            "num_attention_heads": 2,
        },
        "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "dropout_rate": 0.0},
    }
    config = transformers.AutoConfig.for_model(family, image_size=32, num_labels=classes, **(settings[family] | more))
    model: Any = transformers.AutoModelForImageClassification.from_config(config)
    model.train()
    with torch.no_grad():
        for module in model.modules() if family == "efficientnet" else ():
            if isinstance(module, torch.nn.BatchNorm2d):  # transformers draws them about 0, and every score is 0
                torch.nn.init.ones_(module.weight)
        for _ in range(3):
            compute_scores(model, torch.randn(8, 3, 32, 32))
    return model.eval()


@pytest.mark.parametrize("family", READERS)
def test_channels_that_do_nothing_go_first_and_the_scores_stay(family: str, tmp_path: Path) -> None:
    model, draw = small(family), torch.Generator().manual_seed(1)
    names = [name for name, _ in model.named_modules() if name.endswith(READERS[family])]
    with torch.no_grad():
        for name in names:
            reader = model.get_submodule(name)
            count = reader.weight.shape[1]
            idle = torch.randperm(count, generator=draw)[: count // 2]
            reader.weight[:, idle] = 0
            if family == "efficientnet":  # what is squeezed looks at all channels
                model.get_submodule(name.removesuffix(READERS[family]) + "squeeze_excite.reduce").weight[:, idle] = 0
    pixels = torch.randn(4, 3, 32, 32, generator=draw)
    made, words = build_narrower(model, pixels.split(2), 0.5)
    assert made.num_parameters() < 0.95 * model.num_parameters()
    assert f"{made.num_parameters():,} parameters" in words
    with torch.no_grad():
        wanted, found = compute_scores(model, pixels), compute_scores(made, pixels)
    assert torch.linalg.norm(found - wanted) < 1e-4 * torch.linalg.norm(wanted)
    made.save_pretrained(tmp_path)
    again: Any = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    written, held = again.state_dict(), made.state_dict()
    assert written.keys() == held.keys()
    assert [name for name, value in written.items() if not torch.equal(value, held[name])] == []
    with torch.no_grad():  # memory that is aligned otherwise is summed in another order on some processors
        torch.testing.assert_close(compute_scores(again, pixels), found, rtol=1e-4, atol=1e-5)


def test_the_channels_that_stay_are_fitted_to_what_all_of_them_wrote() -> None:
    model, pixels = small("mobilenet_v2"), torch.randn(32, 3, 32, 32)
    name = "mobilenet_v2.layer.0"
    made, _ = build_narrower(model, [pixels], 0.5)
    block, narrow = model.get_submodule(name), made.get_submodule(name)
    seen: dict[str, torch.Tensor] = {}
    for key, one in (("all", block), ("kept", narrow)):
        one.reduce_1x1.convolution.register_forward_hook(
            lambda m, i, o, key=key: seen.update({key: o, f"{key}.in": i[0]})
        )
    with torch.no_grad():
        compute_scores(model, pixels), compute_scores(made, pixels)
    own = block.expand_1x1.convolution.weight.flatten(1)
    kept = [int((own == row).all(1).nonzero()[0, 0]) for row in narrow.expand_1x1.convolution.weight.flatten(1)]
    assert len(set(kept)) == len(kept) < len(own)
    x, y = seen["kept.in"].movedim(1, -1).flatten(0, 2), seen["all"].movedim(1, -1).flatten(0, 2)
    best = torch.linalg.lstsq(x.double(), y.double()).solution
    sliced = x @ block.reduce_1x1.convolution.weight.flatten(1)[:, kept].t()
    off = [
        float((y - z).detach().square().sum())
        for z in (seen["kept"].movedim(1, -1).flatten(0, 2), (x.double() @ best).float(), sliced)
    ]
    assert off[1] <= off[0] < off[2], "not nearer than plain columns"
    assert off[0] < 1.1 * off[1], "far from the least squares"


def test_what_cannot_be_narrower_is_refused() -> None:
    model = small("efficientnet")
    with pytest.raises(RecipeError, match=r"channels: 0.95 leaves expand_ratios at"):
        build_narrower(model, [], 0.95)
    other = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32
        )
    )
    with pytest.raises(
        RecipeError, match=r"supports the blocks of mobilenet_v2, mobilevit, efficientnet, and this model is a vit"
    ):
        build_narrower(other, [], 0.5)


def tinted(folder: Path, count: int = 24) -> Path:
    """Noisy images, by class in another colour."""
    draw = numpy.random.default_rng(0)
    for name in ("blue", "green", "grey", "red"):
        (folder / name).mkdir(parents=True)
        for n in range(count):
            image = draw.normal(90, 20, (32, 32, 3))
            image[..., {"red": 0, "green": 1, "blue": 2}.get(name, slice(None))] += 60
            Image.fromarray(image.clip(0, 255).astype("uint8")).save(folder / name / f"{n}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinted(tmp_path_factory.mktemp("images") / "tinted")


def new_classifier(place: Path) -> Path:
    """A MobileNetV2 that nobody trained, with its image processor."""
    from transformers.models.mobilenet_v2.image_processing_pil_mobilenet_v2 import MobileNetV2ImageProcessorPil

    small("mobilenet_v2", depth_multiplier=0.25).save_pretrained(place)
    MobileNetV2ImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        place
    )
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_classifier(tmp_path_factory.mktemp("models") / "new")


def processor(folder: Path) -> Any:
    return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")


def test_images_are_parted_by_class_and_faults_are_told_with_the_file(
    images: Path, folder: Path, tmp_path: Path
) -> None:
    model, own = open_classifier(folder), processor(folder)
    train, held = read_folder(images, own, model.config)
    assert (len(train), len(held)) == (76, 20)
    assert held.labels.bincount().tolist() == [5] * 4
    assert not set(train.files) & set(held.files)
    again, _ = read_folder(images, own, model.config)
    assert again.files == train.files
    assert train.pixels([0, 3]).shape == (2, 3, 32, 32)
    with Image.open(train.files[3]) as image:
        wanted = own(images=image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(train.pixels([3])[0], wanted)
    named = transformers.MobileNetV2Config(
        id2label={0: "red", 1: "grey", 2: "green", 3: "blue"}, label2id={"red": 0, "grey": 1, "green": 2, "blue": 3}
    )
    turned, _ = read_folder(images, own, named)
    assert turned.labels.tolist() == [3 - n for n in train.labels.tolist()]

    parted = tmp_path / "parted"
    tinted(parted / "train", 2)
    with pytest.raises(DataError, match="has train and none of validation"):
        read_folder(parted, own, model.config)
    tinted(parted / "test", 1)
    few, _ = read_folder(parted, own, model.config)
    with pytest.raises(DataError, match="8 images to calibrate with are too few"):
        sample_calibration(few)
    alike = few.part([0] * 20)
    with pytest.raises(DataError, match="are identical"):
        sample_calibration(alike)
    broken = parted / "train" / "blue" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(DataError, match=r"blue/0\.png: cannot be read as an image"):
        read_folder(parted, own, model.config)[0].pixels([0])
    with pytest.raises(DataError, match="has 4 classes, and the model's head 7"):
        read_folder(images, own, transformers.MobileNetV2Config(num_labels=7))
    (parted / "test" / "up").mkdir()
    with pytest.raises(DataError, match="has no image"):
        read_folder(parted, own, model.config)


def test_the_shard_that_holds_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    model = small("mobilenet_v2", depth_multiplier=0.25)
    name = list(model.state_dict())[-1]
    with torch.no_grad():
        model.state_dict()[name][0] = float("nan")
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    file = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"][name]
    assert not file.startswith("model-00001")
    with pytest.raises(RecipeError, match=rf"{file}: {name} holds 1 values that are not finite"):
        open_classifier(tmp_path)


def test_norms_settle_at_the_mean_over_all_images(images: Path, folder: Path) -> None:
    model = open_classifier(folder)
    train, _ = read_folder(images, processor(folder), model.config)
    stem: Any = model.mobilenet_v2.conv_stem.first_conv
    training.settle_norms(model, train, batch=19)
    pixels = train.pixels(range(len(train)))
    with torch.no_grad():
        padded = torch.nn.functional.pad(pixels, (0, 1, 0, 1))
        found = torch.nn.functional.conv2d(padded, stem.convolution.weight, stride=2)
    assert torch.allclose(stem.normalization.running_mean, found.mean((0, 2, 3)), atol=1e-5)
    # The files stand class by class, and classes are apart: read in that order, the variance of a batch would be that within a class.
    whole = found.var((0, 2, 3))
    within = torch.stack([part.var((0, 2, 3)) for part in found.split(19)]).mean(0)
    assert (stem.normalization.running_var / whole).min() > 0.9 > (within / whole).min()
    assert stem.normalization.momentum == 0.997
    assert not any(m.training for m in model.modules())


def test_a_chain_trains_distils_and_narrows(images: Path, folder: Path, tmp_path: Path) -> None:
    train = Step(train=8, rate=1.0, settings={"batch.size": 19})
    teacher = chains.run_chain(folder, Chain("t", (train,), ("",)), tmp_path / "teacher", data=images, turns=1)
    first = Path(teacher.path)
    assert teacher.variants[0].after.accuracy >= 0.9 > 0.5 > teacher.before.accuracy
    (tmp_path / "mine.yaml").write_text(
        f"""chain:
  - {{compress: width, settings: {{channels: 0.5}}}}
  - {{train: 2, rate: 0.1, settings: {{batch.size: 19}}, techniques: {{distillation: {{teacher: {first}, mixture: 1.0}}}}}}
"""
    )
    mine = load_chain(tmp_path / "mine.yaml")
    made = chains.run_chain(first, mine, tmp_path / "out", data=images, turns=1)
    narrow, distilled = (v.after for v in made.variants)
    assert made.before.accuracy == teacher.variants[0].after.accuracy
    assert narrow.parameters == distilled.parameters < made.before.parameters
    assert narrow.bytes < made.before.bytes
    assert distilled.accuracy >= 0.9
    assert distilled.agreement >= 0.9
    assert "| before |" in (Path(made.path) / "README.md").read_text()
    again = chains.run_chain(first, mine, tmp_path / "again", data=images, turns=1)
    assert again.variants[1].after.loss == distilled.loss, "another run of the same chain gives another model"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("{compress: int8}", "compress: int8: for image classifiers there is width"),
        ("{compress: width, settings: {heads: 0.5}}", "width has no setting 'heads'"),
        ("{compress: width}", "channels: 1.0 prunes nothing"),
        ("{export: gguf}", "export to gguf: image classifiers go to onnx and executorch"),
        ("{export: onnx, settings: {dtype: int4}}", "dtype: int4: an image classifier has float32, int8"),
        ("{train: 1, settings: {optimizer.lrr: 1}}", "settings.optimizer.lrr: .* did you mean 'optimizer.lr'"),
        ("{train: 1, settings: {batch.size: x}}", "settings: batch.size: must be a whole number, got 'x'"),
        ("{train: 1, settings: {optimizer.lr: -1}}", "settings: optimizer.lr: must .*above 0, got -1"),
        ("{train: 1, settings: {optimizer.lr: auto}}", "settings.optimizer.lr: auto: an image classifier's training"),
        ("{train: 1, techniques: {lora: {}}}", "techniques.lora: is for language models"),
        (
            "{train: 1, techniques: {distillation: {teacher: $start, hidden: 1}}}",
            "techniques.distillation.hidden: is for language",
        ),
        (
            "{train: 1, techniques: {distillation: {teacher: gone}}}",
            "distillation.teacher: gone is not a folder of an image",
        ),
    ],
)
def test_what_is_no_step_of_an_image_classifier_is_told_with_its_line(
    step: str, words: str, images: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(f"chain:\n- {{train: 1}}\n- {step}\n")
    with pytest.raises(PreheatError, match=rf"c\.yaml:3: chain\.1: .*{words}"):
        chains.run_chain(folder, load_chain(tmp_path / "c.yaml"), tmp_path / "out", data=images)
    assert not (tmp_path / "out").exists()
