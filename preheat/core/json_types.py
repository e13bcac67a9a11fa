"""Types of data whose shape this package does not know. No torch."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["JsonObject", "StateDict"]

JsonObject: TypeAlias = dict[str, Any]
"""Data of unknown shape that is read from or written to JSON: a configuration, its keyword arguments, a record. Data
whose keys are known has a dataclass or a `TypedDict` of its own."""

StateDict: TypeAlias = dict[str, Any]
"""A state as `state_dict` returns it and `load_state_dict` takes it: tensors and numbers by name, possibly nested."""
