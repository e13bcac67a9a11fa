"""Datasets of images by class: FOLDER/CLASS/*.png, or FOLDER/train/CLASS/… and FOLDER/validation/CLASS/….

Pixel values are computed by the model's own image processor. Decoded images are cached up to `KEPT` bytes; the rest are
decoded again at each access.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.errors import DataError

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig

__all__ = ["Images", "sample_calibration", "read_folder"]

KEPT = 1 << 30  # bytes
_KINDS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_HELD_OUT = ("validation", "valid", "val", "test")
_FEWEST = 16
"""Minimum number of calibration images, from which the activation ranges are taken."""


@dataclass(frozen=True)
class Images:
    """Images with their classes.

    Attributes:
        files: one per image.
        labels: [n] int64, rows of the model's head.
        processor: converts a list of images to pixel values.
        mode: Pillow's: RGB, or L for a model with one channel.
    """

    files: tuple[Path, ...]
    labels: Tensor
    processor: BaseImageProcessor
    mode: str
    # Shared by the subsets of `part`, so that an image is decoded once for all of them.
    _decoded: dict[Path, Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        """Returns [n, channels, height, width] fp32 of the images with these indices.

        Raises:
            DataError: a file is no image, or one that the processor cannot resize.
        """
        return torch.stack([self._load_image(self.files[n]) for n in numbers])

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all images in order: (pixels, labels)."""
        # (batch,)
        for numbers in torch.arange(len(self)).split(size):
            yield self.pixels(numbers.tolist()), self.labels[numbers]

    def part(self, numbers: Sequence[int]) -> Images:
        """Returns the subset with these indices; decoded images are shared."""
        return replace(self, files=tuple(self.files[n] for n in numbers), labels=self.labels[list(numbers)])

    def _load_image(self, file: Path) -> Tensor:
        if (cached := self._decoded.get(file)) is not None:
            return cached
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(file) as image:
                # (channels, height, width)
                pixels: Tensor = self.processor(images=image.convert(self.mode), return_tensors="pt")["pixel_values"][
                    0
                ].float()
        except (UnidentifiedImageError, OSError, ValueError) as error:
            raise DataError(
                f"{file}: cannot be read as an image ({str(error).splitlines()[0][:160]}); fix or remove it"
            ) from None
        # All images have this size after the processor, so the count bounds the bytes.
        if pixels.nbytes * (len(self._decoded) + 1) <= KEPT:
            self._decoded[file] = pixels
        return pixels


def read_folder(
    folder: str | Path, processor: BaseImageProcessor, config: PretrainedConfig, *, held_out: float = 0.2, seed: int = 0
) -> tuple[Images, Images]:
    """Returns the training and held-out images of a folder.

    Args:
        folder: contains a folder per class; or `train` and `validation` (valid, val, test), each with these.
        processor: the model's.
        config: the model's; its label2id names the classes. If it has transformers' default names (LABEL_0 …), classes
            are taken in alphabetical order.
        held_out: fraction of each class to hold out, unless the folder has its own split.
        seed: of that split.

    Returns:
        (training and calibration images, held-out images)

    Raises:
        DataError: no such folder, a class without images, too few classes, or classes that the model does not have.

    Example:
        >>> train, held_out = read_folder("digits", processor, model.config)                        # doctest: +SKIP
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(
            f"--data {root}: no such folder; an image classifier needs one with a folder of images for each class"
        )
    mode = {3: "RGB", 1: "L"}.get(config.num_channels)
    if mode is None:
        raise DataError(
            f"--data {root}: the model reads {config.num_channels} channels, and images are read with 3 or 1"
        )

    def load_images(by_class: dict[str, list[Path]]) -> Images:
        rows = _index_classes(by_class, config, root)
        files = [(file, rows[name]) for name, class_files in by_class.items() for file in class_files]
        return Images(tuple(file for file, _ in files), torch.tensor([row for _, row in files]), processor, mode)

    if (root / "train").is_dir():
        # The names that data sets commonly have, in this order of preference.
        split = next((name for name in _HELD_OUT if (root / name).is_dir()), None)
        if split is None:
            raise DataError(
                f"--data {root}: has train and none of {', '.join(_HELD_OUT)} to measure on; add one, or "
                "leave train out"
            )
        return load_images(_list_files(root / "train")), load_images(_list_files(root / split))
    train, validation, rng = {}, {}, random.Random(seed)
    for name, files in _list_files(root).items():
        if len(files) < 2:
            raise DataError(f"--data {root / name}: has one image, and one has to be held out; add some")
        # Per class, so that both parts have every class.
        rng.shuffle(files)
        count = min(max(1, round(held_out * len(files))), len(files) - 1)
        validation[name], train[name] = files[:count], files[count:]
    return load_images(train), load_images(validation)


def _list_files(root: Path) -> dict[str, list[Path]]:
    """Returns the files per class, both in alphabetical order."""
    files = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        files[folder.name] = sorted(p for p in folder.iterdir() if p.suffix.lower() in _KINDS)
        if not files[folder.name]:
            raise DataError(
                f"--data {folder}: has no image ({', '.join(sorted(_KINDS))}); add some, or remove the folder"
            )
    if len(files) < 2:
        raise DataError(
            f"--data {root}: has {len(files)} folders of images; a classifier needs one for each of two classes or more"
        )
    return files


def _index_classes(by_class: dict[str, list[Path]], config: PretrainedConfig, root: Path) -> dict[str, int]:
    """Returns the row of the head for each class."""
    known = {str(name): int(row) for name, row in config.label2id.items()}
    # Default names: the head was never named, so any classes fit it.
    if set(known) == {f"LABEL_{n}" for n in range(len(known))}:
        if len(by_class) != len(known):
            raise DataError(
                f"--data {root}: has {len(by_class)} classes, and the model's head {len(known)}; these must be equal"
            )
        return {name: row for row, name in enumerate(by_class)}
    if strange := [name for name in by_class if name not in known]:
        raise DataError(
            f"--data {root}: the model knows no class '{strange[0]}'; its classes are {', '.join(list(known)[:12])}"
        )
    return known


def sample_calibration(images: Images, count: int = 128, *, seed: int = 0) -> Images:
    """Returns a random subset of the images for calibration.

    Raises:
        DataError: fewer than 16, or all alike.
    """
    generator = torch.Generator().manual_seed(seed)
    subset = images.part(torch.randperm(len(images), generator=generator)[:count].tolist())
    if len(subset) < _FEWEST:
        raise DataError(f"--data: {len(subset)} images to calibrate with are too few; use {_FEWEST} or more")
    pixels = subset.pixels(range(len(subset)))
    # Identical images would give ranges of a single point.
    if bool((pixels == pixels[:1]).all()):
        raise DataError(f"--data: the {len(subset)} images to calibrate with are identical; add different ones")
    return subset
