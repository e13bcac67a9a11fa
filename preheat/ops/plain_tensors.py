"""Checks if the hand-written kernels accept a tensor."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

__all__ = ["is_plain_tensor"]

# Exactly these types: a DTensor holds only this rank's part, and other subclasses (quantized weights, for example) have
# another layout in memory.
_PLAIN = (Tensor, Parameter, FakeTensor)


def is_plain_tensor(*tensors: object) -> bool:
    """True if all are plain tensors, parameters, or the fake tensors of a dry run, and none of a subclass.

    Example:
        >>> class Quantized(Tensor): ...
        >>> is_plain_tensor(Parameter(Tensor(2))), is_plain_tensor(Tensor(2).as_subclass(Quantized))
        (True, False)
    """
    return all(type(t) in _PLAIN for t in tensors)
