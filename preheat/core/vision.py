"""Images in a batch, and what a model says of those that it reads. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Images", "Vision"]


@dataclass(frozen=True)
class Vision:
    """How a model reads images.

    Attributes:
        blocks: of its vision tower.
        patch: pixels of a patch's side; temporal: frames of a patch (a still image is repeated); channels: of a pixel.
        merge: so many patches by so many become one token of the text.
        side: of the square grid of learned positions.
        deep: layers of the text that the tower's inner features are added to, the first ones.
        image, start, end: tokens that stand for a piece of an image, and around an image.
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
        """Numbers of a patch."""
        return self.channels * self.temporal * self.patch**2

    def grid(self, pixels: int) -> tuple[int, int]:
        """Rows and columns of patches of a square image of at most so many pixels.

        Example:
            >>> Vision(2, 16, 2, 3, 2, 48, 3, 0, 1, 2).grid(1024 * 1024)
            (64, 64)
        """
        side = max(int(pixels**0.5) // (self.patch * self.merge), 1) * self.merge
        return side, side


@dataclass
class Images:
    """The images of a micro-batch, in the order in which their tokens stand in its rows.

    A field of `Batch` of its own: patches are no tokens (four of them make one), rows have different numbers of them,
    and the vision tower reads those of all rows at once, so neither `beside` nor `hidden` can hold them. All that the
    tower derives from the images' sizes is made where the batch is: a step reads no size back from the device.

    Attributes:
        patches: [patches, values of a patch] fp32.
        taps, shares: [patches, 4]: rows of the learned positions that a patch lies between (int64), and the share of
            each (fp32).
        grid: [patches, 2] int64, each patch's row and column in its image.
        places: [tokens of images] int64, where they stand in the batch's rows laid end to end. Fewer than the tower's
            features where a blank image stands in, without a place, for a micro-batch that has none: devices that share
            out weights all have to run the tower.
        sizes: on the host, patches of each image.
    """

    patches: Tensor
    taps: Tensor
    shares: Tensor
    grid: Tensor
    places: Tensor
    sizes: tuple[int, ...]

    def pin_memory(self) -> Images:
        return self.each(lambda t: t.pin_memory())

    def each(self, change: Callable[[Tensor], Tensor]) -> Images:
        patches, taps, shares, grid, places = map(
            change, (self.patches, self.taps, self.shares, self.grid, self.places)
        )
        return Images(patches, taps, shares, grid, places, self.sizes)
