"""TF32 for fp32 matmuls on CUDA: reference-counted use of torch's process-wide switch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from preheat.core import Device

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["allow_tf32", "has_tf32"]

_LEAST = (8, 0)
"""CUDA compute capability of Ampere, the first with TF32 tensor cores."""
_before: list[str] = []
"""torch's setting before each active `allow_tf32`, in order."""


def has_tf32(device: Device) -> bool:
    """True if a device (local or planned for) supports TF32: NVIDIA from Ampere on."""
    if device.kind != "cuda" or device.capability is None or device.capability < _LEAST:
        return False
    if not device.at_hand:
        return True
    import torch

    return torch.version.hip is None  # AMD devices number their capability differently


def allow_tf32(owner: object) -> Callable[[], object]:
    """Runs fp32 matmuls on CUDA in TF32 while an owner is alive, then restores torch's setting.

    The switch is process-wide: it also affects autograd's threads and other models.

    Returns:
        A function that ends it earlier.

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
        # The older name: after setting `fp32_precision`, torch raises when the older ones are read, and torch.compile
        # reads them.
        products.allow_tf32 = True
    # At exit there is nothing to restore, and torch may be half torn down.
    end = weakref.finalize(owner, _release)
    end.atexit = False
    return end


def _release() -> None:
    import torch

    # Owners may end in any order: any but the last only decrements the count.
    if len(_before) > 1:  # the first entry is the original setting
        _before.pop()
        return
    precision = _before.pop()
    if precision != "tf32":
        products: Any = torch.backends.cuda.matmul
        products.allow_tf32 = False  # keeps both names consistent
        products.fp32_precision = precision
