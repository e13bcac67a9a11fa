"""Images of a batch, and the image input of a model. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMAGE_BUDGETS", "ImageLayout", "Images", "Vision"]

ImageLayout = Literal["qwen2_vl", "gemma3", "gemma4", "pixtral", "smolvlm"]
"""The families of transformers' image processors, which decide an image's size, its tiles and its tokens."""

IMAGE_BUDGETS = (70, 140, 280, 560, 1120)
"""The numbers of tokens that Gemma 4's processor in transformers can scale an image to."""


@dataclass(frozen=True)
class Vision:
    """The image input of a model.

    Attributes:
        blocks: layers of its vision tower.
        patch: pixels of a patch's side.
        temporal: frames of a patch (a still image is repeated).
        channels: channels of a pixel.
        merge: merge x merge patches become one token of the text.
        side: side of the square grid of learned positions; 0: there is none.
        deep: number of first text layers that the tower's intermediate features are added to.
        image, start, end: placeholder token of a merged patch, and the tokens around an image.
        window: side in tokens of the square that some of the tower's blocks attend within; 0: all attend to the image.
        layout: the image processor.
        tile: side in patches of the squares that the tower takes, one or several of an image; 0: it takes any size.
        bidirectional: the tokens of an image attend to each other in the text's layers.
    """

    blocks: int
    patch: int
    temporal: int
    channels: int
    merge: int
    side: int
    deep: int
    image: int
    start: int | None
    end: int | None
    window: int = 0
    layout: ImageLayout = "qwen2_vl"
    tile: int = 0
    bidirectional: bool = False

    @property
    def values(self) -> int:
        """Numbers per patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def mrope(self) -> bool:
        """True if positions are along time, height and width (M-RoPE)."""
        return self.layout == "qwen2_vl"

    def grid(self, pixels: int) -> tuple[int, int]:
        """Returns the rows and columns of patches of an image of `pixels` pixels, as the processor hands it over.

        It is as near to a square as its number of tokens allows; with windows, whose number depends on the shape, it
        is the largest square.

        Example:
            >>> Vision(2, 16, 2, 3, 2, 48, 3, 0, 1, 2).grid(1024 * 1024)
            (64, 64)
            >>> Vision(2, 16, 1, 3, 3, 0, 0, 0, 1, 2, layout="gemma4").grid(10 * 48 * 48)
            (6, 15)
        """
        if self.tile:
            squares = -(-pixels // (self.tile * self.patch) ** 2) if self.layout == "smolvlm" else 1
            return squares * self.tile, self.tile
        tokens = max(pixels // (self.patch * self.merge) ** 2, 1)
        rows = columns = math.isqrt(tokens)
        if not self.window:
            rows = next(n for n in range(rows, 0, -1) if tokens % n == 0)
            columns = tokens // rows
        return rows * self.merge, columns * self.merge

    @property
    def blank(self) -> tuple[int, int]:
        """The rows and columns of patches of the smallest image."""
        return (self.tile, self.tile) if self.tile else (self.merge, self.merge)

    def windows(self, rows: int, columns: int) -> list[int]:
        """Returns the patches of each window of an image of so many rows and columns of patches; [] without windows.

        Example:
            >>> Vision(2, 14, 2, 3, 2, 0, 0, 0, 1, 2, window=4).windows(12, 8)
            [64, 32]
        """
        if not self.window:
            return []
        high, wide = (
            [min(self.window, tokens - start) for start in range(0, tokens, self.window)]
            for tokens in (rows // self.merge, columns // self.merge)
        )
        return [h * w * self.merge**2 for h in high for w in wide]


@dataclass
class Images:
    """The images of a micro-batch, in the order of their tokens in its rows.

    They are a separate field of `Batch`: patches are not tokens (four of them make one), rows have different numbers of
    them, and the vision tower reads those of all rows at once, so neither `aligned` nor `hidden` can hold them.
    Everything that the tower derives from the images' sizes is computed with the batch: a step reads no size back from
    the device.

    Attributes:
        patches: [patches, values of a patch] fp32; of layouts other than `qwen2_vl` and `gemma4` the pixels of each
            image, [channels, height, width], in rows of that many values.
        inputs: further inputs of the tower, by transformers' names: `position_ids` [patches, 2] int64, each patch's row
            and column in its image; with learned positions `interp_indices` and `interp_weights` [patches, 4], the
            learned positions around a patch (int64) and their weights (fp32); with windows `window_index` [tokens]
            int64, the tokens window by window.
        positions: [tokens of images] int64, their positions in the flattened batch. Fewer than the tower's features if
            a micro-batch without images has a blank one as a stand-in: ranks that shard weights must all run the tower.
        grids: on the host, rows and columns of patches of each image.
        windows: on the host, patches of each window of the images; empty without windows.
    """

    patches: Tensor
    inputs: Mapping[str, Tensor]
    positions: Tensor
    grids: tuple[tuple[int, int], ...]
    windows: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The patches of each image."""
        return tuple(rows * columns for rows, columns in self.grids)

    def pin_memory(self) -> Images:
        return self.each(lambda t: t.pin_memory())

    def each(self, change: Callable[[Tensor], Tensor]) -> Images:
        inputs = {name: change(t) for name, t in self.inputs.items()}
        return replace(self, patches=change(self.patches), inputs=inputs, positions=change(self.positions))
