"""The type of an optimizer's groups of parameters."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["ParamGroup"]

ParamGroup: TypeAlias = dict[str, Any]
"""Parameters (`params`) and the settings that the optimizer uses for them, as in torch's `param_groups`."""
