"""The interface of attention whose rows are split across devices, for layers that need more of a row than their part.

`models` asks for it and `ops` provides it: neither imports the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.core.batch import MaskSpec

__all__ = ["SplitAttention"]


class SplitAttention(ABC):
    """Attention of rows that are split across devices: (q, k, v, mask, scale) -> out, at this device's positions.

    Attributes:
        rank, degree: this device among those that share a row.
    """

    rank: int
    degree: int

    @abstractmethod
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends; `sinks`: the learned score of each query head that takes part in the softmax without a value."""

    @abstractmethod
    def gather_positions(self, x: Tensor) -> Tensor:
        """Gathers [rows, positions, width] of all devices in order: [rows, degree * positions, width]."""

    @abstractmethod
    def exchange_channels(self, x: Tensor) -> Tensor:
        """Sends channels to their devices and gets all positions of its own, in one all-to-all.

        Args:
            x: [rows, positions, degree * channels], the channels of the first device first.

        Returns:
            [rows, degree * positions, channels].
        """

    @abstractmethod
    def exchange_positions(self, x: Tensor) -> Tensor:
        """Inverse of `exchange_channels`."""
