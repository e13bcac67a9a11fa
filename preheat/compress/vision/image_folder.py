"""A folder of images by class, as models read them: FOLDER/CLASS/*.png, or FOLDER/train/CLASS/… and FOLDER/validation/CLASS/….

Pixel values are made by the model's own image processor. Images are kept decoded up to `KEPT` bytes; beyond, each is read from its file
whenever it is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat.errors import DataError

__all__ = ["Images", "calibration", "read_folder"]

KEPT = 1 << 30
_KINDS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_HELD_OUT = ("validation", "valid", "val", "test")
_FEWEST = 16
"""Images to calibrate with, at least: the ranges of activations are what these make of them."""


@dataclass(frozen=True)
class Images:
    """Images with their classes.

    Attributes:
        files: one each.
        labels: [n] int64, rows of the model's head.
        processor: makes pixel values of a list of images.
        mode: Pillow's: RGB, or L for a model of one channel.
    """

    files: tuple[Path, ...]
    labels: Tensor
    processor: Any
    mode: str
    _decoded: dict[Path, Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        """[n, channels, height, width] fp32 of the images of these numbers.

        Raises:
            DataError: a file is no image, or one that the processor cannot scale.
        """
        return torch.stack([self._one(self.files[n]) for n in numbers])

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All of them in their order: (pixels, labels)."""
        for numbers in torch.arange(len(self)).split(size):
            yield self.pixels(numbers.tolist()), self.labels[numbers]

    def part(self, numbers: Sequence[int]) -> Images:
        """Those of these numbers; what is decoded is shared."""
        return replace(self, files=tuple(self.files[n] for n in numbers), labels=self.labels[list(numbers)])

    def _one(self, file: Path) -> Tensor:
        if (found := self._decoded.get(file)) is not None:
            return found
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(file) as image:
                made: Tensor = self.processor(images=image.convert(self.mode), return_tensors="pt")["pixel_values"][
                    0
                ].float()
        except (UnidentifiedImageError, OSError, ValueError) as error:
            raise DataError(
                f"{file}: cannot be read as an image ({str(error).splitlines()[0][:160]}); mend it or take it out"
            ) from None
        if made.nbytes * (len(self._decoded) + 1) <= KEPT:
            self._decoded[file] = made
        return made


def read_folder(
    folder: str | Path, processor: Any, config: Any, *, held_out: float = 0.2, seed: int = 0
) -> tuple[Images, Images]:
    """Training and held-out images of a folder.

    Args:
        folder: with a folder for each class; or with `train` and `validation` (valid, val, test), each with these.
        processor: the model's.
        config: the model's; its label2id names the classes. Where it has transformers' own names (LABEL_0 …), classes are taken by the
            alphabet.
        held_out: share of each class that is held out, where the folder does not part them itself.
        seed: decides which.

    Returns:
        (to train and calibrate on, held out)

    Raises:
        DataError: no such folder, a class without images, too few classes, or not those of the model.

    Example:
        >>> train, held = read_folder("digits", processor, model.config)                            # doctest: +SKIP
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

    def images(by_class: dict[str, list[Path]]) -> Images:
        rows = _rows_of(by_class, config, root)
        files = [(file, rows[name]) for name, listed in by_class.items() for file in listed]
        return Images(tuple(file for file, _ in files), torch.tensor([row for _, row in files]), processor, mode)

    if (root / "train").is_dir():
        other = next((name for name in _HELD_OUT if (root / name).is_dir()), None)
        if other is None:
            raise DataError(
                f"--data {root}: has train and none of {', '.join(_HELD_OUT)} to measure on; add one, or leave train out"
            )
        return images(_listed(root / "train")), images(_listed(root / other))
    train, held, draw = {}, {}, random.Random(seed)
    for name, files in _listed(root).items():
        if len(files) < 2:
            raise DataError(f"--data {root / name}: has one image, and one has to be held out; add some")
        draw.shuffle(files)
        count = min(max(1, round(held_out * len(files))), len(files) - 1)
        held[name], train[name] = files[:count], files[count:]
    return images(train), images(held)


def _listed(root: Path) -> dict[str, list[Path]]:
    """Class -> its files, both by the alphabet."""
    found = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        found[folder.name] = sorted(p for p in folder.iterdir() if p.suffix.lower() in _KINDS)
        if not found[folder.name]:
            raise DataError(
                f"--data {folder}: has no image ({', '.join(sorted(_KINDS))}); add some, or take the folder out"
            )
    if len(found) < 2:
        raise DataError(
            f"--data {root}: has {len(found)} folders of images; a classifier needs one for each of two classes or more"
        )
    return found


def _rows_of(by_class: dict[str, list[Path]], config: Any, root: Path) -> dict[str, int]:
    """Class -> row of the head."""
    known = {str(name): int(row) for name, row in config.label2id.items()}
    if set(known) == {f"LABEL_{n}" for n in range(len(known))}:
        if len(by_class) != len(known):
            raise DataError(
                f"--data {root}: has {len(by_class)} classes, and the model's head {len(known)}; they must be as many"
            )
        return {name: row for row, name in enumerate(by_class)}
    if strange := [name for name in by_class if name not in known]:
        raise DataError(
            f"--data {root}: the model knows no class '{strange[0]}'; its classes are {', '.join(list(known)[:12])}"
        )
    return known


def calibration(images: Images, count: int = 128, *, seed: int = 0) -> Images:
    """Some of the images, drawn: what ranges and importances are taken from.

    Raises:
        DataError: fewer than 16, or all alike.
    """
    draw = torch.Generator().manual_seed(seed)
    found = images.part(torch.randperm(len(images), generator=draw)[:count].tolist())
    if len(found) < _FEWEST:
        raise DataError(f"--data: {len(found)} images to calibrate with are too few; use {_FEWEST} or more")
    pixels = found.pixels(range(len(found)))
    if bool((pixels == pixels[:1]).all()):
        raise DataError(f"--data: the {len(found)} images to calibrate with are all alike, and say nothing of others")
    return found
