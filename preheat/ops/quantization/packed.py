"""Bases of frozen layers whose weights are stored in few bits: they are dequantized while they are used."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

__all__ = ["FrozenPacked", "FrozenPackedMap", "unpack_all_"]


class FrozenPacked(nn.Module):
    """A module with packed weights, which are properties, not parameters: every read dequantizes one in fp32.

    Attributes:
        packed_names: names of the parameters that hold the packed weights.
    """

    packed_names: tuple[str, ...]

    @abstractmethod
    def count_weights(self) -> int:
        """Returns the number of weights that are packed."""

    @abstractmethod
    def unpack_(self) -> None:
        """Turns the module into a plain one with frozen fp32 weights, in place."""

    def count_packed(self) -> tuple[int, int]:
        """Returns the number of weights, and of the elements of the parameters that they are packed in."""
        parameters = (self._parameters[name] for name in self.packed_names)
        return self.count_weights(), sum(p.numel() for p in parameters if p is not None)

    def count_packed_bytes(self) -> int:
        """Returns the bytes of the packed weights, with their scales."""
        return sum(p.nbytes for name in self.packed_names if (p := self._parameters[name]) is not None)


class FrozenPackedMap(FrozenPacked):
    """A linear layer with a packed weight."""

    bias: Tensor | None

    @property
    @abstractmethod
    def full_shape(self) -> tuple[int, int]:
        """The shape of the weight that is packed."""

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Returns x W^T without the bias, in the dtype of x."""

    def count_weights(self) -> int:
        return self.full_shape[0] * self.full_shape[1]

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype)
        out = self.multiply(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def unpack_all_(model: nn.Module) -> int:
    """Dequantizes every packed module to a plain one in fp32, in place. Returns their number."""
    packed = [module for module in model.modules() if isinstance(module, FrozenPacked)]
    for module in packed:
        module.unpack_()
    return len(packed)
