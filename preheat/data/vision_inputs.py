"""Image inputs: validated when rows are read, turned into patches when a micro-batch is made.

In the text an image is replaced by image tokens, as many as the model's processor makes of its size; its path and its
size in patches are stored with the tokens. A file is decoded when the rows are read, so that a broken one stops the run
before it starts, and again each time it is trained on.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from preheat.core import IMAGE_BUDGETS, Images, Vision
from preheat.data.chat.messages import PLACE, Message, Unreadable
from preheat.data.rows.file_readers import describe_json_type
from preheat.errors import DataError
from preheat.files import to_json
from preheat.model_folder import count_embedding_rows

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from preheat.core.json_types import JsonObject

__all__ = [
    "ImageProcessor",
    "ImageRef",
    "ImageTable",
    "read_images",
    "compute_mrope_positions",
    "resolve_images",
    "find_runs",
]


class ImageRef(NamedTuple):
    """An image of a document: its file, and the rows and columns of its patches."""

    path: str
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class ImageProcessor:
    """Turns images into patches and tokens; cheap to pickle.

    Attributes:
        vision: the model's vision settings.
        processor: settings of transformers' image processor of that layout, including the maximum size of an image.
        marks: texts of the image token and of the layout's further tokens: those at the start and end of an image
            (Qwen-VL, Gemma 3 and 4), at the end of a line and of an image (Pixtral), around a square and before the
            whole image (SmolVLM).
    """

    vision: Vision
    processor: JsonObject = field(hash=False)
    marks: tuple[str, ...]

    @classmethod
    def of(
        cls, vision: Vision, processor: JsonObject, pixels: int, tokenizer: PreTrainedTokenizerFast
    ) -> ImageProcessor:
        """Returns a processor that scales images down to at most `pixels`.

        Raises:
            DataError: the tokenizer has no tokens for images.
        """
        numbers = tuple(n for n in (vision.image, vision.start, vision.end) if n is not None)
        vocabulary = count_embedding_rows(tokenizer)
        marks = tuple(tokenizer.convert_ids_to_tokens(n) if n < vocabulary else None for n in numbers)
        # `text` writes an image as these marks, so each must encode to its own number again.
        encoded = [tokenizer.encode(mark or "", add_special_tokens=False) for mark in marks]
        if wrong := [n for n, ids in zip(numbers, encoded, strict=True) if ids != [n]]:
            raise DataError(
                f"data.tokenizer: has no special token under number {wrong[0]}, the image token of the model's "
                "config.json; use the model's own tokenizer"
            )
        # Tokens that no config.json states; transformers' processors know them by these names too.
        if more := _MARKS.get(vision.layout, ()):
            if missing := [mark for mark in more if len(tokenizer.encode(mark, add_special_tokens=False)) != 1]:
                raise DataError(
                    f"data.tokenizer: has no token {missing[0]}, which encloses images; use the model's own tokenizer"
                )
            marks = (*marks, *more)
        return cls(vision, _limit_pixels(vision, processor, pixels), marks)  # type: ignore[arg-type]

    def key(self) -> str:
        """Returns everything that decides the number of tokens of an image, as a cache key."""
        return json.dumps(asdict(self), sort_keys=True)

    def dump(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def load(cls, values: JsonObject) -> ImageProcessor:
        return cls(Vision(**values["vision"]), values["processor"], tuple(values["marks"]))

    @property
    def placeholder(self) -> str:
        """The token that the model's chat template writes for an image; "" if `look` replaces it before rendering."""
        return {"qwen2_vl": "", "gemma3": self.marks[1]}.get(self.vision.layout, self.marks[0])

    def look(self, path: Path) -> tuple[ImageRef, str]:
        """Returns an image's size in patches and the text of its tokens; validates the file by decoding it.

        Raises:
            Unreadable: the file is missing, corrupt, or of an unsupported size.
        """
        image = _decode_image(path)
        if self.vision.layout != "qwen2_vl":
            return self._process_image(image, path)[:2]
        try:
            picture = ImageRef(str(path), *self._grid(image.height, image.width))
        except ValueError:
            raise Unreadable(
                "images",
                f"image {path} has {image.width} x {image.height} pixels, and the model's processor takes no side 200 "
                "times the other",
            ) from None
        piece, start, end = self.marks
        return picture, f"{start}{piece * (picture.patches // self.vision.merge**2)}{end}"

    def _process_image(self, image: Image, path: Path) -> tuple[ImageRef, str, np.ndarray]:
        """Returns an image as `look` does, and its pixels, from transformers' image processor."""
        vision, more = self.vision, {}
        if vision.layout == "smolvlm":
            more["return_row_col_info"] = True
        try:
            features = self._processor.preprocess(images=[image], return_tensors="np", **more)
        except (ValueError, ZeroDivisionError) as error:
            raise Unreadable(
                "images",
                f"image {path} has {image.width} x {image.height} pixels, which the model's processor does not take "
                f"({str(error).splitlines()[0][:120]})",
            ) from None
        pixels = np.asarray(features["pixel_values"], dtype=np.float32)
        if vision.layout == "gemma4":
            # Position -1 is padding. The patches of a token become neighbours.
            wide, high = (int(last) + 1 for last in features["image_position_ids"][0].max(axis=0))
            blocks = (high // vision.merge, vision.merge, wide // vision.merge, vision.merge, vision.values)
            patches = pixels[0, : high * wide].reshape(blocks).swapaxes(1, 2).reshape(-1, vision.values)
            piece, start, end = self.marks
            tokens = piece * (high * wide // vision.merge**2)
            return ImageRef(str(path), high, wide), f"{start}{tokens}{end}", patches
        high, wide = pixels.shape[-2] // vision.patch, pixels.shape[-1] // vision.patch
        squares = pixels.size // (vision.values * high * wide)
        picture = ImageRef(str(path), squares * high, wide)
        piece, (first, second) = self.marks[0], self.marks[1:]
        if vision.layout == "gemma3":
            text = f"\n\n{first}{piece * (picture.patches // vision.merge**2)}{second}\n\n"
        elif vision.layout == "pixtral":
            lines = [piece * (wide // vision.merge)] * (high // vision.merge)
            text = first.join(lines) + second
        else:
            from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

            (down,), (across,) = features["rows"][0], features["cols"][0]
            text = get_image_prompt_string(down, across, (vision.tile // vision.merge) ** 2, first, piece, second)
        return picture, text, pixels.reshape(-1, vision.values)

    @classmethod
    def planned(cls, vision: Vision, processor: JsonObject, pixels: int) -> int:
        """Returns the pixels of all that the processor makes of a square image of `pixels` pixels.

        Example:
            >>> vision = Vision(2, 16, 1, 3, 2, 0, 0, 0, 1, 2, layout="smolvlm", tile=32)
            >>> settings = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
            >>> ImageProcessor.planned(vision, settings, 1024 * 1024) // 512**2  # four squares, and the whole once more
            5
        """
        rows, columns = cls(vision, _limit_pixels(vision, processor, pixels), ())._grid(
            math.isqrt(pixels), math.isqrt(pixels)
        )
        return rows * columns * vision.patch**2

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns rows and columns of patches of an image of this size, by transformers' own arithmetic.

        Raises:
            ValueError: the processor does not take such an image.
        """
        vision, settings = self.vision, self.processor
        side = vision.patch * vision.merge
        if vision.layout == "gemma3":
            return vision.tile, vision.tile
        if vision.layout == "smolvlm":
            squares, _, _ = self._processor.get_number_of_image_patches(height, width)
            return max(squares, 1) * vision.tile, vision.tile
        if vision.layout == "pixtral":
            from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

            image: np.ndarray = np.broadcast_to(np.False_, (1, height, width))  # of which the shape is read
            height, width = get_resize_output_image_size(
                image, settings["size"]["longest_edge"], side, "channels_first"
            )
        elif vision.layout == "gemma4":
            from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

            budget = settings["max_soft_tokens"] * vision.merge**2
            height, width = get_aspect_ratio_preserving_size(height, width, vision.patch, budget, vision.merge)
        else:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

            size = settings["size"]
            height, width = smart_resize(height, width, side, size["shortest_edge"], size["longest_edge"])
        # In patches, a multiple of `merge` on both axes: each of them rounds to `side`.
        return height // vision.patch, width // vision.patch

    def patches(self, picture: ImageRef) -> np.ndarray:
        """Returns [patches, values per patch] in fp32 from transformers' processor.

        Raises:
            DataError: the file has changed since the rows were read.
        """
        path = Path(picture.path)
        try:
            if self.vision.layout == "qwen2_vl":
                features = self._processor.preprocess(images=[_decode_image(path)], return_tensors="np")
                size, pixels = tuple(features["image_grid_thw"][0, 1:].tolist()), features["pixel_values"]
            else:
                now, _, pixels = self._process_image(_decode_image(path), path)
                size = (now.rows, now.columns)
        except Unreadable as error:
            raise DataError(f"{error.message}; it was intact when the data was read") from None
        if size != (picture.rows, picture.columns):
            raise DataError(
                f"image {picture.path}: has another size than when the data was read; restore it, or read the data "
                "again with another PREHEAT_CACHE"
            )
        return np.asarray(pixels, dtype=np.float32)

    @functools.cached_property
    def _processor(self) -> Any:
        module, name = {
            "qwen2_vl": ("qwen2_vl", "Qwen2VL"),
            "gemma3": ("gemma3", "Gemma3"),
            "gemma4": ("gemma4", "Gemma4"),
            "pixtral": ("pixtral", "Pixtral"),
            "smolvlm": ("smolvlm", "SmolVLM"),
        }[self.vision.layout]
        processors = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
        return getattr(processors, f"{name}ImageProcessorPil")(**self.processor)


_MARKS = {"pixtral": ("[IMG_BREAK]", "[IMG_END]"), "smolvlm": ("<fake_token_around_image>", "<global-img>")}
"""Tokens around images beyond those that config.json states."""


def _limit_pixels(vision: Vision, processor: JsonObject, pixels: int) -> JsonObject:
    """Returns the settings of an image processor that scales images down to a square of at most `pixels`."""
    if vision.layout == "gemma3":  # all images have one size
        return processor
    if vision.layout == "gemma4":  # scales all images up or down to about one number of tokens
        most = min(processor["max_soft_tokens"], pixels // (vision.patch * vision.merge) ** 2)
        return {**processor, "max_soft_tokens": max(n for n in IMAGE_BUDGETS if n <= max(most, IMAGE_BUDGETS[0]))}
    if vision.layout == "qwen2_vl":
        # The pixels of one token: `merge` x `merge` patches become one.
        least = (vision.patch * vision.merge) ** 2
        # In the settings of Qwen2-VL's processor both "edges" are numbers of pixels.
        size = dict(processor["size"])
        size["longest_edge"] = max(min(size["longest_edge"], pixels), least)
        size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
        return {**processor, "size": size}
    least = vision.patch * (vision.tile or vision.merge)
    size = {**processor["size"]}
    size["longest_edge"] = max(min(size["longest_edge"], int(pixels**0.5)), least)
    return {**processor, "size": size}


def resolve_images(
    talk: Sequence[Message], files: Sequence[object] | None, eye: ImageProcessor | None, folder: Path
) -> tuple[list[Message], tuple[ImageRef, ...], list[str]]:
    """Replaces the placeholders of a conversation by the text of the images' tokens; also returns the images in order.

    If the model's chat template writes a placeholder of its own, `PLACE` stays in the messages, and the texts are
    returned for the rendered text.

    Args:
        talk: messages; an image is `PLACE` in the text, with its file (or None) in the message's `images`; or
            `<image>`, if the row has a field for files.
        files: files of that field, for placeholders without a file; None if there is no such field.
        eye: image processor; None for text-only models.
        folder: base of relative paths.

    Raises:
        Unreadable: the numbers of images and placeholders differ, a placeholder is in an answer, or an image is
            unreadable.
    """
    if eye is None:
        if files or any(m.get("images") for m in talk):
            raise Unreadable(
                "images",
                "has images, and the model reads only text; if it was published with a vision part set model.part: "
                "whole, else use one that was, such as a qwen3_vl",
            )
        return list(talk), (), []
    texts = [m["content"].replace("<image>", PLACE) if files is not None else m["content"] for m in talk]
    own = [list(m.get("images") or ()) for m in talk]
    named = [file for listed in own for file in listed if file is not None]
    images, places = len(named) + len(files or ()), sum(text.count(PLACE) for text in texts)
    if images != places:
        raise Unreadable(
            "images",
            f"has {images} image{'s' * (images != 1)} and {places} placeholder{'s' * (places != 1)} (<image>, or a "
            "part of type image)",
        )
    left, messages, pictures, later = list(files or ()), list[Message](), list[ImageRef](), list[str]()
    for n, (message, text, listed) in enumerate(zip(talk, texts, own, strict=True), 1):
        # A mark in the text itself would become an image token without an image.
        if mark := next((mark for mark in eye.marks if mark in text), None):
            raise Unreadable(
                "images", f"message {n} holds {mark} in its text, the placeholder of an image; write <image> there"
            )
        # `first` precedes all images; each of `parts` follows one.
        first, *parts = text.split(PLACE)
        if parts and message["role"] == "assistant":
            raise Unreadable(
                "images", (f"message {n}, of the assistant, has an image; only the other roles may have images")
            )
        for part in range(len(parts)):
            file = listed[part] if part < len(listed) and listed[part] is not None else left.pop(0)
            picture, tokens = eye.look(_find_file(file, folder))
            pictures.append(picture)
            if eye.placeholder:
                later.append(tokens)
            parts[part] = (PLACE if eye.placeholder else tokens) + parts[part]
        messages.append({**{k: v for k, v in message.items() if k != "images"}, "content": "".join((first, *parts))})
    return messages, tuple(pictures), later


def find_runs(marked: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Returns the (start, end) of each run of true values.

    Example:
        >>> find_runs(np.array([0, 1, 1, 0, 1], bool))
        ((1, 3), (4, 5))
    """
    edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def _find_file(name: object, folder: Path) -> Path:
    if not isinstance(name, str) or not name:
        raise Unreadable("images", f"an image is {describe_json_type(name)}, not the path of a file")
    if re.match(r"(https?|data):", name):
        raise Unreadable("images", f"image {name[:80]}: is not a file; download it and name its path")
    # An absolute name replaces `folder`.
    return folder / name.removeprefix("file://")


def _decode_image(path: Path) -> Image:
    """Decodes an image as RGB, rotated by its EXIF orientation."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not path.is_file():
        raise Unreadable("images", f"image {path}: no such file")
    try:
        with warnings.catch_warnings():
            # Pillow only warns up to twice its limit on pixels and raises above that: refuse both.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                return ImageOps.exif_transpose(opened).convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise Unreadable(
            "images", f"image {path}: has more than the {Image.MAX_IMAGE_PIXELS:,} pixels that are read; shrink it"
        ) from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:  # raised by Pillow's decoders
        raise Unreadable(
            "images", f"image {path}: is corrupt or not an image ({str(error).splitlines()[0][:120]})"
        ) from None


@dataclass(frozen=True)
class ImageTable:
    """The images of stored documents.

    Attributes:
        eye: image processor.
        of: [images] int64, the sequence of each image, ascending.
        grids: [images, 2] int64, rows and columns of patches.
        paths: paths of the files.
    """

    eye: ImageProcessor
    of: np.ndarray
    grids: np.ndarray
    paths: Sequence[str]

    @classmethod
    def write(cls, folder: Path, side: str, eye: ImageProcessor, lines: Sequence[str]) -> None:
        """Stores the images of documents, given as one line of JSON per document: [[path, rows, columns], ...]."""
        listed = [json.loads(line) for line in lines]
        # (sequence, path, rows, columns) of each image: documents with images have one sequence.
        rows = [(n, *picture) for n, pictures in enumerate(listed) for picture in pictures]
        np.save(folder / f"{side}-images.npy", np.array([(n, r, c) for n, _, r, c in rows], np.int64).reshape(-1, 3))
        (folder / f"{side}-images.json").write_text(to_json({"eye": eye.dump(), "paths": [p for _, p, _, _ in rows]}))

    @classmethod
    def open(cls, folder: Path, side: str) -> ImageTable | None:
        file = folder / f"{side}-images.json"
        if not file.exists():
            return None
        stored, table = json.loads(file.read_text(encoding="utf-8")), np.load(folder / f"{side}-images.npy")
        return cls(ImageProcessor.load(stored["eye"]), table[:, 0], table[:, 1:], stored["paths"])

    def within(self, sequence: int) -> tuple[ImageRef, ...]:
        """Returns the images of a sequence, in order."""
        # `of` ascends, so the images of a sequence are adjacent.
        first, last = (int(np.searchsorted(self.of, n)) for n in (sequence, sequence + 1))
        return tuple(ImageRef(self.paths[n], *map(int, self.grids[n])) for n in range(first, last))

    def tokens(self) -> np.ndarray:
        """Returns [images], the number of tokens of each image."""
        counts: np.ndarray = self.grids.prod(axis=1) // self.eye.vision.merge**2
        return counts

    def room(self, sequence: int, ids: np.ndarray, used: int) -> tuple[int, int]:
        """Returns how many of a sequence's first `used` tokens fit without cutting an image, and how many images these
        have.

        Args:
            ids: tokens of the whole sequence.
        """
        # Positions of the image tokens, and (with a leading 0) the number of them up to the end of each image.
        pieces = np.flatnonzero(ids == self.eye.vision.image)
        ends = np.cumsum([0, *(p.patches // self.eye.vision.merge**2 for p in self.within(sequence))])
        assert ends[-1] == len(pieces), f"sequence {sequence} has {len(pieces)} positions for {ends[-1]} image tokens"
        # Image tokens among the first `used`, and the images that these complete.
        inside = int((pieces < used).sum())
        complete = int(np.searchsorted(ends, inside, side="right")) - 1
        # If an image is begun but not complete, cut before its first token.
        return (used if ends[complete] == inside else int(pieces[ends[complete]])), complete


def compute_mrope_positions(tokens: np.ndarray, pictures: Sequence[ImageRef], vision: Vision) -> np.ndarray:
    """Returns M-RoPE positions of a document along time, height and width, [tokens, 3].

    Text advances all three together. An image has one time, and the text after it continues from its longer side.
    Source: Wang et al. 2024, "Qwen2-VL" (arXiv:2409.12191), section 2.1.

    Example:
        >>> vision = Vision(2, 16, 2, 3, 2, 48, 3, image=9, start=7, end=8)
        >>> compute_mrope_positions(np.array([1, 7, 9, 9, 8]), [ImageRef("a.png", 2, 4)], vision).tolist()
        [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [4, 4, 4]]
    """
    image_tokens = np.flatnonzero(tokens == vision.image)
    positions: np.ndarray = np.empty((len(tokens), 3), np.int64)
    # at: image tokens so far. begun: tokens done. next_position: position of the next text token.
    at = begun = next_position = 0
    for picture in pictures:
        rows, columns = picture.rows // vision.merge, picture.columns // vision.merge
        start = int(image_tokens[at])
        # Text before the image: one position per token, equal on the three axes.
        text = start - begun
        positions[begun:start] = (next_position + np.arange(text))[:, None]
        next_position += text
        begun = start + rows * columns
        # The image, row by row: one time, and rows and columns counted from the same position.
        positions[start:begun, 0] = next_position
        positions[start:begun, 1] = next_position + np.repeat(np.arange(rows), columns)
        positions[start:begun, 2] = next_position + np.tile(np.arange(columns), rows)
        next_position += max(rows, columns)
        at += rows * columns
    assert at == len(image_tokens), f"{len(image_tokens)} positions for {at} image tokens"
    # Text after the last image.
    positions[begun:] = (next_position + np.arange(len(tokens) - begun))[:, None]
    return positions


def read_images(eye: ImageProcessor, pictures: Sequence[ImageRef], tokens: Tensor) -> Images:
    """Reads the images of a micro-batch from their files; without images it returns a blank one without a position.

    Args:
        tokens: [rows, length], tokens of the micro-batch.
    """
    import torch
    from transformers import vision_utils

    vision = eye.vision
    sizes = tuple((p.rows, p.columns) for p in pictures) or (vision.blank,)
    if pictures:
        # [patches, values per patch] of all images, and [images, 3]: frames, rows and columns of patches.
        patches = np.concatenate([eye.patches(picture) for picture in pictures])
    else:
        patches = np.zeros((vision.blank[0] * vision.blank[1], vision.values), np.float32)
    positions = (tokens.flatten() == vision.image).nonzero().flatten()
    expected = sum(p.patches for p in pictures) // vision.merge**2
    assert len(positions) == expected, f"{len(positions)} positions for {expected} image tokens"
    if vision.tile:
        return Images(torch.from_numpy(patches), {}, positions, sizes)
    grids = torch.tensor([(1, *size) for size in sizes])
    # Patches that become one token are neighbours for Qwen-VL and Gemma 4; those of Pixtral go line by line.
    inputs = {
        "position_ids": vision_utils.get_vision_position_ids(grids, 1 if vision.layout == "pixtral" else vision.merge)
    }
    if vision.side:
        inputs["interp_indices"], inputs["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, num_grid_per_side=vision.side, mode="bilinear", align_corners=True, spatial_merge_size=vision.merge
        )
    windows: list[int] = []
    if vision.window:
        inputs["window_index"], ends = vision_utils.get_vision_window_index(
            grids,
            spatial_merge_size=vision.merge,
            window_size=vision.window * vision.merge * vision.patch,
            patch_size=vision.patch,
        )
        windows = ends.diff().tolist()
    return Images(torch.from_numpy(patches), inputs, positions, sizes, tuple(windows))
