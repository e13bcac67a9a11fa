"""Images of a batch, and the image input of a model. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Images", "Vision"]


@dataclass(frozen=True)
class Vision:
    """The image input of a model.

    Attributes:
        blocks: layers of its vision tower.
        patch: pixels of a patch's side.
        temporal: frames of a patch (a still image is repeated).
        channels: channels of a pixel.
        merge: merge x merge patches become one token of the text.
        side: side of the square grid of learned positions.
        deep: number of first text layers that the tower's intermediate features are added to.
        image, start, end: placeholder token of a merged patch, and the tokens around an image.
    """

    blocks: int
    patch: int
    temporal: int
    channels: int
    merge: int
    side: int
    deep: int
    image: int
    start: int
    end: int

    @property
    def values(self) -> int:
        """Numbers per patch."""
        return self.channels * self.temporal * self.patch**2

    def grid(self, pixels: int) -> tuple[int, int]:
        """Returns the rows and columns of patches of a square image of at most `pixels` pixels.

        Example:
            >>> Vision(2, 16, 2, 3, 2, 48, 3, 0, 1, 2).grid(1024 * 1024)
            (64, 64)
        """
        # A multiple of `merge`, so that patches merge without a remainder.
        side = max(int(pixels**0.5) // (self.patch * self.merge), 1) * self.merge
        return side, side


@dataclass
class Images:
    """The images of a micro-batch, in the order of their tokens in its rows.

    They are a separate field of `Batch`: patches are not tokens (four of them make one), rows have different numbers of
    them, and the vision tower reads those of all rows at once, so neither `aligned` nor `hidden` can hold them.
    Everything that the tower derives from the images' sizes is computed with the batch: a step reads no size back from
    the device.

    Attributes:
        patches: [patches, values of a patch] fp32.
        taps, shares: [patches, 4]: the rows of the learned positions around a patch (int64), and their interpolation
            weights (fp32).
        grid: [patches, 2] int64, each patch's row and column in its image.
        positions: [tokens of images] int64, their positions in the flattened batch. Fewer than the tower's features if
            a micro-batch without images has a blank one as a stand-in: ranks that shard weights must all run the tower.
        sizes: on the host, patches of each image.
    """

    patches: Tensor
    taps: Tensor
    shares: Tensor
    grid: Tensor
    positions: Tensor
    sizes: tuple[int, ...]

    def pin_memory(self) -> Images:
        return self.each(lambda t: t.pin_memory())

    def each(self, change: Callable[[Tensor], Tensor]) -> Images:
        patches, taps, shares, grid, places = map(
            change, (self.patches, self.taps, self.shares, self.grid, self.positions)
        )
        # `sizes` stays on the host.
        return Images(patches, taps, shares, grid, places, self.sizes)
