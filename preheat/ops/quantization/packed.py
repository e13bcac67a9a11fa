"""Base of frozen linear layers whose weight is stored in few bits: it is dequantized while it is used."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

__all__ = ["FrozenPackedMap", "unpack_all_"]


class FrozenPackedMap(nn.Module):
    """A linear layer with a packed weight. `weight` is a property, not a parameter: every read dequantizes it in fp32.

    Attributes:
        packed_names: names of the parameters that hold the packed weight.
    """

    packed_names: ClassVar[tuple[str, ...]]
    bias: Tensor | None

    @property
    @abstractmethod
    def full_shape(self) -> tuple[int, int]:
        """The shape of the weight that is packed."""

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Returns x W^T without the bias, in the dtype of x."""

    @abstractmethod
    def unpack_(self) -> None:
        """Turns the layer into a plain one with a frozen fp32 weight, in place."""

    def count_packed(self) -> tuple[int, int]:
        """Returns the number of weights, and of the elements of the parameters that they are packed in."""
        parameters = (self._parameters[name] for name in self.packed_names)
        return self.full_shape[0] * self.full_shape[1], sum(p.numel() for p in parameters if p is not None)

    def count_packed_bytes(self) -> int:
        """Returns the bytes of the packed weight, with its scales."""
        return sum(p.nbytes for name in self.packed_names if (p := self._parameters[name]) is not None)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype)
        out = self.multiply(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def unpack_all_(model: nn.Module) -> int:
    """Dequantizes every packed layer to a plain one in fp32, in place. Returns their number."""
    packed = [module for module in model.modules() if isinstance(module, FrozenPackedMap)]
    for module in packed:
        module.unpack_()
    return len(packed)
