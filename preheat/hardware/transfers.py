"""Transfers from host to device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["to_device"]


def to_device(values: numpy.ndarray | Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Copies host values to the device asynchronously; torch keeps the pinned source alive until the copy ends."""
    host = values if isinstance(values, Tensor) else torch.from_numpy(numpy.asarray(values))
    if device.type == "cpu":
        return host
    faked = any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
    return (host if faked else host.pin_memory()).to(device, non_blocking=True)  # fake tensors cannot be pinned
