"""Transfers from host to device, and caches of what they give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["cache_tensors", "is_dry_run", "to_device"]

Function = TypeVar("Function", bound=Callable[..., object])


def is_dry_run() -> bool:
    """True under a `FakeTensorMode`, in which new tensors have no values."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def cache_tensors(maxsize: int) -> Callable[[Function], Function]:
    """Decorates a function of hashable arguments that returns tensors: `functools.lru_cache`, except in a dry run.

    A fake tensor must not enter the cache, from which a real run would take it.

    Example:
        >>> @cache_tensors(maxsize=1)
        ... def ones(count: int) -> Tensor:
        ...     return torch.ones(count)
        >>> with FakeTensorMode():
        ...     fake = ones(2)
        >>> type(fake).__name__, ones(2) is ones(2), type(ones(2)).__name__
        ('FakeTensor', True, 'Tensor')
    """

    def decorate(function: Function) -> Function:
        cached = functools.lru_cache(maxsize)(function)

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            return (function if is_dry_run() else cached)(*args, **kwargs)

        call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def to_device(values: numpy.ndarray | Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Copies host values to the device asynchronously; torch keeps the pinned source alive until the copy ends."""
    host = values if isinstance(values, Tensor) else torch.from_numpy(numpy.asarray(values))
    if device.type == "cpu":
        return host
    # Fake tensors cannot be pinned, and those on meta have no values to copy.
    pinned = host if is_dry_run() or device.type == "meta" else host.pin_memory()
    return pinned.to(device, non_blocking=True)
