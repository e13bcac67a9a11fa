"""TF32 for fp32 matrix products on CUDA: torch's switch for the process, turned on for as long as somebody who asked for it lives."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from preheat.core import Device

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["allow_tf32", "has_tf32"]

_LEAST = (8, 0)
"""CUDA's capability of Ampere, whose tensor cores were the first with TF32."""
_before: list[str] = []
"""torch's setting before each that has it allowed now, in the order in which they asked."""


def has_tf32(device: Device) -> bool:
    """Whether a device, here or planned for, computes in TF32 under torch's switch: NVIDIA's from Ampere on."""
    if device.kind != "cuda" or device.capability is None or device.capability < _LEAST:
        return False
    if not device.at_hand:
        return True
    import torch

    return torch.version.hip is None  # AMD's devices number their capability otherwise


def allow_tf32(owner: object) -> Callable[[], object]:
    """Computes fp32 matrix products on CUDA in TF32 as long as `owner` lives, and any other that asked; then torch's setting is what it was.

    The switch is of the whole process: autograd's threads, too, and other models.

    Returns:
        What ends it before `owner` does.

    Example:
        >>> class Owner: ...
        >>> import torch
        >>> before = torch.backends.cuda.matmul.fp32_precision
        >>> owner = Owner()
        >>> _ = allow_tf32(owner)
        >>> torch.backends.cuda.matmul.fp32_precision
        'tf32'
        >>> del owner
        >>> torch.backends.cuda.matmul.fp32_precision == before
        True
    """
    import torch

    products: Any = torch.backends.cuda.matmul
    _before.append(products.fp32_precision)
    if _before[-1] != "tf32":
        # By its older name: if it is set by `fp32_precision`, torch refuses to tell by the older ones what is set, and
        # its own compiler asks by them.
        products.allow_tf32 = True
    end = weakref.finalize(owner, _disown)
    end.atexit = False
    return end


def _disown() -> None:
    import torch

    if len(_before) > 1:  # the first entry is what nobody here had set
        _before.pop()
        return
    precision = _before.pop()
    if precision != "tf32":
        products: Any = torch.backends.cuda.matmul
        products.allow_tf32 = False  # by both names the same
        products.fp32_precision = precision
