"""Copies of modules that share their parameters."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

__all__ = ["copy_shallow"]

M = TypeVar("M", bound=nn.Module)


def copy_shallow(module: M) -> M:
    """Returns a copy of a module whose children, parameters and hooks can be replaced without changing the original."""
    clone = copy.copy(module)
    clone.__dict__ = {
        key: copy.copy(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()
    }
    return clone
